// Words, the key's hash, and loads and stores that say how they go through the caches. No header of CUDA is needed.
#pragma once
typedef unsigned int u32;
typedef unsigned long long u64;
constexpr u32 WARP = 32, ALL = 0xffffffffu;

// Every kernel begins with this: the launch before it on the stream has run from here on. Where the device can, this one was made
// ready meanwhile, and lets the next be.
__device__ __forceinline__ void begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The 64-bit finaliser of MurmurHash3, of a key that a secret of the process has changed: a bijection whose collisions in parts of its
// bits nobody can choose who does not know the secret.
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

struct Pair { u64 low, high; };
// From the L1 cache, if it is there.
__device__ __forceinline__ Pair load_pair(const void* at) {
  Pair p;
  asm volatile("ld.global.v2.u64 {%0, %1}, [%2];" : "=l"(p.low), "=l"(p.high) : "l"(at));
  return p;
}
// From the L2 cache, where other blocks' stores are.
__device__ __forceinline__ Pair load_pair_shared(const void* at) {
  Pair p;
  asm volatile("ld.global.cg.v2.u64 {%0, %1}, [%2];" : "=l"(p.low), "=l"(p.high) : "l"(at) : "memory");
  return p;
}
template <class T> __device__ __forceinline__ T load_shared(const T* at) { return *(const volatile T*)at; }
template <class T> __device__ __forceinline__ void store_shared(T* at, T value) { *(volatile T*)at = value; }
// A lock's word: what the holder before wrote is seen after `acquire_or`, what is written before `release` is seen by the next.
__device__ __forceinline__ u32 acquire_or(u32* at, u32 bits) {
  u32 old;
  asm volatile("atom.acquire.gpu.global.or.b32 %0, [%1], %2;" : "=r"(old) : "l"(at), "r"(bits) : "memory");
  return old;
}
__device__ __forceinline__ void release(u32* at, u32 value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
// For values that are read once.
__device__ __forceinline__ u64 load_once(const u64* at) {
  u64 x;
  asm volatile("ld.global.cs.u64 %0, [%1];" : "=l"(x) : "l"(at));
  return x;
}
__device__ __forceinline__ float4 load_row(const float4* at) {
  float4 x;
  asm volatile("ld.global.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(at));
  return x;
}
__device__ __forceinline__ void store_once(float4* at, const float4& x) {
  asm volatile("st.global.cs.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}

// The lanes of a warp that `is_in` names, in the order of their numbers.
struct LaneList {
  unsigned char lanes[WARP];
  // Gives how many they are.
  __device__ __forceinline__ u32 take(bool is_in) {
    const u32 mask = __ballot_sync(ALL, is_in);
    __syncwarp();
    if (is_in) lanes[__popc(mask & lanes_below())] = lane();
    __syncwarp();
    return __popc(mask);
  }
};
