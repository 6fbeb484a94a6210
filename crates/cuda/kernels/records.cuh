// Records of keys: a row and its optimizer states side by side, found by number, written whole when their key is new.
#pragma once
#include "index.cuh"
#include "initializer.cuh"

struct Table {
  Index index;
  Initializer initializer;
  // Record r begins at records + r * stride.
  float4* records;
  // In groups of four columns: of a record.
  u32 stride;
  // Its record r is number first + r among the records of all tables.
  u32 first;
  // First value of the first state; the others' is 0.
  float first_state;
  u32 pad;
};

// Rows and states are held in groups of four columns, so that a lane moves 16 bytes; the last group may be partly unused.
__host__ __device__ constexpr u32 quads_of(u32 dim) { return (dim + 3) / 4; }

// Lanes that share a row: a power of two, a warp at most.
__host__ __device__ constexpr u32 lanes_of(u32 dim) {
  u32 lanes = 1;
  while (lanes < quads_of(dim) && lanes < WARP) lanes *= 2;
  return lanes;
}

// Four columns of a row of an array (rows, DIM) of the framework's; 0 beyond the last. ONCE: nobody reads them again.
template <u32 DIM, bool ONCE> __device__ __forceinline__ float4 load_columns(const float* rows, u64 row, u32 quad) {
  const float* at = rows + row * DIM + 4 * quad;
  if (DIM % 4 == 0) return ONCE ? __ldcs((const float4*)at) : *(const float4*)at;
  const u32 left = DIM - 4 * quad;
  return make_float4(at[0], left > 1 ? at[1] : 0, left > 2 ? at[2] : 0, left > 3 ? at[3] : 0);
}

template <u32 DIM> __device__ __forceinline__ void store_columns(float* rows, u64 row, u32 quad, const float4& x) {
  float* at = rows + row * DIM + 4 * quad;
  if (DIM % 4 == 0) {
    store_once((float4*)at, x);
    return;
  }
  const u32 left = DIM - 4 * quad;
  at[0] = x.x;
  if (left > 1) at[1] = x.y;
  if (left > 2) at[2] = x.z;
  if (left > 3) at[3] = x.w;
}

// Numbers for new records, one for each lane that `needs` one: one addition to the table's count a block.
template <u32 WARPS> __device__ __forceinline__ u32 take_numbers(const Index& index, bool needs) {
  __shared__ u32 counts[WARPS + 1];
  const u32 mask = __ballot_sync(ALL, needs), warp = threadIdx.x / WARP;
  if (lane() == 0) counts[warp] = __popc(mask);
  __syncthreads();
  if (threadIdx.x == 0) {
    u32 total = 0;
    for (u32 w = 0; w < WARPS; ++w) {
      const u32 count = counts[w];
      counts[w] = total;
      total += count;
    }
    counts[WARPS] = total ? atomicAdd(&index.counters->next, total) : 0;
  }
  __syncthreads();
  return counts[WARPS] + counts[warp] + __popc(mask & lanes_below());
}

// Four columns of a new record.
template <u32 DIM> __device__ __forceinline__ float4 first_columns(const Table& t, u64 key, u32 quad) {
  constexpr u32 QUADS = quads_of(DIM);
  if (quad >= QUADS) {
    const float x = quad < 2 * QUADS ? t.first_state : 0;
    return make_float4(x, x, x, x);
  }
  return first_values(t.initializer, key, quad);
}

// The new records of the lanes that have one.
template <u32 DIM> __device__ __forceinline__ void write_first(const Table& t, bool is_new, u64 key, u32 record, LaneList& list) {
  constexpr u32 LANES = lanes_of(DIM), GROUPS = WARP / LANES;
  const u32 n = list.take(is_new), group = lane() / LANES, column = lane() % LANES;
  for (u32 start = 0; start < n; start += GROUPS) {
    const bool is_one = start + group < n;
    const u32 from = is_one ? list.lanes[start + group] : 0;
    const u64 k = __shfl_sync(ALL, key, from);
    float4* at = t.records + (u64)__shfl_sync(ALL, record, from) * t.stride;
    if (!is_one) continue;
    for (u32 quad = column; quad < t.stride; quad += LANES) store_once(at + quad, first_columns<DIM>(t, k, quad));
  }
}

// Gives keys that were not found a record, and writes its first values. The whole block comes here; `is_missing` somewhere in
// it. Gives the lane's record if its key was missing: NO_RECORD if both buckets of the key are full.
template <u32 DIM, u32 WARPS> __device__ __forceinline__ u32 insert_missing(const Table& t, const Index& index, bool is_missing, u64 key, u64 h, LaneList& list, bool& is_new) {
  // One lane a distinct key of the warp.
  u32 leader = lane();
  const u32 missing = __ballot_sync(ALL, is_missing);
  if (is_missing) leader = __ffs(__match_any_sync(missing, key)) - 1;
  const bool leads = is_missing && leader == lane();
  Claim claim = {nullptr, false};
  if (leads) claim = claim_key(index, key, h);
  __syncwarp();
  is_new = claim.is_mine;
  u32 record = take_numbers<WARPS>(index, is_new);
  if (is_new) store_shared(claim.record, record);
  write_first<DIM>(t, is_new, key, record, list);
  // All of this block's numbers are written, so whoever waits here waits for a block that does not wait for this one.
  if (leads && !is_new) {
    record = NO_RECORD;
    if (claim.record)
      while ((record = load_shared(claim.record)) == CLAIMED) {
      }
  }
  __syncwarp();
  return __shfl_sync(ALL, record, leader);
}
