// Records: a row and its optimizer states, side by side. A record is found by its number. It is written whole when its key is inserted.
#pragma once
#include "index.cuh"
#include "rows.cuh"

// Returns the number of lanes that share a row of `quads` groups of four columns: a power of two, at most a warp.
__host__ __device__ constexpr u32 lanes_for(u32 quads) {
  u32 lanes = 1;
  while (lanes < quads && lanes < WARP) lanes *= 2;
  return lanes;
}
__host__ __device__ constexpr u32 lanes_of(u32 row) { return lanes_for(quads_of(row)); }

template <u32 N> struct Row {
  static constexpr u32 value = N;
};
// Calls `body` with the row of a kind. Tables with the same rows and the same optimizer are of one kind.
template <u32 FIRST, u32... OTHERS, class Body> __device__ __forceinline__ void with_row(u32 kind, const Body& body) {
  if constexpr (sizeof...(OTHERS) == 0) {
    body(Row<FIRST>());
  } else {
    if (kind == 0) body(Row<FIRST>());
    else with_row<OTHERS...>(kind - 1, body);
  }
}

// Returns the record number that is given out as number `taken`: first come those in the ring, then those from `fresh` on.
__device__ __forceinline__ u32 number_of(const Table& t, const Released& released, u64 taken) {
  const u64 i = taken - released.base;
  return i < released.count ? t.released[released.first + i & t.ring_mask] : (u32)(released.fresh + (i - released.count));
}

// Returns a number above all record numbers that were ever given out.
__device__ __forceinline__ u32 num_numbers(const Counters* counters) {
  const u64 given = counters->taken - counters->released.base, of_ring = counters->released.count;
  return (u32)(counters->released.fresh + (given > of_ring ? given - of_ring : 0));
}

// Returns the counts of a table for a report.
__device__ __forceinline__ TableCounts counts_of(const Counters* c) {
  return {c->taken, c->gone, c->evicted, c->expired, c->unlisted, c->released, c->distinct, c->dropped, c->unknown, c->filtered};
}

// Returns consecutive numbers, from `count` on, to the lanes for which `is_in` is true. One atomic addition per warp.
template <class T> __device__ __forceinline__ T take(T* count, bool is_in) {
  const u32 all = __ballot_sync(ALL, is_in);
  T first = 0;
  if (all && lane() == 0) first = atomicAdd(count, (T)__popc(all));
  return __shfl_sync(ALL, first, 0) + __popc(all & lanes_below());
}

// Writes a part of a new record: four columns, initial values of the row or of a state. First come the parts of the row. The key of a row that
// is rounded by chance is written with the first one.
__device__ __forceinline__ void write_part(const Table& t, float4* record, u64 key, u32 part) {
  if (t.row_type == CANDIDATE) {
    ((ulonglong2*)record)[part] = make_ulonglong2(part == 0 ? 0 : key, 0);
    return;
  }
  if (part >= t.quads) {
    const float x = part < 2 * t.quads ? t.first_state : 0;
    store_once(record + t.states + (part - t.quads), make_float4(x, x, x, x));
    return;
  }
  const float4 x = first_values(t.initializer, key, part);
  if (t.row_type == FLOAT32) {
    store_once(record + part, x);
    return;
  }
  __stcs((uint2*)record + part, narrow(t.row_type, x));
  const u32 units = (t.quads + 1) / 2;
  if (part + 1 == t.quads && t.quads % 2) ((uint2*)record)[t.quads] = make_uint2(0, 0);
  if (part == 0 && units < t.states) *(ulonglong2*)(record + units) = make_ulonglong2(key, 0);
}

// Returns a candidate by its number.
__device__ __forceinline__ Candidate* candidate_at(const Table& candidates, u32 number) {
  return (Candidate*)(candidates.records + (u64)number * candidates.stride);
}

// Returns the number of parts of a record.
__device__ __forceinline__ u32 parts_of(const Table& t) { return t.quads + (t.stride - t.states); }

// Returns four columns of the row of a record.
__device__ __forceinline__ float4 row_columns(const Table& t, u32 record, u32 quad) {
  const float4* at = t.records + (u64)record * t.stride;
  return t.row_type == FLOAT32 ? at[quad] : widen(t.row_type, ((const uint2*)at)[quad]);
}

