/* Choosing experts. Twin: Reference.route in finback/kernels/reference.py.
 * Equal scores go to the lower number: a candidate must be strictly better to displace another. */
#include <math.h>
#include <stdlib.h>

#include "functions.h"
#include "kernels.h"
#include "threads.h"

/* The k best of `count` values, best first. */
static void best_of(const float *values, int64_t count, int64_t k, int64_t *ids) {
  for (int64_t filled = 0, i = 0; i < count; i++) {
    int64_t place = filled < k ? filled : k - 1;
    if (filled == k && !(values[i] > values[ids[k - 1]])) continue;
    while (place > 0 && values[i] > values[ids[place - 1]]) {
      ids[place] = ids[place - 1];
      place--;
    }
    ids[place] = i;
    if (filled < k) filled++;
  }
}

static void keep_best_groups(float *choice, const finback_router *r, float *best, int64_t *kept) {
  const int64_t size = r->experts / r->groups;
  for (int64_t g = 0; g < r->groups; g++) {
    float one = -INFINITY, two = -INFINITY;
    for (int64_t i = g * size; i < (g + 1) * size; i++)
      if (choice[i] > one)
        two = one, one = choice[i];
      else if (choice[i] > two)
        two = choice[i];
    best[g] = size > 1 ? one + two : one;
  }
  best_of(best, r->groups, r->top_groups, kept);
  for (int64_t g = 0; g < r->groups; g++) {
    int is_kept = 0;
    for (int64_t i = 0; i < r->top_groups; i++) is_kept |= kept[i] == g;
    for (int64_t i = g * size; !is_kept && i < (g + 1) * size; i++) choice[i] = -INFINITY;
  }
}

static void score(const float *logits, const finback_router *r, float *scores) {
  const int64_t E = r->experts;
  if (r->is_sigmoid) {
    for (int64_t i = 0; i < E; i += VL)
      vf_store_part(scores + i, vf_sigmoid(vf_load_part(logits + i, E - i)), E - i);
    return;
  }
  float best = -INFINITY, total = 0;
  for (int64_t i = 0; i < E; i++)
    if (logits[i] > best) best = logits[i];
  for (int64_t i = 0; i < E; i++) total += scores[i] = expf(logits[i] - best);
  for (int64_t i = 0; i < E; i++) scores[i] /= total;
}

void ISA(route)(const float *logits, const float *bias, const finback_router *r, int64_t tokens,
                int64_t *ids, float *weights) {
  const int64_t E = r->experts, k = r->top_k;
  float *scores = finback_alloc((size_t)(2 * E + r->groups) * sizeof(float));
  float *choice = scores + E, *best = choice + E;
  int64_t *kept = finback_alloc((size_t)r->groups * sizeof(int64_t));
  for (int64_t t = 0; t < tokens; t++, ids += k, weights += k) {
    score(logits + t * E, r, scores);
    for (int64_t i = 0; i < E; i++) choice[i] = bias ? scores[i] + bias[i] : scores[i];
    if (r->groups > r->top_groups) keep_best_groups(choice, r, best, kept);
    best_of(choice, E, k, ids);
    float total = 0;
    for (int64_t i = 0; i < k; i++) total += weights[i] = scores[ids[i]];
    float factor = r->renormalise && k > 1 ? r->scale / (total + 1e-20f) : r->scale;
    for (int64_t i = 0; i < k; i++) weights[i] *= factor;
  }
  free(kept);
  free(scores);
}
