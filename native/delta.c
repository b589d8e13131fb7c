/* Kimi delta attention of a run of tokens, from the products with their weights to the gated output.
 * Twin: Reference.delta_attention.
 *
 * Per head and token, over its K channels:
 *     q, k, v = SiLU(short convolution of raw q, k, v);  q ← unit(q)/√K, k ← unit(k)
 *     f = e^(bound·sigmoid(e^a·(x + dt))), or e^(-e^a·softplus(x + dt)) where bound is 0
 *     S ← diag(f) S;  e = v − Sᵀk;  S ← S + sigmoid(β) k eᵀ;  o = Sᵀ q
 *     out = o / rms(o) · norm · sigmoid(gate)
 * S is (K, K), key by value; a vector runs along the value axis, so that each element of e and o is
 * one chain over the keys. A head's state stays in the cache for the whole run of tokens, and heads
 * share nothing, so each is one turn of a thread. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "functions.h"
#include "kernels.h"
#include "threads.h"

enum { WIDE = 4 }; /* vectors of the value axis that are in flight together */
static const float UNIT_EPS = 1e-6f;        /* inside the root, as in the model's own kernels */

typedef struct {
  const finback_delta *d;
  const finback_delta_weights *w;
  int64_t kept; /* tokens that history and state are advanced by */
  float *history, *state, *out;
} job;

/* q, k or v of one head and token: the convolution over history and earlier tokens, then SiLU. */
INLINE void convolve(const job *j, int which, int64_t t, int64_t head, float *to) {
  const finback_delta *d = j->d;
  const int64_t K = d->width, C = d->heads * K, past = d->taps - 1, at = head * K;
  const float *x = which == 0 ? d->q : which == 1 ? d->k : d->v;
  const float *taps = j->w->taps + which * d->taps * C, *history = j->history + which * past * C;
  for (int64_t c = 0; c < K; c += VL) {
    vf sum = vf_zero();
    for (int64_t n = 0; n < d->taps; n++) {
      const int64_t from = t - past + n;
      const float *z = (from < 0 ? history + (past + from) * C : x + from * C) + at + c;
      sum = vf_fma(vf_load_part(taps + n * C + at + c, K - c), vf_load_part(z, K - c), sum);
    }
    vf_store_part(to + c, sum * vf_sigmoid(sum), K - c);
  }
}

/* The last inputs of the three convolutions that are kept become the history. */
static void remember(const job *j, int64_t head) {
  const finback_delta *d = j->d;
  const int64_t K = d->width, C = d->heads * K, past = d->taps - 1;
  const float *const inputs[3] = {d->q, d->k, d->v};
  for (int which = 0; which < 3; which++)
    for (int64_t p = 0; p < past; p++) {
      const int64_t from = j->kept - past + p; /* upwards: what is read lies at or after p */
      float *rows = j->history + which * past * C + head * K;
      const float *z = from < 0 ? rows + (past + from) * C : inputs[which] + from * C + head * K;
      memmove(rows + p * C, z, (size_t)K * sizeof(float));
    }
}

INLINE float dot(const float *a, const float *b, int64_t width) {
  vf sum = vf_zero();
  for (int64_t i = 0; i < width; i += VL)
    sum = vf_fma(vf_load_part(a + i, width - i), vf_load_part(b + i, width - i), sum);
  return vf_sum(sum);
}

INLINE void scale_row(float *x, float factor, int64_t width) {
  for (int64_t i = 0; i < width; i += VL)
    vf_store_part(x + i, vf_load_part(x + i, width - i) * vf_set(factor), width - i);
}

/* How much of the state stays, per key channel. */
INLINE void forget_of(const job *j, int64_t t, int64_t head, float *forget) {
  const finback_delta *d = j->d;
  const int64_t K = d->width, at = t * d->heads * K + head * K;
  const float *x = d->decay + at, *dt = j->w->dt_bias + head * K;
  const float rate = expf(j->w->a_log[head]), bound = j->w->bound;
  if (bound == 0)
    for (int64_t i = 0; i < K; i++) {
      const float v = x[i] + dt[i];
      forget[i] = -rate * (v > 0 ? v + log1pf(expf(-v)) : log1pf(expf(v)));
    }
  for (int64_t i = 0; i < K; i += VL) {
    const int64_t left = K - i;
    vf log_decay;
    if (bound == 0)
      log_decay = vf_load_part(forget + i, left);
    else
      log_decay = vf_set(bound) * vf_sigmoid(vf_set(rate) * (vf_load_part(x + i, left) +
                                                             vf_load_part(dt + i, left)));
    vf_store_part(forget + i, vf_exp(log_decay), left);
  }
}

