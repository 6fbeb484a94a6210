// Lists of the distinct keys of sorted ids, by their numbers of ids.
#pragma once
#include "records.cuh"
#include "sort.cuh"

// Number of sorted ids that a thread examines; number of warps of a block.
constexpr u32 POSITIONS = 8, LIST_WARPS = LIST_THREADS / WARP;
static_assert(HOT <= WARP, "how many ids a key has is counted over two warps' positions");

// The lists of a dim: of keys with one id, with up to HOT ids and with more, and of runs of the latter.
enum List : u32 { SINGLES, SEVERAL, HOT_KEYS, RUNS, NUM_LISTS };

// Reserves places in the lists of a dim. `first`: by list, the number of places; takes the first one.
__device__ __forceinline__ void take_places(const Keys& keys, u32 (&first)[NUM_LISTS]) {
  const u64 cold = atomicAdd(&keys.lists->cold, (u64)first[SEVERAL] << 32 | first[SINGLES]);
  const u64 of_hot = first[HOT_KEYS] ? atomicAdd(&keys.lists->hot, (u64)first[HOT_KEYS] << 32 | first[RUNS]) : 0;
  first[SINGLES] = (u32)cold, first[SEVERAL] = (u32)(cold >> 32), first[RUNS] = (u32)of_hot, first[HOT_KEYS] = (u32)(of_hot >> 32);
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

// Loads the records of POSITIONS sorted ids of each lane, and of the ids after those. `at`: the warp's first id. `end`: end of the section's
// ids.
__device__ __forceinline__ void load_records(const Sorted* __restrict__ sorted, u32 at, u32 end, u32 (&record)[POSITIONS + 1]) {
#pragma unroll
  for (u32 r = 0; r <= POSITIONS; ++r) {
    const u32 i = at + r * WARP + lane();
    record[r] = i < end ? sorted[i].record : ALL;
  }
}

// Finds the keys that begin among POSITIONS ids of each lane. Record 0 is left out. `begin`, `end`: the section's ids. `at`: the
// warp's first id. `count`: takes the number of ids of the key that begins at a position, or 0.
__device__ __forceinline__ void find_keys(
    const Sorted* __restrict__ sorted, u32 begin, u32 end, u32 at, const u32 (&record)[POSITIONS + 1], u32 (&count)[POSITIONS]) {
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
    if (count[r] > HOT) count[r] = end_of_key(sorted, record[r], i + count[r] - 1, end) - i;
  }
}

// Returns by list the number of the warp's keys with these counts, for RUNS that of the lane's runs.
__device__ __forceinline__ void tally(const u32 (&count)[POSITIONS], u32 (&found)[NUM_LISTS]) {
#pragma unroll
  for (u32 r = 0; r < POSITIONS; ++r) {
    if (count[r] > HOT) found[RUNS] += (count[r] + RUN - 1) / RUN;
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

// Adds the keys that `find_keys` found to the lists of a dim. `at`: the warp's first id. `distinct`: takes the number of the block's keys; or
// null. A block calls this.
__device__ __forceinline__ void list_found(const Keys& keys, const Sorted* __restrict__ sorted, u32 at,
    const u32 (&record)[POSITIONS + 1], const u32 (&count)[POSITIONS], u64* distinct) {
  // By list: the number of entries of each warp, later of the warps before it; and the place of the block's first entry.
  __shared__ u32 of_warps[NUM_LISTS][LIST_WARPS];
  __shared__ u32 first[NUM_LISTS];
  const u32 warp = threadIdx.x / WARP;
  u32 found[NUM_LISTS] = {};
  tally(count, found);
  const u32 runs = found[RUNS];
  if (found[HOT_KEYS]) found[RUNS] = sum_to(runs);
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
  if (threadIdx.x == 0) {
    const u32 all = first[SINGLES] + first[SEVERAL] + first[HOT_KEYS];
    if (distinct && all) atomicAdd(distinct, (u64)all);
    if (all) take_places(keys, first);
  }
  __syncthreads();
  u32 next[NUM_LISTS];
#pragma unroll
  for (u32 list = 0; list < NUM_LISTS; ++list) next[list] = first[list] + of_warps[list][warp];
  next[RUNS] += found[RUNS] - runs;
  write_keys(keys, sorted, at, record, count, next);
}

// Adds a key of each lane to the lists of a dim. `first`, `count`: its sorted ids; a lane with a `count` of 0 has no key. All lanes of a warp must
// call this.
__device__ __forceinline__ void list_lanes(const Keys& keys, const Sorted* __restrict__ sorted, u32 record, u32 first, u32 count) {
  const u32 singles = __ballot_sync(ALL, count == 1), several = __ballot_sync(ALL, count > 1 && count <= HOT),
            hot = __ballot_sync(ALL, count > HOT);
  if (!(singles | several | hot)) return;
  const u32 runs = count > HOT ? (count + RUN - 1) / RUN : 0, runs_to = hot ? sum_to(runs) : 0;
  u32 next[NUM_LISTS] = {(u32)__popc(singles), (u32)__popc(several), (u32)__popc(hot), __shfl_sync(ALL, runs_to, WARP - 1)};
  if (lane() == 0) take_places(keys, next);
#pragma unroll
  for (u32 list = 0; list < NUM_LISTS; ++list) next[list] = __shfl_sync(ALL, next[list], 0);
  const u32 below = lanes_below(), number = next[HOT_KEYS] + __popc(hot & below), first_run = next[RUNS] + runs_to - runs;
  if (count == 1) keys.singles[next[SINGLES] + __popc(singles & below)] = {record, sorted[first].value};
  else if (count > HOT) keys.hot[number] = {record, first_run, runs, 0};
  else if (count) keys.several[next[SEVERAL] + __popc(several & below)] = {record, first, count, sorted[first].value};
  for (u32 k = 0; k < runs; ++k) keys.runs[first_run + k] = {first + k * RUN, min(RUN, count - k * RUN), number, 0};
}

// Lists the candidates among the keys that `find_keys` found, and sets their counts to 0. `at`: the warp's first id. `listed`: takes them, in any
// order. `num_listed`: their number.
__device__ __forceinline__ void take_candidates(
    const Section& section, u32 at, const u32 (&record)[POSITIONS + 1], u32 (&count)[POSITIONS], Listed* listed, u32* num_listed) {
#pragma unroll
  for (u32 r = 0; r < POSITIONS; ++r) {
    const bool is_one = count[r] && is_candidate(section, record[r]);
    if (!__any_sync(ALL, is_one)) continue;
    const u32 to = take(num_listed, is_one);
    if (is_one) listed[to] = {at + r * WARP + lane(), count[r]}, count[r] = 0;
  }
}
