// Operations on one table: keys in, record numbers or rows out.
#include "records.cuh"

constexpr u32 BLOCK = 256, WARPS = BLOCK / WARP;
// In a list of record numbers: the record is new.
constexpr u32 NEW = 1u << 31;

// All places empty.
extern "C" __global__ void clear_index(Bucket* buckets, u32 num_buckets) {
  const u32 at = blockIdx.x * BLOCK + threadIdx.x;
  if (at >= num_buckets) return;
  Bucket bucket = {};
  for (u32 i = 0; i < PLACES; ++i) bucket.keys[i] = nobodys_key(at, num_buckets);
  buckets[at] = bucket;
}

// Record numbers of keys; with INSERT, keys that are not there get one and its first values, and the NEW bit says so.
template <u32 DIM, bool INSERT> __global__ void __launch_bounds__(BLOCK) look_up(Table t, const u64* __restrict__ keys, u32* __restrict__ records, u32 n) {
  const u32 i = blockIdx.x * BLOCK + threadIdx.x;
  const bool is_id = i < n;
  const u64 key = is_id ? load_once(keys + i) : 0, h = hash(key);
  __shared__ LaneList lists[WARPS];
  LaneList& list = lists[threadIdx.x / WARP];
  const Index& index = t.index;
  u32 record = find(index, key, h, is_id, list);
  if (INSERT) {
    const bool is_missing = is_id && record == NO_RECORD;
    if (__syncthreads_or(is_missing)) {
      bool is_new;
      const u32 inserted = insert_missing<DIM, WARPS>(t, index, is_missing, key, h, list, is_new);
      if (is_missing) record = inserted | NEW;
    }
  }
  if (is_id) records[i] = record;
}

// Rows of record numbers, those of lanes whose number is `wanted`: ROWS of them in flight in each group of lanes.
template <u32 DIM, u32 ROWS> __device__ __forceinline__ void copy_rows(const Table& t, bool wanted, u32 record, u32 first, float4* out, LaneList& list) {
  constexpr u32 LANES = lanes_of(DIM), GROUPS = WARP / LANES;
  const u32 n = list.take(wanted), group = lane() / LANES, column = lane() % LANES;
#pragma unroll 1
  for (u32 start = 0; start < n; start += GROUPS * ROWS) {
    float4 row[ROWS];
    u32 from[ROWS];
#pragma unroll
    for (u32 k = 0; k < ROWS; ++k) {
      const u32 at = start + k * GROUPS + group;
      from[k] = at < n ? list.lanes[at] : ALL;
      const u32 r = __shfl_sync(ALL, record, from[k] % WARP);
      if (from[k] != ALL) row[k] = load_row(t.records + (u64)r * t.stride + column);
    }
#pragma unroll
    for (u32 k = 0; k < ROWS; ++k)
      if (from[k] != ALL) store_once(out + (u64)(first + from[k]) * quads_of(DIM) + column, row[k]);
  }
}

// Rows of the keys that are there; the others' stay unwritten.
template <u32 DIM, u32 ROWS> __global__ void __launch_bounds__(BLOCK) find_rows(Table t, const u64* __restrict__ keys, float4* __restrict__ out, u32* __restrict__ found, u32 n) {
  __shared__ LaneList lists[WARPS];
  const u32 i = blockIdx.x * BLOCK + threadIdx.x;
  const u64 key = i < n ? load_once(keys + i) : 0;
  LaneList& list = lists[threadIdx.x / WARP];
  const u32 record = find(t.index, key, hash(key), i < n, list);
  if (i < n) found[i] = record;
  copy_rows<DIM, ROWS>(t, record != NO_RECORD, record, i - lane(), out, list);
}

// With `skips`, rows of new records stay unwritten.
template <u32 DIM, u32 ROWS> __global__ void __launch_bounds__(BLOCK) gather_rows(Table t, const u32* __restrict__ records, float4* __restrict__ out, u32 n, u32 skips) {
  __shared__ LaneList lists[WARPS];
  const u32 i = blockIdx.x * BLOCK + threadIdx.x;
  const u32 record = i < n ? records[i] : NO_RECORD;
  copy_rows<DIM, ROWS>(t, i < n && !(skips && record & NEW), record & ~NEW, i - lane(), out, lists[threadIdx.x / WARP]);
}
