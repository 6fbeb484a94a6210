// Rows in records: their numbers, and groups of four columns (quads) of them. crates/core/src/row_type.rs and store/format.rs have the same
// steps for the host.
#pragma once
#include "initializer.cuh"

// ROW, a template parameter of many kernels, is the code of a row: its dim, the type of its numbers, whether updates round by chance, and the
// type of the numbers of a framework's arrays of such rows and of their gradients, as `RowKind::code` of the host has them.
__host__ __device__ constexpr u32 dim_of(u32 row) { return row & (1u << ROW_DIM_BITS) - 1; }
__host__ __device__ constexpr u32 type_of(u32 row) { return row >> ROW_DIM_BITS & 3; }
__host__ __device__ constexpr bool rounds_by_chance(u32 row) { return row >> ROW_DIM_BITS & ROW_BY_CHANCE; }
__host__ __device__ constexpr u32 array_type_of(u32 row) { return row >> (ROW_DIM_BITS + ROW_ARRAY_BITS) & 3; }

// A lane has four columns. Those of float32 are 16 bytes of a record, those of 16 bits are 8. The last quad may be partly unused.
__host__ __device__ constexpr u32 quads_of(u32 row) { return (dim_of(row) + 3) / 4; }
// Returns how many times 16 bytes the numbers of a row take in a record.
__host__ __device__ constexpr u32 units_of(u32 row) { return type_of(row) == FLOAT32 ? quads_of(row) : (quads_of(row) + 1) / 2; }
// Returns how many times 16 bytes come before the states. Rows that are rounded by chance are followed by their key.
__host__ __device__ constexpr u32 states_of(u32 row) { return units_of(row) + rounds_by_chance(row); }

// Rounds two numbers to the nearest bfloat16, ties to even. The first one becomes the lower half of the word.
__device__ __forceinline__ u32 to_bfloat16(float first, float second) {
#if __CUDA_ARCH__ >= 800
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
  return both;
#else
  const auto rounded = [](float x) {
    const u32 bits = __float_as_uint(x);
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  };
  return rounded(first) | rounded(second) << 16;
#endif
}
__device__ __forceinline__ u32 to_bfloat16(float x) { return to_bfloat16(x, 0); }
// Rounds to the nearest float16, ties to even.
__device__ __forceinline__ u32 to_float16(float x) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
__device__ __forceinline__ float from_float16(u32 bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((unsigned short)bits));
  return x;
}

// Round by chance: up with a probability in proportion to the distance from the lower neighbour. `draw`: 16 random bits.
__device__ __forceinline__ u32 bfloat16_by_chance(float x, u32 draw) {
  const u32 bits = __float_as_uint(x);
  return (bits & 0x7fffffff) >= 0x7f800000 ? to_bfloat16(x) : (bits + draw) >> 16;
}
__device__ __forceinline__ u32 float16_by_chance(float x, u32 draw) {
  const u32 bits = __float_as_uint(x), magnitude = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
  // From 2^16 on, and if it is not a number.
  if (magnitude >= 0x47800000) return to_float16(x);
  draw >>= 3;
  // Below 2^-14, the smallest normal float16, numbers are multiples of 2^-24.
  if (magnitude < 0x38800000)
    return sign | (u32)(int)(__uint_as_float(magnitude) * 16777216.0f + (float)(int)draw * (1.0f / 8192.0f));
  return sign | ((magnitude + draw >> 13) - (112 << 10));
}

