// Lists the distinct keys of sorted ids.
#include "records.cuh"
#include "sort.cuh"

// Number of sorted ids that a thread examines; number of warps of a block.
constexpr u32 POSITIONS = 8, LIST_WARPS = LIST_THREADS / WARP;
static_assert(HOT <= WARP, "how many ids a key has is counted over two warps' positions");

// The lists of a dim: of keys with one id, with up to HOT ids and with more, and of runs of the latter.
enum List : u32 { SINGLES, SEVERAL, HOT_KEYS, RUNS, NUM_LISTS };

// Reserves places in the lists of a dim. `first`: by list, the number of places; takes the first one.
__device__ __forceinline__ void take_places(
    const Table* __restrict__ tables, const Section& section, const Keys& keys, u32 (&first)[NUM_LISTS]) {
  const u32 distinct = first[SINGLES] + first[SEVERAL] + first[HOT_KEYS];
  if (section.table != NO_TABLE && distinct) atomicAdd(&tables[section.table].index.counters->distinct, (u64)distinct);
  const u64 cold = atomicAdd(&keys.lists->cold, (u64)first[SEVERAL] << 32 | first[SINGLES]);
  const u64 of_hot = first[HOT_KEYS] ? atomicAdd(&keys.lists->hot, (u64)first[HOT_KEYS] << 32 | first[RUNS]) : 0;
  first[SINGLES] = (u32)cold, first[SEVERAL] = (u32)(cold >> 32), first[RUNS] = (u32)of_hot, first[HOT_KEYS] = (u32)(of_hot >> 32);
}

// Returns the inclusive prefix sum of `x` over the first N lanes of a warp.
template <u32 N> __device__ __forceinline__ u32 sum_to(u32 x) {
  for (u32 by = 1; by < N; by *= 2) {
    const u32 y = __shfl_up_sync(ALL, x, by);
    if (lane() >= by) x += y;
  }
  return x;
}

// Returns the end of the ids with a record: by strides that double, then by bisection. `low`: position of an id of the record. `end`: end
// of the section's ids.
__device__ __forceinline__ u32 end_of_key(const Sorted* __restrict__ sorted, u32 record, u32 low, u32 end) {
  u32 stride = WARP;
  while (low + stride < end && sorted[low + stride].record == record) low += stride, stride *= 2;
  u32 high = min(low + stride, end);
  while (low + 1 < high) {
    const u32 middle = (low + high) / 2;
    if (sorted[middle].record == record) low = middle;
    else high = middle;
  }
  return high;
}

// Finds the keys that begin among POSITIONS ids of each lane. `begin`, `end`: the section's ids. `at`: the warp's first id. `count`: takes
// the number of ids of the key that begins at a position, or 0. `found`: by list, takes the number of the warp's keys; for RUNS, that of
// the lane's runs.
__device__ __forceinline__ void find_keys(const Sorted* __restrict__ sorted, u32 begin, u32 end, u32 at,
    const u32 (&record)[POSITIONS + 1], u32 (&count)[POSITIONS], u32 (&found)[NUM_LISTS]) {
  u32 left = at > begin && at < end ? sorted[at - 1].record : ALL;
#pragma unroll
  for (u32 r = 0; r < POSITIONS; ++r) {
    const u32 start = at + r * WARP, i = start + lane();
    u32 before = __shfl_up_sync(ALL, record[r], 1);
    if (lane() == 0) before = left;
    left = __shfl_sync(ALL, record[r], WARP - 1);
    const bool is_head = i < end && record[r] != before;
    const u32 heads = __ballot_sync(ALL, is_head);
    count[r] = 0;
    if (heads) {
      const u32 last = WARP - 1 - __clz(heads);
      const u32 tail = __popc(__ballot_sync(ALL, record[r + 1] == __shfl_sync(ALL, record[r], last)));
      if (is_head && record[r] != 0)
        count[r] = lane() == last ? min(WARP, end - start) - last + tail : __ffs(heads >> (lane() + 1));
    }
    if (count[r] > HOT) {
      count[r] = end_of_key(sorted, record[r], i + count[r] - 1, end) - i;
      found[RUNS] += (count[r] + RUN - 1) / RUN;
    }
    found[SINGLES] += __popc(__ballot_sync(ALL, count[r] == 1));
    found[SEVERAL] += __popc(__ballot_sync(ALL, count[r] > 1 && count[r] <= HOT));
    found[HOT_KEYS] += __popc(__ballot_sync(ALL, count[r] > HOT));
  }
}

