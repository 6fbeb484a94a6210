// Scores of records: their uses, and which records have the lowest.
#include "sort.cuh"

// Number of sorted ids that a thread of `take_uses` examines.
constexpr u32 PER_THREAD = LIST_BLOCK / LIST_THREADS;
// `Use::commit` of a record without a row.
constexpr u64 NO_ROW = ~0ull;

__device__ __forceinline__ bool has_row(const Use& use) { return use.commit != NO_ROW; }

// Adds ids to a number of ids, which stays at its maximum. Wherever an addition passes it, the maximum is written after that.
__device__ __forceinline__ void add_ids(u64* score, u64 ids) {
  if (atomicAdd(score, ids) + ids < ids) atomicExch(score, ~0ull);
}

// Counts a use of a record by a number of ids.
__device__ __forceinline__ void count_use(const Table& t, Use* use, u64 step, u32 ids) {
  if (t.has_steps) use->score = step;
  else add_ids(&use->score, ids);
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
// push; RING: it is known to be named. Erased records are passed over. Block b is block `first_block` + b of `list_keys`.
extern "C" __global__ void __launch_bounds__(LIST_THREADS) take_uses(const Table* __restrict__ tables,
    const Section* __restrict__ sections, u32 num_sections, u32 first_block, const Sorted* __restrict__ sorted,
    const Resolved* __restrict__ resolved, u32 row, u32 is_first, u64 commit) {
  begin();
  if (row < RING && (!resolved->is_due || resolved->weights[row] == 0)) return;
  u32 number;
  const u32 block = first_block + blockIdx.x;
  const Section section = section_at(sections, num_sections, block, number, [](const Section& s) { return s.first_list; });
  const Table& t = tables[section.table];
  if (!t.uses) return;
  const u64 step = *t.step;
  const u32 end = section.first + section.count, at = section.first + (block - section.first_list) * LIST_BLOCK + threadIdx.x;
  for (u32 k = 0; k < PER_THREAD; ++k) {
    const u32 i = at + k * LIST_THREADS, record = i < end ? sorted[i].record : 0;
    const u32 ids = same_from(record);
    if (record == 0 || ids == 0) continue;
    Use* use = t.uses + record;
    if (use->commit == NO_ROW) continue;
    if (is_first) count_use(t, use, step, ids);
    use->commit = commit;
  }
}

// Counts a use of the record of each id. Bits that mark records as new are ignored.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) count_records(
    const __grid_constant__ Table t, const u32* __restrict__ records, u32 n) {
  begin();
  const u32 i = blockIdx.x * TABLE_THREADS + threadIdx.x, record = i < n ? records[i] & ~NEW : 0;
  const u32 ids = same_from(record);
  if (record && ids) count_use(t, t.uses + record, *t.step, ids);
}

// Ends the step of each table, if the tickets were valid. One block.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) end_steps(const Table* tables, u32 n, const Resolved* resolved) {
  begin();
  if (!resolved->is_due) return;
  for (u32 t = threadIdx.x; t < n; t += TABLE_THREADS)
    if (tables[t].uses && *tables[t].step != ~0ull) ++*tables[t].step;
}

// Halves all scores, if the tickets were valid.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) halve_scores(
    const __grid_constant__ Table t, u32 numbers, const Resolved* resolved) {
  begin();
  if (!resolved->is_due) return;
  for (u32 i = blockIdx.x * TABLE_THREADS + threadIdx.x; i < numbers; i += gridDim.x * TABLE_THREADS) t.uses[i].score /= 2;
}

// Copies the scores of records.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) read_scores(
    const __grid_constant__ Table t, const u32* __restrict__ records, u64* __restrict__ scores, u32 n) {
  begin();
  const u32 i = blockIdx.x * TABLE_THREADS + threadIdx.x;
  if (i < n) scores[i] = t.uses[records[i]].score;
}

// Sets the scores of records, which are distinct.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) write_scores(
    const __grid_constant__ Table t, const u32* __restrict__ records, const u64* __restrict__ scores, u32 n) {
  begin();
  const u32 i = blockIdx.x * TABLE_THREADS + threadIdx.x;
  if (i < n) t.uses[records[i]].score = scores[i];
}

// Notes that records have no row any more. Record 0 is passed over.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) end_records(
    const __grid_constant__ Table t, const u32* __restrict__ records, u32 n) {
  begin();
  const u32 i = blockIdx.x * TABLE_THREADS + threadIdx.x;
  if (i < n && records[i]) t.uses[records[i]].commit = NO_ROW;
}

