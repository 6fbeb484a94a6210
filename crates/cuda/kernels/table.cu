// Kernels of operations on one table: they take keys and return record numbers or rows.
#include "records.cuh"

constexpr u32 WARPS = TABLE_THREADS / WARP;
// A block that inserts has few warps (FIND_THREADS), because warps that insert take longer than the others. A multiprocessor has many
// blocks, with fewer registers each, because they wait for memory.

// Makes all slots of an index empty.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) clear_index(Index index) {
  begin();
  const u32 at = blockIdx.x * TABLE_THREADS + threadIdx.x;
  if (at >= index.num_buckets) return;
  Bucket bucket = {};
  for (u32 i = 0; i < SLOTS; ++i) bucket.keys[i] = empty_key(index, at);
  index.buckets[at] = bucket;
}

// Makes the step in progress the score of a record, if the table's scores are steps.
__device__ __forceinline__ void score_use(const Table& t, u32 record) {
  if (!t.scores || t.scoring != STEPS || record == NO_RECORD) return;
  t.scores[record] = t.progress->step;
}

// Finds the record numbers of keys. With `inserts`, a key without a record gets one, whose number is returned with the NEW bit. With `scores`,
// `score_use` is called for each record.
extern "C" __global__ void __launch_bounds__(FIND_THREADS, 16) look_up(
    Table t, const u64* __restrict__ keys, u32* __restrict__ records, u32 n, u32 inserts, u32 scores, Overflow overflow) {
  begin();
  __shared__ LaneList lists[FIND_THREADS / WARP];
  const u32 i = blockIdx.x * FIND_THREADS + threadIdx.x;
  bool is_new;
  const u32 record =
      find_or_insert(t, i < n, inserts, i < n ? load_once(keys + i) : 0, i, overflow, lists[threadIdx.x / WARP], is_new);
  if (i >= n) return;
  records[i] = is_new ? record | NEW : record;
  if (scores) score_use(t, record);
}

// Inserts the keys for which `look_up` found no room. Returns NEW alone for a key that finds no room even so.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS, 4) settle_keys(
    Table t, const u64* keys, u32* records, u32 scores, Overflow overflow) {
  begin();
  const LaneGroup<MOVERS> group;
  if (group.number == group.PER_WARP) return;
  const u32 n = *overflow.count, warp = blockIdx.x * WARPS + threadIdx.x / WARP;
  for (u32 k = warp * group.PER_WARP + group.number; k < n; k += gridDim.x * WARPS * group.PER_WARP) {
    const u32 at = overflow.ids[k], record = find_room(t, group, keys[at]);
    if (!group.leads()) continue;
    records[at] = record | NEW;
    if (scores) score_use(t, record);
  }
}

// Copies the row of each lane's record to row `first` + lane of `out`, for the lanes that are `wanted`. Each group of lanes has ROWS rows
// in flight.
template <u32 ROW, u32 ROWS>
__device__ __forceinline__ void copy_rows(const Table& t, bool wanted, u32 record, u32 first, float* out, LaneList& list) {
  constexpr u32 QUADS = quads_of(ROW), LANES = lanes_of(ROW), GROUPS = WARP / LANES;
  const u32 n = list.take(wanted), group = lane() / LANES, column = lane() % LANES;
#pragma unroll 1
  for (u32 start = 0; start < n; start += GROUPS * ROWS) {
    const float4* from[ROWS];
    u32 to[ROWS];
#pragma unroll
    for (u32 k = 0; k < ROWS; ++k) {
      const u32 at = start + k * GROUPS + group;
      to[k] = at < n ? list.lanes[at] : ALL;
      const u32 r = __shfl_sync(ALL, record, to[k] % WARP);
      from[k] = t.records + (u64)r * t.stride;
    }
#pragma unroll 1
    for (u32 quad = column; quad < QUADS; quad += LANES) {
      float4 row[ROWS];
#pragma unroll
      for (u32 k = 0; k < ROWS; ++k)
        if (to[k] != ALL) row[k] = type_of(ROW) == FLOAT32 ? load_row(from[k] + quad) : load_quad<ROW>(from[k], quad);
#pragma unroll
      for (u32 k = 0; k < ROWS; ++k)
        if (to[k] != ALL) store_columns<ROW>(out, first + to[k], quad, row[k]);
    }
  }
}

