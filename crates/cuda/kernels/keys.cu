// Lists the distinct keys of sorted ids.
#include "lists.cuh"

// Adds each distinct record of sorted ids to a list of its dim. Record 0 is left out. Runs of hot keys are listed too. Candidates come to a list
// of their own.
extern "C" __global__ void __launch_bounds__(LIST_THREADS, 4) list_keys(const Keys* __restrict__ kinds,
    const Table* __restrict__ tables, const Section* __restrict__ sections, u32 num_sections, const Sorted* __restrict__ sorted,
    Listed* listed, u32* num_listed) {
  begin();
  u32 number;
  const Section section = section_at(sections, num_sections, blockIdx.x, number, [](const Section& s) { return s.first_list; });
  const u32 end = section.first + section.count;
  const u32 at = section.first + ((blockIdx.x - section.first_list) * LIST_WARPS + threadIdx.x / WARP) * (WARP * POSITIONS);
  u32 record[POSITIONS + 1], count[POSITIONS];
  load_records(sorted, at, end, record);
  find_keys(sorted, section.first, end, at, record, count);
  if (section.first_candidate) take_candidates(section, at, record, count, listed + section.first, num_listed + number);
  u64* distinct = section.table == NO_TABLE ? nullptr : &tables[section.table].index.counters->distinct;
  list_found(kinds[section.kind], sorted, at, record, count, distinct);
}
