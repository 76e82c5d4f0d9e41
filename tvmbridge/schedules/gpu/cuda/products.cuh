// A product of matrices of half precision by tensor cores, with sums in float32.
#ifndef TVMBRIDGE_PRODUCTS
#define TVMBRIDGE_PRODUCTS
namespace tensor_cores {
enum Activation { NONE, RELU, GELU, GELU_TANH, SILU };

template <int ACTIVATION>
__device__ __forceinline__ float activated(float x) {
  if (ACTIVATION == RELU) return x < 0 ? 0 : x;
  if (ACTIVATION == GELU) return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
  if (ACTIVATION == GELU_TANH) {
    return 0.5f * x * (1.0f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
  }
  if (ACTIVATION == SILU) return x / (1.0f + expf(-x));
  return x;
}

// Stores what a thread has of 16 rows: two columns of row `row` and of row + 8, and again every 8
// columns. The sum with the bias is rounded before the activation.
template <bool BFLOAT, int ROWS, int COLUMNS, bool BIAS, int ACTIVATION, int COUNT>
__device__ __forceinline__ void store_sums(const float* sums, const Half* bias, Half* result, int row,
                                           int first_column) {
#pragma unroll
  for (int j = 0; j < COUNT; ++j) {
    int column = first_column + 8 * j;
    bool both = column + 1 < COLUMNS;
    float low_bias = BIAS && column < COLUMNS ? number<BFLOAT>(bias[column]) : 0.0f;
    float high_bias = BIAS && both ? number<BFLOAT>(bias[column + 1]) : 0.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int at = row + 8 * i;
      float low = sums[4 * j + 2 * i], high = sums[4 * j + 2 * i + 1];
      if (BIAS) low += low_bias, high += high_bias;
      Word pair = packed<BFLOAT>(low, high);
      if (ACTIVATION != NONE) {
        pair = packed<BFLOAT>(activated<ACTIVATION>(number<BFLOAT>((Half)pair)),
                              activated<ACTIVATION>(number<BFLOAT>((Half)(pair >> 16))));
      }
      if (at >= ROWS || column >= COLUMNS) continue;
      Half* place = result + (long long)at * COLUMNS + column;
      if (COLUMNS % 2 == 0) {
        *(Word*)place = pair;
      } else {
        place[0] = (Half)pair;
        if (both) place[1] = (Half)(pair >> 16);
      }
    }
  }
}

// Computes a tile of `result` = `left` `right`.
//
// A block has BLOCK_ROWS x BLOCK_COLUMNS elements and takes DEPTH_STEP of the depth at a time, with
// STAGES steps in shared memory. A warp has WARP_ROWS x WARP_COLUMNS elements. Matrices of a batch are
// LEFT_BATCH, RIGHT_BATCH and ROWS * COLUMNS numbers apart. RIGHT_TRANSPOSED: `right` is in memory as
// (COLUMNS, DEPTH). BIAS: `bias` has a number for each column.
template <bool BFLOAT, int ROWS, int COLUMNS, int DEPTH, long long LEFT_BATCH, long long RIGHT_BATCH,
          bool RIGHT_TRANSPOSED, int BLOCK_ROWS, int BLOCK_COLUMNS, int DEPTH_STEP, int WARP_ROWS,
          int WARP_COLUMNS, int STAGES, bool BIAS, int ACTIVATION>
__device__ __forceinline__ void product(const void* left_, const void* right_, const void* bias_,
                                        void* result_, void* shared_, int block, int thread) {
  constexpr int WARPS_ACROSS = BLOCK_COLUMNS / WARP_COLUMNS;
  constexpr int THREADS = BLOCK_ROWS / WARP_ROWS * WARPS_ACROSS * 32;
  constexpr int TILES_DOWN = (ROWS + BLOCK_ROWS - 1) / BLOCK_ROWS;
  constexpr int TILES_ACROSS = (COLUMNS + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS;
  constexpr int STEPS = (DEPTH + DEPTH_STEP - 1) / DEPTH_STEP;
  constexpr int LEFT_PITCH = pitch(DEPTH_STEP) * 8;
  constexpr int RIGHT_ROWS = RIGHT_TRANSPOSED ? BLOCK_COLUMNS : DEPTH_STEP;
  constexpr int RIGHT_WIDTH = RIGHT_TRANSPOSED ? DEPTH_STEP : BLOCK_COLUMNS;
  constexpr int RIGHT_PITCH = pitch(RIGHT_WIDTH) * 8;
  constexpr int LEFT_SIZE = BLOCK_ROWS * LEFT_PITCH, RIGHT_SIZE = RIGHT_ROWS * RIGHT_PITCH;
  constexpr int DOWN = WARP_ROWS / 16, ACROSS = WARP_COLUMNS / 16;
  constexpr bool LEFT_VECTORS = DEPTH % 8 == 0;
  constexpr bool RIGHT_VECTORS = (RIGHT_TRANSPOSED ? DEPTH : COLUMNS) % 8 == 0;

  int tile = block % (TILES_DOWN * TILES_ACROSS), batch = block / (TILES_DOWN * TILES_ACROSS);
  int first_row = tile % TILES_DOWN * BLOCK_ROWS, first_column = tile / TILES_DOWN * BLOCK_COLUMNS;
  const Half* left = (const Half*)left_ + batch * LEFT_BATCH;
  const Half* right = (const Half*)right_ + batch * RIGHT_BATCH;
  const Half* bias = (const Half*)bias_;
  Half* result = (Half*)result_ + (long long)batch * ROWS * COLUMNS;
  Half* shared = (Half*)shared_;
  int warp = thread / 32, lane = thread % 32;
  int warp_row = warp / WARPS_ACROSS * WARP_ROWS, warp_column = warp % WARPS_ACROSS * WARP_COLUMNS;

  auto fetch = [&](int step) {
    Half* to = shared + step % STAGES * (LEFT_SIZE + RIGHT_SIZE);
    int depth = step * DEPTH_STEP;
#pragma unroll
    for (int i = thread; i < BLOCK_ROWS * DEPTH_STEP / 8; i += THREADS) {
      int row = i / (DEPTH_STEP / 8), column = i % (DEPTH_STEP / 8) * 8;
      copy_8<LEFT_VECTORS, ROWS, DEPTH, DEPTH>(to + row * LEFT_PITCH + column, left, first_row + row,
                                               depth + column);
    }
    to += LEFT_SIZE;
#pragma unroll
    for (int i = thread; i < RIGHT_ROWS * RIGHT_WIDTH / 8; i += THREADS) {
      int row = i / (RIGHT_WIDTH / 8), column = i % (RIGHT_WIDTH / 8) * 8;
      Half* place = to + row * RIGHT_PITCH + column;
      if (RIGHT_TRANSPOSED) {
        copy_8<RIGHT_VECTORS, COLUMNS, DEPTH, DEPTH>(place, right, first_column + row, depth + column);
      } else {
        copy_8<RIGHT_VECTORS, DEPTH, COLUMNS, COLUMNS>(place, right, depth + row,
                                                       first_column + column);
      }
    }
  };

  float sums[DOWN][2 * ACROSS][4] = {};
#pragma unroll
  for (int step = 0; step < STAGES - 1; ++step) {
    if (step < STEPS) fetch(step);
    end_group();
  }
  // The rows of matrices whose addresses this lane has.
  int left_row = warp_row + lane % 16, left_column = lane / 16 * 8;
  int right_row = RIGHT_TRANSPOSED ? warp_column + lane % 8 + lane / 16 * 8 : lane % 16;
  int right_column = RIGHT_TRANSPOSED ? lane / 8 % 2 * 8 : warp_column + lane / 16 * 8;
#pragma unroll 1
  for (int step = 0; step < STEPS; ++step) {
    wait_for_groups<STAGES - 2>();
    __syncthreads();
    if (step + STAGES - 1 < STEPS) fetch(step + STAGES - 1);
    end_group();
    const Half* lefts = shared + step % STAGES * (LEFT_SIZE + RIGHT_SIZE);
    const Half* rights = lefts + LEFT_SIZE;
#pragma unroll
    for (int depth = 0; depth < DEPTH_STEP; depth += 16) {
      Word a[DOWN][4], b[ACROSS][4];
#pragma unroll
      for (int i = 0; i < DOWN; ++i) {
        load_matrices(a[i], lefts + (left_row + 16 * i) * LEFT_PITCH + left_column + depth);
      }
#pragma unroll
      for (int j = 0; j < ACROSS; ++j) {
        if (RIGHT_TRANSPOSED) {
          load_matrices(b[j], rights + (right_row + 16 * j) * RIGHT_PITCH + right_column + depth);
        } else {
          load_transposed(b[j], rights + (right_row + depth) * RIGHT_PITCH + right_column + 16 * j);
        }
      }
#pragma unroll
      for (int i = 0; i < DOWN; ++i) {
#pragma unroll
        for (int j = 0; j < ACROSS; ++j) {
          multiply<BFLOAT>(sums[i][2 * j], a[i], b[j][0], b[j][1]);
          multiply<BFLOAT>(sums[i][2 * j + 1], a[i], b[j][2], b[j][3]);
        }
      }
    }
  }

#pragma unroll
  for (int i = 0; i < DOWN; ++i) {
    store_sums<BFLOAT, ROWS, COLUMNS, BIAS, ACTIVATION, 2 * ACROSS>(
        (const float*)sums[i], bias, result, first_row + warp_row + 16 * i + lane / 4,
        first_column + warp_column + lane % 4 * 2);
  }
}
}  // namespace tensor_cores
#endif