// The numbers of a quad of 16 bits each, as two words.
__device__ __forceinline__ uint2 pack(u32 a, u32 b, u32 c, u32 d) { return make_uint2(a | b << 16, c | d << 16); }
__device__ __forceinline__ uint2 narrow(u32 type, const float4& x) {
  if (type == FLOAT16) return pack(to_float16(x.x), to_float16(x.y), to_float16(x.z), to_float16(x.w));
  return make_uint2(to_bfloat16(x.x, x.y), to_bfloat16(x.z, x.w));
}
__device__ __forceinline__ float4 widen(u32 type, const uint2& x) {
  if (type == FLOAT16)
    return make_float4(from_float16(x.x & 0xffff), from_float16(x.x >> 16), from_float16(x.y & 0xffff), from_float16(x.y >> 16));
  return make_float4(
      __uint_as_float(x.x << 16), __uint_as_float(x.x & 0xffff0000), __uint_as_float(x.y << 16), __uint_as_float(x.y & 0xffff0000));
}
// Rounds numbers to those that rows of a type can have.
__device__ __forceinline__ float4 rounded(u32 type, const float4& x) { return type == FLOAT32 ? x : widen(type, narrow(type, x)); }

// Loads a quad of the row of a record.
template <u32 ROW> __device__ __forceinline__ float4 load_quad(const float4* record, u32 quad) {
  if constexpr (type_of(ROW) == FLOAT32) return __ldcs(record + quad);
  else return widen(type_of(ROW), __ldcs((const uint2*)record + quad));
}
// Stores a quad of the row of a record, rounded to the nearest.
template <u32 ROW> __device__ __forceinline__ void store_quad(float4* record, u32 quad, const float4& x) {
  if constexpr (type_of(ROW) == FLOAT32) __stcs(record + quad, x);
  else __stcs((uint2*)record + quad, narrow(type_of(ROW), x));
}

// The chance by which an update rounds: a function of seed, step, key and column.
struct Chance {
  u64 seed;
  u32 step;
};
// Returns a quad of a row of 16 bits as an update rounds it.
template <u32 ROW>
__device__ __forceinline__ uint2 narrow_updated(const float4* record, u32 quad, const float4& x, const Chance& chance) {
  if constexpr (!rounds_by_chance(ROW)) {
    return narrow(type_of(ROW), x);
  } else {
    const u64 key = *(const u64*)(record + units_of(ROW));
    const Words all = philox((u32)key, (u32)(key >> 32), quad / 2, chance.step, (u32)chance.seed, (u32)(chance.seed >> 32));
    const u32 first = quad % 2 ? all.w[2] : all.w[0], second = quad % 2 ? all.w[3] : all.w[1];
    const auto number = [](float x, u32 draw) {
      return type_of(ROW) == FLOAT16 ? float16_by_chance(x, draw) : bfloat16_by_chance(x, draw);
    };
    return pack(number(x.x, first & 0xffff), number(x.y, first >> 16), number(x.z, second & 0xffff), number(x.w, second >> 16));
  }
}
// Stores a quad of the row of a record after an update.
template <u32 ROW> __device__ __forceinline__ void store_updated(float4* record, u32 quad, const float4& x, const Chance& chance) {
  if constexpr (!rounds_by_chance(ROW)) store_quad<ROW>(record, quad, x);
  else __stcs((uint2*)record + quad, narrow_updated<ROW>(record, quad, x, chance));
}

// Returns how many quads of rows fit into a place of a stage, which has 16 bytes.
__host__ __device__ constexpr u32 quads_of_place(u32 row) { return type_of(row) == FLOAT32 ? 1 : 2; }

// Requests a quad of the row of a record, as row `k` of a turn of a stage.
template <u32 ROW, class S>
__device__ __forceinline__ void start_quad(const S& stage, u32 turn, u32 k, const float4* record, u32 quad) {
  if constexpr (type_of(ROW) == FLOAT32) stage.start(turn, k, record + quad);
  else stage.start_half(turn, k, (const uint2*)record + quad);
}
// Returns a quad that has come.
template <u32 ROW, class S> __device__ __forceinline__ float4 quad_of(const S& stage, u32 turn, u32 k) {
  if constexpr (type_of(ROW) == FLOAT32) return stage.at(turn, k);
  else return widen(type_of(ROW), stage.half_at(turn, k));
}
// Puts a quad where one would come.
template <u32 ROW, class S> __device__ __forceinline__ void put_quad(const S& stage, u32 turn, u32 k, const float4& x) {
  if constexpr (type_of(ROW) == FLOAT32) stage.at(turn, k) = x;
  else stage.half_at(turn, k) = narrow(type_of(ROW), x);
}

