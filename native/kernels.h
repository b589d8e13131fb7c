/* The kernels that exist once for every instruction set, and the table of them. */
#ifndef FINBACK_KERNELS_H
#define FINBACK_KERNELS_H

#include "finback.h"

/* name, parameters, arguments: of every public kernel, in the order of finback.h */
#define EACH_KERNEL(K)                                                                             \
  K(linears,                                                                                       \
    (const float *x, int64_t tokens, const finback_weight *const *weights, int64_t count,          \
     int32_t bits, float *y),                                                                      \
    (x, tokens, weights, count, bits, y))                                                          \
  K(mlp,                                                                                           \
    (const float *x, int64_t tokens, const finback_weight *const *weights,                         \
     const finback_activation *a, int32_t bits, float *y),                                         \
    (x, tokens, weights, a, bits, y))                                                              \
  K(experts,                                                                                       \
    (const float *x, int64_t tokens, const int64_t *ids, int64_t top_k, const int64_t *numbers,    \
     const finback_weight *const *weights, int64_t count, const finback_activation *a,             \
     int32_t bits, float *parts),                                                                  \
    (x, tokens, ids, top_k, numbers, weights, count, a, bits, parts))                              \
  K(add_experts,                                                                                   \
    (const float *x, int64_t tokens, const int64_t *ids, const float *shares, int64_t top_k,       \
     const int64_t *numbers, const finback_weight *const *weights, int64_t count,                  \
     const finback_activation *a, int32_t bits, float *y),                                         \
    (x, tokens, ids, shares, top_k, numbers, weights, count, a, bits, y))                          \
  K(combine,                                                                                       \
    (const float *parts, const int64_t *ids, const float *shares, int64_t tokens, int64_t top_k,   \
     int64_t width, float *y),                                                                     \
    (parts, ids, shares, tokens, top_k, width, y))                                                 \
  K(rms_norm, (const float *x, const float *w, float eps, int64_t rows, int64_t width, float *y),  \
    (x, w, eps, rows, width, y))                                                                   \
  K(mix,                                                                                           \
    (const float *const *entries, int64_t count, const float *w, const float *norm, float eps,     \
     int64_t rows, int64_t width, float *y),                                                       \
    (entries, count, w, norm, eps, rows, width, y))                                                \
  K(gated, (const float *x, const float *gate, int64_t rows, int64_t width, float *y),             \
    (x, gate, rows, width, y))                                                                     \
  K(delta_attention,                                                                               \
    (const finback_delta *d, const finback_delta_weights *w, int64_t kept, float *history,         \
     float *state, float *out),                                                                    \
    (d, w, kept, history, state, out))                                                             \
  K(latent_attention,                                                                              \
    (const finback_latent *a, const float *q, const float *rows, const float *key,                 \
     const float *value, float *out),                                                              \
    (a, q, rows, key, value, out))                                                                 \
  K(route,                                                                                         \
    (const float *logits, const float *bias, const finback_router *r, int64_t tokens,              \
     int64_t *ids, float *weights),                                                                \
    (logits, bias, r, tokens, ids, weights))                                                       \
  K(shares,                                                                                        \
    (const float *logits, int64_t size, float largest, float temperature, float *shares,           \
     double *total),                                                                               \
    (logits, size, largest, temperature, shares, total))                                           \
  K(likeliest, (const float *values, int64_t size, int64_t count, int64_t *ids),                   \
    (values, size, count, ids))                                                                    \
  K(read_memory, (const void *data, int64_t bytes, float *largest), (data, bytes, largest))

#define DECLARE_BASE(name, parameters, arguments) void name##_base parameters;
#define DECLARE_AVX2(name, parameters, arguments) void name##_avx2 parameters;
#define DECLARE_AVX512(name, parameters, arguments) void name##_avx512 parameters;
#define DECLARE_NEON(name, parameters, arguments) void name##_neon parameters;
EACH_KERNEL(DECLARE_BASE)
EACH_KERNEL(DECLARE_AVX2)
EACH_KERNEL(DECLARE_AVX512)
EACH_KERNEL(DECLARE_NEON)

#endif
