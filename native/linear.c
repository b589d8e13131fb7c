/* y[t][r] = Σ_c x[t][c] · W[r][c], W in a published format, float32 arithmetic.
 *
 * Twin: Reference.linear in finback/kernels/reference.py. The plain loop:
 *     for t: for r: y[t][r] = sum(x[t][c] * unpack(W[r][c]) for c)
 *
 * One element is always VL partial sums, advanced along c by fused multiply-adds and added in a
 * fixed order at the end, whatever tile it is in. So one row and many rows, any number of threads and
 * any split give the same bits.
 *
 * Few rows of x: weights are widened in registers and used at once. Many rows: blocks of weights are
 * widened once into memory that stays in the cache, and multiplied with all rows of x.
 * Columns are padded with zeros to a multiple of 32; a product with zero changes no sum. */
#include <stdlib.h>

#include "products.h"
#include "threads.h"

enum { BLOCK = 32, PER = BLOCK / VL, TILE_R = 4, AHEAD = 8192 };
enum { COLUMNS = 512, MANY = 96 }; /* the blocks that many rows of x are cut into */

/* A product whose rows are PLAIN or EVEN_FIRST. */
typedef struct {
  const float *x; /* (tokens, padded) */
  int64_t tokens, padded;
  const finback_weight *w;
  float *y;
} float_product;

/* --- widening a block of 32 columns -------------------------------------------------------------- */

/* Bytes of one row, and of 32 columns. */
INLINE int64_t bytes_of(int format, int64_t cols) {
  return format == FINBACK_F32                               ? 4 * cols
         : format == FINBACK_BF16 || format == FINBACK_F16   ? 2 * cols
         : format == FINBACK_MXFP4 || format == FINBACK_INT4 ? cols / 2
                                                             : cols;
}

/* Two codes a byte: widening gives the even columns first. */
INLINE int is_packed(int format) { return format == FINBACK_MXFP4 || format == FINBACK_INT4; }

/* What a block of 32 columns is multiplied with. */
INLINE float factor_of(int format, const finback_weight *w, int64_t row, int64_t block) {
  const int64_t at = row * (w->cols / BLOCK) + block;
  if (format == FINBACK_MXFP4) return scale_of(((const uint8_t *)w->scale)[at]);
  if (format == FINBACK_INT4) {
    uint32_t bits = (uint32_t)((const uint16_t *)w->scale)[at] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
  }
  if (format == FINBACK_FP8)
    return ((const float *)w->scale)[row / 128 * ((w->cols + 127) / 128) + block * BLOCK / 128];
  return 1;
}

/* What a finished sum is multiplied with. */
INLINE float finish(int format, const finback_weight *w, int64_t row, float sum) {
  return format == FINBACK_INT8 ? sum * ((const float *)w->scale)[row] : sum;
}

INLINE void widen_block(int format, const uint8_t *data, float factor, vf out[PER]) {
  if (format == FINBACK_MXFP4) widen_mxfp4(data, out);
  if (format == FINBACK_INT4) widen_int4(data, out);
  for (int i = 0; i < PER; i++) {
    if (format == FINBACK_F32) out[i] = vf_load((const float *)data + i * VL);
    if (format == FINBACK_BF16) out[i] = widen_bf16((const uint16_t *)data + i * VL);
    if (format == FINBACK_F16) out[i] = widen_f16((const uint16_t *)data + i * VL);
    if (format == FINBACK_INT8) out[i] = widen_int8((const int8_t *)data + i * VL);
    if (format == FINBACK_FP8) out[i] = widen_fp8(data + i * VL);
    if (is_packed(format) || format == FINBACK_FP8) out[i] = out[i] * vf_set(factor);
  }
}

/* The last block of a row whose columns are no multiple of 32. */
static void widen_tail(int format, const uint8_t *data, int64_t cols, float factor, vf out[PER]) {
  uint8_t block[BLOCK * 4] = {0};
  memcpy(block, data, (size_t)bytes_of(format, cols));
  widen_block(format, block, factor, out);
}

/* --- few rows of x ------------------------------------------------------------------------------- */

