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
        finback_linears(x, TOKENS, &(const finback_weight *){&w}, 1, bits, y);
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
          finback_linears(x, count, &(const finback_weight *){&w}, 1, bits, one);
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

/* Routed feed-forwards against the same ones alone, and those against float64. */
static void check_feeds(void) {
  enum { T = 7, D = 64, N = 96, K = 2, E = 3 };
  const finback_activation situ = {FINBACK_SITU_BOUNDED, 4, 25};
  for (int format = 0; format < 7; format++) {
    finback_weight w[3 * E];
    const finback_weight *list[3 * E];
    for (int i = 0; i < 3 * E; i++) {
      w[i] = i % 3 == 1 ? weight(format, D, N) : weight(format, N, D);
      list[i] = &w[i];
    }
    float *x = floats(T * D), *y = floats(T * D), *parts = floats(T * K * D);
    int64_t ids[T * K], numbers[E] = {4, 0, 9};
    for (int t = 0; t < T; t++) ids[t * K] = numbers[t % 3], ids[t * K + 1] = numbers[(t + 1) % 3];
    finback_set_threads(2);
    finback_experts(x, T, ids, K, numbers, list, E, &situ, 0, parts);
    const int64_t upwards[E] = {0, 4, 9};
    const finback_weight *sorted[3 * E];
    for (int i = 0; i < 3; i++)
      sorted[i] = list[3 + i], sorted[3 + i] = list[i], sorted[6 + i] = list[6 + i];
    float *shares = floats(T * K), *one = floats(T * D), *other = floats(T * D);
    finback_combine(parts, ids, shares, T, K, D, one);
    memset(other, 0, T * D * sizeof(float));
    finback_add_experts(x, T, ids, shares, K, upwards, sorted, E, &situ, 0, other);
    for (int i = 0; i < T * D; i++) expect(one[i] == other[i], "sum of experts", one[i], other[i]);
    free(shares), free(one), free(other);
    for (int e = 0; e < E; e++) {
      finback_mlp(x, T, list + 3 * e, &situ, 0, y);
      for (int at = 0; at < T * K; at++)
        for (int c = 0; ids[at] == numbers[e] && c < D; c++)
          expect(parts[at * D + c] == y[at / K * D + c], "expert", parts[at * D + c], y[at / K * D + c]);
      for (int t = 0; t < T; t++) {
        double inner[N];
        for (int n = 0; n < N; n++) {
          double g = 0, u = 0;
          for (int c = 0; c < D; c++) {
            g += element(list[3 * e], n, c) * x[t * D + c];
            u += element(list[3 * e + 2], n, c) * x[t * D + c];
          }
          inner[n] = 4 * tanh(g / 4) * sigmoid(g) * 25 * tanh(u / 25);
        }
        for (int c = 0; c < D; c++) {
          double sum = 0, size = 1e-3;
          for (int n = 0; n < N; n++) {
            double product = element(list[3 * e + 1], c, n) * inner[n];
            sum += product, size += fabs(product);
          }
          expect(fabs(y[t * D + c] - sum) <= 2e-4 * size, "feed", y[t * D + c], sum);
        }
      }
    }
    for (int i = 0; i < 3 * E; i++) free((void *)w[i].data), free((void *)w[i].scale);
    free(x), free(y), free(parts);
  }
  puts("ok feed-forwards");
}

static void check_delta(void) {
  enum { T = 5, H = 3, K = 20, J = 4, C = H * K };
  float *q = floats(T * C), *k = floats(T * C), *v = floats(T * C), *g = floats(T * C);
  float *gate = floats(T * C), *beta = floats(T * H), *out = floats(T * C);
  float *taps = floats(3 * J * C), *dt = floats(C), *a = floats(H), *norm = floats(K);
  for (int with_bound = 0; with_bound < 2; with_bound++) {
    const float bound = with_bound ? -5 : 0;
    float *state = calloc(H * K * K, sizeof(float)), *history = calloc(3 * (J - 1) * C, sizeof(float));
    double S[H][K][K] = {{{0}}};
    const finback_delta d = {T, H, K, J, q, k, v, g, beta, gate};
    const finback_delta_weights w = {taps, dt, a, norm, bound, 1e-5f};
    finback_set_threads(2);
    finback_delta_attention(&d, &w, T, history, state, out);
    for (int t = 0; t < T; t++)
      for (int h = 0; h < H; h++) {
        const float *const inputs[3] = {q, k, v};
        double z[3][K], size[2] = {1e-6, 1e-6}, e[K], o[K], mean = 1e-5;
        for (int n = 0; n < 3; n++)
          for (int i = 0; i < K; i++) {
            double sum = 0;
            for (int j = 0; j < J; j++)
              if (t - J + 1 + j >= 0)
                sum += taps[(n * J + j) * C + h * K + i] * inputs[n][(t - J + 1 + j) * C + h * K + i];
            z[n][i] = sum * sigmoid(sum);
            if (n < 2) size[n] += z[n][i] * z[n][i];
          }
        for (int i = 0; i < K; i++) {
          const int at = t * C + h * K + i;
          double x = g[at] + (double)dt[h * K + i], rate = exp(a[h]);
          double decay = bound ? bound * sigmoid(rate * x) : -rate * log1p(exp(x));
          z[0][i] /= sqrt(size[0]) * sqrt(K), z[1][i] /= sqrt(size[1]);
          for (int c = 0; c < K; c++) S[h][i][c] *= exp(decay);
        }
        for (int c = 0; c < K; c++) {
          e[c] = z[2][c], o[c] = 0;
          for (int i = 0; i < K; i++) e[c] -= z[1][i] * S[h][i][c];
          for (int i = 0; i < K; i++) {
            S[h][i][c] += sigmoid(beta[t * H + h]) * z[1][i] * e[c];
            o[c] += z[0][i] * S[h][i][c];
          }
          mean += o[c] * o[c] / K;
        }
        for (int c = 0; c < K; c++) {
          const int at = t * C + h * K + c;
          double wanted = o[c] / sqrt(mean) * norm[c] * sigmoid(gate[at]);
          expect(fabs(out[at] - wanted) < 2e-5 * (1 + fabs(wanted)), "delta", out[at], wanted);
        }
      }
    for (int i = 0; i < C; i++)
      expect(history[2 * C + i] == q[(T - 1) * C + i], "history", history[2 * C + i], 0);
    free(state), free(history);
  }
  free(q), free(k), free(v), free(g), free(gate), free(beta), free(out);
  free(taps), free(dt), free(a), free(norm);
  puts("ok delta attention");
}

int main(void) {
  printf("%s\n", finback_isa());
  check_products();
  check_rows();
  check_feeds();
  check_delta();
  puts("ok all");
  return 0;
}
