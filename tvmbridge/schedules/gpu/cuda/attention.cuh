// Attention in half precision by tensor cores, with scores and sums in float32.
#ifndef TVMBRIDGE_ATTENTION
#define TVMBRIDGE_ATTENTION
namespace tensor_cores {
enum Mask { OPEN, OF_BOOL, ADDED };

// An operand (batch, head, row, depth): the distances of neighbours, in numbers; depth is contiguous.
template <long long OFFSET, long long BATCH, long long HEAD, long long ROW>
struct Operand {
  static constexpr int stride = ROW;
  __device__ static const Half* matrix(const void* data, int batch, int head) {
    return (const Half*)data + OFFSET + batch * BATCH + head * HEAD;
  }
};

// Computes softmax(query key^T * scale + mask) value for 64 rows of one head. A block has 128 threads,
// and a warp has 16 rows. Keys and values are read 64 at a time; the sum so far is scaled when a larger
// score comes. A row whose scores are all masked is zero. The result is (batch, row, head, depth).
// SHARED_BY heads have one key and one value. MASK_*: the distances of neighbours in the mask.
template <bool BFLOAT, int HEADS, int SHARED_BY, int ROWS, int COLUMNS, int DEPTH, class Query,
          class Key, class Value, int MASK, long long MASK_BATCH, long long MASK_HEAD,
          long long MASK_ROW, long long MASK_COLUMN, bool CAUSAL>
__device__ __forceinline__ void attention(const void* query_, const void* key_, const void* value_,
                                          const void* mask_, void* result_, void* shared_,
                                          float scale, int block, int thread) {
  constexpr int TILE = 64, THREADS = 128, STEPS = (DEPTH + 15) / 16, WIDTH = STEPS * 16;
  constexpr int PITCH = pitch(WIDTH) * 8, SIZE = TILE * PITCH;
  constexpr int TILES = (ROWS + TILE - 1) / TILE, KEY_TILES = (COLUMNS + TILE - 1) / TILE;
  constexpr float LOG2_E = 1.4426950408889634f;
  const float lowest = __int_as_float(0xff800000);

  int first_row = block % TILES * TILE, head = block / TILES % HEADS, batch = block / TILES / HEADS;
  const Half* query = Query::matrix(query_, batch, head);
  const Half* key = Key::matrix(key_, batch, head / SHARED_BY);
  const Half* value = Value::matrix(value_, batch, head / SHARED_BY);
  long long mask_place = batch * MASK_BATCH + head * MASK_HEAD;
  Half* queries = (Half*)shared_;
  Half *keys = queries + SIZE, *values = keys + 2 * SIZE;  // two tiles each
  int warp = thread / 32, lane = thread % 32;

  auto fetch_queries = [&] {
#pragma unroll
    for (int i = thread; i < TILE * WIDTH / 8; i += THREADS) {
      int row = i / (WIDTH / 8), column = i % (WIDTH / 8) * 8;
      copy_8<true, ROWS, DEPTH, Query::stride>(queries + row * PITCH + column, query,
                                               first_row + row, column);
    }
  };
  auto fetch_keys = [&](int tile) {
#pragma unroll
    for (int i = thread; i < TILE * WIDTH / 8; i += THREADS) {
      int row = i / (WIDTH / 8), column = i % (WIDTH / 8) * 8;
      copy_8<true, COLUMNS, DEPTH, Key::stride>(keys + tile % 2 * SIZE + row * PITCH + column, key,
                                                tile * TILE + row, column);
    }
  };
  auto fetch_values = [&](int tile) {
#pragma unroll
    for (int i = thread; i < TILE * WIDTH / 8; i += THREADS) {
      int row = i / (WIDTH / 8), column = i % (WIDTH / 8) * 8;
      copy_8<true, COLUMNS, DEPTH, Value::stride>(values + tile % 2 * SIZE + row * PITCH + column,
                                                  value, tile * TILE + row, column);
    }
  };

  Word q[STEPS][4];
  float sums[2 * STEPS][4] = {};
  float largest[2] = {lowest, lowest}, total[2] = {0.0f, 0.0f};
  int row = first_row + warp * 16 + lane / 4;  // and row + 8
  int tiles = CAUSAL ? min(KEY_TILES, first_row / TILE + 1) : KEY_TILES;
  fetch_queries();
  fetch_keys(0);
  end_group();
  fetch_values(0);
  end_group();
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    wait_for_groups<1>();
    __syncthreads();
    if (tile == 0) {
#pragma unroll
      for (int k = 0; k < STEPS; ++k) {
        load_matrices(q[k], queries + (warp * 16 + lane % 16) * PITCH + lane / 16 * 8 + 16 * k);
      }
    }
    if (tile + 1 < tiles) fetch_keys(tile + 1);
    end_group();
    float scores[TILE / 8][4] = {};
    const Half* of_keys = keys + tile % 2 * SIZE;
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
#pragma unroll
      for (int j = 0; j < TILE / 16; ++j) {
        Word b[4];
        load_matrices(b, of_keys + (lane % 8 + lane / 16 * 8 + 16 * j) * PITCH + lane / 8 % 2 * 8 +
                             16 * k);
        multiply<BFLOAT>(scores[2 * j], q[k], b[0], b[1]);
        multiply<BFLOAT>(scores[2 * j + 1], q[k], b[2], b[3]);
      }
    }
    float highest[2] = {largest[0], largest[1]};
#pragma unroll
    for (int j = 0; j < TILE / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int at = row + i / 2 * 8, column = tile * TILE + 8 * j + lane % 4 * 2 + i % 2;
        float score = scores[j][i] * (scale * LOG2_E);
        bool inside = column < COLUMNS && (!CAUSAL || column <= at);
        if (MASK != OPEN && inside && at < ROWS) {
          long long place = mask_place + at * MASK_ROW + column * MASK_COLUMN;
          if (MASK == OF_BOOL) inside = ((const unsigned char*)mask_)[place] != 0;
          if (MASK == ADDED) score += number<BFLOAT>(((const Half*)mask_)[place]) * LOG2_E;
        }
        scores[j][i] = inside ? score : lowest;
        highest[i / 2] = fmaxf(highest[i / 2], scores[j][i]);
      }
    }
    float base[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      highest[i] = fmaxf(highest[i], __shfl_xor_sync(0xffffffffu, highest[i], 1, 32));
      highest[i] = fmaxf(highest[i], __shfl_xor_sync(0xffffffffu, highest[i], 2, 32));
      base[i] = highest[i] == lowest ? 0.0f : highest[i];
      float factor = exp2f(largest[i] - base[i]);
      largest[i] = highest[i];
      total[i] *= factor;
#pragma unroll
      for (int j = 0; j < 2 * STEPS; ++j) {
        sums[j][2 * i] *= factor;
        sums[j][2 * i + 1] *= factor;
      }
    }