/* `rows` (1 to 4) rows of weights by `tokens` (1 to TILE_T) rows of x; both known to the compiler. */
INLINE void few(int format, const float_product *p, int64_t r, int rows, int64_t t, int tokens) {
  const int64_t cols = p->w->cols, whole = cols / BLOCK, stride = bytes_of(format, cols);
  const int64_t step = bytes_of(format, BLOCK);
  const uint8_t *data = (const uint8_t *)p->w->data + r * stride;
  const float *x = p->x + t * p->padded;
  vf sum[TILE_R][TILE_T];
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < tokens; j++) sum[i][j] = vf_zero();
  for (int64_t b = 0; b * BLOCK < cols; b++) {
    for (int i = 0; i < rows; i++) {
      vf w[PER];
      const uint8_t *at = data + i * stride + b * step;
      const float factor = factor_of(format, p->w, r + i, b);
      if (b < whole) {
        __builtin_prefetch(at + AHEAD);
        if (step > 64) __builtin_prefetch(at + AHEAD + 64);
        widen_block(format, at, factor, w);
      } else {
        widen_tail(format, at, cols - b * BLOCK, factor, w);
      }
      for (int k = 0; k < PER; k++)
        for (int j = 0; j < tokens; j++)
          sum[i][j] = vf_fma(w[k], vf_load(x + j * p->padded + b * BLOCK + k * VL), sum[i][j]);
    }
  }
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < tokens; j++)
      p->y[(t + j) * p->w->rows + r + i] = finish(format, p->w, r + i, vf_sum(sum[i][j]));
}

/* --- tiles --------------------------------------------------------------------------------------- */

/* Call `tile` with constants for its last argument, so that each becomes straight code. */
#if TILE_T == 6
#define FOR_TOKENS(count, call)                                                     \
  switch (count) {                                                                  \
    case 1: call(1); break; case 2: call(2); break; case 3: call(3); break;         \
    case 4: call(4); break; case 5: call(5); break; default: call(6);               \
  }
#elif TILE_T == 5
#define FOR_TOKENS(count, call)                                                     \
  switch (count) {                                                                  \
    case 1: call(1); break; case 2: call(2); break; case 3: call(3); break;         \
    case 4: call(4); break; default: call(5);                                       \
  }
#elif TILE_T == 3
#define FOR_TOKENS(count, call)                                                     \
  switch (count) {                                                                  \
    case 1: call(1); break; case 2: call(2); break; default: call(3);               \
  }
#else
#define FOR_TOKENS(count, call)                                                     \
  switch (count) {                                                                  \
    case 1: call(1); break; default: call(2);                                       \
  }
#endif

/* --- many rows of x ------------------------------------------------------------------------------
 * Cut so that what is used again stays in the cache: a block of columns of 16 rows of weights, widened
 * once, meets the same columns of up to 96 rows of x. The partial sums wait in memory between blocks
 * of columns; a sum that was stored and loaded is the same sum. */

/* Widen `count` columns of a row, from column `from`; both are multiples of 32, zeros past the end. */
INLINE void widen_columns(int format, const float_product *p, int64_t r, int64_t from, int64_t count,
                          float *to) {
  const int64_t cols = p->w->cols;
  const uint8_t *row = (const uint8_t *)p->w->data + r * bytes_of(format, cols);
  for (int64_t c = from; c < from + count; c += BLOCK) {
    vf w[PER];
    const float factor = factor_of(format, p->w, r, c / BLOCK);
    if (c + BLOCK <= cols)
      widen_block(format, row + bytes_of(format, c), factor, w);
    else
      widen_tail(format, row + bytes_of(format, c), cols - c, factor, w);
    for (int k = 0; k < PER; k++) vf_store(to + c - from + k * VL, w[k]);
  }
}

/* Advance the sums of `rows` by `tokens` elements over a block of columns. */
INLINE void many_tile(const float *panel, int rows, const float *x, int64_t stride, int tokens,
                      int64_t count, float *sums) {
  vf sum[TILE_R][TILE_T];
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < tokens; j++) sum[i][j] = vf_load(sums + (i * MANY + j) * VL);
  for (int64_t c = 0; c < count; c += VL) {
    vf w[TILE_R];
    for (int i = 0; i < rows; i++) w[i] = vf_load(panel + i * COLUMNS + c);
    for (int j = 0; j < tokens; j++) {
      vf v = vf_load(x + j * stride + c);
      for (int i = 0; i < rows; i++) sum[i][j] = vf_fma(w[i], v, sum[i][j]);
    }
  }
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < tokens; j++) vf_store(sums + (i * MANY + j) * VL, sum[i][j]);
}

