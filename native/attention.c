/* What remembers: short convolution, the gated delta rule, latent attention.
 * Twins: the methods of the same names of Reference in finback/kernels/reference.py. */
#include <math.h>
#include <stdlib.h>

#include "functions.h"
#include "kernels.h"
#include "threads.h"

enum { WORTH_SHARING = 1 << 15 };

/* --- short convolution ---------------------------------------------------------------------------
 * y[t][c] = SiLU( Σ_j taps[j][c] · z[t - (J-1) + j][c] ), z being history followed by x. */

void ISA(short_conv)(const float *x, float *history, const float *taps, int64_t tokens,
                     int64_t channels, int64_t num_taps, float *y) {
  const int64_t past = num_taps - 1;
  for (int64_t c = 0; c < channels; c += VL) {
    const int64_t left = channels - c;
    for (int64_t t = 0; t < tokens; t++) {
      vf sum = vf_zero();
      for (int64_t j = 0; j < num_taps; j++) {
        int64_t from = t - past + j;
        const float *z = from < 0 ? history + (past + from) * channels : x + from * channels;
        sum = vf_fma(vf_load_part(taps + j * channels + c, left), vf_load_part(z + c, left), sum);
      }
      vf_store_part(y + t * channels + c, sum * vf_sigmoid(sum), left);
    }
  }
  int64_t kept = tokens >= past ? 0 : past - tokens; /* rows of the old history that stay */
  memmove(history, history + (past - kept) * channels, (size_t)(kept * channels) * sizeof(float));
  memcpy(history + kept * channels, x + (tokens - (past - kept)) * channels,
         (size_t)((past - kept) * channels) * sizeof(float));
}

/* --- gated delta rule ------------------------------------------------------------------------------
 * Per head and token: S ← diag(e^g) S;  e = v − Sᵀk;  S ← S + β k eᵀ;  o = Sᵀ q.
 * S is (K, K), key by value; a vector runs along the value axis, so that each element of e and o is
 * one chain over the keys. A head's state stays in the cache for the whole run of tokens. */

typedef struct {
  const float *q, *k, *v, *decay, *beta;
  float *state, *out;
  int64_t tokens, heads, width;
} delta_job;

static void delta_head(void *context, int64_t head) {
  const delta_job *j = context;
  const int64_t K = j->width;
  float *S = j->state + head * K * K;
  float *forget = finback_alloc((size_t)(2 * K) * sizeof(float));
  float *error = forget + K;
  for (int64_t t = 0; t < j->tokens; t++) {
    const int64_t at = (t * j->heads + head) * K;
    const float *q = j->q + at, *k = j->k + at, beta = j->beta[t * j->heads + head];
    for (int64_t i = 0; i < K; i += VL)
      vf_store_part(forget + i, vf_exp(vf_load_part(j->decay + at + i, K - i)), K - i);
    for (int64_t c = 0; c < K; c += VL) {
      const int64_t left = K - c;
      vf e = vf_load_part(j->v + at + c, left);
      for (int64_t i = 0; i < K; i++) {
        vf s = vf_load_part(S + i * K + c, left) * vf_set(forget[i]);
        vf_store_part(S + i * K + c, s, left);
        e = vf_fma(vf_set(-k[i]), s, e);
      }
      vf_store_part(error + c, e, left);
      vf o = vf_zero();
      for (int64_t i = 0; i < K; i++) {
        vf s = vf_fma(vf_set(beta * k[i]), e, vf_load_part(S + i * K + c, left));
        vf_store_part(S + i * K + c, s, left);
        o = vf_fma(vf_set(q[i]), s, o);
      }
      vf_store_part(j->out + at + c, o, left);
    }
  }
  free(forget);
}

void ISA(delta_rule)(const float *q, const float *k, const float *v, const float *decay,
                     const float *beta, float *state, int64_t tokens, int64_t heads, int64_t width,
                     float *out) {
  delta_job j = {q, k, v, decay, beta, state, out, tokens, heads, width};
  if (tokens * heads * width * width >= WORTH_SHARING)
    finback_parallel(heads, delta_head, &j);
  else
    for (int64_t head = 0; head < heads; head++) delta_head(&j, head);
}

/* --- latent attention ------------------------------------------------------------------------------
 * Per token and head, in absorbed form: q' = keyᵀ q; score_s = ([q' | q_extra] · row_s) · scale;
 * p = softmax(score) over the rows up to this token; m = Σ_s p_s row_s; o = value · m. */

typedef struct {
  const float *q, *extra, *rows, *key, *value;
  float *out, scale;
  int64_t tokens, seen, heads, nope, extra_width, rank, value_width;
} latent_job;

INLINE float dot(const float *a, const float *b, int64_t width) {
  vf sum = vf_zero();
  for (int64_t i = 0; i < width; i += VL)
    sum = vf_fma(vf_load_part(a + i, width - i), vf_load_part(b + i, width - i), sum);
  return vf_sum(sum);
}

static void latent_one(void *context, int64_t index) {
  const latent_job *j = context;
  const int64_t t = index / j->heads, head = index % j->heads, rank = j->rank;
  const int64_t row = rank + j->extra_width, count = j->seen - j->tokens + t + 1;
  float *query = finback_alloc((size_t)(row + rank + count) * sizeof(float));
  float *mixed = query + row, *share = mixed + rank;
  const float *q = j->q + (t * j->heads + head) * j->nope;
  for (int64_t c = 0; c < rank; c += VL) {
    vf sum = vf_zero();
    for (int64_t n = 0; n < j->nope; n++) {
      const float *key = j->key + (head * j->nope + n) * rank;
      sum = vf_fma(vf_set(q[n]), vf_load_part(key + c, rank - c), sum);
    }
    vf_store_part(query + c, sum, rank - c);
  }
  memcpy(query + rank, j->extra + (t * j->heads + head) * j->extra_width,
         (size_t)j->extra_width * sizeof(float));
  float best = -INFINITY, total = 0;
  for (int64_t s = 0; s < count; s++) {
    share[s] = dot(query, j->rows + s * row, row) * j->scale;
    if (share[s] > best) best = share[s];
  }
  for (int64_t s = 0; s < count; s += VL) {
    vf e = vf_exp(vf_load_part(share + s, count - s) - vf_set(best));
    vf_store_part(share + s, e, count - s);
  }
  for (int64_t s = 0; s < count; s++) total += share[s];
  for (int64_t c = 0; c < rank; c += VL) {
    vf sum = vf_zero();
    for (int64_t s = 0; s < count; s++)
      sum = vf_fma(vf_set(share[s]), vf_load_part(j->rows + s * row + c, rank - c), sum);
    vf_store_part(mixed + c, sum / vf_set(total), rank - c);
  }
  float *out = j->out + (t * j->heads + head) * j->value_width;
  for (int64_t m = 0; m < j->value_width; m++)
    out[m] = dot(j->value + (head * j->value_width + m) * rank, mixed, rank);
  free(query);
}

void ISA(latent_attention)(const finback_latent *a, const float *q, const float *extra,
                           const float *rows, const float *key, const float *value, float *out) {
  latent_job j = {q, extra, rows, key, value, out, a->scale, a->tokens, a->seen, a->heads,
                  a->nope, a->extra, a->rank, a->value};
  int64_t work = a->rank * (a->nope + a->value) + a->seen * (2 * a->rank + a->extra);
  if (a->tokens * a->heads * work >= 4 * WORTH_SHARING)
    finback_parallel(a->tokens * a->heads, latent_one, &j);
  else
    for (int64_t i = 0; i < a->tokens * a->heads; i++) latent_one(&j, i);
}
