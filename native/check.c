/* A program that checks the kernels without Python: for instruction sets of other machines, under an
 * emulator, and for sanitizers. Prints one line a check; ends with 1 at the first that fails.
 *
 *     cc -O2 native/check.c native/[a-bd-z]*.c -lm -lpthread && ./a.out */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "finback.h"

static uint64_t seed = 88172645463325252u;

static uint32_t draw(void) { /* xorshift */
  seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
  return (uint32_t)(seed >> 16);
}

static float uniform(void) { return (float)(draw() & 0xffff) / 32768.0f - 1.0f; }

static float *floats(int64_t count) {
  float *out = malloc((size_t)count * sizeof(float));
  for (int64_t i = 0; i < count; i++) out[i] = uniform();
  return out;
}

static void expect(int is_right, const char *what, double got, double wanted) {
  if (is_right) return;
  printf("FAILED %s: %.9g instead of %.9g\n", what, got, wanted);
  exit(1);
}

static const double E2M1[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};

/* The plain value of one element of a weight. */
static double element(const finback_weight *w, int64_t r, int64_t c) {
  const int64_t at = r * w->cols + c;
  if (w->format == FINBACK_F32) return ((const float *)w->data)[at];
  if (w->format == FINBACK_BF16) {
    uint32_t bits = (uint32_t)((const uint16_t *)w->data)[at] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
  }
  if (w->format == FINBACK_F16) {
    uint16_t h = ((const uint16_t *)w->data)[at];
    int exponent = h >> 10 & 31, fraction = h & 1023;
    double size = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
    return h & 0x8000 ? -size : size;
  }
  if (w->format == FINBACK_INT8)
    return ((const int8_t *)w->data)[at] * (double)((const float *)w->scale)[r];
  if (w->format == FINBACK_FP8) {
    int byte = ((const uint8_t *)w->data)[at], exponent = byte >> 3 & 15, fraction = byte & 7;
    double size = exponent ? ldexp(8 + fraction, exponent - 10) : ldexp(fraction, -9);
    size *= ((const float *)w->scale)[r / 128 * ((w->cols + 127) / 128) + c / 128];
    return byte & 0x80 ? -size : size;
  }
  int code = ((const uint8_t *)w->data)[at / 2] >> (c & 1 ? 4 : 0) & 15;
  if (w->format == FINBACK_INT4) {
    uint32_t bits = (uint32_t)((const uint16_t *)w->scale)[r * (w->cols / 32) + c / 32] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return (code - 8) * (double)value;
  }
  int scale = ((const uint8_t *)w->scale)[r * (w->cols / 32) + c / 32];
  double size = ldexp(E2M1[code & 7], scale - 127);
  return code & 8 ? -size : size;
}

static finback_weight weight(int format, int64_t rows, int64_t cols) {
  const int64_t count = rows * cols;
  uint8_t *data = malloc((size_t)count * 4), *scale = malloc((size_t)(count + rows) * 4);
  for (int64_t i = 0; i < count + rows; i++) ((float *)scale)[i] = uniform();
  for (int64_t i = 0; i < count; i++) {
    if (format == FINBACK_F32) ((float *)data)[i] = uniform();
    if (format == FINBACK_BF16) ((uint16_t *)data)[i] = (uint16_t)(0x3f00 ^ (draw() & 0x81ff));
    if (format == FINBACK_F16) ((uint16_t *)data)[i] = (uint16_t)(draw() & 0xbbff);
    if (format == FINBACK_MXFP4 || format == FINBACK_INT4) data[i / 2] = (uint8_t)draw();
    if (format == FINBACK_INT8) data[i] = (uint8_t)draw();
    if (format == FINBACK_FP8) data[i] = (uint8_t)(draw() % 127 + (draw() & 0x80));
    if (format == FINBACK_INT4) ((uint16_t *)scale)[i / 32] = (uint16_t)(0x3c00 ^ (draw() & 0x81ff));
    if (format == FINBACK_MXFP4) scale[i / 32] = (uint8_t)(118 + draw() % 16);
  }
  return (finback_weight){format, rows, cols, data, scale};
}