// Finds keys and copies their rows. Rows of keys without a record are not written. `found`: takes the record numbers.
template <u32 ROW, u32 ROWS>
__global__ void __launch_bounds__(TABLE_THREADS) find_rows(
    Table t, const u64* __restrict__ keys, float* __restrict__ out, u32* __restrict__ found, u32 n) {
  begin();
  __shared__ LaneList lists[WARPS];
  const u32 i = blockIdx.x * TABLE_THREADS + threadIdx.x;
  const u64 key = i < n ? load_once(keys + i) : 0;
  LaneList& list = lists[threadIdx.x / WARP];
  const u32 record = find(t.index, key, hash(t.index, key), i < n, list);
  if (i < n) found[i] = record;
  copy_rows<ROW, ROWS>(t, record != NO_RECORD, record, i - lane(), out, list);
}

// Copies the rows of records. Rows of keys without a record are not written; with `skips`, neither are rows of new records.
template <u32 ROW, u32 ROWS>
__global__ void __launch_bounds__(TABLE_THREADS) gather_rows(Table t, const u32* records, float* out, u32 n, u32 skips) {
  begin();
  __shared__ LaneList lists[WARPS];
  const u32 i = blockIdx.x * TABLE_THREADS + threadIdx.x;
  const u32 record = i < n ? records[i] : NO_RECORD;
  copy_rows<ROW, ROWS>(
      t, (record & ~NEW) != NO_RECORD && !(skips && record & NEW), record & ~NEW, i - lane(), out, lists[threadIdx.x / WARP]);
}

// Writes the rows of keys without a record, which have 0 in `records`.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) fill_missing(const __grid_constant__ Table t,
    const u64* __restrict__ keys, const u32* __restrict__ records, float* __restrict__ out, u32 n, u32 dim) {
  begin();
  for (u64 at = (u64)blockIdx.x * TABLE_THREADS + threadIdx.x; at < (u64)n * t.quads; at += (u64)gridDim.x * TABLE_THREADS) {
    const u32 i = (u32)(at / t.quads), quad = (u32)(at % t.quads);
    if (records[i] & ~NEW) continue;
    const u32 out_of_vocabulary = t.has_out_of_vocabulary_key ? find_alone(t.index, t.out_of_vocabulary_key) : NO_RECORD;
    const float4 x = missing_columns(t, keys[i], quad, out_of_vocabulary);
    for (u32 c = 4 * quad; c < min(4 * quad + 4, dim); ++c) out[(u64)i * dim + c] = ((const float*)&x)[c - 4 * quad];
  }
}

// ---- whole records; on the host's side they are dense, row and states one after the other

// Returns the address of a column of float32. `column`: of the dense record.
__device__ __forceinline__ float* column_at(const Table& t, const DeviceFields& fields, u32 record, u32 column) {
  u32 p = 0;
  while (p + 1 < fields.count && column >= fields.fields[p + 1].column) ++p;
  return (float*)(t.records + (u64)record * t.stride + fields.fields[p].unit) + (column - fields.fields[p].column);
}

// Returns the address of a column of a row of 16 bits; null for other columns.
__device__ __forceinline__ unsigned short* narrow_column_at(const Table& t, const DeviceFields& fields, u32 record, u32 column) {
  if (t.row_type == FLOAT32 || column >= fields.fields[0].width) return nullptr;
  return (unsigned short*)(t.records + (u64)record * t.stride) + column;
}

// Copies whole records to `values`, (n, fields.width).
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) read_records(const __grid_constant__ Table t,
    const __grid_constant__ DeviceFields fields, const u32* __restrict__ records, float* __restrict__ values, u32 n) {
  begin();
  for (u64 at = (u64)blockIdx.x * TABLE_THREADS + threadIdx.x; at < (u64)n * fields.width; at += (u64)gridDim.x * TABLE_THREADS) {
    const u32 record = records[at / fields.width], column = (u32)(at % fields.width);
    const unsigned short* narrow = narrow_column_at(t, fields, record, column);
    values[at] = narrow ? widen(t.row_type, make_uint2(*narrow, 0)).x : *column_at(t, fields, record, column);
  }
}

