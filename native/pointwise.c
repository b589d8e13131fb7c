/* Norms, gates and mixtures: one row at a time, each the same operations whatever the others are.
 * Twins: the methods of the same names of Reference in finback/kernels/reference.py. */
#include <math.h>
#include <stdlib.h>

#include "functions.h"
#include "kernels.h"
#include "threads.h"

typedef struct {
  const float *x, *w, *other;
  float *y;
  const float *const *entries;
  int64_t width, count;
  float eps;
} rows_job;

/* Σ a·b over a row: VL partial sums, then a fixed tree. */
INLINE float dot(const float *a, const float *b, int64_t width) {
  vf sum = vf_zero();
  int64_t i = 0;
  for (; i + VL <= width; i += VL) sum = vf_fma(vf_load(a + i), vf_load(b + i), sum);
  if (i < width) sum = vf_fma(vf_load_part(a + i, width - i), vf_load_part(b + i, width - i), sum);
  return vf_sum(sum);
}

/* y = x / sqrt(mean(x²) + eps) · w; y may be x */
INLINE void normalise(const float *x, const float *w, float eps, int64_t width, float *y) {
  vf factor = vf_set(1.0f / sqrtf(dot(x, x, width) / (float)width + eps));
  for (int64_t i = 0; i < width; i += VL) {
    int64_t left = width - i;
    vf_store_part(y + i, vf_load_part(x + i, left) * factor * vf_load_part(w + i, left), left);
  }
}

static void norm_row(void *context, int64_t row) {
  const rows_job *j = context;
  normalise(j->x + row * j->width, j->w, j->eps, j->width, j->y + row * j->width);
}

void ISA(rms_norm)(const float *x, const float *w, float eps, int64_t rows, int64_t width, float *y) {
  rows_job j = {.x = x, .w = w, .eps = eps, .width = width, .y = y};
  finback_parallel(rows, rows * width / 2, norm_row, &j);
}

/* y = Σ a_n e_n with a = softmax_n( Σ e_n·w / sqrt(mean(e_n²) + eps) ): raw entries, normalised scores.
 * Then y / sqrt(mean(y²) + eps) · norm. */
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
  normalise(j->y + at, j->other, j->eps, j->width, j->y + at);
  if (share != usual) free(share);
}

void ISA(mix)(const float *const *entries, int64_t count, const float *w, const float *norm,
              float eps, int64_t rows, int64_t width, float *y) {
  rows_job j = {.entries = entries, .count = count, .w = w, .other = norm, .eps = eps};
  j.width = width, j.y = y;
  finback_parallel(rows, rows * width * count / 2, mix_row, &j);
}

/* y = x · sigmoid(gate) */
static void gated_row(void *context, int64_t row) {
  const rows_job *j = context;
  const int64_t at = row * j->width;
  for (int64_t i = 0; i < j->width; i += VL) {
    int64_t left = j->width - i;
    vf out = vf_sigmoid(vf_load_part(j->other + at + i, left));
    vf_store_part(j->y + at + i, vf_load_part(j->x + at + i, left) * out, left);
  }
}

void ISA(gated)(const float *x, const float *gate, int64_t rows, int64_t width, float *y) {
  rows_job j = {.x = x, .other = gate, .width = width, .y = y};
  finback_parallel(rows, rows * width, gated_row, &j);
}