INLINE void tiles_of(const float *panel, int rows, const float *x, int64_t stride, int64_t tokens,
                     int64_t count, float *sums) {
  for (int64_t t = 0; t < tokens; t += TILE_T) {
#define CALL(n) many_tile(panel, rows, x + t * stride, stride, n, count, sums + t * VL)
    FOR_TOKENS(tokens - t, CALL)
#undef CALL
  }
}

INLINE void chunk_of_many(int format, const float_product *p, int64_t first, int64_t rows) {
  float *panel = finback_alloc((size_t)(CHUNK_ROWS * COLUMNS) * sizeof(float));
  float *sums = finback_alloc((size_t)(CHUNK_ROWS * MANY * VL) * sizeof(float));
  for (int64_t t = 0; t < p->tokens; t += MANY) {
    const int64_t tokens = p->tokens - t < MANY ? p->tokens - t : MANY;
    memset(sums, 0, (size_t)(CHUNK_ROWS * MANY * VL) * sizeof(float));
    for (int64_t c = 0; c < p->padded; c += COLUMNS) {
      const int64_t count = p->padded - c < COLUMNS ? p->padded - c : COLUMNS;
      const float *x = p->x + t * p->padded + c;
      for (int64_t i = 0; i < rows; i++)
        widen_columns(format, p, first + i, c, count, panel + i * COLUMNS);
      int64_t i = 0;
      for (; i + TILE_R <= rows; i += TILE_R)
        tiles_of(panel + i * COLUMNS, TILE_R, x, p->padded, tokens, count, sums + i * MANY * VL);
      for (; i < rows; i++)
        tiles_of(panel + i * COLUMNS, 1, x, p->padded, tokens, count, sums + i * MANY * VL);
    }
    for (int64_t i = 0; i < rows; i++)
      for (int64_t j = 0; j < tokens; j++)
        p->y[(t + j) * p->w->rows + first + i] =
            finish(format, p->w, first + i, vf_sum(vf_load(sums + (i * MANY + j) * VL)));
  }
  free(sums);
  free(panel);
}

INLINE void chunk_of(int format, const float_product *p, int64_t chunk) {
  int64_t r = chunk * CHUNK_ROWS, end = r + CHUNK_ROWS;
  if (end > p->w->rows) end = p->w->rows;
  if (p->tokens > TILE_T) {
    chunk_of_many(format, p, r, end - r);
    return;
  }
#define CALL(n) few(format, p, r, TILE_R, 0, n)
  for (; r + TILE_R <= end; r += TILE_R) { FOR_TOKENS(p->tokens, CALL) }
#undef CALL
#define CALL(n) few(format, p, r, 1, 0, n)
  for (; r < end; r++) { FOR_TOKENS(p->tokens, CALL) }
#undef CALL
}

void ISA(float_chunk)(const product *q, int64_t chunk) {
  const prepared_rows *rows = q->x;
  const float *x = (const float *)rows->values + q->first * rows->steps;
  const float_product p = {x, q->tokens, rows->steps, q->w, q->y};
  switch (q->w->format) { /* straight code for each */
    case FINBACK_F32: chunk_of(FINBACK_F32, &p, chunk); break;
    case FINBACK_BF16: chunk_of(FINBACK_BF16, &p, chunk); break;
    case FINBACK_F16: chunk_of(FINBACK_F16, &p, chunk); break;
    case FINBACK_MXFP4: chunk_of(FINBACK_MXFP4, &p, chunk); break;
    case FINBACK_INT8: chunk_of(FINBACK_INT8, &p, chunk); break;
    case FINBACK_INT4: chunk_of(FINBACK_INT4, &p, chunk); break;
    default: chunk_of(FINBACK_FP8, &p, chunk);
  }
}