// ---- the rows with the lowest scores

// Marks records. `stride`: of their numbers, in words. Bits that mark records as new are ignored.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) mark_records(
    const u32* __restrict__ records, u32 stride, u32 n, u32* __restrict__ marks) {
  begin();
  const u32 i = blockIdx.x * TABLE_THREADS + threadIdx.x;
  if (i >= n) return;
  const u32 record = records[(u64)i * stride] & ~NEW;
  if (record) atomicOr(marks + record / WARP, 1u << record % WARP);
}

// Returns whether a sweep may remove the row of a record.
__device__ __forceinline__ bool may_go(const Sweep& s, u32 record, const Use& use) {
  return has_row(use) && use.commit <= s.settled_commit && !(s.marks[record / WARP] >> record % WARP & 1);
}

// Calls `body` with the number and the use of each record whose row may go.
template <class Body> __device__ __forceinline__ void for_each_removable(const Sweep& s, const Body& body) {
  const u64 stride = (u64)gridDim.x * TABLE_THREADS;
  for (u64 record = 1 + (u64)blockIdx.x * TABLE_THREADS + threadIdx.x; record < s.numbers; record += stride) {
    const Pair pair = load_pair(s.uses + record);
    const Use use = {pair.low, pair.high};
    if (may_go(s, (u32)record, use)) body((u32)record, use);
  }
}

// Counts the rows that may go, and finds their lowest and highest score.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) measure_rows(const __grid_constant__ Sweep s, Removable* all) {
  begin();
  u64 count = 0, lowest = ~0ull, highest = 0;
  for_each_removable(s, [&](u32, const Use& use) { ++count, lowest = min(lowest, use.score), highest = max(highest, use.score); });
  for (u32 by = WARP / 2; by; by /= 2) {
    count += __shfl_down_sync(ALL, count, by);
    lowest = min(lowest, __shfl_down_sync(ALL, lowest, by)), highest = max(highest, __shfl_down_sync(ALL, highest, by));
  }
  if (lane() != 0 || !count) return;
  atomicAdd(&all->count, count), atomicMin(&all->lowest, lowest), atomicMax(&all->highest, highest);
}

// A number of 128 bits: a score and a key.
struct Rank {
  u64 score, key;
};
// Returns `a - b`, shifted right.
__device__ __forceinline__ Rank distance(const Rank& a, const Rank& b, u32 shift) {
  Rank d = {a.score - b.score - (a.key < b.key), a.key - b.key};
  if (shift >= 64) return {0, shift == 64 ? d.score : d.score >> (shift - 64)};
  if (shift > 0) d = {d.score >> shift, d.score << (64 - shift) | d.key >> shift};
  return d;
}

// Counts the rows that may go by their rank: bin b has the ranks from `low + (b << shift)` on. Ranks beyond the last bin are not counted.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) count_ranks(
    const __grid_constant__ Sweep s, u64 low_score, u64 low_key, u32 shift, u32* bins) {
  begin();
  __shared__ u32 counts[RANK_BINS];
  for (u32 b = threadIdx.x; b < RANK_BINS; b += TABLE_THREADS) counts[b] = 0;
  __syncthreads();
  const Rank low = {low_score, low_key};
  for_each_removable(s, [&](u32 record, const Use& use) {
    // Where bins are wider than all keys of a score, `low_key` is 0.
    const Rank rank = {use.score, shift < 64 ? s.keys[record] : 0};
    if (rank.score < low.score || (rank.score == low.score && rank.key < low.key)) return;
    const Rank bin = distance(rank, low, shift);
    if (bin.score == 0 && bin.key < RANK_BINS) atomicAdd(counts + bin.key, 1);
  });
  __syncthreads();
  for (u32 b = threadIdx.x; b < RANK_BINS; b += TABLE_THREADS)
    if (counts[b]) atomicAdd(bins + b, counts[b]);
}

// Lists the rows that may go whose rank is not above the highest. `out`: has room for all of them.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) list_lowest(
    const __grid_constant__ Sweep s, u64 highest_score, u64 highest_key, const __grid_constant__ Lowest out) {
  begin();
  for_each_removable(s, [&](u32 record, const Use& use) {
    if (use.score > highest_score) return;
    const u64 key = s.keys[record];
    if (use.score == highest_score && key > highest_key) return;
    const u32 at = atomicAdd(out.count, 1);
    out.scores[at] = use.score, out.keys[at] = key, out.records[at] = record;
  });
}
