// Rows on their way from memory, which take no registers meanwhile.
#pragma once
#include "types.cuh"

// Four columns of N rows for each lane of a block, twice: what is asked for in a turn is read after the next has been asked for. A lane
// sees what it has asked for itself.
template <u32 N, u32 THREADS> struct Stage {
  typedef float4 Memory[2 * N][THREADS];
  Memory& memory;

  // `k`: below N.
  __device__ __forceinline__ float4& at(u32 turn, u32 k) const { return memory[turn % 2 * N + k][threadIdx.x]; }
  __device__ __forceinline__ void ask(u32 turn, u32 k, const float4* from) const {
#if __CUDA_ARCH__ < 800
    at(turn, k) = *from;
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(&at(turn, k))), "l"(from) : "memory");
#endif
  }
  // Of an array (rows, DIM) of the framework's; 0 beyond the last column.
  template <u32 DIM> __device__ __forceinline__ void ask_columns(u32 turn, u32 k, const float* rows, u64 row, u32 quad) const {
    const float* from = rows + row * DIM + 4 * quad;
    if (DIM % 4 == 0) {
      ask(turn, k, (const float4*)from);
      return;
    }
#if __CUDA_ARCH__ < 800
    const u32 left = DIM - 4 * quad;
    at(turn, k) = make_float4(from[0], left > 1 ? from[1] : 0, left > 2 ? from[2] : 0, left > 3 ? from[3] : 0);
#else
    const u32 to = (u32)__cvta_generic_to_shared(&at(turn, k));
#pragma unroll
    for (u32 c = 0; c < 4; ++c) {
      const bool is_there = 4 * quad + c < DIM;
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to + 4 * c), "l"(from + (is_there ? c : 0)), "r"(is_there ? 4 : 0) : "memory");
    }
#endif
  }
  // Ends what is asked for in a turn.
  __device__ __forceinline__ void end() const {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
  }
  // All that was asked for is there, but for the last turn's.
  __device__ __forceinline__ void wait() const {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group 1;" ::: "memory");
#endif
  }
};
