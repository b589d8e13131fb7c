/* One pool of threads for the whole process. */
#ifndef FINBACK_THREADS_H
#define FINBACK_THREADS_H

#include <stddef.h>
#include <stdint.h>

/* Run work(context, chunk) for every chunk from 0 to count-1, each exactly once, on any thread. `cost` is
 * about how many nanoseconds all of it takes one thread: what is short is done by the caller alone. */
void finback_parallel(int64_t count, int64_t cost, void (*work)(void *context, int64_t chunk),
                      void *context);

/* Memory on a cache line's border, to be freed; ends the process with a word where there is none. */
void *finback_alloc(size_t bytes);

#endif
