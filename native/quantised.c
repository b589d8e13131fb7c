/* y[t][r] = Σ_c x[t][c] · W[r][c], W in MXFP4, x rounded to int16 or int8 with one scale per 32 columns.
 *
 * Twin: Reference.linear on rounded rows (`rounded` in kernels/reference.py). The plain loop:
 *     for t: for r: y[t][r] = sum over groups g of
 *         (Σ_c in g code[r][c] · q[t][c], exact in int32) · scale_w[r][g] · scale_x[t][g]
 *
 * The whole-number sum of a group is exact, in four lanes; each lane is then one fused multiply-add
 * into its own float32 sum, group after group, and the lanes are added in a fixed order at the end.
 * So one row and many rows, any number of threads and any split give the same bits.
 *
 * Rounding: q = nearest of x / scale_x, scale_x = largest |x| of the group / 32767 (127). Relative error
 * of a product about 2e-5 (5e-3).  The codes enter doubled (they are multiples of a half), for int16
 * in the high byte of a lane; scale_x carries the factor that undoes it. */
#include <math.h>
#include <stdlib.h>

#include "products.h"
#include "threads.h"

enum { GROUP = 32, STEP = GROUP * GROUPS, TILE_R = 4, AHEAD = 8192 };
enum { MANY = 64 }; /* so many rows of x stay in the cache */
#define TILE_Q (VL >= 16 ? 4 : VL >= 8 ? 2 : 2)

/* A product whose rows are INT16 or INT8. A step is GROUPS groups: what one vector of codes holds. */
typedef struct {
  const void *q;       /* (tokens, steps, STEP) int16 or int8, in the order of codes_16, codes_8 */
  const float *scales; /* (tokens, steps, VL) */
  const int32_t *offsets; /* (tokens, steps, VL): what OFFSET_8 adds to each sum; int8 only */
  int64_t tokens, steps;
  const finback_weight *w;
  float *y;
} rounded_product;

/* --- rounding ------------------------------------------------------------------------------------ */

/* Where column c of a group stands in a step's vectors, in elements from the group's first lane. */
INLINE int64_t place16(int c) { return (int64_t)((c & 1) * 2 + c / 16) * 8 * GROUPS + (c % 16) / 2; }
INLINE int64_t place8(int c) { return (int64_t)(c & 1) * 16 * GROUPS + c / 2; }

/* The nearest whole number, ties to even, of a value below 2^22; loops over it become vectors. */
INLINE int32_t nearest(float value) {
  const float shifted = value + 12582912.0f; /* 1.5 · 2^23: the fraction is rounded away */
  int32_t bits;
  memcpy(&bits, &shifted, sizeof bits);
  return bits - 0x4B400000;
}

INLINE void round_group(const float *v, int bits, int16_t *q16, int8_t *q8, float *scale,
                        int32_t sums[4]) {
  const float largest = bits == 16 ? 32767.0f : 127.0f;
  vf sizes = vf_zero(), zeros = vf_zero();
  for (int c = 0; c < GROUP; c += VL) {
    sizes = vf_max(sizes, vf_abs(vf_load(v + c)));
    zeros = vf_fma(vf_load(v + c), vf_zero(), zeros);
  }
  const float lost = vf_sum(zeros);
  float lanes[VL], size = 0;
  vf_store(lanes, sizes);
  for (int i = 0; i < VL; i++) size = lanes[i] > size ? lanes[i] : size;
  const float inverse = size > 0 ? largest / size : 0;
  *scale = size / largest + lost; /* no number in, no number out */
  int32_t whole[GROUP];
  for (int c = 0; c < GROUP; c++) whole[c] = nearest(v[c] * inverse);
  if (bits == 16) {
    for (int half = 0; half < 2; half++)
      for (int i = 0; i < 8; i++) {
        q16[place16(16 * half) + i] = (int16_t)whole[16 * half + 2 * i];
        q16[place16(16 * half + 1) + i] = (int16_t)whole[16 * half + 2 * i + 1];
      }
    return;
  }
  for (int i = 0; i < 16; i++) {
    q8[place8(0) + i] = (int8_t)whole[2 * i];
    q8[place8(1) + i] = (int8_t)whole[2 * i + 1];
  }
  for (int i = 0; i < 4; i++) {
    sums[i] = 0;
    for (int k = 0; k < 8; k++) sums[i] += whole[8 * i + k];
  }
}

