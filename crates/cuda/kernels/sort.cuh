// What is sorted, and how it lies: the ids of each table by their records.
#pragma once
#include "types.cuh"

// The ids of a table, side by side. Blocks of a launch are a section's own.
struct Section {
  // Places of its ids.
  u32 first, count;
  // Blocks of the sections before it, in the sort and in `list_keys`.
  u32 first_tile, first_list;
  // Place of its dim; the table whose distinct keys are counted, or NOBODY.
  u32 kind, table, pad[2];
};
static_assert(sizeof(Section) == 32, "as crates/cuda/src/layout.rs has it");
constexpr u32 NOBODY = ALL;

// An id in its new place: its record, 0 if it has none, and what went with it.
struct __align__(8) Sorted {
  u32 record, value;
};

// The last section that begins at or before this block, and its number. A whole warp comes here.
template <class FirstOf> __device__ __forceinline__ Section section_at(const Section* sections, u32 n, u32 block, u32& number, const FirstOf& first_of) {
  number = 0;
  for (u32 start = 0; start < n; start += WARP) {
    const u32 begun = __ballot_sync(ALL, start + lane() < n && first_of(sections[start + lane()]) <= block);
    number += __popc(begun);
    if (begun != ALL) break;
  }
  return sections[--number];
}