// Returns four columns of the row of a key without a record: of the row that all such keys have, initial values or zeros, as the
// table's configuration says. Keys outside the vocabulary get zeros. `out_of_vocabulary`: record of the out-of-vocabulary key, or
// NO_RECORD.
__device__ __forceinline__ float4 missing_columns(const Table& t, u64 key, u32 quad, u32 out_of_vocabulary) {
  if (key > t.last_key) return make_float4(0, 0, 0, 0);
  if (t.has_out_of_vocabulary_key) {
    if (t.out_of_vocabulary_row) return t.out_of_vocabulary_row[quad];
    if (out_of_vocabulary != NO_RECORD) return row_columns(t, out_of_vocabulary, quad);
    key = t.out_of_vocabulary_key;
  } else if (t.missing != INITIAL) {
    return make_float4(0, 0, 0, 0);
  }
  return rounded(t.row_type, first_values(t.initializer, key, quad));
}

// Writes the initial values of the new records of a warp. `is_new`: whether this lane has a new record.
__device__ __forceinline__ void write_first(const Table& t, bool is_new, u64 key, u32 record, LaneList& list) {
  const u32 parts = parts_of(t), lanes = min(lanes_for(parts), WARP), groups = WARP / lanes;
  const u32 n = list.take(is_new), group = lane() / lanes, column = lane() % lanes;
  for (u32 start = 0; start < n; start += groups) {
    const bool is_one = start + group < n;
    const u32 from = is_one ? list.lanes[start + group] : 0;
    const u64 k = __shfl_sync(ALL, key, from);
    float4* at = t.records + (u64)__shfl_sync(ALL, record, from) * t.stride;
    if (!is_one) continue;
    for (u32 part = column; part < parts; part += lanes) write_part(t, at, k, part);
  }
}

// The commit of a record without a row.
constexpr u64 NO_ROW = ~0ull;
// The same, if the row has expired at the end of this step, and the ring of released numbers had no room for it. No commit has a larger number.
constexpr u64 UNLISTED = 1ull << 63;
__device__ __forceinline__ u64 unlisted_at(u64 step) { return UNLISTED | min(step, UNLISTED - 2); }
__device__ __forceinline__ bool is_unlisted(u64 commit) { return commit >= UNLISTED && commit != NO_ROW; }

// Returns whether a record has no row, if a policy of the table removes rows.
__device__ __forceinline__ bool is_vacant(const Table& t, u32 record) { return t.vacant[record / WARP] >> record % WARP & 1; }

// Notes that a record has no row any more. `vacant` and `commits`: of its table.
__device__ __forceinline__ void vacate(u32* vacant, u64* commits, u32 record, u64 commit = NO_ROW) {
  atomicOr(vacant + record / WARP, 1u << record % WARP);
  if (commits) commits[record] = commit;
}

// Notes that the rank of a row may be lower than it was. `floor_scores`: of its table, or null.
__device__ __forceinline__ void lower_floor(u64* floor_scores, u32 record) {
  if (floor_scores) floor_scores[record / FLOOR_RECORDS] = 0;
}

// Notes that the row of a record changes, or its use.
__device__ __forceinline__ void note_change(const Table& t, u32 record) {
  if (!t.changes) return;
  u32* word = t.changes + record;
  if (*word >> 1 != t.epoch) *word = t.epoch << 1;
}

// Starts what a table has beside a new record: when its row was made, and its score.
__device__ __forceinline__ void start_record(const Table& t, u64 key, u32 record) {
  if (t.changes) t.changes[record] = t.epoch << 1 | 1;
  if (t.taken) t.taken[record] = *t.now;
  if (!t.scores) return;
  atomicAnd(t.vacant + record / WARP, ~(1u << record % WARP));
  t.scores[record] = t.scoring == STEPS ? t.progress->step : 0;
  lower_floor(t.floor_scores, record);
  if (t.commits) t.commits[record] = t.progress->settled_commit;
  t.keys[record] = key;
}

// Adds ids to a number of ids, which stays at its maximum. Wherever an addition passes it, the maximum is written after that.
__device__ __forceinline__ void add_ids(u64* score, u64 ids) {
  if (atomicAdd(score, ids) + ids < ids) atomicExch(score, ~0ull);
}

