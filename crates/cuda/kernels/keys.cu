// Lists the distinct keys of sorted ids.
#include "records.cuh"
#include "sort.cuh"

// Number of sorted ids that a thread examines; number of warps of a block.
constexpr u32 POSITIONS = 8, LIST_WARPS = LIST_THREADS / WARP;
static_assert(HOT <= WARP, "how many ids a key has is counted over two warps' positions");

// Reserves places in the lists of a dim. `first`: by list, the number of places; takes the first one.
__device__ __forceinline__ void take_places(
    const Table* __restrict__ tables, const Section& section, const Keys& keys, u32 (&first)[4]) {
  const u32 distinct = first[0] + first[1] + first[2];
  if (section.table != NO_TABLE && distinct) atomicAdd(&tables[section.table].index.counters->distinct, distinct);
  const u64 cold = atomicAdd(&keys.lists->cold, (u64)first[1] << 32 | first[0]);
  const u64 of_hot = first[2] ? atomicAdd(&keys.lists->hot, (u64)first[2] << 32 | first[3]) : 0;
  first[0] = (u32)cold, first[1] = (u32)(cold >> 32), first[3] = (u32)of_hot, first[2] = (u32)(of_hot >> 32);
}

// Adds each distinct record of sorted ids to a list of its dim: of keys with one id, with up to HOT ids, or with more. Record 0 is
// left out. Runs of hot keys are listed too.
extern "C" __global__ void __launch_bounds__(LIST_THREADS, 4) list_keys(const Keys* __restrict__ kinds,
    const Table* __restrict__ tables, const Section* __restrict__ sections, u32 num_sections, const Sorted* __restrict__ sorted) {
  begin();
  __shared__ u32 of_warps[4][LIST_WARPS];
  __shared__ u32 first[4];
  u32 number;
  const Section section = section_at(sections, num_sections, blockIdx.x, number, [](const Section& s) { return s.first_list; });
  const Keys& keys = kinds[section.kind];
  const u32 warp = threadIdx.x / WARP, start_of = section.first, n = start_of + section.count;
  const u32 at = start_of + ((blockIdx.x - section.first_list) * LIST_WARPS + warp) * (WARP * POSITIONS);
  u32 record[POSITIONS + 1], count[POSITIONS], singles = 0, several = 0, hot = 0, runs = 0;
#pragma unroll
  for (u32 r = 0; r <= POSITIONS; ++r) {
    const u32 i = at + r * WARP + lane();
    record[r] = i < n ? sorted[i].record : ALL;
  }
  u32 left = at > start_of && at < n ? sorted[at - 1].record : ALL;
#pragma unroll
  for (u32 r = 0; r < POSITIONS; ++r) {
    const u32 start = at + r * WARP, i = start + lane();
    u32 before = __shfl_up_sync(ALL, record[r], 1);
    if (lane() == 0) before = left;
    left = __shfl_sync(ALL, record[r], WARP - 1);
    const bool is_head = i < n && record[r] != before;
    const u32 heads = __ballot_sync(ALL, is_head);
    count[r] = 0;
    if (heads) {
      const u32 last = WARP - 1 - __clz(heads);
      const u32 tail = __popc(__ballot_sync(ALL, record[r + 1] == __shfl_sync(ALL, record[r], last)));
      if (is_head && record[r] != 0) count[r] = lane() == last ? min(WARP, n - start) - last + tail : __ffs(heads >> (lane() + 1));
    }
    if (count[r] > HOT) {
      // Finds the end of the key's ids: by strides that double, then by bisection.
      u32 low = i + count[r] - 1, stride = WARP;
      while (low + stride < n && sorted[low + stride].record == record[r]) low += stride, stride *= 2;
      u32 high = min(low + stride, n);
      while (low + 1 < high) {
        const u32 middle = (low + high) / 2;
        if (sorted[middle].record == record[r]) low = middle;
        else high = middle;
      }
      count[r] = high - i;
      runs += (count[r] + RUN - 1) / RUN;
    }
    singles += __popc(__ballot_sync(ALL, count[r] == 1));
    several += __popc(__ballot_sync(ALL, count[r] > 1 && count[r] <= HOT));
    hot += __popc(__ballot_sync(ALL, count[r] > HOT));
  }
  u32 runs_here = runs;
  if (hot)
    for (u32 by = 1; by < WARP; by *= 2) {
      const u32 x = __shfl_up_sync(ALL, runs_here, by);
      if (lane() >= by) runs_here += x;
    }
  if (lane() == WARP - 1)
    of_warps[0][warp] = singles, of_warps[1][warp] = several, of_warps[2][warp] = hot, of_warps[3][warp] = runs_here;
  __syncthreads();
  if (warp < 4) {
    const u32 mine = lane() < LIST_WARPS ? of_warps[warp][lane()] : 0;
    u32 sum = mine;
    for (u32 by = 1; by < LIST_WARPS; by *= 2) {
      const u32 x = __shfl_up_sync(ALL, sum, by);
      if (lane() >= by) sum += x;
    }
    if (lane() < LIST_WARPS) of_warps[warp][lane()] = sum - mine;
    if (lane() == LIST_WARPS - 1) first[warp] = sum;
  }
  __syncthreads();
  if (threadIdx.x == 0) take_places(tables, section, keys, first);
  __syncthreads();
  u32 single_at = first[0] + of_warps[0][warp], several_at = first[1] + of_warps[1][warp], hot_at = first[2] + of_warps[2][warp];
  u32 run_at = first[3] + of_warps[3][warp] + runs_here - runs;
#pragma unroll
  for (u32 r = 0; r < POSITIONS; ++r) {
    const u32 i = at + r * WARP + lane();
    const u32 one = __ballot_sync(ALL, count[r] == 1), many = __ballot_sync(ALL, count[r] > 1 && count[r] <= HOT),
              most = __ballot_sync(ALL, count[r] > HOT);
    if (count[r] == 1) {
      keys.singles[single_at + __popc(one & lanes_below())] = {record[r], sorted[i].value};
    } else if (count[r] > HOT) {
      const u32 h = hot_at + __popc(most & lanes_below()), of_key = (count[r] + RUN - 1) / RUN;
      keys.hot[h] = {record[r], run_at, of_key, 0};
      for (u32 k = 0; k < of_key; ++k) keys.runs[run_at + k] = {i + k * RUN, min(RUN, count[r] - k * RUN), h, 0};
      run_at += of_key;
    } else if (count[r]) {
      keys.several[several_at + __popc(many & lanes_below())] = {record[r], i, count[r], sorted[i].value};
    }
    single_at += __popc(one), several_at += __popc(many), hot_at += __popc(most);
  }
}
