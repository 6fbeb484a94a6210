// Scores of records: their uses.
#include "records.cuh"
#include "sort.cuh"

// Number of sorted ids that a thread of `take_uses` examines.
constexpr u32 PER_THREAD = LIST_BLOCK / LIST_THREADS;

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
  if (!t.scores) return;
  const u64 step = t.progress->step;
  const u32 end = section.first + section.count, at = section.first + (block - section.first_list) * LIST_BLOCK + threadIdx.x;
  u32 record[PER_THREAD], ids[PER_THREAD];
  bool has_row[PER_THREAD];
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
    has_row[k] = ids[k] && !is_vacant(t, record[k]);
  }
#pragma unroll
  for (u32 k = 0; k < PER_THREAD; ++k) {
    if (!has_row[k]) continue;
    note_change(t, record[k]);
    if (is_first) count_use(t, record[k], step, ids[k]);
    if (t.commits) t.commits[record[k]] = commit;
  }
}

// Counts a use of the record of each id. Bits that mark records as new are ignored. `counts`: how many ids each stands for; or null.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) count_records(
    const __grid_constant__ Table t, const u32* __restrict__ records, const u32* __restrict__ counts, u32 n) {
  begin();
  const u32 i = blockIdx.x * TABLE_THREADS + threadIdx.x, record = i < n ? records[i] & ~NEW : 0;
  const u32 same = same_from(record), ids = counts && record && t.scoring == COUNTED_IDS ? counts[i] : same;
  if (!record || !ids) return;
  count_use(t, record, t.progress->step, ids);
  note_change(t, record);
}

// Ends the step of each table, if the tickets were valid. One block.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) end_steps(const Table* tables, u32 n, const Resolved* resolved) {
  begin();
  if (!resolved->is_due) return;
  for (u32 t = threadIdx.x; t < n; t += TABLE_THREADS)
    if (tables[t].scores && tables[t].progress->step != ~0ull) ++tables[t].progress->step;
}

// Halves the score of each row, if the tickets were valid. A removed row keeps its score, because the host may read it later.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) halve_scores(
    const __grid_constant__ Table t, u32 numbers, const Resolved* resolved) {
  begin();
  if (!resolved->is_due) return;
  for (u32 i = 1 + blockIdx.x * TABLE_THREADS + threadIdx.x; i < numbers; i += gridDim.x * TABLE_THREADS) {
    if (!is_vacant(t, i)) t.scores[i] /= 2;
    if (i % FLOOR_RECORDS == 0 || i == 1) lower_floor(t.floor_scores, i);
  }
}

// Copies the uses of records.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) read_uses(
    const __grid_constant__ Table t, const u32* __restrict__ records, Use* __restrict__ uses, u32 n) {
  begin();
  const u32 i = blockIdx.x * TABLE_THREADS + threadIdx.x;
  if (i < n) uses[i] = {t.scores[records[i]], t.commits ? t.commits[records[i]] : 0};
}

// Sets the uses of records, which are distinct.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) write_uses(
    const __grid_constant__ Table t, const u32* __restrict__ records, const Use* __restrict__ uses, u32 n) {
  begin();
  const u32 i = blockIdx.x * TABLE_THREADS + threadIdx.x;
  if (i >= n) return;
  t.scores[records[i]] = uses[i].score;
  lower_floor(t.floor_scores, records[i]);
  if (t.commits) t.commits[records[i]] = uses[i].commit;
}
