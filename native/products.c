/* Preparing rows, and running lists of products. Twins: Reference.linear and Reference.linears. */
#include "products.h"

#include <stdlib.h>

#include "kernels.h"
#include "threads.h"

enum { BLOCK = 32, STEP = BLOCK * GROUPS };
enum { ROWS_TOGETHER = 64 }; /* of x, in one piece */
enum { GRAIN = 1 << 15 }; /* multiplications worth a turn */

row_form ISA(form_for)(const finback_weight *w, int32_t bits) {
  if (w->format == FINBACK_MXFP4 && bits) return bits == 16 ? INT16 : INT8;
  return w->format == FINBACK_MXFP4 || w->format == FINBACK_INT4 ? EVEN_FIRST : PLAIN;
}

static int64_t value_bytes(row_form form) { return form == INT8 ? 1 : form == INT16 ? 2 : 4; }

void ISA(rows_make)(prepared_rows *rows, row_form form, int64_t cols, int64_t count) {
  const int is_rounded = form == INT16 || form == INT8;
  *rows = (prepared_rows){.form = form, .cols = cols, .count = count};
  rows->steps = is_rounded ? (cols + STEP - 1) / STEP : (cols + BLOCK - 1) / BLOCK * BLOCK;
  const int64_t values = count * rows->steps * (is_rounded ? STEP : 1) * value_bytes(form);
  const int64_t lanes = is_rounded ? count * rows->steps * VL : 0;
  const int64_t offsets = form == INT8 && OFFSET_8 ? lanes : 0;
  const int64_t at_scales = (values + 63) / 64 * 64;
  char *memory = finback_alloc((size_t)(at_scales + 4 * (lanes + offsets)));
  rows->memory = rows->values = memory;
  rows->scales = (float *)(memory + at_scales);
  rows->offsets = offsets ? (int32_t *)(rows->scales + lanes) : NULL;
}

void ISA(rows_fill)(const prepared_rows *rows, int64_t row, const float *x) {
  if (rows->form == INT16 || rows->form == INT8) {
    ISA(round_row)(rows, row, x);
    return;
  }
  float *to = (float *)rows->values + row * rows->steps;
  if (rows->form == EVEN_FIRST)
    for (int64_t b = 0; b < rows->cols; b += BLOCK)
      for (int i = 0; i < BLOCK / 2; i++) {
        to[b + i] = x[b + 2 * i];
        to[b + BLOCK / 2 + i] = x[b + 2 * i + 1];
      }
  else
    memcpy(to, x, (size_t)rows->cols * sizeof(float));
  memset(to + rows->cols, 0, (size_t)(rows->steps - rows->cols) * sizeof(float));
}

/* --- lists ---------------------------------------------------------------------------------------- */

typedef struct {
  const product *list;
  const int64_t *ends; /* turns up to and with each product */
  int64_t count;
} run;

/* So many chunks of a product are one turn of a thread: small ones are not worth a turn each. */
static int64_t chunks_a_turn(const product *p) {
  const int64_t work = CHUNK_ROWS * p->w->cols * p->tokens;
  return work >= GRAIN ? 1 : GRAIN / (work ? work : 1) + 1;
}

static int64_t turns_of(const product *p) {
  const int64_t chunks = (p->w->rows + CHUNK_ROWS - 1) / CHUNK_ROWS, each = chunks_a_turn(p);
  return (chunks + each - 1) / each;
}

static void chunks_of(const product *p, int64_t first, int64_t count) {
  const int64_t chunks = (p->w->rows + CHUNK_ROWS - 1) / CHUNK_ROWS;
  const int64_t end = first + count < chunks ? first + count : chunks;
  const int is_rounded = p->x->form == INT16 || p->x->form == INT8;
  for (int64_t chunk = first; chunk < end; chunk++)
    if (is_rounded)
      ISA(rounded_chunk)(p, chunk);
    else
      ISA(float_chunk)(p, chunk);
}

