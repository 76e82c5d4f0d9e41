// A product of matrices of half precision by the instructions of compute capability 9.0, with which
// four warps multiply matrices in shared memory.
#ifndef TVMBRIDGE_WARP_GROUPS
#define TVMBRIDGE_WARP_GROUPS
namespace tensor_cores {
typedef unsigned long long Matrix;  // a matrix in shared memory: where it begins, and how it lies

#ifndef EMULATED_TENSOR_CORES
// Rows of 128 bytes begin at a multiple of 1024 bytes. The 16-byte chunks of row r are permuted:
// chunk c is at place c ^ (r % 8).
__device__ __forceinline__ Matrix matrix_at(const void* first) {
  return (Matrix)((shared_address(first) & 0x3ffff) >> 4) | (Matrix)1 << 16 | (Matrix)64 << 32 |
         (Matrix)1 << 62;
}

__device__ __forceinline__ Matrix advanced(Matrix matrix, int bytes) { return matrix + (bytes >> 4); }

// Lets the following instructions of warp groups read what this thread has copied.
__device__ __forceinline__ void show_copies() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}
__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}
__device__ __forceinline__ void end_products() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}
template <int COUNT>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(COUNT) : "memory");
}
__device__ __forceinline__ char* aligned_shared(void* shared) {
  return (char*)shared + (-shared_address(shared) & 1023);
}
#endif

// Adds the product of a 64 x 16 and a 16 x COLUMNS matrix to `sum`; specialized by the number.
template <int COLUMNS>
struct Group;

// Computes a tile of `result` = `left` `right`^T; parameters as of `product`. A group of four warps has
// 64 rows and all columns of the block. DEPTH is a multiple of 8.
template <bool BFLOAT, int ROWS, int COLUMNS, int DEPTH, long long LEFT_BATCH, long long RIGHT_BATCH,
          int BLOCK_ROWS, int BLOCK_COLUMNS, int STAGES, bool BIAS, int ACTIVATION>
__device__ __forceinline__ void product_of_groups(const void* left_, const void* right_,
                                                  const void* bias_, void* result_, void* shared_,
                                                  int block, int thread) {
  constexpr int STEP = 64, THREADS = BLOCK_ROWS * 2, AT_ONCE = THREADS / 8;
  constexpr int TILES_DOWN = (ROWS + BLOCK_ROWS - 1) / BLOCK_ROWS;
  constexpr int TILES_ACROSS = (COLUMNS + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS;
  constexpr int STEPS = (DEPTH + STEP - 1) / STEP;
  constexpr int LEFT_BYTES = BLOCK_ROWS * 128, BYTES = LEFT_BYTES + BLOCK_COLUMNS * 128;

  int tile = block % (TILES_DOWN * TILES_ACROSS), batch = block / (TILES_DOWN * TILES_ACROSS);
  int first_row = tile % TILES_DOWN * BLOCK_ROWS, first_column = tile / TILES_DOWN * BLOCK_COLUMNS;
  const Half* left = (const Half*)left_ + batch * LEFT_BATCH;
  const Half* right = (const Half*)right_ + batch * RIGHT_BATCH;
  char* shared = aligned_shared(shared_);
  int chunk = thread % 8, row = thread / 8;

  auto fetch = [&](int step) {
    char* to = shared + step % STAGES * BYTES;
    int depth = step * STEP + chunk * 8;
    bool deep = DEPTH % STEP == 0 || depth < DEPTH;
#pragma unroll
    for (int i = 0; i < BLOCK_ROWS; i += AT_ONCE) {
      int at = first_row + row + i;
      bool inside = deep && (ROWS % BLOCK_ROWS == 0 || at < ROWS);
      copy_16(to + (row + i) * 128 + ((chunk ^ (row + i) % 8) << 4),
              inside ? left + (long long)at * DEPTH + depth : left, inside);
    }
    to += LEFT_BYTES;
#pragma unroll
    for (int i = 0; i < BLOCK_COLUMNS; i += AT_ONCE) {
      if (BLOCK_COLUMNS % AT_ONCE != 0 && row + i >= BLOCK_COLUMNS) break;
      int at = first_column + row + i;
      bool inside = deep && (COLUMNS % BLOCK_COLUMNS == 0 || at < COLUMNS);
      copy_16(to + (row + i) * 128 + ((chunk ^ (row + i) % 8) << 4),
              inside ? right + (long long)at * DEPTH + depth : right, inside);
    }
  };

  float sums[BLOCK_COLUMNS / 2];
#pragma unroll
  for (int i = 0; i < BLOCK_COLUMNS / 2; ++i) sums[i] = 0.0f;
#pragma unroll
  for (int step = 0; step < STAGES - 2; ++step) {
    if (step < STEPS) fetch(step);
    end_group();
  }
  int group = thread / 128;
#pragma unroll 1
  for (int step = 0; step < STEPS; ++step) {
    wait_for_groups<STAGES - 3>();
    show_copies();
    // Here all warps have ended their products of two steps ago, whose place is filled again below.
    __syncthreads();
    Matrix a = matrix_at(shared + step % STAGES * BYTES + group * 64 * 128);
    Matrix b = matrix_at(shared + step % STAGES * BYTES + LEFT_BYTES);
    begin_products();
#pragma unroll
    for (int k = 0; k < STEP / 16; ++k) {
      Group<BLOCK_COLUMNS>::template multiply<BFLOAT>(sums, advanced(a, 32 * k), advanced(b, 32 * k));
    }
    end_products();
    if (step + STAGES - 2 < STEPS) fetch(step + STAGES - 2);
    end_group();
    wait_for_products<1>();
  }
  wait_for_products<0>();

  int lane = thread % 32;
  int first = first_row + thread / 32 * 16 + lane / 4;
  store_sums<BFLOAT, ROWS, COLUMNS, BIAS, ACTIVATION, BLOCK_COLUMNS / 8>(
      sums, (const Half*)bias_, (Half*)result_ + (long long)batch * ROWS * COLUMNS, first,
      first_column + lane % 4 * 2);
}
}  // namespace tensor_cores
#endif
