// Runs CUDA kernels on the host: the threads of a block are fibers, and blocks run one after another.
//
// A warp runs until all of its threads have come to a barrier, a shuffle or their end, before the
// next warp does: what another warp has not written yet, or has written too early, is then missed.
// The order of threads and of warps can be turned round. A kernel that is right gives the same bits.

#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <type_traits>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __shared__ static __attribute__((section("emulated_shared")))

typedef unsigned int uint;
typedef unsigned char uchar;
typedef unsigned short ushort;

struct Index {
  uint x = 0, y = 0, z = 0;
};
static Index threadIdx, blockIdx;

// ---- numbers ----

template <class To, class From>
static To with_bits(From value) {
  static_assert(sizeof(To) == sizeof(From), "another size");
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}

struct nv_bfloat16 {
  uint16_t bits;
  nv_bfloat16() = default;
  template <class T, class = std::enable_if_t<std::is_arithmetic<T>::value>>
  explicit nv_bfloat16(T number) {
    float value = number;
    uint32_t wide = with_bits<uint32_t>(value);
    bits = value != value ? 0x7fff : (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
  }
  operator float() const { return with_bits<float>((uint32_t)bits << 16); }
};

struct half {
  _Float16 value;
  half() = default;
  template <class T, class = std::enable_if_t<std::is_arithmetic<T>::value>>
  explicit half(T number) : value((_Float16)(float)number) {}
  operator float() const { return (float)value; }
};

#define EMULATED_ARITHMETIC(type, op) \
  static inline type operator op(type a, type b) { return type((float)a op (float)b); }
#define EMULATED_NUMBER(type)   \
  EMULATED_ARITHMETIC(type, +)  \
  EMULATED_ARITHMETIC(type, -)  \
  EMULATED_ARITHMETIC(type, *)  \
  EMULATED_ARITHMETIC(type, /)  \
  static inline type max(type a, type b) { return a > b ? a : b; } \
  static inline type min(type a, type b) { return a < b ? a : b; }
EMULATED_NUMBER(nv_bfloat16)
EMULATED_NUMBER(half)

static inline nv_bfloat16 __float2bfloat16_rn(float value) { return nv_bfloat16(value); }
static inline float __bfloat162float(nv_bfloat16 value) { return value; }
static inline half __float2half_rn(float value) { return half(value); }

// CUDA's max and min of floats give the operand that is a number.
static inline float max(float a, float b) { return fmaxf(a, b); }
static inline float min(float a, float b) { return fminf(a, b); }
static inline double max(double a, double b) { return fmax(a, b); }
static inline double min(double a, double b) { return fmin(a, b); }
template <class T, class = std::enable_if_t<std::is_integral<T>::value>>
static inline T max(T a, T b) { return a > b ? a : b; }
template <class T, class = std::enable_if_t<std::is_integral<T>::value>>
static inline T min(T a, T b) { return a < b ? a : b; }

static inline int __float_as_int(float v) { return with_bits<int>(v); }
static inline uint __float_as_uint(float v) { return with_bits<uint>(v); }
static inline float __int_as_float(int v) { return with_bits<float>(v); }
static inline float __uint_as_float(uint v) { return with_bits<float>(v); }
static inline long long __double_as_longlong(double v) { return with_bits<long long>(v); }
static inline double __longlong_as_double(long long v) { return with_bits<double>(v); }
static inline ushort __bfloat16_as_ushort(nv_bfloat16 v) { return v.bits; }
static inline nv_bfloat16 __ushort_as_bfloat16(ushort v) { return with_bits<nv_bfloat16>(v); }
static inline ushort __half_as_ushort(half v) { return with_bits<ushort>(v); }
static inline half __ushort_as_half(ushort v) { return with_bits<half>(v); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
#define __expf expf
#define __logf logf
#define __powf powf
#define CUDART_INF_F INFINITY
#define CUDART_NAN_F NAN
#define CUDART_INF ((double)INFINITY)
#define CUDART_NAN ((double)NAN)

// ---- vectors, which lie on multiples of their size ----

static char failure[200];

static inline void __trap() { snprintf(failure, 200, "a trap"); }

template <int SIZE>
struct Vector {
  char bytes[SIZE];
  Vector& operator=(const Vector& other) {
    for (const Vector* side : {(const Vector*)this, &other})
      if ((uintptr_t)side % SIZE) snprintf(failure, 200, "a vector of %d bytes is not aligned", SIZE);
    memcpy(bytes, other.bytes, SIZE);
    return *this;
  }
};
typedef Vector<16> float4, double2, int4, uint4, longlong2, ulonglong2;
typedef Vector<8> float2, int2, uint2, half4, nv_bfloat164, short4, ushort4;
typedef Vector<4> half2, nv_bfloat162, short2, ushort2;
typedef Vector<2> char2, uchar2;

// ---- fibers ----

enum State { READY, BARRIER, SHUFFLE, DONE };

struct Fiber {
  jmp_buf at;
  State state;
  int line, offset;
  uint64_t sent, received;
  bool started;
  char* stack;
};

static const int WARP = 32, STACK = 1 << 16;
static Fiber fibers[1024];  // the most threads of a block
static jmp_buf scheduler;
static void (*body)();
static int current;
static void enter();

// Let the fiber `current` run until it stops. Unlike swapcontext, these jumps are no system calls.
__attribute__((noinline)) static void resume() {
  if (_setjmp(scheduler)) return;
  Fiber& fiber = fibers[current];
  if (fiber.started) _longjmp(fiber.at, 1);
  fiber.started = true;
  if (!fiber.stack) fiber.stack = (char*)malloc(STACK);
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fiber.stack;
  context.uc_stack.ss_size = STACK;
  makecontext(&context, enter, 0);
  setcontext(&context);
}

__attribute__((noinline)) static void stop(State state, int line) {
  fibers[current].state = state;
  fibers[current].line = line;
  if (!_setjmp(fibers[current].at)) _longjmp(scheduler, 1);
}

// A fiber serves the threads of its number in all blocks of a launch.
static void enter() {
  for (;;) {
    body();
    stop(DONE, 0);
  }
}

template <class T>
static T shuffled(uint mask, T value, int offset, int width, int line) {
  if (mask != 0xffffffffu || width != WARP) snprintf(failure, 200, "not a shuffle of a whole warp");
  Fiber& own = fibers[current];
  own.offset = offset;
  memcpy(&own.sent, &value, sizeof(T));
  stop(SHUFFLE, line);
  memcpy(&value, &own.received, sizeof(T));
  return value;
}

#define __syncthreads() stop(BARRIER, __LINE__)
#define __shfl_xor_sync(mask, value, offset, width) shuffled(mask, value, offset, width, __LINE__)

// ---- tensor cores, and copies to shared memory ----

#define EMULATED_TENSOR_CORES

namespace tensor_cores {
typedef unsigned int Word;
typedef unsigned short Half;

// Copies that a thread has begun: they happen when the thread waits for them.
struct Copy {
  void* to;
  const void* from;  // null: zeros
  int group;
};
static std::vector<Copy> copies[1024];
static int groups[1024];

static inline void copy_16(void* to, const void* from, bool inside) {
  if ((uintptr_t)to % 16 || (uintptr_t)from % 16) snprintf(failure, 200, "a copy is not aligned");
  copies[current].push_back({to, inside ? from : nullptr, groups[current]});
}

static inline void end_group() { ++groups[current]; }

template <int COUNT>
static inline void wait_for_groups() {
  std::vector<Copy>& own = copies[current];
  size_t done = 0;
  for (; done < own.size() && own[done].group < groups[current] - COUNT; ++done) {
    const Copy& copy = own[done];
    if (copy.from) memcpy(copy.to, copy.from, 16);
    else memset(copy.to, 0, 16);
  }
  own.erase(own.begin(), own.begin() + done);
}

// The values of all lanes of the warp.
static void gather(uint64_t value, uint64_t (&all)[WARP], int line) {
  fibers[current].offset = 0;
  fibers[current].sent = value;
  stop(SHUFFLE, line);
  for (int i = 0; i < WARP; ++i) all[i] = fibers[current / WARP * WARP + i].sent;
  stop(SHUFFLE, -line);
}

static void load(Word (&to)[4], const void* row, bool transposed) {
  uint64_t rows[WARP];
  if ((uintptr_t)row % 16) snprintf(failure, 200, "a row of a matrix is not aligned");
  gather((uint64_t)row, rows, __LINE__);
  int lane = current % WARP;
  for (int i = 0; i < 4; ++i) {
    Half pair[2];
    for (int j = 0; j < 2; ++j) {
      int down = transposed ? lane % 4 * 2 + j : lane / 4, across = transposed ? lane / 4 : lane % 4 * 2 + j;
      pair[j] = ((const Half*)rows[8 * i + down])[across];
    }
    memcpy(&to[i], pair, 4);
  }
}
static inline void load_matrices(Word (&to)[4], const void* row) { load(to, row, false); }
static inline void load_transposed(Word (&to)[4], const void* row) { load(to, row, true); }

template <bool BFLOAT>
static inline float number(Half bits) {
  return BFLOAT ? (float)with_bits<nv_bfloat16>(bits) : (float)with_bits<half>(bits);
}

template <bool BFLOAT>
static inline Word packed(float low, float high) {
  auto bits = [](float v) {
    return BFLOAT ? with_bits<Half>(nv_bfloat16(v)) : with_bits<Half>(half(v));
  };
  return bits(low) | (Word)bits(high) << 16;
}

template <bool BFLOAT>
static void multiply(float (&sum)[4], const Word (&left)[4], Word low, Word high) {
  uint64_t lefts[2][WARP], rights[WARP];
  gather(left[0] | (uint64_t)left[1] << 32, lefts[0], __LINE__);
  gather(left[2] | (uint64_t)left[3] << 32, lefts[1], __LINE__);
  gather(low | (uint64_t)high << 32, rights, __LINE__);
  int lane = current % WARP;
  for (int i = 0; i < 4; ++i) {
    int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      // Lane 4 r + k / 2 has the numbers of row r; words: rows from 8 on, depths from 8 on.
      Half a = lefts[k / 8][row % 8 * 4 + k % 8 / 2] >> (row / 8 * 32 + k % 2 * 16);
      Half b = rights[column * 4 + k % 8 / 2] >> (k / 8 * 32 + k % 2 * 16);
      sum[i] += number<BFLOAT>(a) * number<BFLOAT>(b);
    }
  }
}

// A matrix is its address. Chunks of 16 bytes are permuted by the number of the row of 128 bytes.
typedef unsigned long long Matrix;
static inline Matrix matrix_at(const void* first) {
  if ((uintptr_t)first % 1024) snprintf(failure, 200, "a matrix is not aligned");
  return (Matrix)first;
}
static inline Matrix advanced(Matrix matrix, int bytes) { return matrix + bytes; }
static inline void show_copies() {}
static inline void begin_products() {}
static inline void end_products() {}
template <int COUNT>
static inline void wait_for_products() {}
static inline char* aligned_shared(void* shared) {
  return (char*)(((uintptr_t)shared + 1023) / 1024 * 1024);
}

template <bool BFLOAT>
static inline float element(Matrix matrix, int row, int k) {
  Matrix at = matrix + row * 128 + k * 2;
  return number<BFLOAT>(*(const Half*)(at ^ (at >> 7 & 7) << 4));
}

// The product of a 64 x 16 and a transposed COLUMNS x 16 matrix, as four warps hold it.
template <bool BFLOAT, int COLUMNS>
static inline void multiply_group(float (&sum)[COLUMNS / 2], Matrix left, Matrix right) {
  int lane = current % WARP, warp = current / WARP % 4;
  for (int i = 0; i < COLUMNS / 2; ++i) {
    int row = warp * 16 + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      sum[i] += element<BFLOAT>(left, row, k) * element<BFLOAT>(right, column, k);
    }
  }
}
}  // namespace tensor_cores