INLINE void round_row_to(int bits, const prepared_rows *rows, int64_t row, const float *x) {
  const float undo = bits == 16 ? 0.5f / 256.0f : 0.5f;
  int16_t *q16 = (int16_t *)rows->values + row * rows->steps * STEP;
  int8_t *q8 = (int8_t *)rows->values + row * rows->steps * STEP;
  float *scales = rows->scales + row * rows->steps * VL;
  int32_t *offsets = rows->offsets ? rows->offsets + row * rows->steps * VL : NULL;
  const float nothing[GROUP] = {0};
  for (int64_t g = 0; g < rows->steps * GROUPS; g++) {
    const int64_t step = g / GROUPS, lane = g % GROUPS;
    const float *v = g * GROUP < rows->cols ? x + g * GROUP : nothing;
    float scale;
    int32_t sums[4] = {0};
    round_group(v, bits, q16 + step * STEP + lane * 8, q8 + step * STEP + lane * 16, &scale, sums);
    for (int i = 0; i < 4; i++) {
      scales[step * VL + lane * 4 + i] = scale * undo;
      if (offsets) offsets[step * VL + lane * 4 + i] = -OFFSET_8 * sums[i];
    }
  }
}

void ISA(round_row)(const prepared_rows *rows, int64_t row, const float *x) {
  if (rows->form == INT16)
    round_row_to(16, rows, row, x);
  else
    round_row_to(8, rows, row, x);
}

/* --- one group of rows and tokens ------------------------------------------------------------------ */

/* The codes of one step of a row: widened, and its scales. The last step may be cut. */
INLINE void widen_step(const finback_weight *w, int64_t row, int64_t step, int bits, vi16 w16[4],
                       vi8 w8[2], vf *scales) {
  const int64_t groups = w->cols / GROUP, first = step * GROUPS, left = groups - first;
  const uint8_t *codes = (const uint8_t *)w->data + row * (w->cols / 2) + first * 16;
  const uint8_t *bytes = (const uint8_t *)w->scale + row * groups + first;
  uint8_t padded[GROUPS * 16], padded_scales[GROUPS];
  if (left < GROUPS) {
    memset(padded, 0, sizeof padded), memset(padded_scales, 127, sizeof padded_scales);
    memcpy(padded, codes, (size_t)left * 16), memcpy(padded_scales, bytes, (size_t)left);
    codes = padded, bytes = padded_scales;
  } else {
    __builtin_prefetch(codes + AHEAD);
  }
  if (bits == 16)
    codes_16(codes, w16);
  else
    codes_8(codes, w8);
  *scales = scales_of(bytes);
}

INLINE vf advance(const rounded_product *p, int64_t t, int64_t step, int bits, const vi16 w16[4],
                  const vi8 w8[2], vf scales, vf sum) {
  const int64_t at = t * p->steps + step;
  vi d;
  if (bits == 16) {
    const int16_t *q = (const int16_t *)p->q + at * STEP;
    d = vi_dot16(vi_zero(), w16[0], vi16_load(q));
    for (int k = 1; k < 4; k++) d = vi_dot16(d, w16[k], vi16_load(q + k * 8 * GROUPS));
  } else {
    const int8_t *q = (const int8_t *)p->q + at * STEP;
    d = OFFSET_8 ? vi_load(p->offsets + at * VL) : vi_zero();
    d = vi_dot8(d, w8[0], vi8_load(q));
    d = vi_dot8(d, w8[1], vi8_load(q + 16 * GROUPS));
  }
  /* In this order: the product of both scales could leave float32's range. */
  return vf_fma(vf_from(d) * vf_load(p->scales + at * VL), scales, sum);
}

/* Codes widened as they are read: for few tokens. */
INLINE void few(int bits, const rounded_product *p, int64_t r, int rows, int64_t t, int tokens) {
  vf sum[TILE_R][TILE_Q];
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < tokens; j++) sum[i][j] = vf_zero();
  for (int64_t step = 0; step < p->steps; step++)
    for (int i = 0; i < rows; i++) {
      vi16 w16[4] = {{0}};
      vi8 w8[2] = {{0}};
      vf scales;
      widen_step(p->w, r + i, step, bits, w16, w8, &scales);
      for (int j = 0; j < tokens; j++)
        sum[i][j] = advance(p, t + j, step, bits, w16, w8, scales, sum[i][j]);
    }
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < tokens; j++) p->y[(t + j) * p->w->rows + r + i] = vf_sum(sum[i][j]);
}