static void check_products(void) {
  const int64_t shapes[][2] = {{1, 32}, {5, 96}, {130, 160}, {18, 1024}, {3, 7}, {9, 45}};
  enum { TOKENS = 19 };
  for (int format = 0; format < 7; format++)
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
      for (int bits = 0; bits <= 16; bits += 8) {
        const int64_t rows = shapes[s][0], cols = shapes[s][1];
        if ((format == FINBACK_MXFP4 || format == FINBACK_INT4) && cols % 32) continue;
        if (format != FINBACK_MXFP4 && bits) continue;
        finback_weight w = weight(format, rows, cols);
        float *x = floats(TOKENS * cols), *y = floats(TOKENS * rows), *one = floats(TOKENS * rows);
        finback_set_threads(1);
        finback_linear(x, TOKENS, &w, bits, y);
        const double limit = bits == 0 ? 1e-6 : bits == 16 ? 1e-4 : 3e-2;
        for (int64_t t = 0; t < TOKENS; t++)
          for (int64_t r = 0; r < rows; r++) {
            double sum = 0, size = 1e-30;
            for (int64_t c = 0; c < cols; c++) {
              double product = element(&w, r, c) * x[t * cols + c];
              sum += product, size += fabs(product);
            }
            expect(fabs(y[t * rows + r] - sum) <= limit * size, "product", y[t * rows + r], sum);
          }
        for (int64_t count = 1; count <= TOKENS; count++) {
          finback_set_threads(1 + (int)(count % 3));
          finback_linear(x, count, &w, bits, one);
          for (int64_t i = 0; i < count * rows; i++)
            expect(one[i] == y[i], "bits of fewer rows", one[i], y[i]);
        }
        free((void *)w.data), free((void *)w.scale), free(x), free(y), free(one);
      }
  puts("ok products");
}

static double sigmoid(double x) { return 1 / (1 + exp(-x)); }

static void check_rows(void) {
  enum { ROWS = 3 };
  for (int64_t width = 1; width < 70; width += 11) {
    float *x = floats(ROWS * width), *w = floats(width), *u = floats(ROWS * width);
    float *y = floats(ROWS * width);
    for (int64_t i = 0; i < ROWS * width; i++) x[i] *= 9, u[i] *= 9;
    finback_activation situ = {FINBACK_SITU_BOUNDED, 4, 25};
    finback_glu(x, u, &situ, ROWS, width, y);
    for (int64_t i = 0; i < ROWS * width; i++) {
      double wanted = 4 * tanh(x[i] / 4.0) * sigmoid(x[i]) * 25 * tanh(u[i] / 25.0);
      expect(fabs(y[i] - wanted) <= 1e-6 * (1 + fabs(wanted)), "situ", y[i], wanted);
    }
    finback_gated(x, u, ROWS, width, y);
    for (int64_t i = 0; i < ROWS * width; i++)
      expect(fabs(y[i] - x[i] * sigmoid(u[i])) <= 2e-6 * (1 + fabs(x[i])), "gated", y[i], 0);
    finback_rms_norm(x, w, 1e-5f, ROWS, width, y);
    for (int64_t r = 0; r < ROWS; r++) {
      double mean = 1e-5;
      for (int64_t i = 0; i < width; i++) mean += x[r * width + i] * x[r * width + i] / (double)width;
      for (int64_t i = 0; i < width; i++) {
        double wanted = x[r * width + i] / sqrt(mean) * w[i];
        expect(fabs(y[r * width + i] - wanted) <= 1e-5, "norm", y[r * width + i], wanted);
      }
    }
    free(x), free(w), free(u), free(y);
  }
  puts("ok rows");
}

static void check_delta(void) {
  enum { T = 5, H = 3, K = 20 };
  float *q = floats(T * H * K), *k = floats(T * H * K), *v = floats(T * H * K);
  float *g = floats(T * H * K), *beta = floats(T * H), *out = floats(T * H * K);
  float *state = calloc(H * K * K, sizeof(float));
  double S[H][K][K] = {{{0}}};
  for (int i = 0; i < T * H * K; i++) g[i] = -fabsf(g[i]);
  finback_delta_rule(q, k, v, g, beta, state, T, H, K, out);
  for (int t = 0; t < T; t++)
    for (int h = 0; h < H; h++) {
      const int at = (t * H + h) * K;
      double e[K], o[K] = {0};
      for (int c = 0; c < K; c++) {
        e[c] = v[at + c];
        for (int i = 0; i < K; i++) {
          S[h][i][c] *= exp(g[at + i]);
          e[c] -= k[at + i] * S[h][i][c];
        }
        for (int i = 0; i < K; i++) {
          S[h][i][c] += beta[t * H + h] * k[at + i] * e[c];
          o[c] += q[at + i] * S[h][i][c];
        }
        expect(fabs(out[at + c] - o[c]) < 1e-4 * (1 + fabs(o[c])), "delta", out[at + c], o[c]);
      }
    }
  free(q), free(k), free(v), free(g), free(beta), free(out), free(state);
  puts("ok delta rule");
}

int main(void) {
  printf("%s\n", finback_isa());
  check_products();
  check_rows();
  check_delta();
  puts("ok all");
  return 0;
}
