// Integer types, the hash of keys, and loads and stores with cache hints. Needs no header of CUDA.
#pragma once
typedef unsigned int u32;
typedef unsigned long long u64;
#include "abi.cuh"
constexpr u32 WARP = 32, ALL = 0xffffffffu;

// Every kernel calls this first. After the call, the previous launch on the stream has completed. From compute capability 9.0 on,
// this launch may have been prepared while that one ran, and the next launch may be prepared from here on.
__device__ __forceinline__ void begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// As `begin`, for a kernel that waits for other ranks: the next launch is prepared when this one has ended. Blocks of that launch would
// otherwise keep the multiprocessors from other streams, for whose work another rank may wait.
__device__ __forceinline__ void begin_meeting() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Returns the hash of a key: the 64-bit finalizer of MurmurHash3, applied to the key mixed with a secret of the process. The hash is
// a bijection. Nobody who does not know the secret can choose keys whose hashes collide in some of their bits.
__device__ __forceinline__ u64 hash(u64 secret, u64 key) {
  u64 h = (key ^ secret) * (secret | 1);
  h ^= h >> 33;
  h *= 0xff51afd7ed558ccdull;
  h ^= h >> 33;
  h *= 0xc4ceb9fe1a85ec53ull;
  return h ^ h >> 33;
}

__device__ __forceinline__ u32 lane() { return threadIdx.x % WARP; }
__device__ __forceinline__ u32 lanes_below() { return (1u << lane()) - 1; }
// Returns the mask of this lane's group in its warp. Groups have LANES consecutive lanes, a power of two.
template <u32 LANES> __device__ __forceinline__ u32 group_mask() {
  return LANES == WARP ? ALL : ((1u << LANES % WARP) - 1) << (lane() / LANES * LANES);
}

struct Pair {
  u64 low, high;
};
// Loads 16 bytes, from the L1 cache if they are there.
__device__ __forceinline__ Pair load_pair(const void* at) {
  Pair p;
  asm volatile("ld.global.v2.u64 {%0, %1}, [%2];" : "=l"(p.low), "=l"(p.high) : "l"(at));
  return p;
}
// Loads 16 bytes from the L2 cache, where the stores of other blocks are visible.
__device__ __forceinline__ Pair load_pair_shared(const void* at) {
  Pair p;
  asm volatile("ld.global.cg.v2.u64 {%0, %1}, [%2];" : "=l"(p.low), "=l"(p.high) : "l"(at) : "memory");
  return p;
}
// Volatile load and store of a value that other threads read and write.
template <class T> __device__ __forceinline__ T load_shared(const T* at) { return *(const volatile T*)at; }
template <class T> __device__ __forceinline__ void store_shared(T* at, T value) { *(volatile T*)at = value; }
// Acquire and release operations. After an acquire operation that sees the value of a release operation, a thread sees what the other thread
// wrote before.
__device__ __forceinline__ u32 acquire_or(u32* at, u32 bits) {
  u32 old;
  asm volatile("atom.acquire.gpu.global.or.b32 %0, [%1], %2;" : "=r"(old) : "l"(at), "r"(bits) : "memory");
  return old;
}
__device__ __forceinline__ u32 acquire(const u32* at) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
__device__ __forceinline__ void release(u32* at, u32 value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
// Loads a value that is read only once.
__device__ __forceinline__ u64 load_once(const u64* at) {
  u64 x;
  asm volatile("ld.global.cs.u64 %0, [%1];" : "=l"(x) : "l"(at));
  return x;
}
// Loads four columns without allocating a line in the L1 cache.
__device__ __forceinline__ float4 load_row(const float4* at) {
  float4 x;
  asm volatile("ld.global.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(at));
  return x;
}
// Stores four columns with the streaming hint.
__device__ __forceinline__ void store_once(float4* at, const float4& x) {
  asm volatile("st.global.cs.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}

// Returns the sum over the lanes of a warp, to its first lane.
__device__ __forceinline__ u32 sum_of_warp(u32 x) {
#pragma unroll
  for (u32 by = WARP / 2; by; by /= 2) x += __shfl_down_sync(ALL, x, by);
  return x;
}

// Returns the inclusive prefix sum of `x` over the first N lanes of a warp.
template <u32 N = WARP, class T> __device__ __forceinline__ T sum_to(T x) {
#pragma unroll
  for (u32 by = 1; by < N; by *= 2) {
    const T y = __shfl_up_sync(ALL, x, by);
    if (lane() >= by) x += y;
  }
  return x;
}

// Returns the exclusive prefix sum of `x` over the threads of a block. `of_warps`: shared memory for a sum of each warp.
template <class T> __device__ __forceinline__ T sum_before(T x, T* of_warps) {
  const T sum = sum_to(x);
  if (lane() == WARP - 1) of_warps[threadIdx.x / WARP] = sum;
  __syncthreads();
  T before = sum - x;
  for (u32 w = 0; w < threadIdx.x / WARP; ++w) before += of_warps[w];
  return before;
}

// A list of lanes of a warp, in ascending order.
struct LaneList {
  unsigned char lanes[WARP];
  // Fills the list with the lanes for which `is_in` is true. Returns their number. All lanes of the warp must call this.
  __device__ __forceinline__ u32 take(bool is_in) {
    const u32 mask = __ballot_sync(ALL, is_in);
    __syncwarp();
    if (is_in) lanes[__popc(mask & lanes_below())] = lane();
    __syncwarp();
    return __popc(mask);
  }
};

// Returns whether this is the last of a number of blocks to come here. Threads of that block see what the others wrote before.
__device__ __forceinline__ bool is_last_block(u32* done, u32 blocks) {
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(done, 1) == blocks - 1;
  __syncthreads();
  __threadfence();
  if (is_last && threadIdx.x == 0) *done = 0;
  return is_last;
}