// Counts a use of a record by a number of ids, if a policy of the table removes rows.
__device__ __forceinline__ void count_use(const Table& t, u32 record, u64 step, u32 ids) {
  if (t.scoring == STEPS) t.scores[record] = step;
  else if (t.scoring == COUNTED_IDS) add_ids(t.scores + record, ids);
}

// Inserts the keys that the warp's find has missed, and writes the initial values of their records. All lanes of a warp must call
// this. Returns the record number of the lane's key if it was missing, or NO_RECORD if both buckets of the key are full.
__device__ __forceinline__ u32 insert_missing(const Table& t, const Index& index, bool is_missing, u64 key, u64 h, LaneList& list) {
  // One lane leads for each distinct key of the warp.
  u32 leader = lane();
  const u32 missing = __ballot_sync(ALL, is_missing);
  if (is_missing) leader = __ffs(__match_any_sync(missing, key)) - 1;
  const bool leads = is_missing && leader == lane();
  // Loaded before the claim, so that the number of a new record does not wait for it.
  const Released released = t.index.counters->released;
  Claim claim = {nullptr, false};
  if (leads) claim = claim_key(index, key, h);
  __syncwarp();
  const bool is_new = claim.is_mine;
  const u64 taken = take(&t.index.counters->taken, is_new);
  u32 record = NO_RECORD;
  if (is_new) {
    store_shared(claim.record, record = number_of(t, released, taken));
    start_record(t, key, record);
  }
  write_first(t, is_new, key, record, list);
  // The warp has already written all record numbers of its own claims. A warp that waits here therefore never waits for a warp that
  // waits for it.
  if (leads && !is_new) {
    record = NO_RECORD;
    if (claim.record)
      while ((record = load_shared(claim.record)) == CLAIMED) {}
  }
  __syncwarp();
  return __shfl_sync(ALL, record, leader);
}

// Returns the record numbers of a warp's keys, all of one table. With `inserts`, a key without a record gets one, and `is_new` says
// whether the lane's find has missed its key. If both buckets of a key are full, `at` (the place of its id) is added to `overflow`. A
// warp that inserts nothing does not wait for other warps.
__device__ __forceinline__ u32 find_or_insert(
    const Table& t, bool is_id, bool inserts, u64 key, u32 at, const Overflow& overflow, LaneList& list, bool& is_new) {
  const Index index = t.index;
  const u64 h = hash(index, key);
  u32 record = find(index, key, h, is_id, list);
  is_new = inserts && is_id && record == NO_RECORD;
  if (!inserts || !__any_sync(ALL, is_new)) return record;
  const u32 inserted = insert_missing(t, index, is_new, key, h, list);
  if (is_new) record = inserted;
  const bool is_overflow = is_new && record == NO_RECORD;
  const u32 place = take(overflow.count, is_overflow);
  if (is_overflow) overflow.ids[place] = at;
  return record;
}

// Inserts a key whose buckets were both full, in a launch of its own. A group of lanes has one key. Returns the record number to all of them,
// or NO_RECORD if even the stash is full.
template <u32 N> __device__ __forceinline__ u32 find_room(const Table& t, const LaneGroup<N>& group, u64 key) {
  u32 record = NO_RECORD;
  bool is_new = false;
  const Index& index = t.index;
  const u64 h = hash(index, key);
  const u32 hint =
      movable(index, group, index.buckets + first_of(h, index.num_buckets), index.buckets + second_of(h, index.num_buckets));
  if (group.leads()) {
    const Claim claim = settle(index, key, hint);
    is_new = claim.is_mine;
    if (is_new) {
      store_shared(claim.record, record = number_of(t, index.counters->released, atomicAdd(&index.counters->taken, 1ull)));
      start_record(t, key, record);
    } else if (claim.record)
      while ((record = load_shared(claim.record)) == CLAIMED) {}
  }
  record = group.from_first(record);
  if (group.from_first(is_new)) {
    float4* at = t.records + (u64)record * t.stride;
    for (u32 part = group.at; part < parts_of(t); part += N) write_part(t, at, key, part);
  }
  return record;
}
