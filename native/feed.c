/* Gated feed-forwards, y = w2 · glu(w1 · x, w3 · x): one that all rows go through, and routed ones, each
 * for the rows that chose it. Twins: Reference.mlp, experts, add_experts, combine.
 *
 * Whatever the number of experts, the threads meet four times: rows are prepared, all gates and ups
 * are one list of products, their pairs are joined and prepared, all downs are another list. */
#include <stdlib.h>
#include <string.h>

#include "functions.h"
#include "kernels.h"
#include "products.h"
#include "threads.h"

enum { ROWS_AT_ONCE = 256 }; /* rows whose inner values are in memory */

/* Consecutive rows that go through the same three weights. */
typedef struct {
  int64_t first, count;
  const finback_weight *gate, *down, *up;
} group;

typedef struct {
  const float *const *in; /* (rows) where each row of x is */
  const group *groups;
  int64_t num_groups, rows, width, inner, outer;
  const finback_activation *activation;
  int32_t bits;
  float *gates, *ups, *out; /* (rows, inner), (rows, inner), (rows, outer) */
  prepared_rows before[ROW_FORMS], between[ROW_FORMS];
} feed;

/* silu: g·sigmoid(g)·u. situ: β·tanh(g/β)·sigmoid(g) · λ·tanh(u/λ), or ·u without λ. In place of g. */
static void join(const finback_activation *a, float *g, const float *u, int64_t width) {
  const vf beta = vf_set(a->beta), linear = vf_set(a->linear);
  for (int64_t i = 0; i < width; i += VL) {
    const int64_t left = width - i;
    vf gate = vf_load_part(g + i, left), up = vf_load_part(u + i, left), out = vf_sigmoid(gate);
    if (a->kind == FINBACK_SILU)
      out = gate * out;
    else
      out = beta * vf_tanh(gate / beta) * out;
    if (a->kind == FINBACK_SITU_BOUNDED) up = linear * vf_tanh(up / linear);
    vf_store_part(g + i, out * up, left);
  }
}

static void fill_before(void *context, int64_t row) {
  const feed *f = context;
  for (int form = 0; form < ROW_FORMS; form++)
    if (f->before[form].memory) ISA(rows_fill)(&f->before[form], row, f->in[row]);
}

static void fill_between(void *context, int64_t row) {
  const feed *f = context;
  float *g = f->gates + row * f->inner;
  join(f->activation, g, f->ups + row * f->inner, f->inner);
  for (int form = 0; form < ROW_FORMS; form++)
    if (f->between[form].memory) ISA(rows_fill)(&f->between[form], row, g);
}

/* Make room for rows in the form that a weight asks for, once. */
static const prepared_rows *form_of(const feed *f, prepared_rows *forms, const finback_weight *w) {
  const row_form form = ISA(form_for)(w, f->bits);
  if (!forms[form].memory) ISA(rows_make)(&forms[form], form, w->cols, f->rows);
  return &forms[form];
}

/* All rows of `f`, which are at most ROWS_AT_ONCE unless one group has more. */
static void run_feed(feed *f) {
  memset(f->before, 0, sizeof f->before);
  memset(f->between, 0, sizeof f->between);
  product usual[64];
  product *list =
      f->num_groups <= 32 ? usual : finback_alloc((size_t)(2 * f->num_groups) * sizeof(product));
  for (int64_t i = 0; i < f->num_groups; i++) {
    const group *g = &f->groups[i];
    list[2 * i] = (product){form_of(f, f->before, g->gate), g->first, g->count, g->gate,
                            f->gates + g->first * f->inner};
    list[2 * i + 1] = (product){form_of(f, f->before, g->up), g->first, g->count, g->up,
                                f->ups + g->first * f->inner};
    form_of(f, f->between, g->down);
  }
  finback_parallel(f->rows, f->rows * f->width / 2, fill_before, f);
  ISA(run_products)(list, 2 * f->num_groups);
  finback_parallel(f->rows, f->rows * f->inner * 2, fill_between, f);
  for (int64_t i = 0; i < f->num_groups; i++) {
    const group *g = &f->groups[i];
    list[i] = (product){form_of(f, f->between, g->down), g->first, g->count, g->down,
                        f->out + g->first * f->outer};
  }
  ISA(run_products)(list, f->num_groups);
  if (list != usual) free(list);
  for (int form = 0; form < ROW_FORMS; form++) free(f->before[form].memory), free(f->between[form].memory);
}

void ISA(mlp)(const float *x, int64_t tokens, const finback_weight *const *weights,
              const finback_activation *a, int32_t bits, float *y) {
  if (tokens == 0) return;
  const finback_weight *gate = weights[0], *down = weights[1], *up = weights[2];
  const int64_t width = gate->cols, inner = gate->rows, outer = down->rows;
  const int64_t most = tokens < ROWS_AT_ONCE ? tokens : ROWS_AT_ONCE;
  float *gates = finback_alloc((size_t)(2 * most * inner) * sizeof(float));
  const float *in[ROWS_AT_ONCE];
  for (int64_t t = 0; t < tokens; t += most) {
    const int64_t rows = tokens - t < most ? tokens - t : most;
    for (int64_t i = 0; i < rows; i++) in[i] = x + (t + i) * width;
    const group all = {0, rows, gate, down, up};
    feed f = {in, &all, 1, rows, width, inner, outer, a, bits, gates, gates + most * inner,
              y + t * outer, {{0}}, {{0}}};
    run_feed(&f);
  }
  free(gates);
}