// Writes whole records, their rows rounded to the nearest. `records`: distinct numbers. `rows`: by record, its row of `values`.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) write_records(const __grid_constant__ Table t,
    const __grid_constant__ DeviceFields fields, const u32* __restrict__ records, const u32* __restrict__ rows,
    const float* __restrict__ values, u32 n) {
  begin();
  for (u64 at = (u64)blockIdx.x * TABLE_THREADS + threadIdx.x; at < (u64)n * fields.width; at += (u64)gridDim.x * TABLE_THREADS) {
    const u32 i = (u32)(at / fields.width), column = (u32)(at % fields.width);
    const float x = values[(u64)rows[i] * fields.width + column];
    if (unsigned short* to = narrow_column_at(t, fields, records[i], column))
      *to = (unsigned short)narrow(t.row_type, make_float4(x, 0, 0, 0)).x;
    else *column_at(t, fields, records[i], column) = x;
  }
}

// Copies records to a layout with other states. Rows are kept. States get their initial values.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) lay_out(Table from, Table to, u32 n) {
  begin();
  // Record 0 belongs to no key.
  const u64 first = to.stride + (u64)blockIdx.x * TABLE_THREADS + threadIdx.x;
  for (u64 at = first; at < (u64)n * to.stride; at += (u64)gridDim.x * TABLE_THREADS) {
    const u64 record = at / to.stride;
    const u32 unit = (u32)(at % to.stride);
    const float x = unit < to.states + to.quads ? to.first_state : 0;
    to.records[at] = unit < to.states ? from.records[record * from.stride + unit] : make_float4(x, x, x, x);
  }
}

// ---- entries of the index

// Erases keys. `erased`: takes what `erase_key` returns.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) erase_keys(
    const __grid_constant__ Table t, const u64* __restrict__ keys, u32* __restrict__ erased, u32 n) {
  begin();
  const u32 i = blockIdx.x * TABLE_THREADS + threadIdx.x;
  if (i >= n) return;
  erased[i] = erase_key(t.index, keys[i]);
  if (t.scores && erased[i] != NO_RECORD) vacate(t.vacant, t.commits, erased[i]);
}

// Inserts an entry into an index. All keys are different, so no lock is needed. An entry without room goes to `overflow`.
__device__ __forceinline__ void move_entry(const Index& to, u64 key, u32 record, const Moving& overflow) {
  const u64 h = hash(to, key);
  Bucket* first = to.buckets + first_of(h, to.num_buckets);
  Bucket* second = to.buckets + second_of(h, to.num_buckets);
  u32 word = 0;
  if (u32* at = put(first, second, h, key, free_slots(load_line(first)), word)) {
    store_shared(at, record);
    if (word) atomicOr(&first->word, word);
    return;
  }
  const u32 at = atomicAdd(overflow.count, 1);
  if (at < overflow.room) overflow.keys[at] = key, overflow.records[at] = record;
}

// Moves all entries of an index into a larger one.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) move_entries(Index from, Index to, Moving overflow) {
  begin();
  const u32 at = blockIdx.x * TABLE_THREADS + threadIdx.x;
  if (at < from.num_buckets) {
    const Line line = load_line(from.buckets + at);
#pragma unroll
    for (u32 i = 0; i < SLOTS; ++i)
      if (line.records[i] != NO_RECORD) move_entry(to, line.keys[i], line.records[i], overflow);
  } else if (at - from.num_buckets < min(from.counters->stashed, STASH)) {
    const u32 i = at - from.num_buckets;
    if (from.stash->records[i] != NO_RECORD) move_entry(to, from.stash->keys[i], from.stash->records[i], overflow);
  }
}

// Inserts the entries for which `move_entries` found no room: moves others away.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) settle_entries(Index to, Moving overflow) {
  begin();
  const u32 n = min(*overflow.count, overflow.room);
  for (u32 k = blockIdx.x * WARPS + threadIdx.x / WARP; k < n; k += gridDim.x * WARPS) {
    if (lane() != 0) continue;
    const Claim claim = settle(to, overflow.keys[k], ALL);
    if (claim.record) store_shared(claim.record, overflow.records[k]);
  }
}