// What threads from `first` on wait for; false, and a failure, if they wait for different things.
static bool agree(int first, int count, const char* which) {
  for (int i = first + 1; i < first + count; ++i) {
    if (fibers[i].state != fibers[first].state || fibers[i].line != fibers[first].line) {
      snprintf(failure, 200, "not all threads of a %s come to line %d: thread %d does, thread %d not",
               which, fibers[first].state == DONE ? fibers[i].line : fibers[first].line,
               fibers[first].state == DONE ? i : first, fibers[first].state == DONE ? first : i);
      return false;
    }
  }
  return true;
}

static void run_warp(int first, int count, bool descending) {
  for (;;) {
    for (int i = 0; i < count; ++i) {
      current = first + (descending ? count - 1 - i : i);
      threadIdx.x = current;
      if (fibers[current].state == READY) resume();
    }
    bool shuffling = false;
    for (int i = first; i < first + count; ++i) shuffling |= fibers[i].state == SHUFFLE;
    if (!shuffling || !agree(first, count, "warp")) return;
    if (count < WARP) {
      snprintf(failure, 200, "a shuffle in a warp of %d threads", count);
      return;
    }
    for (int i = first; i < first + count; ++i) {
      fibers[i].received = fibers[first + ((i - first) ^ fibers[i].offset)].sent;
      fibers[i].state = READY;
    }
    if (failure[0]) return;
  }
}

