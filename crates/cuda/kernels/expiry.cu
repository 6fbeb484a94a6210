// Rows that go because training has not used them for long.
#include "removal.cuh"

template <u32 N> struct Expiries {
  Expiry of[N];
};

struct ExpiredRow {
  u64 key;
  u32 record;
};
typedef StagedRows<TABLE_THREADS, ExpiredRow> Staged;

// Number of records that a thread reads at once.
constexpr u32 AT_ONCE = 4;

// Erases the rows of a table whose time to live is over, and adds as many of them to the ring as there is room for. `block`: of `blocks`.
__device__ __forceinline__ void expire(u32* memory, const Expiry& e, const Table& t, u32 block, u32 blocks) {
  const u64 newest = e.newest, step = t.progress->step, ring_end = t.index.counters->released.end;
  const u32 numbers = num_numbers(t.index.counters), stride = blocks * TABLE_THREADS;
  const u64 *commits = t.commits, *keys = t.keys;
  u32* num_expired = &t.progress->num_expired;
  Staged staged(memory);
  const auto load = [&](u32 record, ExpiredRow& row) {
    row = {keys[record], record};
    return true;
  };
  const auto remove = [&](const ExpiredRow& row, u32 i, bool is_in) {
    const bool is_listed = i < e.room;
    if (is_in && is_listed) add_removed(e.removal, ring_end + i, row.record, row.key, t.changes);
    if (is_in) vacate(t.vacant, t.commits, row.record, is_listed ? NO_ROW : unlisted_at(step));
    erase_distinct(t.index, is_in ? row.key : 0, is_in);
  };
  for (u64 first = 1 + block * TABLE_THREADS + threadIdx.x - lane(); first < numbers; first += AT_ONCE * stride) {
    u64 commit[AT_ONCE], key[AT_ONCE];
    bool is_old[AT_ONCE];
#pragma unroll
    for (u32 k = 0; k < AT_ONCE; ++k) {
      const u64 record = first + k * stride + lane();
      commit[k] = record < numbers ? commits[record] : NO_ROW;
    }
#pragma unroll
    for (u32 k = 0; k < AT_ONCE; ++k) {
      // A record without a row has a larger number.
      is_old[k] = commit[k] <= newest;
      key[k] = is_old[k] ? keys[first + k * stride + lane()] : 0;
    }
#pragma unroll
    for (u32 k = 0; k < AT_ONCE; ++k) {
      const bool is_own = t.has_out_of_vocabulary_key && key[k] == t.out_of_vocabulary_key;
      // The hash without a secret, as on the host.
      const bool goes = is_old[k] && !is_own && (hash(0, key[k]) & e.mask) == e.ending;
      staged.add(goes, (u32)first + k * stride + lane(), num_expired, load, remove);
    }
  }
  staged.flush(num_expired, load, remove);
}

// Erases the rows whose time to live is over, if the tickets were valid. The launch has `blocks` blocks for each entry.
template <u32 N>
__global__ void __launch_bounds__(TABLE_THREADS) expire_rows(
    const Table* tables, const Resolved* resolved, const __grid_constant__ Expiries<N> all, u32 blocks) {
  begin();
  __shared__ u32 places[Staged::WORDS];
  const Expiry& e = all.of[blockIdx.x / blocks];
  const Table& t = tables[e.table];
  Progress* progress = t.progress;
  if (resolved->is_due) expire(places, e, t, blockIdx.x % blocks, blocks);
  if (!is_last_block(&progress->blocks_done, blocks) || threadIdx.x != 0) return;
  Counters* counters = t.index.counters;
  const u32 n = load_shared(&progress->num_expired), listed = min(n, e.room);
  progress->num_expired = 0;
  counters->gone += n, counters->expired += n, counters->unlisted += n - listed;
  end_removal(counters, e.removal, progress->step, listed);
}

// Lists expired rows for which the ring had no room. `takes`: whether they are not listed again.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) list_unlisted(
    const __grid_constant__ Table t, UnlistedRow* list, u32* count, u32 room, u32 takes) {
  begin();
  const u64 numbers = num_numbers(t.index.counters);
  for (u64 record = 1 + (u64)blockIdx.x * TABLE_THREADS + threadIdx.x; record < numbers; record += (u64)gridDim.x * TABLE_THREADS) {
    const u64 commit = t.commits[record];
    if (!is_unlisted(commit)) continue;
    const u32 place = atomicAdd(count, 1);
    if (place >= room) continue;
    list[place] = {t.keys[record], commit & ~UNLISTED, (u32)record, t.changes ? t.changes[record] : 0};
    if (!takes) continue;
    t.commits[record] = NO_ROW;
    atomicAdd(&t.index.counters->unlisted, ~0ull);
  }
}
