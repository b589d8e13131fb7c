/* Products of rows with weights: rows brought into the form that a weight asks for, then lists of products
 * that all threads take chunks of. Inside the library only. */
#ifndef FINBACK_PRODUCTS_H
#define FINBACK_PRODUCTS_H

#include "finback.h"
#include "simd.h"

enum { CHUNK_ROWS = 16 }; /* rows of weights that are computed together */

/* How rows are laid out for a product. PLAIN and EVEN_FIRST: float32, padded with zeros to a multiple of
 * 32 columns, within each 32 the even columns first where widening gives them first. INT16 and INT8:
 * rounded, see quantised.c. */
typedef enum { PLAIN, EVEN_FIRST, INT16, INT8, ROW_FORMS } row_form;

typedef struct {
  row_form form;
  int64_t cols, count;
  int64_t steps;        /* INT16, INT8: vectors of codes in a row; else columns, padding included */
  void *values;         /* (count, …) */
  float *scales;        /* INT16, INT8: (count, steps, VL) */
  int32_t *offsets;     /* INT8: (count, steps, VL), where OFFSET_8 is not zero */
  void *memory;         /* to be freed; NULL where values are somebody else's */
} prepared_rows;

/* y (tokens, w->rows) = rows `first` to `first + tokens` of x, times wᵀ */
typedef struct {
  const prepared_rows *x;
  int64_t first, tokens;
  const finback_weight *w;
  float *y;
} product;

/* quantised.c and linear.c: chunk `chunk` of CHUNK_ROWS rows of weights. */
void ISA(rounded_chunk)(const product *p, int64_t chunk);
void ISA(float_chunk)(const product *p, int64_t chunk);
/* quantised.c: one row into whole numbers. */
void ISA(round_row)(const prepared_rows *rows, int64_t row, const float *x);

/* products.c */
row_form ISA(form_for)(const finback_weight *w, int32_t bits);
void ISA(rows_make)(prepared_rows *rows, row_form form, int64_t cols, int64_t count);
void ISA(rows_fill)(const prepared_rows *rows, int64_t row, const float *x);
void ISA(run_products)(const product *list, int64_t count);

#endif
