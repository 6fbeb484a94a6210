// How a rank tells others that something is done, and waits for them, through flags in their memory.
#pragma once
#include "types.cuh"

__device__ __forceinline__ void store_release_system(u64* at, u64 value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
__device__ __forceinline__ u64 load_acquire_system(const u64* at) {
  u64 x;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(x) : "l"(at) : "memory");
  return x;
}
__device__ __forceinline__ u64 nanoseconds() {
  u64 x;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(x));
  return x;
}

// Returns the flag of `rank` that rank `by` sets.
__device__ __forceinline__ u64* flag_of(const Peers& p, u32 rank, u32 flag, u32 by) {
  return (u64*)p.flags[rank] + flag * MAX_RANKS + by;
}

// Whether ranks set flags for each other. If NCCL moves what they exchange, its launches wait for each other.
__device__ __forceinline__ bool has_flags(const Peers& p) { return p.flags[p.rank] != 0; }

// Tells all other ranks that this one has come as far as `call`. What earlier launches and this block have written is then visible to
// them. A block calls this.
__device__ __forceinline__ void raise(const Peers& p, u32 flag, u64 call) {
  __syncthreads();
  if (!has_flags(p) || threadIdx.x >= p.world_size || threadIdx.x == p.rank) return;
  __threadfence_system();
  store_release_system(flag_of(p, threadIdx.x, flag, p.rank), call);
}

// Notes that a rank has been waited for in vain. The first one counts. Then nobody waits any more.
__device__ __noinline__ void give_up(const Peers& p, u32 rank, u32 flag, u64 call) {
  RankState* state = p.state;
  if (atomicCAS_system(&state->silent, 0, rank + 1) == 0) {
    state->flag = flag, state->call = call;
    __threadfence_system();
    store_shared(&state->is_aborted, 1u);
  }
}

// Waits until all other ranks have come as far as `call`. Returns whether they have. A block calls this.
__device__ __forceinline__ bool wait_for(const Peers& p, u32 flag, u64 call) {
  bool has_come = true;
  if (!has_flags(p)) {
    has_come = !load_shared(&p.state->is_aborted);
  } else if (threadIdx.x < p.world_size && threadIdx.x != p.rank) {
    const u64* at = flag_of(p, p.rank, flag, threadIdx.x);
    const u64 start = nanoseconds();
    for (u32 turn = 1; load_acquire_system(at) < call; ++turn) {
      __nanosleep(40);
      // The host's memory is far away.
      if (turn % 64 != 0) continue;
      if (load_shared(&p.state->is_aborted)) {
        has_come = false;
        break;
      }
      if (nanoseconds() - start > p.timeout) {
        give_up(p, threadIdx.x, flag, call);
        has_come = false;
        break;
      }
    }
  }
  return __syncthreads_and(has_come);
}