#pragma unroll
    for (int j = 0; j < TILE / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[j][i] = exp2f(scores[j][i] - base[i / 2]);
        total[i / 2] += scores[j][i];
      }
    }
    wait_for_groups<1>();
    __syncthreads();
    if (tile + 1 < tiles) fetch_values(tile + 1);
    end_group();
    const Half* of_values = values + tile % 2 * SIZE;
#pragma unroll
    for (int k = 0; k < TILE / 16; ++k) {
      Word a[4] = {packed<BFLOAT>(scores[2 * k][0], scores[2 * k][1]),
                   packed<BFLOAT>(scores[2 * k][2], scores[2 * k][3]),
                   packed<BFLOAT>(scores[2 * k + 1][0], scores[2 * k + 1][1]),
                   packed<BFLOAT>(scores[2 * k + 1][2], scores[2 * k + 1][3])};
#pragma unroll
      for (int j = 0; j < STEPS; ++j) {
        Word b[4];
        load_transposed(b, of_values + (lane % 16 + 16 * k) * PITCH + lane / 16 * 8 + 16 * j);
        multiply<BFLOAT>(sums[2 * j], a, b[0], b[1]);
        multiply<BFLOAT>(sums[2 * j + 1], a, b[2], b[3]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    total[i] += __shfl_xor_sync(0xffffffffu, total[i], 1, 32);
    total[i] += __shfl_xor_sync(0xffffffffu, total[i], 2, 32);
    float factor = total[i] == 0.0f ? 0.0f : 1.0f / total[i];
    int at = row + 8 * i;
    if (at >= ROWS) continue;
    Half* place = (Half*)result_ + (((long long)batch * ROWS + at) * HEADS + head) * DEPTH;
#pragma unroll
    for (int j = 0; j < 2 * STEPS; ++j) {
      int column = 8 * j + lane % 4 * 2;
      Word pair = packed<BFLOAT>(sums[j][2 * i] * factor, sums[j][2 * i + 1] * factor);
      if (column < DEPTH) *(Word*)(place + column) = pair;
    }
  }
}
}  // namespace tensor_cores
#endif
