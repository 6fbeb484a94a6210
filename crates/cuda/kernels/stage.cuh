// Asynchronous copies of rows from global to shared memory (`cp.async`). Rows in flight take no registers. Below compute capability
// 8.0 the copies are synchronous.
#pragma once
#include "types.cuh"

// A double buffer: in each turn, every thread of a block requests four columns of up to N rows. It reads them after it has requested
// the rows of the next turn. A thread reads only what it has requested itself.
template <u32 N, u32 THREADS> struct Stage {
  typedef float4 Memory[2 * N][THREADS];
  Memory& memory;

  // The place of the four columns that this thread requests as row `k` of a turn. `k`: below N.
  __device__ __forceinline__ float4& at(u32 turn, u32 k) const { return memory[turn % 2 * N + k][threadIdx.x]; }
  // Requests four columns.
  __device__ __forceinline__ void start(u32 turn, u32 k, const float4* from) const {
#if __CUDA_ARCH__ < 800
    at(turn, k) = *from;
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(&at(turn, k))), "l"(from)
        : "memory");
#endif
  }
  // The same for eight bytes. Two of them share a place, so `k` is below 2 * N.
  __device__ __forceinline__ uint2& half_at(u32 turn, u32 k) const { return ((uint2*)&at(turn, k / 2))[k % 2]; }
  // Requests eight bytes.
  __device__ __forceinline__ void start_half(u32 turn, u32 k, const uint2* from) const {
#if __CUDA_ARCH__ < 800
    half_at(turn, k) = *from;
#else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"((u32)__cvta_generic_to_shared(&half_at(turn, k))), "l"(from)
        : "memory");
#endif
  }
  // Requests four columns of a row of a framework's array (rows, DIM). Columns beyond the last are 0.
  template <u32 DIM> __device__ __forceinline__ void start_columns(u32 turn, u32 k, const float* rows, u64 row, u32 quad) const {
    const float* from = rows + row * DIM + 4 * quad;
    if (DIM % 4 == 0) {
      start(turn, k, (const float4*)from);
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
      asm volatile(
          "cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to + 4 * c), "l"(from + (is_there ? c : 0)), "r"(is_there ? 4 : 0)
          : "memory");
    }
#endif
  }
  // Ends the requests of a turn.
  __device__ __forceinline__ void end() const {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
  }
  // Waits until all requested columns have arrived, except those of the last turn.
  __device__ __forceinline__ void wait() const {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group 1;" ::: "memory");
#endif
  }
};
