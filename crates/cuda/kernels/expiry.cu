// Rows that go because training has not used them for long.
#include "records.cuh"

template <u32 N> struct Expiries {
  Expiry of[N];
};

__device__ __forceinline__ ExpiredRow* rows_of(ExpiredHead* list) { return (ExpiredRow*)(list + 1); }

// Returns when the row of a record changed; 0 if the table does not note changes.
__device__ __forceinline__ u32 change_of(const Table& t, u64 record) { return t.changes ? t.changes[record] : 0; }

// Erases the rows whose time to live is over, if the tickets were valid, and lists as many of them as there is room for. The launch has
// `blocks` blocks for each entry.
template <u32 N>
__global__ void __launch_bounds__(TABLE_THREADS) expire_rows(
    const Table* tables, const Resolved* resolved, const __grid_constant__ Expiries<N> all, u32 blocks) {
  begin();
  if (!resolved->is_due) return;
  const Expiry& e = all.of[blockIdx.x / blocks];
  const Table& t = tables[e.table];
  const u64 numbers = num_numbers(t.index.counters), stride = (u64)blocks * TABLE_THREADS, newest = e.newest;
  const u64* commits = t.commits;
  const u64* keys = t.keys;
  for (u64 first = 1 + (u64)(blockIdx.x % blocks) * TABLE_THREADS + threadIdx.x - lane(); first < numbers; first += stride) {
    const u64 record = first + lane();
    // A record without a row has a larger number.
    const bool is_old = (record < numbers ? commits[record] : NO_ROW) <= newest;
    if (!__any_sync(ALL, is_old)) continue;
    const u64 key = is_old ? keys[record] : 0;
    const bool is_own = t.has_out_of_vocabulary_key && key == t.out_of_vocabulary_key;
    // The hash without a secret, as on the host.
    const bool goes = is_old && !is_own && (hash(0, key) & e.mask) == e.ending;
    const u32 place = take(&e.list->count, goes);
    take(&t.index.counters->gone, goes);
    if (!goes) continue;
    const bool is_listed = place < e.capacity;
    if (is_listed) rows_of(e.list)[place] = {key, t.scores[record], (u32)record, change_of(t, record)};
    vacate(t.vacant, t.commits, (u32)record, is_listed ? NO_ROW : UNLISTED);
    erase_key(t.index, key);
  }
}

// Copies the list of expired rows to memory that the host reads, then the number of the commit, and empties the list. The launch has
// `blocks` blocks for each entry.
template <u32 N>
__global__ void __launch_bounds__(TABLE_THREADS) give_expired(const __grid_constant__ Expiries<N> all, u64 commit, u32 blocks) {
  begin();
  const Expiry& e = all.of[blockIdx.x / blocks];
  const u32 count = load_shared(&e.list->count);
  const u64 words = (u64)min(count, e.capacity) * (sizeof(ExpiredRow) / sizeof(u64));
  const u64 *from = (const u64*)rows_of(e.list), stride = (u64)blocks * TABLE_THREADS;
  u64* to = (u64*)rows_of(e.given);
  for (u64 i = (u64)(blockIdx.x % blocks) * TABLE_THREADS + threadIdx.x; i < words; i += stride) to[i] = from[i];
  __threadfence_system();
  if (!is_last_block(&e.list->blocks_done, blocks) || threadIdx.x != 0) return;
  e.list->count = 0;
  store_shared(&e.given->count, count);
  __threadfence_system();
  store_shared(&e.given->commit, commit);
}

// Lists the rows for which a list had no room.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) list_unlisted(
    const __grid_constant__ Table t, ExpiredHead* list, u32 capacity) {
  begin();
  const u64 numbers = num_numbers(t.index.counters);
  for (u64 record = 1 + (u64)blockIdx.x * TABLE_THREADS + threadIdx.x; record < numbers; record += (u64)gridDim.x * TABLE_THREADS) {
    if (t.commits[record] != UNLISTED) continue;
    const u32 place = atomicAdd(&list->count, 1);
    if (place >= capacity) continue;
    rows_of(list)[place] = {t.keys[record], t.scores[record], (u32)record, change_of(t, record)};
    t.commits[record] = NO_ROW;
  }
}
