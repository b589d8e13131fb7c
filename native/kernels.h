/* The kernels that exist once for every instruction set, and the table of them. */
#ifndef FINBACK_KERNELS_H
#define FINBACK_KERNELS_H

#include "finback.h"

/* name, parameters, arguments: of every public kernel, in the order of finback.h */
#define EACH_KERNEL(K)                                                                             \
  K(linear, (const float *x, int64_t tokens, const finback_weight *w, int32_t bits, float *y),      \
    (x, tokens, w, bits, y))                                                                       \
  K(experts,                                                                                       \
    (const float *x, int64_t tokens, const int64_t *ids, int64_t top_k, const int64_t *numbers,    \
     const finback_weight *const *weights, int64_t count, const finback_activation *a,             \
     int32_t bits, float *parts),                                                                  \
    (x, tokens, ids, top_k, numbers, weights, count, a, bits, parts))                              \
  K(combine,                                                                                       \
    (const float *parts, const float *shares, int64_t tokens, int64_t top_k, int64_t width,        \
     float *y),                                                                                    \
    (parts, shares, tokens, top_k, width, y))                                                      \
  K(rms_norm, (const float *x, const float *w, float eps, int64_t rows, int64_t width, float *y),  \
    (x, w, eps, rows, width, y))                                                                   \
  K(unit, (const float *x, float scale, int64_t rows, int64_t width, float *y),                    \
    (x, scale, rows, width, y))                                                                    \
  K(mix,                                                                                           \
    (const float *const *entries, int64_t count, const float *w, float eps, int64_t rows,          \
     int64_t width, float *y),                                                                     \
    (entries, count, w, eps, rows, width, y))                                                      \
  K(glu,                                                                                           \
    (const float *gate, const float *up, const finback_activation *a, int64_t rows, int64_t width, \
     float *y),                                                                                    \
    (gate, up, a, rows, width, y))                                                                 \
  K(gated, (const float *x, const float *gate, int64_t rows, int64_t width, float *y),             \
    (x, gate, rows, width, y))                                                                     \
  K(decay,                                                                                         \
    (const float *x, const float *a_log, float bound, int64_t tokens, int64_t heads,               \
     int64_t width, float *y),                                                                     \
    (x, a_log, bound, tokens, heads, width, y))                                                    \
  K(short_conv,                                                                                    \
    (const float *x, float *history, const float *taps, int64_t tokens, int64_t channels,          \
     int64_t num_taps, float *y),                                                                  \
    (x, history, taps, tokens, channels, num_taps, y))                                             \
  K(delta_rule,                                                                                    \
    (const float *q, const float *k, const float *v, const float *decay, const float *beta,        \
     float *state, int64_t tokens, int64_t heads, int64_t width, float *out),                      \
    (q, k, v, decay, beta, state, tokens, heads, width, out))                                      \
  K(latent_attention,                                                                              \
    (const finback_latent *a, const float *q, const float *extra, const float *rows,               \
     const float *key, const float *value, float *out),                                            \
    (a, q, extra, rows, key, value, out))                                                          \
  K(route,                                                                                         \
    (const float *logits, const float *bias, const finback_router *r, int64_t tokens,              \
     int64_t *ids, float *weights),                                                                \
    (logits, bias, r, tokens, ids, weights))                                                       \
  K(read_memory, (const void *data, int64_t bytes, float *largest), (data, bytes, largest))

#define DECLARE_BASE(name, parameters, arguments) void name##_base parameters;
#define DECLARE_AVX2(name, parameters, arguments) void name##_avx2 parameters;
#define DECLARE_AVX512(name, parameters, arguments) void name##_avx512 parameters;
#define DECLARE_NEON(name, parameters, arguments) void name##_neon parameters;
/* quantised.c; reached through linear */
#define ROUNDED(isa)                                                                               \
  void linear_rounded_##isa(const float *x, int64_t tokens, const finback_weight *w, int32_t bits, \
                            float *y);
ROUNDED(base)
ROUNDED(avx2)
ROUNDED(avx512)
ROUNDED(neon)
EACH_KERNEL(DECLARE_BASE)
EACH_KERNEL(DECLARE_AVX2)
EACH_KERNEL(DECLARE_AVX512)
EACH_KERNEL(DECLARE_NEON)

#endif
