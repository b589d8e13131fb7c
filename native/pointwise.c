/* Norms, gates and mixtures: one row at a time, each the same operations whatever the others are.
 * Twins: the methods of the same names of Reference in finback/kernels/reference.py. */
#include <math.h>
#include <stdlib.h>

#include "functions.h"
#include "kernels.h"
#include "threads.h"

/* Work below this many elements is not worth waking a thread for. */
enum { WORTH_SHARING = 1 << 15 };

static void by_rows(int64_t rows, int64_t width, void (*work)(void *, int64_t), void *context) {
  if (rows * width >= WORTH_SHARING)
    finback_parallel(rows, work, context);
  else
    for (int64_t row = 0; row < rows; row++) work(context, row);
}

typedef struct {
  const float *x, *w, *other;
  float *y;
  const float *const *entries;
  int64_t width, count;
  float eps, scale, bound, beta, linear;
  int32_t kind;
} rows_job;

/* Σ a·b over a row: VL partial sums, then a fixed tree. */
INLINE float dot(const float *a, const float *b, int64_t width) {
  vf sum = vf_zero();
  int64_t i = 0;
  for (; i + VL <= width; i += VL) sum = vf_fma(vf_load(a + i), vf_load(b + i), sum);
  if (i < width) sum = vf_fma(vf_load_part(a + i, width - i), vf_load_part(b + i, width - i), sum);
  return vf_sum(sum);
}

/* y = x / sqrt(mean(x²) + eps) · w */
static void norm_row(void *context, int64_t row) {
  const rows_job *j = context;
  const float *x = j->x + row * j->width;
  float *y = j->y + row * j->width;
  vf factor = vf_set(1.0f / sqrtf(dot(x, x, j->width) / (float)j->width + j->eps));
  for (int64_t i = 0; i < j->width; i += VL) {
    int64_t left = j->width - i;
    vf_store_part(y + i, vf_load_part(x + i, left) * factor * vf_load_part(j->w + i, left), left);
  }
}

void ISA(rms_norm)(const float *x, const float *w, float eps, int64_t rows, int64_t width, float *y) {
  rows_job j = {.x = x, .w = w, .eps = eps, .width = width, .y = y};
  by_rows(rows, width, norm_row, &j);
}

/* y = x / sqrt(Σ x² + 1e-6) · scale */
static void unit_row(void *context, int64_t row) {
  const rows_job *j = context;
  const float *x = j->x + row * j->width;
  vf factor = vf_set(j->scale / sqrtf(dot(x, x, j->width) + 1e-6f));
  for (int64_t i = 0; i < j->width; i += VL) {
    int64_t left = j->width - i;
    vf_store_part(j->y + row * j->width + i, vf_load_part(x + i, left) * factor, left);
  }
}

void ISA(unit)(const float *x, float scale, int64_t rows, int64_t width, float *y) {
  rows_job j = {.x = x, .scale = scale, .width = width, .y = y};
  by_rows(rows, width, unit_row, &j);
}

/* y = Σ a_n e_n with a = softmax_n( Σ e_n·w / sqrt(mean(e_n²) + eps) ): raw entries, normalised scores */
static void mix_row(void *context, int64_t row) {
  const rows_job *j = context;
  const int64_t at = row * j->width;
  float usual[64], best = -INFINITY, total = 0;
  float *share = j->count <= 64 ? usual : finback_alloc((size_t)j->count * sizeof(float));
  for (int64_t n = 0; n < j->count; n++) {
    const float *e = j->entries[n] + at;
    float size = sqrtf(dot(e, e, j->width) / (float)j->width + j->eps);
    share[n] = dot(e, j->w, j->width) / size;
    if (share[n] > best) best = share[n];
  }
  for (int64_t n = 0; n < j->count; n++) total += share[n] = expf(share[n] - best);
  for (int64_t i = 0; i < j->width; i += VL) {
    int64_t left = j->width - i;
    vf sum = vf_zero();
    for (int64_t n = 0; n < j->count; n++)
      sum = vf_fma(vf_set(share[n] / total), vf_load_part(j->entries[n] + at + i, left), sum);
    vf_store_part(j->y + at + i, sum, left);
  }
  if (share != usual) free(share);
}

void ISA(mix)(const float *const *entries, int64_t count, const float *w, float eps, int64_t rows,
              int64_t width, float *y) {
  rows_job j = {.entries = entries, .count = count, .w = w, .eps = eps, .width = width, .y = y};
  by_rows(rows, width * count, mix_row, &j);
}

/* silu: g·sigmoid(g)·u. situ: β·tanh(g/β)·sigmoid(g) · λ·tanh(u/λ), or ·u without λ. */
static void glu_row(void *context, int64_t row) {
  const rows_job *j = context;
  const float *g = j->x + row * j->width, *u = j->other + row * j->width;
  const vf beta = vf_set(j->beta), linear = vf_set(j->linear);
  for (int64_t i = 0; i < j->width; i += VL) {
    int64_t left = j->width - i;
    vf gate = vf_load_part(g + i, left), up = vf_load_part(u + i, left), out = vf_sigmoid(gate);
    if (j->kind == FINBACK_SILU)
      out = gate * out;
    else
      out = beta * vf_tanh(gate / beta) * out;
    if (j->kind == FINBACK_SITU_BOUNDED) up = linear * vf_tanh(up / linear);
    vf_store_part(j->y + row * j->width + i, out * up, left);
  }
}

void ISA(glu)(const float *gate, const float *up, const finback_activation *a, int64_t rows,
              int64_t width, float *y) {
  rows_job j = {.x = gate, .other = up, .kind = a->kind, .beta = a->beta, .linear = a->linear};
  j.width = width, j.y = y;
  by_rows(rows, width * 8, glu_row, &j);
}

/* y = x · sigmoid(gate), or sigmoid(gate) alone without x */
static void gated_row(void *context, int64_t row) {
  const rows_job *j = context;
  const int64_t at = row * j->width;
  for (int64_t i = 0; i < j->width; i += VL) {
    int64_t left = j->width - i;
    vf out = vf_sigmoid(vf_load_part(j->other + at + i, left));
    if (j->x) out = vf_load_part(j->x + at + i, left) * out;
    vf_store_part(j->y + at + i, out, left);
  }
}

void ISA(gated)(const float *x, const float *gate, int64_t rows, int64_t width, float *y) {
  rows_job j = {.x = x, .other = gate, .width = width, .y = y};
  by_rows(rows, width * 4, gated_row, &j);
}

/* Log decay of one head of one token: bound·sigmoid(e^a·x), or -e^a·softplus(x) where bound is 0. */
static void decay_row(void *context, int64_t row) {
  const rows_job *j = context;
  const float *x = j->x + row * j->width;
  float *y = j->y + row * j->width;
  const float rate = expf(j->w[row % j->count]);
  if (j->bound == 0) {
    for (int64_t i = 0; i < j->width; i++)
      y[i] = -rate * (x[i] > 0 ? x[i] + log1pf(expf(-x[i])) : log1pf(expf(x[i])));
    return;
  }
  for (int64_t i = 0; i < j->width; i += VL) {
    int64_t left = j->width - i;
    vf out = vf_set(j->bound) * vf_sigmoid(vf_set(rate) * vf_load_part(x + i, left));
    vf_store_part(y + i, out, left);
  }
}

void ISA(decay)(const float *x, const float *a_log, float bound, int64_t tokens, int64_t heads,
                int64_t width, float *y) {
  rows_job j = {.x = x, .w = a_log, .bound = bound, .count = heads, .width = width, .y = y};
  by_rows(tokens * heads, width * 4, decay_row, &j);
}
