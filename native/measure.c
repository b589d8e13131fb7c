/* The rate at which this machine reads memory: the limit that products of few rows are held to. */
#include "kernels.h"
#include "simd.h"
#include "threads.h"

enum { PIECE = 1 << 20, STRIDE = 4 * VL, AHEAD = 8192 };

typedef struct {
  const char *data;
  int64_t bytes;
  float sums[64]; /* so that no read can be left out; threads may overwrite each other's */
} read_job;

static void read_piece(void *context, int64_t piece) {
  read_job *j = context;
  int64_t at = piece * PIECE, end = at + PIECE < j->bytes ? at + PIECE : j->bytes;
  vf a = vf_zero(), b = vf_zero(), c = vf_zero(), d = vf_zero();
  for (; at + 4 * STRIDE <= end; at += 4 * STRIDE) {
    const char *p = j->data + at;
    /* As the products do: with small pages the hardware alone does not look far enough ahead. */
    for (int line = 0; line < 4 * STRIDE; line += 64) __builtin_prefetch(p + AHEAD + line);
    a = vf_max(a, vf_load((const float *)p)), b = vf_max(b, vf_load((const float *)(p + STRIDE)));
    c = vf_max(c, vf_load((const float *)(p + 2 * STRIDE)));
    d = vf_max(d, vf_load((const float *)(p + 3 * STRIDE)));
  }
  j->sums[piece % 64] = vf_sum(vf_max(vf_max(a, b), vf_max(c, d)));
}

void ISA(read_memory)(const void *data, int64_t bytes, float *largest) {
  read_job j = {.data = data, .bytes = bytes};
  finback_parallel((bytes + PIECE - 1) / PIECE, bytes / 16, read_piece, &j);
  *largest = j.sums[0];
}
