// Scores of records: their uses, and which records have the lowest.
#include "records.cuh"
#include "sort.cuh"

// Number of sorted ids that a thread of `take_uses` examines.
constexpr u32 PER_THREAD = LIST_BLOCK / LIST_THREADS;

// Adds ids to a number of ids, which stays at its maximum. Wherever an addition passes it, the maximum is written after that.
__device__ __forceinline__ void add_ids(u64* score, u64 ids) {
  if (atomicAdd(score, ids) + ids < ids) atomicExch(score, ~0ull);
}

// Counts a use of a record by a number of ids.
__device__ __forceinline__ void count_use(const Table& t, Use* use, u64 step, u32 ids) {
  if (t.scoring == STEPS) use->score = step;
  else if (t.scoring == COUNTED_IDS) add_ids(&use->score, ids);
}

// Returns how many lanes from this one on have the same record, if it is the first of them; otherwise 0. All lanes of a warp must call this.
__device__ __forceinline__ u32 same_from(u32 record) {
  const u32 before = __shfl_up_sync(ALL, record, 1);
  const bool is_first = lane() == 0 || before != record;
  const u32 firsts = __ballot_sync(ALL, is_first), later = (u32)((u64)firsts >> (lane() + 1));
  const u32 count = later ? __ffs(later) : WARP - lane();
  return is_first ? count : 0;
}

// As a commit takes a push of a lookup: counts the uses of its rows if `is_first`, and notes the commit. `row`: of the ticket that names the
// push; RING: it is known to be named. Erased records are passed over. Block b is block `first_block` + b of `list_keys`. `of_keys`: how many
// ids a sorted one stands for.
extern "C" __global__ void __launch_bounds__(LIST_THREADS) take_uses(const Table* __restrict__ tables,
    const Section* __restrict__ sections, u32 num_sections, u32 first_block, const Sorted* __restrict__ sorted,
    const Resolved* __restrict__ resolved, u32 row, u32 is_first, u64 commit, const __grid_constant__ IdCounts of_keys) {
  begin();
  if (row < RING && (!resolved->is_due || resolved->weights[row] == 0)) return;
  u32 number;
  const u32 block = first_block + blockIdx.x;
  const Section section = section_at(sections, num_sections, block, number, [](const Section& s) { return s.first_list; });
  const Table& t = tables[section.table];
  if (!t.uses) return;
  const u64 step = t.progress->step;
  const u32 end = section.first + section.count, at = section.first + (block - section.first_list) * LIST_BLOCK + threadIdx.x;
  u32 record[PER_THREAD], ids[PER_THREAD];
  Pair use[PER_THREAD];
#pragma unroll
  for (u32 k = 0; k < PER_THREAD; ++k) {
    const u32 i = at + k * LIST_THREADS;
    record[k] = i < end ? sorted[i].record : 0;
  }
#pragma unroll
  for (u32 k = 0; k < PER_THREAD; ++k) {
    ids[k] = same_from(record[k]);
    // Only a score that is a number of ids needs the ids of each key.
    if (of_keys.counts && t.scoring == COUNTED_IDS && record[k]) ids[k] = num_ids_at(of_keys, sorted[at + k * LIST_THREADS].value);
    if (record[k] == 0) ids[k] = 0;
    if (ids[k]) use[k] = load_pair_shared(t.uses + record[k]);
  }
#pragma unroll
  for (u32 k = 0; k < PER_THREAD; ++k) {
    if (ids[k] == 0 || use[k].high >= UNLISTED) continue;
    Use* to = t.uses + record[k];
    note_change(t, record[k]);
    if (is_first && t.scoring == STEPS) {
      *to = {step, commit};
    } else {
      if (is_first && t.scoring == COUNTED_IDS) add_ids(&to->score, ids[k]);
      to->commit = commit;
    }
  }
}

// Copies the counts of each table to memory that the host reads, then the number of this call to `flag`, if it is not null. One block.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) note_counts(
    const Table* tables, u32 n, TableCounts* to, u64* flag, u64 call) {
  begin();
  for (u32 t = threadIdx.x; t < n; t += TABLE_THREADS) {
    const Counters* counters = tables[t].index.counters;
    to[t] = {counters->taken, 0, counters->distinct, counters->dropped, counters->unknown, counters->filtered};
  }
  __threadfence_system();
  __syncthreads();
  if (flag && threadIdx.x == 0) *(volatile u64*)flag = call;
}

// Counts a use of the record of each id. Bits that mark records as new are ignored. `counts`: how many ids each stands for; or null.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) count_records(
    const __grid_constant__ Table t, const u32* __restrict__ records, const u32* __restrict__ counts, u32 n) {
  begin();
  const u32 i = blockIdx.x * TABLE_THREADS + threadIdx.x, record = i < n ? records[i] & ~NEW : 0;
  const u32 same = same_from(record), ids = counts && record && t.scoring == COUNTED_IDS ? counts[i] : same;
  if (!record || !ids) return;
  count_use(t, t.uses + record, t.progress->step, ids);
  note_change(t, record);
}