// Writes the keys that `find_keys` found. `next`: where the next key of each list goes, and the lane's next run.
__device__ __forceinline__ void write_keys(const Keys& keys, const Sorted* __restrict__ sorted, u32 at,
    const u32 (&record)[POSITIONS + 1], const u32 (&count)[POSITIONS], u32 (&next)[NUM_LISTS]) {
#pragma unroll
  for (u32 r = 0; r < POSITIONS; ++r) {
    const u32 i = at + r * WARP + lane();
    const u32 singles = __ballot_sync(ALL, count[r] == 1), several = __ballot_sync(ALL, count[r] > 1 && count[r] <= HOT),
              hot = __ballot_sync(ALL, count[r] > HOT);
    if (count[r] == 1) {
      keys.singles[next[SINGLES] + __popc(singles & lanes_below())] = {record[r], sorted[i].value};
    } else if (count[r] > HOT) {
      const u32 number = next[HOT_KEYS] + __popc(hot & lanes_below()), runs = (count[r] + RUN - 1) / RUN;
      keys.hot[number] = {record[r], next[RUNS], runs, 0};
      for (u32 k = 0; k < runs; ++k) keys.runs[next[RUNS] + k] = {i + k * RUN, min(RUN, count[r] - k * RUN), number, 0};
      next[RUNS] += runs;
    } else if (count[r]) {
      keys.several[next[SEVERAL] + __popc(several & lanes_below())] = {record[r], i, count[r], sorted[i].value};
    }
    next[SINGLES] += __popc(singles), next[SEVERAL] += __popc(several), next[HOT_KEYS] += __popc(hot);
  }
}

// Adds each distinct record of sorted ids to a list of its dim. Record 0 is left out. Runs of hot keys are listed too.
extern "C" __global__ void __launch_bounds__(LIST_THREADS, 4) list_keys(const Keys* __restrict__ kinds,
    const Table* __restrict__ tables, const Section* __restrict__ sections, u32 num_sections, const Sorted* __restrict__ sorted) {
  begin();
  // By list: the number of entries of each warp, later of the warps before it; and the place of the block's first entry.
  __shared__ u32 of_warps[NUM_LISTS][LIST_WARPS];
  __shared__ u32 first[NUM_LISTS];
  u32 number;
  const Section section = section_at(sections, num_sections, blockIdx.x, number, [](const Section& s) { return s.first_list; });
  const Keys& keys = kinds[section.kind];
  const u32 warp = threadIdx.x / WARP, end = section.first + section.count;
  const u32 at = section.first + ((blockIdx.x - section.first_list) * LIST_WARPS + warp) * (WARP * POSITIONS);
  u32 record[POSITIONS + 1], count[POSITIONS], found[NUM_LISTS] = {};
#pragma unroll
  for (u32 r = 0; r <= POSITIONS; ++r) {
    const u32 i = at + r * WARP + lane();
    record[r] = i < end ? sorted[i].record : ALL;
  }
  find_keys(sorted, section.first, end, at, record, count, found);
  const u32 runs = found[RUNS];
  if (found[HOT_KEYS]) found[RUNS] = sum_to<WARP>(runs);
  if (lane() == WARP - 1) {
#pragma unroll
    for (u32 list = 0; list < NUM_LISTS; ++list) of_warps[list][warp] = found[list];
  }
  __syncthreads();
  if (warp < NUM_LISTS) {
    const u32 mine = lane() < LIST_WARPS ? of_warps[warp][lane()] : 0, sum = sum_to<LIST_WARPS>(mine);
    if (lane() < LIST_WARPS) of_warps[warp][lane()] = sum - mine;
    if (lane() == LIST_WARPS - 1) first[warp] = sum;
  }
  __syncthreads();
  if (threadIdx.x == 0) take_places(tables, section, keys, first);
  __syncthreads();
  u32 next[NUM_LISTS];
#pragma unroll
  for (u32 list = 0; list < NUM_LISTS; ++list) next[list] = first[list] + of_warps[list][warp];
  next[RUNS] += found[RUNS] - runs;
  write_keys(keys, sorted, at, record, count, next);
}
