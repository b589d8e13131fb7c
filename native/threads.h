/* One pool of threads for the whole process. */
#ifndef FINBACK_THREADS_H
#define FINBACK_THREADS_H

#include <stdint.h>

/* Run work(context, chunk) for every chunk from 0 to count-1, each exactly once, on any thread. */
void finback_parallel(int64_t count, void (*work)(void *context, int64_t chunk), void *context);

#endif