// Ends the step of each table, if the tickets were valid. One block.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) end_steps(const Table* tables, u32 n, const Resolved* resolved) {
  begin();
  if (!resolved->is_due) return;
  for (u32 t = threadIdx.x; t < n; t += TABLE_THREADS)
    if (tables[t].uses && tables[t].progress->step != ~0ull) ++tables[t].progress->step;
}

// Halves all scores, if the tickets were valid.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) halve_scores(
    const __grid_constant__ Table t, u32 numbers, const Resolved* resolved) {
  begin();
  if (!resolved->is_due) return;
  for (u32 i = 1 + blockIdx.x * TABLE_THREADS + threadIdx.x; i < numbers; i += gridDim.x * TABLE_THREADS) t.uses[i].score /= 2;
}

// Copies the uses of records.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) read_uses(
    const __grid_constant__ Table t, const u32* __restrict__ records, Use* __restrict__ uses, u32 n) {
  begin();
  const u32 i = blockIdx.x * TABLE_THREADS + threadIdx.x;
  if (i < n) uses[i] = t.uses[records[i]];
}

// Sets the uses of records, which are distinct.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) write_uses(
    const __grid_constant__ Table t, const u32* __restrict__ records, const Use* __restrict__ uses, u32 n) {
  begin();
  const u32 i = blockIdx.x * TABLE_THREADS + threadIdx.x;
  if (i < n) t.uses[records[i]] = uses[i];
}

// ---- the rows with the lowest scores

// A launch for several sweeps has `blocks` blocks for each. Returns the number of the sweep, and of the block among its blocks.
struct BlockOfSweep {
  u32 sweep, block;
  __device__ __forceinline__ explicit BlockOfSweep(u32 blocks) : sweep(blockIdx.x / blocks), block(blockIdx.x % blocks) {}
};

// Marks records that must stay. Bits that mark records as new are ignored.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) mark_used(const Used* all, u32 blocks) {
  begin();
  const BlockOfSweep at(blocks);
  const Used used = all[at.sweep];
  const u32 count = used.counted ? *used.counted : used.count;
  for (u32 i = at.block * TABLE_THREADS + threadIdx.x; i < count; i += blocks * TABLE_THREADS) {
    const u32 record = used.records[(u64)i * used.stride] & ~NEW;
    if (record && record < used.end) atomicOr(used.marks + record / WARP, 1u << record % WARP);
  }
}

// A number of 128 bits: a score and a key.
struct Rank {
  u64 score, key;
};
__device__ __forceinline__ bool operator<(const Rank& a, const Rank& b) {
  return a.score < b.score || (a.score == b.score && a.key < b.key);
}
// Returns `bin << shift`.
__device__ __forceinline__ Rank start_of(u64 bin, u32 shift) {
  if (shift >= 64) return {bin << (shift - 64), 0};
  return {shift ? bin >> (64 - shift) : 0, bin << shift};
}
__device__ __forceinline__ Rank sum(const Rank& a, const Rank& b) {
  const u64 key = a.key + b.key;
  return {a.score + b.score + (key < a.key), key};
}
__device__ __forceinline__ Rank difference(const Rank& a, const Rank& b) {
  return {a.score - b.score - (a.key < b.key), a.key - b.key};
}
// Returns the bin of a rank that is not below `low`, or RANK_BINS if it is beyond the last one.
__device__ __forceinline__ u32 bin_of(const Rank& rank, const Rank& low, u32 shift) {
  const Rank d = difference(rank, low);
  const u64 high = shift >= 64 ? 0 : d.score >> shift;
  const u64 bin = shift >= 64 ? d.score >> (shift - 64) : shift ? d.score << (64 - shift) | d.key >> shift : d.key;
  return high || bin >= RANK_BINS ? RANK_BINS : (u32)bin;
}
// Returns the rank below the start of bin 1, if `low` is that of bin 0.
__device__ __forceinline__ Rank end_of(const Rank& low, u32 shift) { return difference(sum(low, start_of(1, shift)), {0, 1}); }

// Calls `body` with the number and the use of each record whose row may go.
template <class Body> __device__ __forceinline__ void for_each_removable(const Sweep& s, u32 block, u32 blocks, const Body& body) {
  const u64 stride = (u64)blocks * TABLE_THREADS;
  for (u64 record = 1 + (u64)block * TABLE_THREADS + threadIdx.x; record < s.numbers; record += stride) {
    const Pair pair = load_pair(s.uses + record);
    const Use use = {pair.low, pair.high};
    // A record without a row has the largest number of a commit.
    const bool may_go = use.commit <= s.settled_commit && !(s.marks[record / WARP] >> record % WARP & 1);
    if (may_go) body((u32)record, use);
  }
}

