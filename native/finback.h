/* The whole interface of the native core. Python's half is finback/kernels/library.py.
 *
 * Matrices are row-major and contiguous. A weight is (rows, cols) as published; x is (T, cols), y is
 * (T, rows), both float32. Row t of y depends on row t of x alone, with the same bits whatever T,
 * the number of threads and the split are: each element is one fixed sequence of operations over cols.
 * Pointers may have any alignment. Nothing is kept but the threads. */
#ifndef FINBACK_H
#define FINBACK_H

#include <stdint.h>

#define FINBACK_ABI 9
#define FINBACK_API __attribute__((visibility("default")))

/* The number of this interface; the caller refuses a library with another one. */
FINBACK_API int32_t finback_abi(void);

/* The compiler that built the library, a static string. */
FINBACK_API const char *finback_compiler(void);

/* --- instruction sets and threads ------------------------------------------------------------- */

/* The instruction set in use: "base", "avx2", "avx512" or "neon". */
FINBACK_API const char *finback_isa(void);

/* Choose an instruction set by name; 0 where this machine or build does not have it. */
FINBACK_API int32_t finback_set_isa(const char *name);

/* Use this many threads, the caller's included, from the next call on. */
FINBACK_API void finback_set_threads(int32_t count);

/* --- products ----------------------------------------------------------------------------------- */

enum finback_format {
  FINBACK_F32 = 0,
  FINBACK_BF16 = 1,
  FINBACK_F16 = 2,
  FINBACK_MXFP4 = 3, /* data: two codes a byte, even column low; scale: one E8M0 byte per 32 columns */
  FINBACK_INT8 = 4,  /* scale: one float32 a row */
  FINBACK_INT4 = 5,  /* data: two codes a byte, even column low, value + 8; scale: bfloat16 per 32 */
  FINBACK_FP8 = 6,   /* E4M3; scale: one float32 per block of 128 x 128, rounded up at the edges */
};

typedef struct {
  int32_t format;
  int64_t rows, cols; /* cols is a multiple of 32 for MXFP4 and INT4 */
  const void *data;
  const void *scale; /* NULL for plain formats */
} finback_weight;

/* The products of the same rows with several weights, one (T, rows) after the other in y. With bits 0
 * products and sums are float32, fused. With 16 or 8, and MXFP4 weights, x is first rounded to whole
 * numbers of so many bits, one scale per 32 columns. All weights have as many columns as x. */
FINBACK_API void finback_linears(const float *x, int64_t tokens,
                                 const finback_weight *const *weights, int64_t count, int32_t bits,
                                 float *y);

enum finback_activation_kind { FINBACK_SILU = 0, FINBACK_SITU = 1, FINBACK_SITU_BOUNDED = 2 };

typedef struct {
  int32_t kind;
  float beta, linear;
} finback_activation;

/* y (T, w2.rows) = w2 · glu(w1 · x, w3 · x). */
FINBACK_API void finback_mlp(const float *x, int64_t tokens, const finback_weight *const *weights,
                             const finback_activation *a, int32_t bits, float *y);

/* Experts by number, three weights each: w1, w2, w3. ids is (T, k), parts (T, k, w1.cols).
 * Where ids names one of them, its w2 · glu(w1 · x, w3 · x) is written to parts; the rest stays. */
FINBACK_API void finback_experts(const float *x, int64_t tokens, const int64_t *ids, int64_t top_k,
                                 const int64_t *numbers, const finback_weight *const *weights,
                                 int64_t count, const finback_activation *a, int32_t bits,
                                 float *parts);

/* The same added up at once: y (T, w1.cols) += shares (T, k) · each of them, in the order of numbers. */
FINBACK_API void finback_add_experts(const float *x, int64_t tokens, const int64_t *ids,
                                     const float *shares, int64_t top_k, const int64_t *numbers,
                                     const finback_weight *const *weights, int64_t count,
                                     const finback_activation *a, int32_t bits, float *y);

/* y = Σ_i shares[t][i] · parts[t][i], in the order of ids[t][i], which are different: what
 * add_experts gives for ascending numbers. */
FINBACK_API void finback_combine(const float *parts, const int64_t *ids, const float *shares,
                                 int64_t tokens, int64_t top_k, int64_t width, float *y);

/* --- row by row ----------------------------------------------------------------------------------- */

FINBACK_API void finback_rms_norm(const float *x, const float *w, float eps, int64_t rows,
                                  int64_t width, float *y);

/* Fold entries (rows, width), `count` of them, by a softmax over their normalised products with w; then
 * a norm with the weight `norm`. Both use eps. */
FINBACK_API void finback_mix(const float *const *entries, int64_t count, const float *w,
                             const float *norm, float eps, int64_t rows, int64_t width, float *y);

/* y = x · sigmoid(gate) */
FINBACK_API void finback_gated(const float *x, const float *gate, int64_t rows, int64_t width,
                               float *y);

/* --- what remembers -------------------------------------------------------------------------------- */

/* Tokens of one sequence, as the products with the weights gave them, C = heads · width:
 * q, k, v, decay, gate (T, C); beta (T, H). */
typedef struct {
  int64_t tokens, heads, width, taps;
  const float *q, *k, *v, *decay, *beta, *gate;
} finback_delta;

/* taps (3, J, C) of q, k and v; dt_bias (C); a_log (H); norm (K); bound 0 means none. */
typedef struct {
  const float *taps, *dt_bias, *a_log, *norm;
  float bound, eps;
} finback_delta_weights;

/* history (3, J-1, C) and state (H, K, K), key by value, are advanced in place by the first `kept`
 * tokens; out (T, C) is of all. */
FINBACK_API void finback_delta_attention(const finback_delta *d, const finback_delta_weights *w,
                                         int64_t kept, float *history, float *state, float *out);

typedef struct {
  int64_t tokens, seen, heads, nope, extra, rank, value; /* the last `tokens` of `seen` rows are new */
  float scale;
} finback_latent;

/* q (T, H, nope + extra), rows (seen, rank + extra), key (H, nope, rank), value (H, value, rank),
 * out (T, H, value). */
FINBACK_API void finback_latent_attention(const finback_latent *a, const float *q,
                                          const float *rows, const float *key, const float *value,
                                          float *out);

/* --- routing ---------------------------------------------------------------------------------------- */

typedef struct {
  int64_t experts, top_k, groups, top_groups;
  int32_t is_sigmoid, renormalise; /* else softmax over all */
  float scale;
} finback_router;

/* logits (T, E), bias (E) or NULL, ids (T, k) best first, weights (T, k). */
FINBACK_API void finback_route(const float *logits, const float *bias, const finback_router *r,
                               int64_t tokens, int64_t *ids, float *weights);

/* --- picking tokens --------------------------------------------------------------------------------- */

/* shares[i] = e^((logits[i] - largest) / temperature), and their sum. */
FINBACK_API void finback_shares(const float *logits, int64_t size, float largest, float temperature,
                                float *shares, double *total);

/* The numbers of the `count` (at most `size`) largest values, best first, of equals the lower first. */
FINBACK_API void finback_likeliest(const float *values, int64_t size, int64_t count, int64_t *ids);

/* --- measuring -------------------------------------------------------------------------------------- */

/* Read memory once, with all threads; `largest` gets a value that depends on it. */
FINBACK_API void finback_read_memory(const void *data, int64_t bytes, float *largest);

#endif
