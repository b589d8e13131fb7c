/* Latent attention. Twin: Reference.latent_attention. */
#include <math.h>
#include <stdlib.h>

#include "functions.h"
#include "kernels.h"
#include "threads.h"

/* Per token and head, in absorbed form: q' = keyᵀ q; score_s = ([q' | q_extra] · row_s) · scale;
 * p = softmax(score) over the rows up to this token; m = Σ_s p_s row_s; o = value · m. */

typedef struct {
  const float *q, *rows, *key, *value;
  float *out, scale;
  int64_t tokens, seen, heads, nope, extra_width, rank, value_width;
} latent_job;

/* Heads that share each load of a row, and vectors of a row held in registers meanwhile. */
#if VL >= 16
enum { HEADS = 4, WIDE = 4, ROWS = 4 };
#else
enum { HEADS = 2, WIDE = 4, ROWS = 4 };
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

/* Scores of `heads` queries with `rows` (both known to the compiler) consecutive rows. */
INLINE void score_tile(const float *const *queries, int heads, const float *row, int rows,
                       int64_t width, float scale, float *const *scores, int64_t at) {
  vf sum[HEADS][ROWS];
  for (int h = 0; h < heads; h++)
    for (int i = 0; i < rows; i++) sum[h][i] = vf_zero();
  for (int64_t c = 0; c < width; c += VL) {
    const int64_t left = width - c;
    vf v[ROWS];
    for (int i = 0; i < rows; i++) v[i] = vf_load_part(row + i * width + c, left);
    for (int h = 0; h < heads; h++) {
      vf q = vf_load_part(queries[h] + c, left);
      for (int i = 0; i < rows; i++) sum[h][i] = vf_fma(q, v[i], sum[h][i]);
    }
  }
  for (int h = 0; h < heads; h++)
    for (int i = 0; i < rows; i++) scores[h][at + i] = vf_sum(sum[h][i]) * scale;
}

/* scores[h][i] = queries[h] · rows[i] · scale for some heads: each one sum over the columns. */
INLINE void score_rows(const float *const *queries, int heads, const float *rows, int64_t width,
                       int64_t count, float scale, float *const *scores) {
  int64_t i = 0;
  for (; i + ROWS <= count; i += ROWS)
    score_tile(queries, heads, rows + i * width, ROWS, width, scale, scores, i);
  for (; i < count; i++) score_tile(queries, heads, rows + i * width, 1, width, scale, scores, i);
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
    const int64_t head = first + h;
    const float *q = j->q + (t * j->heads + head) * (j->nope + j->extra_width);
    query[h] = work + h * each, mixed[h] = query[h] + row, share[h] = mixed[h] + rank;
    weighted_rows(&q, 1, j->key + head * j->nope * rank, rank, j->nope, rank, &query[h]);
    memcpy(query[h] + rank, q + j->nope, (size_t)j->extra_width * sizeof(float));
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

void ISA(latent_attention)(const finback_latent *a, const float *q, const float *rows,
                           const float *key, const float *value, float *out) {
  latent_job j = {q, rows, key, value, out, a->scale, a->tokens, a->seen, a->heads,
                  a->nope, a->extra, a->rank, a->value};
  int64_t work = a->rank * (a->nope + a->value) + a->seen * (2 * a->rank + a->extra);
  const int64_t groups = a->tokens * ((a->heads + HEADS - 1) / HEADS);
  finback_parallel(groups, a->tokens * a->heads * work / 16, latent_group, &j);
}
