// Records of keys: a row and its optimizer states side by side, found by number, written whole when their key is new.
#pragma once
#include "index.cuh"
#include "initializer.cuh"

struct Table {
  Index index;
  Initializer initializer;
  // Record r begins at records + r * stride.
  float4* records;
  // In float4: of a record, of its row.
  u32 stride, row;
  // Its record r is number first + r among the records of all tables.
  u32 first, pad;
};

// Lanes that share a row of so many float4: a power of two, a warp at most.
__host__ __device__ constexpr u32 lanes_of(u32 row) {
  u32 lanes = 1;
  while (lanes < row && lanes < WARP) lanes *= 2;
  return lanes;
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

// First values of the rows, and zeros of the states, of the lanes that have a new record.
template <u32 ROW> __device__ __forceinline__ void write_first(const Table& t, bool is_new, u64 key, u32 record, LaneList& list) {
  constexpr u32 LANES = lanes_of(ROW), GROUPS = WARP / LANES;
  const u32 n = list.take(is_new), group = lane() / LANES, column = lane() % LANES;
  for (u32 start = 0; start < n; start += GROUPS) {
    const bool is_one = start + group < n;
    const u32 from = is_one ? list.lanes[start + group] : 0;
    const u64 k = __shfl_sync(ALL, key, from);
    float4* at = t.records + (u64)__shfl_sync(ALL, record, from) * t.stride;
    if (!is_one) continue;
    for (u32 c = column; c < ROW; c += LANES) store_once(at + c, first_values(t.initializer, k, c));
    for (u32 c = ROW + column; c < t.stride; c += LANES) store_once(at + c, make_float4(0, 0, 0, 0));
  }
}

// Gives keys that were not found a record, and writes its first values. The whole block comes here; `is_missing` somewhere in
// it. Gives the lane's record if its key was missing: NO_RECORD if both buckets of the key are full.
template <u32 ROW, u32 WARPS> __device__ __forceinline__ u32 insert_missing(const Table& t, const Index& index, bool is_missing, u64 key, u64 h, LaneList& list, bool& is_new) {
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
  write_first<ROW>(t, is_new, key, record, list);
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
