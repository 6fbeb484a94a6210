// Records of keys: a row and its optimizer states side by side, found by number, written whole when their key is new.
#pragma once
#include "index.cuh"
#include "initializer.cuh"

enum Missing : u32 { INITIAL, ZEROS };

struct Table {
  Index index;
  Initializer initializer;
  // Record r begins at records + r * stride.
  float4* records;
  // Numbers to give out before those from `fresh` on: of records that were erased.
  const u32* released;
  // Keys beyond it are outside the vocabulary.
  u64 last_key;
  // In groups of four columns: of a record, and of its row.
  u32 stride, quads;
  u32 num_released, fresh;
  // First value of the first state; the others' is 0.
  float first_state;
  // What a key without a record answers.
  u32 missing;
  // Place of its dim among those of the group.
  u32 kind, pad;
};
static_assert(sizeof(Table) == 120, "as crates/cuda/src/layout.rs has it");

// Rows and states are held in groups of four columns, so that a lane moves 16 bytes; the last group may be partly unused.
__host__ __device__ constexpr u32 quads_of(u32 dim) { return (dim + 3) / 4; }

// Lanes that share a row of so many groups of columns: a power of two, a warp at most.
__host__ __device__ constexpr u32 lanes_for(u32 quads) {
  u32 lanes = 1;
  while (lanes < quads && lanes < WARP) lanes *= 2;
  return lanes;
}
__host__ __device__ constexpr u32 lanes_of(u32 dim) { return lanes_for(quads_of(dim)); }

template <u32 N> struct Dim {
  static constexpr u32 value = N;
};
// Calls `body` with the dim of this place among those of a group.
template <u32 FIRST, u32... OTHERS, class Body> __device__ __forceinline__ void with_dim(u32 kind, const Body& body) {
  if constexpr (sizeof...(OTHERS) == 0) {
    body(Dim<FIRST>());
  } else {
    if (kind == 0) body(Dim<FIRST>());
    else with_dim<OTHERS...>(kind - 1, body);
  }
}

// Four columns of a row of an array (rows, DIM) of the framework's; 0 beyond the last. ONCE: nobody reads them again.
template <u32 DIM, bool ONCE> __device__ __forceinline__ float4 load_columns(const float* rows, u64 row, u32 quad) {
  const float* at = rows + row * DIM + 4 * quad;
  if (DIM % 4 == 0) return ONCE ? __ldcs((const float4*)at) : *(const float4*)at;
  const u32 left = DIM - 4 * quad;
  return make_float4(at[0], left > 1 ? at[1] : 0, left > 2 ? at[2] : 0, left > 3 ? at[3] : 0);
}

template <u32 DIM> __device__ __forceinline__ void store_columns(float* rows, u64 row, u32 quad, const float4& x) {
  float* at = rows + row * DIM + 4 * quad;
  if (DIM % 4 == 0) {
    store_once((float4*)at, x);
    return;
  }
  const u32 left = DIM - 4 * quad;
  at[0] = x.x;
  if (left > 1) at[1] = x.y;
  if (left > 2) at[2] = x.z;
  if (left > 3) at[3] = x.w;
}

// The record with this number among those that were given out since the table was told which are released.
__device__ __forceinline__ u32 number_of(const Table& t, u32 taken) {
  return taken < t.num_released ? t.released[taken] : t.fresh + (taken - t.num_released);
}

// A number for each lane that `is_in`, from a count on: one addition a warp.
__device__ __forceinline__ u32 take(u32* count, bool is_in) {
  const u32 all = __ballot_sync(ALL, is_in);
  u32 first = 0;
  if (all && lane() == 0) first = atomicAdd(count, __popc(all));
  return __shfl_sync(ALL, first, 0) + __popc(all & lanes_below());
}

// Four columns of a new record.
__device__ __forceinline__ float4 first_columns(const Table& t, u64 key, u32 quad) {
  if (quad >= t.quads) {
    const float x = quad < 2 * t.quads ? t.first_state : 0;
    return make_float4(x, x, x, x);
  }
  return first_values(t.initializer, key, quad);
}

// Four columns of what a key without a record answers; zeros outside the vocabulary.
__device__ __noinline__ float4 missing_columns(const Table& t, u64 key, u32 quad) {
  return t.missing == INITIAL && key <= t.last_key ? first_values(t.initializer, key, quad) : make_float4(0, 0, 0, 0);
}