// Counts the rows that may go, and divides the range of their ranks into bins.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) measure_rows(const Sweep* sweeps, u32 blocks) {
  begin();
  const BlockOfSweep at(blocks);
  const Sweep& s = sweeps[at.sweep];
  Choice* choice = s.choice;
  u64 count = 0, lowest = ~0ull, highest = 0;
  for_each_removable(s, at.block, blocks,
      [&](u32, const Use& use) { ++count, lowest = min(lowest, use.score), highest = max(highest, use.score); });
  for (u32 by = WARP / 2; by; by /= 2) {
    count += __shfl_down_sync(ALL, count, by);
    lowest = min(lowest, __shfl_down_sync(ALL, lowest, by)), highest = max(highest, __shfl_down_sync(ALL, highest, by));
  }
  if (lane() == 0 && count) {
    atomicAdd(&choice->count, count), atomicMax(&choice->highest, highest);
    // Zeros are the first values of all fields, so this one is kept inverted.
    atomicMax(&choice->inverse_of_lowest, ~lowest);
  }
  if (!is_last_block(&choice->blocks_done, blocks) || threadIdx.x != 0) return;
  lowest = ~load_shared(&choice->inverse_of_lowest), highest = load_shared(&choice->highest);
  choice->high_score = highest, choice->high_key = ~0ull;
  choice->is_done = load_shared(&choice->count) <= s.wanted;
  const u32 bits = 64 + (highest > lowest ? 64 - __clzll(highest - lowest) : 0);
  choice->low_score = lowest, choice->low_key = 0, choice->shift = bits - RANK_BITS;
}

// Counts the rows that may go by their bins. The last block finds the bin with the row that is number `wanted` of them, and divides it.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) count_ranks(const Sweep* sweeps, u32 blocks) {
  begin();
  const BlockOfSweep at(blocks);
  const Sweep& s = sweeps[at.sweep];
  constexpr u32 PER_THREAD = RANK_BINS / TABLE_THREADS;
  Choice* choice = s.choice;
  if (choice->is_done) return;
  __shared__ u32 counts[RANK_BINS];
  for (u32 b = threadIdx.x; b < RANK_BINS; b += TABLE_THREADS) counts[b] = 0;
  __syncthreads();
  const Rank low = {choice->low_score, choice->low_key};
  const u32 shift = choice->shift;
  for_each_removable(s, at.block, blocks, [&](u32 record, const Use& use) {
    // Where bins are wider than all keys of a score, the key of `low` is 0.
    const Rank rank = {use.score, shift < 64 ? s.keys[record] : 0};
    if (rank < low) return;
    const u32 bin = bin_of(rank, low, shift);
    if (bin < RANK_BINS) atomicAdd(counts + bin, 1);
  });
  __syncthreads();
  for (u32 b = threadIdx.x; b < RANK_BINS; b += TABLE_THREADS)
    if (counts[b]) atomicAdd(s.bins + b, counts[b]);
  if (!is_last_block(&choice->blocks_done, blocks)) return;
  __shared__ u32 of_threads[TABLE_THREADS];
  u32 mine[PER_THREAD], all = 0;
  for (u32 k = 0; k < PER_THREAD; ++k) {
    u32* bin = s.bins + threadIdx.x * PER_THREAD + k;
    all += mine[k] = load_shared(bin);
    *bin = 0;
  }
  of_threads[threadIdx.x] = all;
  __syncthreads();
  u64 below = choice->below;
  for (u32 t = 0; t < threadIdx.x; ++t) below += of_threads[t];
  __syncthreads();
  for (u32 k = 0; k < PER_THREAD; ++k, below += mine[k - 1]) {
    // True for one bin of one thread.
    if (below >= s.wanted || below + mine[k] < s.wanted) continue;
    const Rank start = sum(low, start_of(threadIdx.x * PER_THREAD + k, shift)), high = end_of(start, shift);
    choice->low_score = start.score, choice->low_key = start.key;
    choice->high_score = high.score, choice->high_key = high.key;
    choice->below = below;
    choice->is_done = shift == 0 || below + mine[k] == s.wanted;
    choice->shift = shift > RANK_BITS ? shift - RANK_BITS : 0;
  }
}

// Lists the chosen rows.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) list_chosen(const Sweep* sweeps, u32 blocks) {
  begin();
  const BlockOfSweep at(blocks);
  const Sweep& s = sweeps[at.sweep];
  const Rank high = {s.choice->high_score, s.choice->high_key};
  for_each_removable(s, at.block, blocks, [&](u32 record, const Use& use) {
    if (use.score > high.score) return;
    const u64 key = s.keys[record];
    if (use.score == high.score && key > high.key) return;
    const u32 place = atomicAdd(&s.choice->num_listed, 1);
    s.listed_keys[place] = key, s.listed_records[place] = record;
    if (s.listed_scores) s.listed_scores[place] = use.score;
    if (s.listed_changes) s.listed_changes[place] = s.changes[record];
  });
}
