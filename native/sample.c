/* Helpers for picking tokens from logits over a large vocabulary. Twins: finback/kernels/sampling.py. */
#include <stdlib.h>

#include "functions.h"
#include "kernels.h"
#include "threads.h"

/* shares[i] = e^((logits[i] - largest) / temperature), and their sum: one fixed order of additions. */
void ISA(shares)(const float *logits, int64_t size, float largest, float temperature, float *shares,
                 double *total) {
  const vf best = vf_set(largest), by = vf_set(temperature);
  double sums[VL] = {0};
  for (int64_t i = 0; i < size; i += VL) {
    const int64_t left = size - i < VL ? size - i : VL;
    float lanes[VL];
    vf_store(lanes, vf_exp((vf_load_part(logits + i, left) - best) / by));
    for (int64_t n = 0; n < left; n++) sums[n] += lanes[n];
    vf_store_part(shares + i, vf_load(lanes), left);
  }
  *total = 0;
  for (int n = 0; n < VL; n++) *total += sums[n];
}

/* Whether a stands before b: the larger value, of equals the lower number. */
static int is_before(const float *values, int64_t a, int64_t b) {
  return values[a] > values[b] || (values[a] == values[b] && a < b);
}

/* A heap whose root is the last of those kept: push it down to its place. */
static void sift(const float *values, int64_t *heap, int64_t count, int64_t at) {
  for (;;) {
    int64_t last = at, left = 2 * at + 1, right = left + 1;
    if (left < count && is_before(values, heap[last], heap[left])) last = left;
    if (right < count && is_before(values, heap[last], heap[right])) last = right;
    if (last == at) return;
    const int64_t moved = heap[at];
    heap[at] = heap[last], heap[last] = moved;
    at = last;
  }
}

/* ids = the `count` likeliest, best first. Most values are passed over a vector at a time. */
void ISA(likeliest)(const float *values, int64_t size, int64_t count, int64_t *ids) {
  for (int64_t i = 0; i < count; i++) ids[i] = i;
  for (int64_t i = count / 2; i-- > 0;) sift(values, ids, count, i);
  for (int64_t i = count; i < size; i += VL) {
    const int64_t end = i + VL < size ? i + VL : size;
    if (end - i == VL) {
      float any[VL], found = 0;
      vf_store(any, vf_less(vf_set(values[ids[0]]), vf_load(values + i), vf_set(1), vf_zero()));
      for (int n = 0; n < VL; n++) found += any[n];
      if (found == 0) continue;
    }
    for (int64_t n = i; n < end; n++)
      if (values[n] > values[ids[0]]) ids[0] = n, sift(values, ids, count, 0);
  }
  for (int64_t left = count - 1; left > 0; left--) {
    const int64_t last = ids[0];
    ids[0] = ids[left], ids[left] = last;
    sift(values, ids, left, 0);
  }
}
