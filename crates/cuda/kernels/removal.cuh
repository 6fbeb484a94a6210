// The rows that sweeps remove, and their numbers, which are given out again.
#pragma once
#include "records.cuh"

// Places that a warp has found, until it writes the rows there to a list. It takes room for them by one atomic addition.
template <u32 THREADS, class Row> class StagedRows {
  static constexpr u32 PER_LANE = 4;
  static constexpr u32 ROOM = PER_LANE * WARP;
  u32* places;
  u32 count = 0;

 public:
  static constexpr u32 WORDS = ROOM * (THREADS / WARP);
  __device__ __forceinline__ StagedRows(u32* memory) : places(memory + threadIdx.x / WARP * ROOM) {}
  // Adds the places of the lanes for which `is_in` is true. `len`, `load` and `write`: as for `flush`.
  template <class Load, class Write>
  __device__ __forceinline__ void add(bool is_in, u32 place, u32* len, const Load& load, const Write& write) {
    const u32 all = __ballot_sync(ALL, is_in);
    if (!all) return;
    if (is_in) places[count + __popc(all & lanes_below())] = place;
    count += __popc(all);
    if (count > ROOM - WARP) flush(len, load, write);
  }
  // Calls `load` with each place, which returns whether the row there is listed. Calls `write` with each row, its index in the list, and whether it is
  // listed; all lanes of the warp call it. `len`: that of the list.
  template <class Load, class Write> __device__ __forceinline__ void flush(u32* len, const Load& load, const Write& write) {
    if (!count) return;
    // The places of all lanes are visible after this.
    __syncwarp();
    Row rows[PER_LANE];
    bool is_listed[PER_LANE];
#pragma unroll
    for (u32 k = 0; k < PER_LANE; ++k) {
      const u32 i = k * WARP + lane();
      is_listed[k] = i < count && load(places[i], rows[k]);
    }
    u32 before[PER_LANE], all = 0;
#pragma unroll
    for (u32 k = 0; k < PER_LANE; ++k) {
      const u32 listed = __ballot_sync(ALL, is_listed[k]);
      before[k] = all + __popc(listed & lanes_below()), all += __popc(listed);
    }
    u32 first = 0;
    if (lane() == 0 && all) first = atomicAdd(len, all);
    first = __shfl_sync(ALL, first, 0);
#pragma unroll
    for (u32 k = 0; k < PER_LANE; ++k) write(rows[k], first + before[k], is_listed[k]);
    count = 0;
    // All lanes have read the places before others are written there.
    __syncwarp();
  }
};

// Writes a removed row to a place in the ring of released numbers. `changes`: `Table::changes` of the row's table.
__device__ __forceinline__ void add_removed(const Removal& removal, u64 place, u32 record, u64 key, const u32* changes) {
  const u64 at = place & removal.mask;
  removal.numbers[at] = record, removal.keys[at] = key;
  if (removal.changes) removal.changes[at] = changes[record];
}

// Ends a sweep that has added `n` rows to the ring, after its end. One thread calls it when no other uses the ring.
__device__ __forceinline__ void end_removal(Counters* counters, const Removal& removal, u64 step, u32 n) {
  Released* released = &counters->released;
  // What was given out since the last sweep.
  const u64 taken = counters->taken, given = taken - released->base, of_ring = min(given, released->count);
  released->base = taken, released->fresh += given - of_ring;
  released->first += of_ring, released->count -= of_ring, released->end += n;
  removal.notes[removal.sweep % SWEEP_NOTES] = {step, released->end};
  if (removal.usable == NO_SWEEP) return;
  const u64 end = removal.notes[removal.usable % SWEEP_NOTES].end;
  if (end > released->first + released->count) released->count = end - released->first;
}
