// The instructions of NVIDIA's tensor cores from compute capability 8.0 on, and copies to shared memory.
#ifndef TVMBRIDGE_TENSOR_CORES
#define TVMBRIDGE_TENSOR_CORES
namespace tensor_cores {
typedef unsigned int Word;    // two numbers of half precision
typedef unsigned short Half;  // the bits of a number of half precision

#ifndef EMULATED_TENSOR_CORES
__device__ __forceinline__ Word shared_address(const void* place) {
  return (Word)__cvta_generic_to_shared(place);
}

// Copies 16 bytes to shared memory; zeros if the source is outside of its array.
__device__ __forceinline__ void copy_16(void* to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(to)),
               "l"(from), "r"(inside ? 16 : 0)
               : "memory");
}

// Ends a group of copies.
__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Waits until at most COUNT groups of this thread's copies are left.
template <int COUNT>
__device__ __forceinline__ void wait_for_groups() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(COUNT) : "memory");
}

// Loads four matrices of 8x8 numbers. Lane 8 i + r has the address of row r of matrix i.
__device__ __forceinline__ void load_matrices(Word (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}

__device__ __forceinline__ void load_transposed(Word (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}

// Adds the product of a 16x16 and a 16x8 matrix to `sum`.
template <bool BFLOAT>
__device__ __forceinline__ void multiply(float (&sum)[4], const Word (&left)[4], Word low, Word high) {
  if (BFLOAT) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(low), "r"(high));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(low), "r"(high));
  }
}

template <bool BFLOAT>
__device__ __forceinline__ Word packed(float low, float high) {
  Word result;
  if (BFLOAT) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(result) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(result) : "f"(high), "f"(low));
  }
  return result;
}

template <bool BFLOAT>
__device__ __forceinline__ float number(Half bits) {
  if (BFLOAT) return __uint_as_float((Word)bits << 16);
  float result;
  asm("cvt.f32.f16 %0, %1;\n" : "=f"(result) : "h"(bits));
  return result;
}
#endif

// The number of 16-byte chunks between rows of `columns` numbers in shared memory. It is odd, so that
// eight rows are in different banks.
__host__ __device__ constexpr int pitch(int columns) { return (columns / 8) | 1; }

// Copies 8 neighbouring numbers of a matrix; zeros beyond its end.
template <bool VECTORS, int ROWS, int COLUMNS, int STRIDE>
__device__ __forceinline__ void copy_8(Half* to, const Half* matrix, int row, int column) {
  if (VECTORS) {
    bool inside = row < ROWS && column < COLUMNS;
    copy_16(to, inside ? matrix + (long long)row * STRIDE + column : matrix, inside);
  } else {
    for (int i = 0; i < 8; ++i) {
      bool inside = row < ROWS && column + i < COLUMNS;
      to[i] = inside ? matrix[(long long)row * STRIDE + column + i] : (Half)0;
    }
  }
}
}  // namespace tensor_cores
#endif
