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