/* The most rows that chose one expert. */
static int64_t rows_of_one(const int64_t *ids, int64_t choices, const int64_t *numbers,
                           int64_t count) {
  int64_t largest = 0;
  for (int64_t e = 0; e < count; e++) {
    int64_t rows = 0;
    for (int64_t i = 0; i < choices; i++) rows += ids[i] == numbers[e];
    largest = rows > largest ? rows : largest;
  }
  return largest;
}

/* y += share · row. */
static void add(float share, const float *row, int64_t width, float *y) {
  for (int64_t c = 0; c < width; c += VL) {
    const int64_t left = width - c;
    vf_store_part(y + c, vf_fma(vf_set(share), vf_load_part(row + c, left), vf_load_part(y + c, left)),
                  left);
  }
}

/* Results go to parts (T, k, width), or with their shares into y (T, width). */
static void run_experts(const float *x, int64_t tokens, const int64_t *ids, const float *shares,
                        int64_t top_k, const int64_t *numbers,
                        const finback_weight *const *weights, int64_t count,
                        const finback_activation *a, int32_t bits, float *parts, float *y) {
  if (tokens == 0 || count == 0) return;
  const int64_t width = weights[0]->cols, inner = weights[0]->rows, choices = tokens * top_k;
  /* An expert's rows are never split, so that its weights are read once. */
  const int64_t largest = rows_of_one(ids, choices, numbers, count);
  const int64_t most = choices < ROWS_AT_ONCE + largest ? choices : ROWS_AT_ONCE + largest;
  float *gates = finback_alloc((size_t)(most * (2 * inner + width)) * sizeof(float));
  const float **in = finback_alloc((size_t)most * sizeof(float *));
  int64_t *at = finback_alloc((size_t)most * sizeof(int64_t)); /* which of the choices a row is */
  group *groups = finback_alloc((size_t)count * sizeof(group));
  for (int64_t e = 0; e < count;) {
    int64_t rows = 0, num_groups = 0;
    for (; e < count && rows < ROWS_AT_ONCE; e++) {
      const int64_t first = rows;
      for (int64_t i = 0; i < choices; i++)
        if (ids[i] == numbers[e]) at[rows] = i, in[rows++] = x + i / top_k * width;
      const finback_weight *const *w = weights + 3 * e;
      if (rows > first) groups[num_groups++] = (group){first, rows - first, w[0], w[1], w[2]};
    }
    feed f = {in, groups, num_groups, rows, width, inner, width, a, bits, gates,
              gates + most * inner, gates + 2 * most * inner, {{0}}, {{0}}};
    run_feed(&f);
    for (int64_t i = 0; i < rows; i++)
      if (parts)
        memcpy(parts + at[i] * width, f.out + i * width, (size_t)width * sizeof(float));
      else
        add(shares[at[i]], f.out + i * width, width, y + at[i] / top_k * width);
  }
  free(groups);
  free(at);
  free(in);
  free(gates);
}

void ISA(experts)(const float *x, int64_t tokens, const int64_t *ids, int64_t top_k,
                  const int64_t *numbers, const finback_weight *const *weights, int64_t count,
                  const finback_activation *a, int32_t bits, float *parts) {
  run_experts(x, tokens, ids, NULL, top_k, numbers, weights, count, a, bits, parts, NULL);
}

void ISA(add_experts)(const float *x, int64_t tokens, const int64_t *ids, const float *shares,
                      int64_t top_k, const int64_t *numbers, const finback_weight *const *weights,
                      int64_t count, const finback_activation *a, int32_t bits, float *y) {
  run_experts(x, tokens, ids, shares, top_k, numbers, weights, count, a, bits, NULL, y);
}

typedef struct {
  const float *parts, *shares;
  const int64_t *ids;
  int64_t top_k, width;
  float *y;
} sums;

static void combine_row(void *context, int64_t t) {
  const sums *s = context;
  const int64_t *ids = s->ids + t * s->top_k;
  float *y = s->y + t * s->width;
  memset(y, 0, (size_t)s->width * sizeof(float));
  for (int64_t last = -1, n = 0; n < s->top_k; n++) { /* k is small: the next larger id each time */
    int64_t next = -1;
    for (int64_t i = 0; i < s->top_k; i++)
      if (ids[i] > last && (next < 0 || ids[i] < ids[next])) next = i;
    if (next < 0) return; /* an id twice, which a router does not give */
    last = ids[next];
    const int64_t at = t * s->top_k + next;
    add(s->shares[at], s->parts + at * s->width, s->width, y);
  }
}

void ISA(combine)(const float *parts, const int64_t *ids, const float *shares, int64_t tokens,
                  int64_t top_k, int64_t width, float *y) {
  sums s = {parts, shares, ids, top_k, width, y};
  finback_parallel(tokens, top_k * width / 4, combine_row, &s);
}