// The bounds of what kernels declare as shared.
static __attribute__((section("emulated_shared"), used)) char some_shared[1];
extern char __start_emulated_shared[], __stop_emulated_shared[];

static void run_block(int threads, bool descending) {
  // What nobody has written is not a number.
  memset(__start_emulated_shared, 0xff, __stop_emulated_shared - __start_emulated_shared);
  for (int i = 0; i < threads; ++i) {
    fibers[i].state = READY;
    tensor_cores::copies[i].clear();
  }
  int warps = (threads + WARP - 1) / WARP;
  do {
    for (int i = 0; i < warps && !failure[0]; ++i) {
      int first = WARP * (descending ? warps - 1 - i : i);
      run_warp(first, threads - first < WARP ? threads - first : WARP, descending);
    }
    if (failure[0] || !agree(0, threads, "block")) return;
    for (int i = 0; i < threads; ++i) {
      if (fibers[i].state == BARRIER) fibers[i].state = READY;
    }
  } while (fibers[0].state != DONE);
}

// ---- accesses outside of arrays ----

// Pages without access are before and behind each array.
static sigjmp_buf before_fault;

static void on_fault(int signal) { siglongjmp(before_fault, signal); }

struct FaultHandlers {
  struct sigaction segv, bus;
  FaultHandlers() {
    struct sigaction ours = {};
    ours.sa_handler = on_fault;
    sigaction(SIGSEGV, &ours, &segv);
    sigaction(SIGBUS, &ours, &bus);
  }
  ~FaultHandlers() {
    sigaction(SIGSEGV, &segv, nullptr);
    sigaction(SIGBUS, &bus, nullptr);
  }
};