/* Advance `count` vectors of the value axis, from column c; the last may be of `left` columns. */
INLINE void advance(float *S, int64_t K, int64_t c, int count, int64_t left, const float *q,
                    const float *k, const float *v, const float *bk, const float *forget, float *o) {
  vf e[WIDE], sum[WIDE];
  for (int n = 0; n < count; n++)
    e[n] = vf_load_part(v + c + n * VL, left - n * VL), sum[n] = vf_zero();
  for (int64_t i = 0; i < K; i++)
    for (int n = 0; n < count; n++) {
      vf s = vf_load_part(S + i * K + c + n * VL, left - n * VL) * vf_set(forget[i]);
      e[n] = vf_fma(vf_set(-k[i]), s, e[n]);
    }
  for (int64_t i = 0; i < K; i++)
    for (int n = 0; n < count; n++) {
      float *at = S + i * K + c + n * VL;
      vf s = vf_load_part(at, left - n * VL) * vf_set(forget[i]);
      s = vf_fma(vf_set(bk[i]), e[n], s);
      vf_store_part(at, s, left - n * VL);
      sum[n] = vf_fma(vf_set(q[i]), s, sum[n]);
    }
  for (int n = 0; n < count; n++) vf_store_part(o + c + n * VL, sum[n], left - n * VL);
}

static void one_head(void *context, int64_t head) {
  const job *j = context;
  const finback_delta *d = j->d;
  const int64_t K = d->width, C = d->heads * K;
  float *S = j->state + head * K * K;
  const int has_drafts = j->kept < d->tokens;
  float *q = finback_alloc((size_t)(6 * K + (has_drafts ? K * K : 0)) * sizeof(float));
  float *k = q + K, *v = k + K, *bk = v + K, *forget = bk + K, *o = forget + K;
  for (int64_t t = 0; t < d->tokens; t++) {
    if (t == j->kept) S = memcpy(o + K, S, (size_t)(K * K) * sizeof(float)); /* from here on a copy */
    convolve(j, 0, t, head, q);
    convolve(j, 1, t, head, k);
    convolve(j, 2, t, head, v);
    scale_row(q, 1.0f / sqrtf((float)K) / sqrtf(dot(q, q, K) + UNIT_EPS), K);
    scale_row(k, 1.0f / sqrtf(dot(k, k, K) + UNIT_EPS), K);
    forget_of(j, t, head, forget);
    float beta[VL];
    vf_store(beta, vf_sigmoid(vf_set(d->beta[t * d->heads + head])));
    for (int64_t i = 0; i < K; i++) bk[i] = beta[0] * k[i];
    int64_t c = 0;
    for (; c + WIDE * VL <= K; c += WIDE * VL)
      advance(S, K, c, WIDE, WIDE * VL, q, k, v, bk, forget, o);
    for (; c < K; c += VL) advance(S, K, c, 1, K - c, q, k, v, bk, forget, o);
    const vf size = vf_set(1.0f / sqrtf(dot(o, o, K) / (float)K + j->w->eps));
    const int64_t at = t * C + head * K;
    for (int64_t i = 0; i < K; i += VL) {
      const int64_t left = K - i;
      vf y = vf_load_part(o + i, left) * size * vf_load_part(j->w->norm + i, left);
      vf_store_part(j->out + at + i, y * vf_sigmoid(vf_load_part(d->gate + at + i, left)), left);
    }
  }
  remember(j, head);
  free(q);
}

void ISA(delta_attention)(const finback_delta *d, const finback_delta_weights *w, int64_t kept,
                          float *history, float *state, float *out) {
  job j = {d, w, kept, history, state, out};
  finback_parallel(d->heads, d->tokens * d->heads * d->width * d->width / 2, one_head, &j);
}