static void one_turn(void *context, int64_t turn) {
  const run *r = context;
  int64_t low = 0, high = r->count - 1; /* the first product that ends after this turn */
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (r->ends[middle] > turn)
      high = middle;
    else
      low = middle + 1;
  }
  const product *p = &r->list[low];
  const int64_t each = chunks_a_turn(p);
  chunks_of(p, (turn - (low ? r->ends[low - 1] : 0)) * each, each);
}

/* Cut products of many rows into pieces whose rows stay in the cache while all weights pass by. */
static int64_t pieces_of(const product *p) {
  return p->tokens <= ROWS_TOGETHER ? 1 : (p->tokens + ROWS_TOGETHER - 1) / ROWS_TOGETHER;
}

static int64_t cut(const product *p, product *to) {
  const int64_t pieces = pieces_of(p);
  int64_t size = (p->tokens + pieces - 1) / pieces, count = 0;
  size = pieces > 1 ? (size + 3) / 4 * 4 : size; /* whole tiles */
  for (int64_t t = 0; t < p->tokens; t += size) {
    to[count] = *p;
    to[count].first += t;
    to[count].tokens = p->tokens - t < size ? p->tokens - t : size;
    to[count++].y += t * p->w->rows;
  }
  return count;
}

static void run_list(const product *list, int64_t count) {
  int64_t work = 0, turns = 0;
  int64_t usual[64], *ends = count <= 64 ? usual : finback_alloc((size_t)count * sizeof(int64_t));
  for (int64_t i = 0; i < count; i++) {
    work += list[i].w->rows * list[i].w->cols * list[i].tokens;
    ends[i] = turns += turns_of(&list[i]);
  }
  run r = {list, ends, count};
  finback_parallel(turns, work / 10, one_turn, &r);
  if (ends != usual) free(ends);
}

void ISA(run_products)(const product *list, int64_t count) {
  int64_t pieces = 0;
  for (int64_t i = 0; i < count; i++) pieces += pieces_of(&list[i]);
  if (pieces == count) {
    run_list(list, count);
    return;
  }
  product *all = finback_alloc((size_t)pieces * sizeof(product));
  int64_t n = 0;
  for (int64_t i = 0; i < count; i++) n += cut(&list[i], all + n);
  run_list(all, n);
  free(all);
}

/* --- entries --------------------------------------------------------------------------------------- */

typedef struct {
  const prepared_rows *rows;
  const float *x;
} fill_job;

static void fill_one(void *context, int64_t row) {
  const fill_job *j = context;
  ISA(rows_fill)(j->rows, row, j->x + row * j->rows->cols);
}

/* x in one form: x itself where that is the form already. */
static void prepare(prepared_rows *rows, row_form form, const float *x, int64_t cols, int64_t tokens) {
  if (form == PLAIN && cols % BLOCK == 0) {
    *rows = (prepared_rows){.form = PLAIN, .cols = cols, .count = tokens, .steps = cols};
    rows->values = (float *)x; /* only read */
    return;
  }
  ISA(rows_make)(rows, form, cols, tokens);
  fill_job j = {rows, x};
  finback_parallel(tokens, tokens * cols / 2, fill_one, &j);
}

void ISA(linears)(const float *x, int64_t tokens, const finback_weight *const *weights,
                  int64_t count, int32_t bits, float *y) {
  if (tokens == 0 || count == 0) return; /* a step in which no row is wanted */
  prepared_rows forms[ROW_FORMS] = {{0}};
  product usual[16] = {{0}};
  product *list = count <= 16 ? usual : finback_alloc((size_t)count * sizeof(product));
  for (int64_t i = 0; i < count; i++) {
    const row_form form = ISA(form_for)(weights[i], bits);
    if (!forms[form].values) prepare(&forms[form], form, x, weights[i]->cols, tokens);
    list[i] = (product){&forms[form], 0, tokens, weights[i], y};
    y += tokens * weights[i]->rows;
  }
  ISA(run_products)(list, count);
  if (list != usual) free(list);
  for (int form = 0; form < ROW_FORMS; form++) free(forms[form].memory);
}
