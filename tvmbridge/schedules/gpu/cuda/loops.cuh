// A product of matrices in the arithmetic of their elements, by tiles in shared memory.
#ifndef TVMBRIDGE_LOOPS
#define TVMBRIDGE_LOOPS
namespace tiled {
// As tensor_cores::product, for float and double. A block of 256 threads has 64 x 64 elements.
template <class T, int ROWS, int COLUMNS, int DEPTH, long long LEFT_BATCH, long long RIGHT_BATCH,
          bool RIGHT_TRANSPOSED>
__device__ __forceinline__ void product(const void* left_, const void* right_, void* result_,
                                        void* shared_, int block, int thread) {
  constexpr int TILE = 64, STEP = 16, EACH = 4, PITCH = TILE + 1;
  constexpr int TILES_DOWN = (ROWS + TILE - 1) / TILE, TILES_ACROSS = (COLUMNS + TILE - 1) / TILE;
  int tile = block % (TILES_DOWN * TILES_ACROSS), batch = block / (TILES_DOWN * TILES_ACROSS);
  int first_row = tile % TILES_DOWN * TILE, first_column = tile / TILES_DOWN * TILE;
  const T* left = (const T*)left_ + batch * LEFT_BATCH;
  const T* right = (const T*)right_ + batch * RIGHT_BATCH;
  T* result = (T*)result_ + (long long)batch * ROWS * COLUMNS;
  T* lefts = (T*)shared_;  // (STEP, TILE): both operands have the depth first
  T* rights = lefts + STEP * PITCH;
  int down = thread / 16, across = thread % 16;
  T sums[EACH][EACH] = {};
  for (int first = 0; first < DEPTH; first += STEP) {
    for (int i = thread; i < TILE * STEP; i += 256) {
      int row = first_row + i / STEP, depth = first + i % STEP;
      lefts[i % STEP * PITCH + i / STEP] =
          row < ROWS && depth < DEPTH ? left[(long long)row * DEPTH + depth] : (T)0;
      int j = RIGHT_TRANSPOSED ? i / STEP : i % TILE, k = RIGHT_TRANSPOSED ? i % STEP : i / TILE;
      bool inside = first_column + j < COLUMNS && first + k < DEPTH;
      long long place = RIGHT_TRANSPOSED ? (long long)(first_column + j) * DEPTH + first + k
                                         : (long long)(first + k) * COLUMNS + first_column + j;
      rights[k * PITCH + j] = inside ? right[place] : (T)0;
    }
    __syncthreads();
#pragma unroll
    for (int depth = 0; depth < STEP; ++depth) {
      T a[EACH], b[EACH];
#pragma unroll
      for (int i = 0; i < EACH; ++i) {
        a[i] = lefts[depth * PITCH + down + 16 * i];
        b[i] = rights[depth * PITCH + across + 16 * i];
      }
#pragma unroll
      for (int i = 0; i < EACH; ++i) {
#pragma unroll
        for (int j = 0; j < EACH; ++j) sums[i][j] += a[i] * b[j];
      }
    }
    __syncthreads();
  }
  for (int i = 0; i < EACH; ++i) {
    for (int j = 0; j < EACH; ++j) {
      int row = first_row + down + 16 * i, column = first_column + across + 16 * j;
      if (row < ROWS && column < COLUMNS) result[(long long)row * COLUMNS + column] = sums[i][j];
    }
  }
}
}  // namespace tiled
#endif