static const char* run_grid(uint blocks, int threads, bool meets, bool descending) {
  failure[0] = 0;
  for (Fiber& fiber : fibers) fiber.started = false;  // a failure leaves fibers within a thread
  FaultHandlers handlers;
  if (sigsetjmp(before_fault, 1)) {
    snprintf(failure, 200, "an access outside of an array, by thread %u of block %u",
             meets ? (uint)current : threadIdx.x, blockIdx.x);
    return failure;
  }
  for (uint i = 0; i < blocks && !failure[0]; ++i) {
    blockIdx.x = descending ? blocks - 1 - i : i;
    if (meets) {
      run_block(threads, descending);
      continue;
    }
    for (threadIdx.x = 0; threadIdx.x < (uint)threads; ++threadIdx.x) body();
  }
  return failure;
}

static void* const* arguments;

template <class... P, size_t... I>
static inline void call(void (*kernel)(P...), std::index_sequence<I...>) {
  kernel((P)arguments[I]...);
}

// An entry for a kernel; `meets`: whether its threads wait for each other.
#define EMULATED(kernel, meets)                                                                  \
  static void body_of_##kernel() {                                                               \
    call(kernel, std::make_index_sequence<parameters_of(kernel)>());                             \
  }                                                                                              \
  extern "C" int count_##kernel() { return parameters_of(kernel); }                              \
  extern "C" const char* run_##kernel(void** given, int blocks, int threads, int descending) {   \
    arguments = given;                                                                           \
    body = body_of_##kernel;                                                                     \
    return run_grid(blocks, threads, meets, descending);                                         \
  }

#define parameters_of(kernel) decltype(counter(kernel))::value
template <class... P>
std::integral_constant<size_t, sizeof...(P)> counter(void (*)(P...));