/* Codes widened once into memory that stays in the cache: for many tokens. */
INLINE void many(int bits, const rounded_product *p, int64_t r, int rows, const char *panel, int64_t t,
                 int tokens) {
  const int64_t size = STEP * (bits / 8), stride = p->steps * (size + VL * 4);
  vf sum[TILE_R][TILE_Q];
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < tokens; j++) sum[i][j] = vf_zero();
  for (int64_t step = 0; step < p->steps; step++)
    for (int i = 0; i < rows; i++) {
      const char *at = panel + i * stride + step * (size + VL * 4);
      vi16 w16[4] = {{0}};
      vi8 w8[2] = {{0}};
      if (bits == 16)
        for (int k = 0; k < 4; k++) w16[k] = vi16_load(at + k * 16 * GROUPS);
      else
        for (int k = 0; k < 2; k++) w8[k] = vi8_load(at + k * 16 * GROUPS);
      vf scales = vf_load((const float *)(at + size));
      for (int j = 0; j < tokens; j++)
        sum[i][j] = advance(p, t + j, step, bits, w16, w8, scales, sum[i][j]);
    }
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < tokens; j++) p->y[(t + j) * p->w->rows + r + i] = vf_sum(sum[i][j]);
  (void)r;
}

INLINE void fill_panel(int bits, const rounded_product *p, int64_t r, int rows, char *panel) {
  const int64_t size = STEP * (bits / 8);
  for (int i = 0; i < rows; i++)
    for (int64_t step = 0; step < p->steps; step++) {
      char *at = panel + (i * p->steps + step) * (size + VL * 4);
      vi16 w16[4] = {{0}};
      vi8 w8[2] = {{0}};
      vf scales;
      widen_step(p->w, r + i, step, bits, w16, w8, &scales);
      if (bits == 16)
        for (int k = 0; k < 4; k++) vi16_store(at + k * 16 * GROUPS, w16[k]);
      else
        for (int k = 0; k < 2; k++) vi8_store(at + k * 16 * GROUPS, w8[k]);
      vf_store((float *)(at + size), scales);
    }
}

/* --- chunks ---------------------------------------------------------------------------------------- */

/* Call with a constant number of tokens, so that each tile becomes straight code. */
#define FOR_TOKENS(count, call)                                                \
  switch (count) {                                                             \
    case 1: call(1); break;                                                    \
    case 2: call(2); break;                                                    \
    case 3: call((TILE_Q < 3 ? TILE_Q : 3)); break;                            \
    default: call(TILE_Q);                                                     \
  }

/* Some rows of weights by tokens `first` to `end`. */
INLINE void rows_of(int bits, const rounded_product *p, int64_t r, int rows, char *panel, int64_t first,
                    int64_t end) {
  if (panel) fill_panel(bits, p, r, rows, panel);
  for (int64_t t = first; t < end; t += TILE_Q) {
    int64_t count = end - t < TILE_Q ? end - t : TILE_Q;
    if (panel) {
#define CALL(n) many(bits, p, r, rows, panel, t, n)
      FOR_TOKENS(count, CALL)
#undef CALL
    } else {
#define CALL(n) few(bits, p, r, rows, t, n)
      FOR_TOKENS(count, CALL)
#undef CALL
    }
  }
}

INLINE void chunk_of(int bits, const rounded_product *p, int64_t chunk) {
  const int64_t start = chunk * CHUNK_ROWS;
  const int64_t end = start + CHUNK_ROWS < p->w->rows ? start + CHUNK_ROWS : p->w->rows;
  char *panel = NULL;
  if (p->tokens > TILE_Q)
    panel = finback_alloc((size_t)(TILE_R * p->steps * (STEP * (bits / 8) + VL * 4)));
  for (int64_t t = 0; t < p->tokens; t += MANY) {
    const int64_t last = t + MANY < p->tokens ? t + MANY : p->tokens;
    int64_t r = start;
    for (; r + TILE_R <= end; r += TILE_R) rows_of(bits, p, r, TILE_R, panel, t, last);
    for (; r < end; r++) rows_of(bits, p, r, 1, panel, t, last);
  }
  free(panel);
}

void ISA(rounded_chunk)(const product *q, int64_t chunk) {
  const prepared_rows *rows = q->x;
  const int64_t at = q->first * rows->steps;
  const int64_t row_bytes = at * STEP * (rows->form == INT16 ? 2 : 1);
  const rounded_product p = {(const char *)rows->values + row_bytes, rows->scales + at * VL,
                             rows->offsets ? rows->offsets + at * VL : NULL,
                             q->tokens, rows->steps, q->w, q->y};
  if (rows->form == INT16)
    chunk_of(16, &p, chunk);
  else
    chunk_of(8, &p, chunk);
}
