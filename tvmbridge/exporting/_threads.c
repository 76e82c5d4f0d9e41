/* The threads of an exported function, linked into its code.
 *
 * Compiled loops call __TVMBackendParallelLaunch, a pointer that TVM's runtime sets to its own
 * thread pool when the code is loaded. Each calling thread has such a pool. It binds its threads to
 * cores, and uses half of the processors because the others may be hyperthreads.
 * tvmbridge_use_threads() sets the pointer to the pool in this file instead. This pool has the given
 * number of threads, the caller included, and binds none of them.
 *
 * A loop is cut into more parts than there are threads. Each thread begins with parts of its own,
 * so that the data of one kernel are in its cache for the next, and then takes parts that others
 * have not begun. The caller waits for parts that have begun, not for threads: a thread that sleeps
 * or that the operating system has suspended delays no loop.
 */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>

#define MOST_THREADS 256
/* About 50 microseconds: longer than the time between two kernels of one call. */
#define SPINS 2000
/* Parts of a loop for each thread, and for all: more balance the work, but each costs some 20 ns. */
#define PARTS_OF_THREAD 8
#define ENOUGH_PARTS 128
#define LINE 64

typedef struct {
  void* sync_handle;
  int32_t num_task;
} Environment;

typedef int (*Task)(int, Environment*, void*);
typedef int (*Launch)(Task, void*, int);

extern __attribute__((weak)) Launch __TVMBackendParallelLaunch;

/* The next part of a thread, as (number of the loop << 32 | part): a thread that is late by a loop
 * cannot take a part of another. Each is in a cache line of its own. */
typedef struct {
  _Alignas(LINE) atomic_ullong next;
} Share;

static struct {
  pthread_mutex_t turns; /* one loop at a time */
  pthread_mutex_t mutex;
  pthread_cond_t wake;
  pthread_t threads[MOST_THREADS];
  int size;
  pid_t process;
  atomic_int ending, sleeping, pending, failed, parts;
  _Atomic(Task) task;
  _Atomic(void*) data;
  atomic_uint generation;
  Share shares[MOST_THREADS];
} pool = {.turns = PTHREAD_MUTEX_INITIALIZER,
          .mutex = PTHREAD_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER,
          .size = 1};

static _Thread_local int inside;

static void pause_shortly(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

/* Run the parts of loop `generation` in the share of thread `owner` that no thread has begun. */
static void run_share(int owner, unsigned generation) {
  atomic_ullong* next = &pool.shares[owner].next;
  unsigned long long seen = atomic_load(next);
  while ((unsigned)(seen >> 32) == generation) {
    /* These are of this loop if the exchange succeeds: the caller waits until all parts ended. */
    int parts = atomic_load(&pool.parts), of_thread = parts / pool.size;
    Task task = atomic_load(&pool.task);
    void* data = atomic_load(&pool.data);
    int part = (int)(unsigned)seen;
    if (part >= of_thread) return;
    if (!atomic_compare_exchange_weak(next, &seen, seen + 1)) continue;
    Environment environment = {NULL, parts};
    int code = task(owner * of_thread + part, &environment, data);
    if (code != 0) atomic_store(&pool.failed, code);
    atomic_fetch_sub(&pool.pending, 1);
    seen = atomic_load(next);
  }
}

static void run_shares(int thread, unsigned generation) {
  for (int i = 0; i < pool.size; ++i) run_share((thread + i) % pool.size, generation);
}

static void* work(void* argument) {
  int thread = (int)(intptr_t)argument;
  unsigned seen = 0;
  inside = 1;
  for (;;) {
    int spins = 0;
    while (atomic_load(&pool.generation) == seen && ++spins < SPINS) pause_shortly();
    if (atomic_load(&pool.generation) == seen) {
      pthread_mutex_lock(&pool.mutex);
      atomic_fetch_add(&pool.sleeping, 1);
      while (atomic_load(&pool.generation) == seen && !atomic_load(&pool.ending))
        pthread_cond_wait(&pool.wake, &pool.mutex);
      atomic_fetch_sub(&pool.sleeping, 1);
      pthread_mutex_unlock(&pool.mutex);
    }
    if (atomic_load(&pool.ending)) return NULL;
    seen = atomic_load(&pool.generation);
    run_shares(thread, seen);
  }
}

static int run_alone(Task task, void* data) {
  Environment environment = {NULL, 1};
  return task(0, &environment, data);
}

static int parts_of_thread(void) {
  int enough = ENOUGH_PARTS / pool.size;
  return enough > PARTS_OF_THREAD ? PARTS_OF_THREAD : enough > 1 ? enough : 1;
}

static void wake_sleepers(void) {
  /* A thread counts itself as sleeping before it compares the generation for the last time. */
  if (atomic_load(&pool.sleeping) == 0) return;
  pthread_mutex_lock(&pool.mutex);
  pthread_cond_broadcast(&pool.wake);
  pthread_mutex_unlock(&pool.mutex);
}

static int launch(Task task, void* data, int wanted) {
  (void)wanted;
  /* A loop inside another, and a loop in the child of a fork, run on the calling thread alone. */
  if (inside || pool.size == 1 || pool.process != getpid()) return run_alone(task, data);
  pthread_mutex_lock(&pool.turns);
  int parts = pool.size * parts_of_thread();
  unsigned generation = atomic_load(&pool.generation) + 1;
  atomic_store(&pool.task, task);
  atomic_store(&pool.data, data);
  atomic_store(&pool.parts, parts);
  atomic_store(&pool.failed, 0);
  atomic_store(&pool.pending, parts);
  for (int i = 0; i < pool.size; ++i)
    atomic_store(&pool.shares[i].next, (unsigned long long)generation << 32);
  atomic_store(&pool.generation, generation);
  wake_sleepers();
  inside = 1;
  run_shares(0, generation);
  inside = 0;
  for (int spins = 0; atomic_load(&pool.pending) > 0;) {
    if (++spins < SPINS)
      pause_shortly();
    else
      sched_yield();
  }
  int code = atomic_load(&pool.failed);
  pthread_mutex_unlock(&pool.turns);
  return code;
}

/* Run the loops of this code on `count` threads; return the number of threads. Called once. */
int tvmbridge_use_threads(int count) {
  if (&__TVMBackendParallelLaunch == NULL) return 1; /* the code has no parallel loop */
  if (pool.process != 0) return pool.size;
  if (count > MOST_THREADS) count = MOST_THREADS;
  pool.process = getpid();
  int size = 1;
  while (size < count) {
    if (pthread_create(&pool.threads[size], NULL, work, (void*)(intptr_t)size) != 0) break;
    ++size;
  }
  pool.size = size;
  __TVMBackendParallelLaunch = launch;
  return size;
}

__attribute__((destructor)) static void end_threads(void) {
  if (pool.process != getpid()) return;
  pthread_mutex_lock(&pool.mutex);
  atomic_store(&pool.ending, 1);
  pthread_cond_broadcast(&pool.wake);
  pthread_mutex_unlock(&pool.mutex);
  for (int i = 1; i < pool.size; ++i) pthread_join(pool.threads[i], NULL);
}
