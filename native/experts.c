/* Routed feed-forwards: each expert computes the rows that chose it, whatever else is in the batch.
 * Twins: Reference.experts and Reference.combine in finback/kernels/reference.py. */
#include <stdlib.h>
#include <string.h>

#include "functions.h"
#include "kernels.h"
#include "threads.h"

/* y = w2 · glu(w1 · x, w3 · x) for gathered rows */
static void one_expert(const float *x, int64_t rows, const finback_weight *const w[3],
                       const finback_activation *a, int32_t bits, float *y) {
  float *gate = finback_alloc((size_t)(2 * rows * w[0]->rows) * sizeof(float));
  float *up = gate + rows * w[0]->rows;
  ISA(linear)(x, rows, w[0], bits, gate);
  ISA(linear)(x, rows, w[2], bits, up);
  ISA(glu)(gate, up, a, rows, w[0]->rows, gate);
  ISA(linear)(gate, rows, w[1], bits, y);
  free(gate);
}

void ISA(experts)(const float *x, int64_t tokens, const int64_t *ids, int64_t top_k,
                  const int64_t *numbers, const finback_weight *const *weights, int64_t count,
                  const finback_activation *a, int32_t bits, float *parts) {
  if (tokens == 0 || count == 0) return;
  const int64_t width = weights[0]->cols;
  const size_t row_bytes = (size_t)width * sizeof(float);
  float *in = finback_alloc((size_t)(2 * tokens * top_k) * row_bytes);
  float *out = in + tokens * top_k * width;
  for (int64_t e = 0; e < count; e++) {
    int64_t rows = 0;
    for (int64_t at = 0; at < tokens * top_k; at++)
      if (ids[at] == numbers[e]) memcpy(in + rows++ * width, x + at / top_k * width, row_bytes);
    if (rows == 0) continue;
    one_expert(in, rows, weights + 3 * e, a, bits, out);
    rows = 0;
    for (int64_t at = 0; at < tokens * top_k; at++)
      if (ids[at] == numbers[e]) memcpy(parts + at * width, out + rows++ * width, row_bytes);
  }
  free(in);
}

void ISA(combine)(const float *parts, const float *shares, int64_t tokens, int64_t top_k,
                  int64_t width, float *y) {
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t c = 0; c < width; c += VL) {
      const int64_t left = width - c;
      vf sum = vf_zero();
      for (int64_t i = 0; i < top_k; i++) {
        const int64_t at = t * top_k + i;
        sum = vf_fma(vf_set(shares[at]), vf_load_part(parts + at * width + c, left), sum);
      }
      vf_store_part(y + t * width + c, sum, left);
    }
}
