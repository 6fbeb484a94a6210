// Which rows of a table have changed since a dump. crates/core/src/contract/epochs.rs says what the words of records are.
#include "merged.cuh"

// Notes that the rows of all merged keys of a launch change, in tables that note changes. It precedes their update.
template <u32 SOURCE, u32... ROW>
__global__ void __launch_bounds__(UPDATE_THREADS) note_updated(const __grid_constant__ Work<sizeof...(ROW)> w) {
  begin();
  if (!w.prepared->is_due) return;
  const u32 thread = blockIdx.x * UPDATE_THREADS + threadIdx.x, stride = gridDim.x * UPDATE_THREADS;
  for (const Keys& keys : w.kinds) {
    const Counts counts(*keys.lists);
    for (u32 number = thread; number < counts.keys(); number += stride) {
      const Summed key = summed(w, keys, counts, number);
      if (SOURCE == SUMS) {
        const Entry& entry = w.entries[key.value];
        note_change(w.tables[entry.table], entry.record);
      } else if (const Side& side = side_of<SOURCE>(w, key.value); side.stride) {
        note_change(w.tables[side.table], key.record);
      }
    }
  }
}

// Notes that the rows of records change. Bits that mark records as new are ignored. Ids without a record have 0.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) note_changes(
    const __grid_constant__ Table t, const u32* __restrict__ records, u32 n) {
  begin();
  const u32 i = blockIdx.x * TABLE_THREADS + threadIdx.x, record = i < n ? records[i] & ~NEW : NO_RECORD;
  if (record != NO_RECORD) note_change(t, record);
}

// Copies the words of records.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) read_changes(
    const __grid_constant__ Table t, const u32* __restrict__ records, u32* __restrict__ words, u32 n) {
  begin();
  const u32 i = blockIdx.x * TABLE_THREADS + threadIdx.x;
  if (i < n) words[i] = t.changes[records[i]];
}

// Adds the keys of a warp that have changed to the list, or all keys if the table does not note changes. `is_in`: whether the lane has a
// key. All lanes of a warp must call this.
__device__ __forceinline__ void list_one(const Table& t, u32 since, const ChangedList& list, bool is_in, u64 key, u32 record) {
  is_in = is_in && record != NO_RECORD && (!t.changes || t.changes[record] >> 1 >= since);
  const u32 place = take(list.count, is_in);
  if (!is_in || !list.keys) return;
  list.keys[place] = key, list.records[place] = record;
}

// Lists the keys whose rows have changed since the start of an epoch: those of the buckets from `first` to `first + n`. The slots of the stash
// count as buckets that come last.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) list_changed(
    const __grid_constant__ Table t, u32 since, const __grid_constant__ ChangedList list, u32 first, u32 n) {
  begin();
  const u32 i = blockIdx.x * TABLE_THREADS + threadIdx.x, at = first + i, buckets = t.index.num_buckets;
  Line line = {};
  const bool is_bucket = i < n && at < buckets, is_stash = i < n && at >= buckets && at - buckets < STASH;
  if (is_bucket) line = load_line(t.index.buckets + at);
#pragma unroll
  for (u32 slot = 0; slot < SLOTS; ++slot) list_one(t, since, list, is_bucket, line.keys[slot], line.records[slot]);
  const u64 key = is_stash ? t.index.stash->keys[at - buckets] : 0;
  list_one(t, since, list, is_stash, key, is_stash ? t.index.stash->records[at - buckets] : NO_RECORD);
}

// Copies whole records that have no unused columns to `values`, (n, 4 * stride).
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) copy_records(
    const __grid_constant__ Table t, const u32* __restrict__ records, float4* __restrict__ values, u32 n) {
  begin();
  const u64 quads = (u64)n * t.stride, threads = (u64)gridDim.x * TABLE_THREADS;
  for (u64 at = (u64)blockIdx.x * TABLE_THREADS + threadIdx.x; at < quads; at += threads) {
    const u64 i = at / t.stride;
    store_once(values + at, load_row(t.records + (u64)records[i] * t.stride + (at - i * t.stride)));
  }
}