// Loads four columns of a row of a framework's array (rows, DIM) of a 16-bit type. Does not convert them. Columns beyond the last are 0.
template <u32 DIM, bool ONCE> __device__ __forceinline__ uint2 load_narrow(const unsigned short* rows, u64 row, u32 quad) {
  const unsigned short* at = rows + row * DIM + 4 * quad;
  if (DIM % 4 == 0) return ONCE ? __ldcs((const uint2*)at) : *(const uint2*)at;
  const u32 left = DIM - 4 * quad;
  return pack(at[0], left > 1 ? at[1] : 0, left > 2 ? at[2] : 0, left > 3 ? at[3] : 0);
}

// Loads four columns of a row of a framework's array (rows, dim). Columns beyond the last are 0. ONCE: the columns are not read again.
template <u32 ROW, bool ONCE> __device__ __forceinline__ float4 load_columns(const void* rows, u64 row, u32 quad) {
  constexpr u32 DIM = dim_of(ROW), TYPE = array_type_of(ROW);
  if constexpr (TYPE != FLOAT32) {
    return widen(TYPE, load_narrow<DIM, ONCE>((const unsigned short*)rows, row, quad));
  } else {
    const float* at = (const float*)rows + row * DIM + 4 * quad;
    if (DIM % 4 == 0) return ONCE ? __ldcs((const float4*)at) : *(const float4*)at;
    const u32 left = DIM - 4 * quad;
    return make_float4(at[0], left > 1 ? at[1] : 0, left > 2 ? at[2] : 0, left > 3 ? at[3] : 0);
  }
}

// Stores four columns of a row of a framework's array (rows, dim). Columns beyond the last are not stored.
template <u32 ROW> __device__ __forceinline__ void store_columns(void* rows, u64 row, u32 quad, const float4& x) {
  constexpr u32 DIM = dim_of(ROW), TYPE = array_type_of(ROW);
  const u32 left = DIM - 4 * quad;
  if constexpr (TYPE != FLOAT32) {
    unsigned short* at = (unsigned short*)rows + row * DIM + 4 * quad;
    const uint2 bits = narrow(TYPE, x);
    if (DIM % 4 == 0) {
      __stcs((uint2*)at, bits);
      return;
    }
    at[0] = bits.x;
    if (left > 1) at[1] = bits.x >> 16;
    if (left > 2) at[2] = bits.y;
    if (left > 3) at[3] = bits.y >> 16;
  } else {
    float* at = (float*)rows + row * DIM + 4 * quad;
    if (DIM % 4 == 0) {
      store_once((float4*)at, x);
      return;
    }
    at[0] = x.x;
    if (left > 1) at[1] = x.y;
    if (left > 2) at[2] = x.z;
    if (left > 3) at[3] = x.w;
  }
}

// Requests four columns of a row of a framework's array (rows, dim), as row `k` of a turn of a stage.
template <u32 ROW, class S>
__device__ __forceinline__ void start_columns(const S& stage, u32 turn, u32 k, const void* rows, u64 row, u32 quad) {
  constexpr u32 DIM = dim_of(ROW);
  if constexpr (array_type_of(ROW) == FLOAT32) {
    stage.template start_columns<DIM>(turn, k, (const float*)rows, row, quad);
  } else if constexpr (DIM % 4 == 0) {
    stage.start_half(turn, 2 * k, (const uint2*)((const unsigned short*)rows + row * DIM + 4 * quad));
  } else {
    // An asynchronous copy has at least four bytes.
    stage.half_at(turn, 2 * k) = load_narrow<DIM, true>((const unsigned short*)rows, row, quad);
  }
}
// Returns four columns that have come.
template <u32 ROW, class S> __device__ __forceinline__ float4 columns_of(const S& stage, u32 turn, u32 k) {
  if constexpr (array_type_of(ROW) == FLOAT32) return stage.at(turn, k);
  else return widen(array_type_of(ROW), stage.half_at(turn, 2 * k));
}