// The new records of the lanes that have one.
__device__ __forceinline__ void write_first(const Table& t, bool is_new, u64 key, u32 record, LaneList& list) {
  const u32 lanes = min(lanes_for(t.stride), WARP), groups = WARP / lanes;
  const u32 n = list.take(is_new), group = lane() / lanes, column = lane() % lanes;
  for (u32 start = 0; start < n; start += groups) {
    const bool is_one = start + group < n;
    const u32 from = is_one ? list.lanes[start + group] : 0;
    const u64 k = __shfl_sync(ALL, key, from);
    float4* at = t.records + (u64)__shfl_sync(ALL, record, from) * t.stride;
    if (!is_one) continue;
    for (u32 quad = column; quad < t.stride; quad += lanes) store_once(at + quad, first_columns(t, k, quad));
  }
}

// Gives keys that were not found a record, and writes its first values. The whole warp comes here. Gives the lane's record if its
// key was missing: NO_RECORD if both buckets of the key are full.
__device__ __forceinline__ u32 insert_missing(const Table& t, const Index& index, bool is_missing, u64 key, u64 h, LaneList& list) {
  // One lane a distinct key of the warp.
  u32 leader = lane();
  const u32 missing = __ballot_sync(ALL, is_missing);
  if (is_missing) leader = __ffs(__match_any_sync(missing, key)) - 1;
  const bool leads = is_missing && leader == lane();
  Claim claim = {nullptr, false};
  if (leads) claim = claim_key(index, key, h);
  __syncwarp();
  const bool is_new = claim.is_mine;
  const u32 taken = take(&t.index.counters->taken, is_new);
  u32 record = NO_RECORD;
  if (is_new) store_shared(claim.record, record = number_of(t, taken));
  write_first(t, is_new, key, record, list);
  // All of this warp's numbers are written, so whoever waits here waits for a warp that does not wait for this one.
  if (leads && !is_new) {
    record = NO_RECORD;
    if (claim.record)
      while ((record = load_shared(claim.record)) == CLAIMED) {
      }
  }
  __syncwarp();
  return __shfl_sync(ALL, record, leader);
}

// Keys that have found both of their buckets full, by the places of their ids in the call.
struct Homeless {
  u32* count;
  u32* ids;
};

// Record numbers of a warp's keys, of one table. If it `inserts`, keys that are not there get one, and `is_new` says whose was not;
// those for which there is no room are listed. Warps that have nothing to insert do not wait for others.
__device__ __forceinline__ u32 find_or_insert(const Table& t, bool is_id, bool inserts, u64 key, u32 at, const Homeless& homeless, LaneList& list, bool& is_new) {
  const Index index = t.index;
  const u64 h = hash(index, key);
  u32 record = find(index, key, h, is_id, list);
  is_new = inserts && is_id && record == NO_RECORD;
  if (!inserts || !__any_sync(ALL, is_new)) return record;
  const u32 inserted = insert_missing(t, index, is_new, key, h, list);
  if (is_new) record = inserted;
  const bool is_homeless = is_new && record == NO_RECORD;
  const u32 place = take(homeless.count, is_homeless);
  if (is_homeless) homeless.ids[place] = at;
  return record;
}

// Finds room for a key that had none, in a launch of its own: a warp a key. Every lane gets the record; NO_RECORD if even the stash
// is full.
__device__ __forceinline__ u32 find_room(const Table& t, u64 key) {
  u32 record = NO_RECORD;
  bool is_new = false;
  const u64 h = hash(t.index, key);
  const u32 hint = movable(t.index, t.index.buckets + first_of(h, t.index.num_buckets), t.index.buckets + second_of(h, t.index.num_buckets));
  if (lane() == 0) {
    const Claim claim = settle(t.index, key, hint);
    is_new = claim.is_mine;
    if (is_new) store_shared(claim.record, record = number_of(t, atomicAdd(&t.index.counters->taken, 1)));
    else if (claim.record)
      while ((record = load_shared(claim.record)) == CLAIMED) {
      }
  }
  record = __shfl_sync(ALL, record, 0);
  if (__shfl_sync(ALL, is_new, 0)) {
    float4* at = t.records + (u64)record * t.stride;
    for (u32 quad = lane(); quad < t.stride; quad += WARP) store_once(at + quad, first_columns(t, key, quad));
  }
  return record;
}
