/* The rate at which this machine reads memory: the limit that products of few rows are held to. */
#include "kernels.h"
#include "simd.h"
#include "threads.h"

enum { PIECE = 1 << 20 };

typedef struct {
  const char *data;
  int64_t bytes;
  float sums[64]; /* so that no read can be left out; threads may overwrite each other's */
} read_job;

static void read_piece(void *context, int64_t piece) {
  read_job *j = context;
  int64_t at = piece * PIECE, end = at + PIECE < j->bytes ? at + PIECE : j->bytes;
  vf a = vf_zero(), b = vf_zero(), c = vf_zero(), d = vf_zero();
  for (; at + 16 * VL <= end; at += 16 * VL) {
    const float *p = (const float *)(j->data + at);
    a = vf_max(a, vf_load(p)), b = vf_max(b, vf_load(p + VL));
    c = vf_max(c, vf_load(p + 2 * VL)), d = vf_max(d, vf_load(p + 3 * VL));
  }
  j->sums[piece % 64] = vf_sum(vf_max(vf_max(a, b), vf_max(c, d)));
}

void ISA(read_memory)(const void *data, int64_t bytes, float *largest) {
  read_job j = {.data = data, .bytes = bytes};
  finback_parallel((bytes + PIECE - 1) / PIECE, bytes / 16, read_piece, &j);
  *largest = j.sums[0];
}
