// Initial values of rows: a function of seed, key and column, bit-identical to crates/core/src/initializer.rs on the host.
#pragma once
#include "math.cuh"

struct Words {
  u32 w[4];
};
// The counter-based random number generator Philox4x32-10 (Salmon et al., SC 2011).
__device__ __forceinline__ Words philox(u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1) {
#pragma unroll
  for (u32 round = 0; round < 10; ++round) {
    const u64 p0 = 0xd2511f53ull * c0, p2 = 0xcd9e8d57ull * c2;
    const u32 n0 = (u32)(p2 >> 32) ^ c1 ^ k0, n2 = (u32)(p0 >> 32) ^ c3 ^ k1;
    c0 = n0, c1 = (u32)p2, c2 = n2, c3 = (u32)p0;
    k0 += 0x9e3779b9u, k1 += 0xbb67ae85u;
  }
  return {c0, c1, c2, c3};
}

__device__ __forceinline__ float unit_f32(u32 word) { return (float)(int)(word >> 8) * (1.0f / 16777216.0f); }
__device__ __forceinline__ double unit_f64(u32 word) { return ((double)word + 0.5) * (1.0 / 4294967296.0); }

__device__ __forceinline__ float first_value(const Initializer& init, u32 word) {
  if (init.kind == CONSTANT) return init.a;
  if (init.kind == UNIFORM) return init.a + init.b * unit_f32(word);
  // The largest number below 1.
  const double p = fmin(init.below + unit_f64(word) * init.between, 0.99999999999999988898);
  return (float)((double)init.a + (double)init.b * normal_quantile(p));
}

// Returns the initial values of columns 4 * group to 4 * group + 3.
__device__ __forceinline__ float4 first_values(const Initializer& init, u64 key, u32 group) {
  if (init.kind == DEBUG) {
    const float x = (float)(key % DEBUG_KEYS);
    return make_float4(x, x, x, x);
  }
  const Words x = philox((u32)key, (u32)(key >> 32), group, 0, (u32)init.seed, (u32)(init.seed >> 32));
  return make_float4(first_value(init, x.w[0]), first_value(init, x.w[1]), first_value(init, x.w[2]), first_value(init, x.w[3]));
}
