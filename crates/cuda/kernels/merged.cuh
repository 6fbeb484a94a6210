// The keys of a merge, with their records and sums.
#pragma once
#include "optimizer.cuh"
#include "step.cuh"

// Parameters of a merge or an update. KINDS: the number of distinct dims.
template <u32 KINDS> struct Work : WorkHead {
  Keys kinds[KINDS];
};

// The number of keys in each list of a dim, and of runs of its hot keys.
struct Counts {
  u32 singles, several, hot, runs;
  __device__ __forceinline__ explicit Counts(const Lists& lists)
      : singles((u32)lists.cold), several((u32)(lists.cold >> 32)), hot((u32)(lists.hot >> 32)), runs((u32)lists.hot) {}
  __device__ __forceinline__ u32 keys() const { return singles + several + hot; }
};

__device__ __forceinline__ float4 add(const float4& a, const float4& b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
__device__ __forceinline__ float4 scaled(const float4& a, float by) { return make_float4(a.x * by, a.y * by, a.z * by, a.w * by); }

// Returns the sum of the squares of a row whose columns a group of lanes has, in eight partial sums, as in crates/core/src/math.rs. `width`: number
// of columns. ROW may be rounded up to a multiple of four; the columns that fill it hold first values, so they must not count.
template <u32 ROW, u32 CHUNKS>
__device__ __forceinline__ float sum_of_squares(const float4 (&columns)[CHUNKS], u32 mask, u32 width) {
  constexpr u32 QUADS = quads_of(ROW), LANES = lanes_of(ROW);
  const u32 num_last = width - 4 * (QUADS - 1);
  float lanes[8] = {};
#pragma unroll
  for (u32 quad = 0; quad < QUADS; ++quad) {
#pragma unroll
    for (u32 c = 0; c < 4; ++c) {
      const float x = __shfl_sync(mask, ((const float*)&columns[quad / LANES])[c], quad % LANES, LANES);
      if (quad + 1 < QUADS || c < num_last) lanes[4 * (quad % 2) + c] += x * x;
    }
  }
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

// Returns the side of the feature that a sorted value belongs to.
template <u32 SOURCE, class W> __device__ __forceinline__ const Side& side_of(const W& w, u32 value) {
  return w.sides[(SOURCE == WEIGHTED_ROWS ? w.named[value].name : value) >> w.shift];
}

// Returns the address of a record. `value`: the sorted value of one of its ids.
template <u32 SOURCE, class W> __device__ __forceinline__ float4* record_at(const W& w, u32 record, u32 value) {
  if (SOURCE == SUMS) {
    const Entry& entry = w.entries[value];
    return w.tables[entry.table].records + (u64)entry.record * w.tables[entry.table].stride;
  }
  const Side& side = side_of<SOURCE>(w, value);
  return side.records + (u64)record * side.stride;
}

// Returns the descriptor of the key's table.
template <u32 SOURCE, class W> __device__ __forceinline__ const Table& table_of(const W& w, u32 value) {
  return w.tables[SOURCE == SUMS ? w.entries[value].table : side_of<SOURCE>(w, value).table];
}

// Returns the chance by which the update of a key rounds. Only rows that are rounded by chance need one.
template <u32 SOURCE, u32 ROW, class W> __device__ __forceinline__ Chance chance_of(const W& w, const Prepared& now, u32 value) {
  if constexpr (!rounds_by_chance(ROW)) return {};
  else return {table_of<SOURCE>(w, value).initializer.seed, now.step};
}

// Returns the factor that clips by the norm of the key's table; 1 if tables are not clipped.
template <u32 SOURCE, class W> __device__ __forceinline__ float factor_of(const W& w, u32 value) {
  if (!w.factors) return 1.0f;
  return w.factors[SOURCE == SUMS ? w.entries[value].table : side_of<SOURCE>(w, value).table];
}

// A merged key: its record number, and the sorted value of one of its ids. `summed` returns the key whose sum has this number: first come
// the singles, then several, then hot.
struct Summed {
  u32 record, value;
};
template <class W> __device__ __forceinline__ Summed summed(const W& w, const Keys& keys, const Counts& counts, u32 number) {
  if (number < counts.singles) return {keys.singles[number].record, keys.singles[number].gradient_row};
  if (number < counts.singles + counts.several)
    return {keys.several[number - counts.singles].record, keys.several[number - counts.singles].name};
  const Hot& hot = keys.hot[number - counts.singles - counts.several];
  return {hot.record, w.sorted[keys.runs[hot.first_run].first].value};
}
