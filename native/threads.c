/* A pool that takes chunks from a shared counter. Which thread computes a chunk changes no result.
 *
 * Between calls a worker spins for about 20 microseconds, then sleeps: a longer spin costs other
 * programs of a shared machine dearly. Waking takes longer than a small product, so nobody waits for
 * it: a worker joins the work that it finds when it comes, and the caller waits only for those that
 * have joined. One call at a time uses the pool; a second caller meanwhile computes alone. */
#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "finback.h"

#define MAX_THREADS 256
#define SPINS 4000
#define OPEN (1 << 30)
#define WORTH_SHARING 8000  /* nanoseconds: lines of the cache move between cores */
#define SHORT_PAUSE 15000
#define WORTH_WAKING 60000  /* when all workers sleep: the call that wakes them takes 20000 */

#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ volatile("yield")
#else
#define RELAX() ((void)0)
#endif

/* Counters that different threads write lie on lines of their own. */
static _Alignas(64) _Atomic int64_t next_chunk;
static _Alignas(64) _Atomic int32_t door; /* OPEN while there is work, plus the workers inside */
static _Alignas(64) _Atomic int64_t generation;
static _Alignas(64) _Atomic int32_t sleeping;

static struct {
  void (*work)(void *, int64_t);
  void *context;
  int64_t count;
} job;

static pthread_mutex_t in_use = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static pthread_t workers[MAX_THREADS];
static _Atomic int32_t num_workers; /* besides the caller; written under in_use */
static _Atomic int32_t wanted_workers;
static _Atomic int leaving;

static void take_chunks(void) {
  for (;;) {
    int64_t chunk = atomic_fetch_add_explicit(&next_chunk, 1, memory_order_relaxed);
    if (chunk >= job.count) return;
    job.work(job.context, chunk);
  }
}

static void wait_for(int64_t seen) {
  for (int spin = 0; spin < SPINS; spin++) {
    if (atomic_load_explicit(&generation, memory_order_acquire) != seen) return;
    RELAX();
  }
  pthread_mutex_lock(&lock);
  atomic_fetch_add(&sleeping, 1);
  while (atomic_load(&generation) == seen) pthread_cond_wait(&wake, &lock);
  atomic_fetch_sub(&sleeping, 1);
  pthread_mutex_unlock(&lock);
}

/* Go in, unless the door is closed: then the work is done, and the next one not yet there. */
static int join(void) {
  int32_t now = atomic_load_explicit(&door, memory_order_relaxed);
  while (now & OPEN)
    if (atomic_compare_exchange_weak_explicit(&door, &now, now + 1, memory_order_acquire,
                                              memory_order_relaxed))
      return 1;
  return 0;
}

static void *worker(void *start) {
  int64_t seen = (int64_t)(intptr_t)start;
  for (;;) {
    wait_for(seen);
    seen = atomic_load_explicit(&generation, memory_order_acquire);
    if (atomic_load(&leaving)) return NULL;
    if (!join()) continue;
    take_chunks();
    atomic_fetch_sub_explicit(&door, 1, memory_order_release);
  }
}

static void announce(void) {
  atomic_fetch_add(&generation, 1);
  if (atomic_load(&sleeping)) {
    pthread_mutex_lock(&lock);
    pthread_cond_broadcast(&wake);
    pthread_mutex_unlock(&lock);
  }
}

static void resize(int32_t wanted) {
  if (num_workers) {
    atomic_store(&leaving, 1);
    announce();
    for (int32_t i = 0; i < num_workers; i++) pthread_join(workers[i], NULL);
    atomic_store(&leaving, 0);
  }
  int64_t now = atomic_load(&generation);
  for (num_workers = 0; num_workers < wanted; num_workers++)
    if (pthread_create(&workers[num_workers], NULL, worker, (void *)(intptr_t)now)) break;
}

static int64_t nanoseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Sleeping workers are woken for much work, or for little pieces of work that follow each other. */
static int is_worth_it(int64_t cost) {
  static _Atomic int64_t alone, last; /* done alone of late, and until when; only a hint */
  if (cost < WORTH_SHARING || atomic_load(&wanted_workers) == 0) return 0;
  if (cost >= WORTH_WAKING || atomic_load(&sleeping) < num_workers) return 1;
  const int64_t now = nanoseconds(), before = now - last > SHORT_PAUSE ? 0 : alone;
  alone = before + cost;
  last = now + cost;
  if (alone < WORTH_WAKING) return 0;
  alone = 0;
  return 1;
}

void finback_parallel(int64_t count, int64_t cost, void (*work)(void *, int64_t), void *context) {
  if (count <= 1 || !is_worth_it(cost) || pthread_mutex_trylock(&in_use)) {
    for (int64_t chunk = 0; chunk < count; chunk++) work(context, chunk);
    return;
  }
  int32_t wanted = atomic_load(&wanted_workers);
  if (num_workers != wanted) resize(wanted);
  job.work = work, job.context = context, job.count = count;
  atomic_store(&next_chunk, 0);
  atomic_store_explicit(&door, OPEN, memory_order_release);
  announce();
  take_chunks();
  atomic_fetch_and_explicit(&door, ~OPEN, memory_order_relaxed);
  for (int spin = 0; atomic_load_explicit(&door, memory_order_acquire); spin++)
    if (spin < SPINS)
      RELAX();
    else
      sched_yield(); /* a worker has lost its core; let it finish its chunk */
  pthread_mutex_unlock(&in_use);
}

void *finback_alloc(size_t bytes) {
  void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);
  if (!memory) {
    fprintf(stderr, "finback: out of memory: %zu bytes for a kernel's work\n", bytes);
    abort();
  }
  return memory;
}

void finback_set_threads(int32_t count) {
  int32_t others = count - 1;
  atomic_store(&wanted_workers, others < 0 ? 0 : others > MAX_THREADS ? MAX_THREADS : others);
}

/* A child process has no workers; it starts its own. */
static void in_child(void) {
  num_workers = 0;
  pthread_mutex_init(&in_use, NULL);
  pthread_mutex_init(&lock, NULL);
  pthread_cond_init(&wake, NULL);
  atomic_store(&sleeping, 0);
  atomic_store(&door, 0);
}

__attribute__((constructor)) static void prepare(void) { pthread_atfork(NULL, NULL, in_child); }
