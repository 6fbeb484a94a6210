// The sections of the sort. The ids of each table are a section, which is sorted by record.
#pragma once
#include "types.cuh"

// Returns the last section whose first block is at or before `block`, and sets `number` to its index. `first_of`: returns the first
// block of a section. All lanes of a warp must call this.
template <class FirstOf>
__device__ __forceinline__ Section section_at(const Section* sections, u32 n, u32 block, u32& number, const FirstOf& first_of) {
  number = 0;
  for (u32 start = 0; start < n; start += WARP) {
    const u32 begun = __ballot_sync(ALL, start + lane() < n && first_of(sections[start + lane()]) <= block);
    number += __popc(begun);
    if (begun != ALL) break;
  }
  return sections[--number];
}

// Returns whether a sorted number is that of a candidate.
__device__ __forceinline__ bool is_candidate(const Section& section, u32 number) {
  return section.first_candidate && number >= section.first_candidate;
}

// Returns the number of ids of a key that ranks ask for. `value`: its sorted value.
__device__ __forceinline__ u32 num_ids_at(const IdCounts& of_keys, u32 value) {
  const Feature& f = of_keys.features[value >> of_keys.shift];
  return of_keys.counts[f.first_id + (value & ((1u << of_keys.shift) - 1))];
}
