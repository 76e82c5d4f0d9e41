/* The threads of an exported function, linked into its code.
 *
 * Compiled loops call __TVMBackendParallelLaunch, a pointer that TVM's runtime sets to its own
 * thread pool when the code is loaded. Each calling thread has such a pool. It binds its threads to
 * cores, and uses half of the processors because the others may be hyperthreads.
 * tvmbridge_use_threads() sets the pointer to the pool in this file instead. This pool has the given
 * number of threads, the caller included, and binds none of them.
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

typedef struct {
  void* sync_handle;
  int32_t num_task;
} Environment;

typedef int (*Task)(int, Environment*, void*);
typedef int (*Launch)(Task, void*, int);

extern __attribute__((weak)) Launch __TVMBackendParallelLaunch;

static struct {
  pthread_mutex_t turns; /* one loop at a time */
  pthread_mutex_t mutex;
  pthread_cond_t wake;
  pthread_t threads[MOST_THREADS];
  int size;
  pid_t process;
  int ending;
  Task task;
  void* data;
  atomic_int count, pending, failed;
  atomic_uint generation;
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

static void run_part(int id, int count) {
  Environment environment = {NULL, count};
  int code = pool.task(id, &environment, pool.data);
  if (code != 0) atomic_store(&pool.failed, code);
}

static void* work(void* argument) {
  int id = (int)(intptr_t)argument;
  unsigned seen = 0;
  inside = 1;
  for (;;) {
    int spins = 0;
    while (atomic_load(&pool.generation) == seen && ++spins < SPINS) pause_shortly();
    if (atomic_load(&pool.generation) == seen) {
      pthread_mutex_lock(&pool.mutex);
      while (atomic_load(&pool.generation) == seen && !pool.ending)
        pthread_cond_wait(&pool.wake, &pool.mutex);
      pthread_mutex_unlock(&pool.mutex);
    }
    if (pool.ending) return NULL;
    seen = atomic_load(&pool.generation);
    int count = atomic_load(&pool.count);
    if (id < count) run_part(id, count);
    atomic_fetch_sub(&pool.pending, 1);
  }
}

static int run_alone(Task task, void* data) {
  Environment environment = {NULL, 1};
  return task(0, &environment, data);
}

static int launch(Task task, void* data, int wanted) {
  /* A loop inside another, and a loop in the child of a fork, run on the calling thread alone. */
  if (inside || pool.size == 1 || pool.process != getpid()) return run_alone(task, data);
  pthread_mutex_lock(&pool.turns);
  int count = wanted > 0 && wanted < pool.size ? wanted : pool.size;
  pool.task = task;
  pool.data = data;
  atomic_store(&pool.failed, 0);
  atomic_store(&pool.count, count);
  /* Wait for threads without a task too, so that none is late for the next loop. */
  atomic_store(&pool.pending, pool.size - 1);
  pthread_mutex_lock(&pool.mutex);
  atomic_fetch_add(&pool.generation, 1);
  pthread_cond_broadcast(&pool.wake);
  pthread_mutex_unlock(&pool.mutex);
  inside = 1;
  run_part(0, count);
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
  pool.ending = 1;
  pthread_cond_broadcast(&pool.wake);
  pthread_mutex_unlock(&pool.mutex);
  for (int i = 1; i < pool.size; ++i) pthread_join(pool.threads[i], NULL);
}
