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

/* Heads that share each load of a row, and vectors of a row held in registers meanwhile. */
#if VL >= 16
enum { HEADS = 4, WIDE = 4 };
#else
enum { HEADS = 2, WIDE = 4 };
#endif

INLINE float dot(const float *a, const float *b, int64_t width) {
  vf sum = vf_zero();
  for (int64_t i = 0; i < width; i += VL)
    sum = vf_fma(vf_load_part(a + i, width - i), vf_load_part(b + i, width - i), sum);
  return vf_sum(sum);
}

/* out[h][c] = Σ_i factors[h][i] · rows[i][c] for some heads: each element one chain over i. */
INLINE void weighted_rows(const float *const *factors, int heads, const float *rows, int64_t stride,
                          int64_t count, int64_t width, float *const *out) {
  int64_t c = 0;
  for (; c + WIDE * VL <= width; c += WIDE * VL) {
    vf sum[HEADS][WIDE];
    for (int h = 0; h < heads; h++)
      for (int k = 0; k < WIDE; k++) sum[h][k] = vf_zero();
    for (int64_t i = 0; i < count; i++) {
      vf v[WIDE];
      for (int k = 0; k < WIDE; k++) v[k] = vf_load(rows + i * stride + c + k * VL);
      for (int h = 0; h < heads; h++)
        for (int k = 0; k < WIDE; k++) sum[h][k] = vf_fma(vf_set(factors[h][i]), v[k], sum[h][k]);
    }
    for (int h = 0; h < heads; h++)
      for (int k = 0; k < WIDE; k++) vf_store(out[h] + c + k * VL, sum[h][k]);
  }
  for (; c < width; c += VL)
    for (int h = 0; h < heads; h++) {
      vf sum = vf_zero();
      for (int64_t i = 0; i < count; i++)
        sum = vf_fma(vf_set(factors[h][i]), vf_load_part(rows + i * stride + c, width - c), sum);
      vf_store_part(out[h] + c, sum, width - c);
    }
}

/* scores[h][i] = queries[h] · rows[i] · scale for some heads: each as `dot` computes it. */
INLINE void score_rows(const float *const *queries, int heads, const float *rows, int64_t width,
                       int64_t count, float scale, float *const *scores) {
  for (int64_t i = 0; i < count; i++) {
    const float *row = rows + i * width;
    vf sum[HEADS];
    for (int h = 0; h < heads; h++) sum[h] = vf_zero();
    int64_t c = 0;
    for (; c + VL <= width; c += VL) {
      vf v = vf_load(row + c);
      for (int h = 0; h < heads; h++) sum[h] = vf_fma(vf_load(queries[h] + c), v, sum[h]);
    }
    if (c < width) {
      vf v = vf_load_part(row + c, width - c);
      for (int h = 0; h < heads; h++)
        sum[h] = vf_fma(vf_load_part(queries[h] + c, width - c), v, sum[h]);
    }
    for (int h = 0; h < heads; h++) scores[h][i] = vf_sum(sum[h]) * scale;
  }
}

/* In place; the sum goes back, for the mixture to be divided by. */
INLINE float exponentials(float *scores, int64_t count) {
  float best = -INFINITY, total = 0;
  for (int64_t s = 0; s < count; s++)
    if (scores[s] > best) best = scores[s];
  for (int64_t s = 0; s < count; s += VL) {
    vf e = vf_exp(vf_load_part(scores + s, count - s) - vf_set(best));
    vf_store_part(scores + s, e, count - s);
  }
  for (int64_t s = 0; s < count; s++) total += scores[s];
  return total;
}

/* Some heads of one token. */
INLINE void latent_heads(const latent_job *j, int64_t t, int64_t first, int heads) {
  const int64_t rank = j->rank, row = rank + j->extra_width, count = j->seen - j->tokens + t + 1;
  const int64_t each = row + rank + count;
  float *work = finback_alloc((size_t)(heads * each) * sizeof(float));
  float *query[HEADS], *mixed[HEADS], *share[HEADS];
  for (int h = 0; h < heads; h++) {
    const int64_t head = first + h, at = t * j->heads + head;
    query[h] = work + h * each, mixed[h] = query[h] + row, share[h] = mixed[h] + rank;
    const float *q = j->q + at * j->nope;
    weighted_rows(&q, 1, j->key + head * j->nope * rank, rank, j->nope, rank, &query[h]);
    memcpy(query[h] + rank, j->extra + at * j->extra_width,
           (size_t)j->extra_width * sizeof(float));
  }
  score_rows((const float *const *)query, heads, j->rows, row, count, j->scale, share);
  float total[HEADS];
  for (int h = 0; h < heads; h++) total[h] = exponentials(share[h], count);
  weighted_rows((const float *const *)share, heads, j->rows, row, count, rank, mixed);
  for (int h = 0; h < heads; h++) {
    for (int64_t c = 0; c < rank; c += VL) {
      vf m = vf_load_part(mixed[h] + c, rank - c) / vf_set(total[h]);
      vf_store_part(mixed[h] + c, m, rank - c);
    }
    const int64_t head = first + h;
    float *out = j->out + (t * j->heads + head) * j->value_width;
    for (int64_t m = 0; m < j->value_width; m++)
      out[m] = dot(j->value + (head * j->value_width + m) * rank, mixed[h], rank);
  }
  free(work);
}

static void latent_group(void *context, int64_t index) {
  const latent_job *j = context;
  const int64_t groups = (j->heads + HEADS - 1) / HEADS;
  const int64_t t = index / groups, first = index % groups * HEADS;
  if (first + HEADS <= j->heads)
    latent_heads(j, t, first, HEADS);
  else
    for (int64_t head = first; head < j->heads; head++) latent_heads(j, t, head, 1);
}

void ISA(latent_attention)(const finback_latent *a, const float *q, const float *extra,
                           const float *rows, const float *key, const float *value, float *out) {
  latent_job j = {q, extra, rows, key, value, out, a->scale, a->tokens, a->seen, a->heads,
                  a->nope, a->extra, a->rank, a->value};
  int64_t work = a->rank * (a->nope + a->value) + a->seen * (2 * a->rank + a->extra);
  const int64_t groups = a->tokens * ((a->heads + HEADS - 1) / HEADS);
  if (a->tokens * a->heads * work >= 4 * WORTH_SHARING)
    finback_parallel(groups, latent_group, &j);
  else
    for (int64_t i = 0; i < groups; i++) latent_group(&j, i);
}
