// The forward pass of a step: finds the records of all ids of a call, then writes their rows, pooled by bag.
#include "stage.cuh"
#include "step.cuh"

// A block has few warps, because warps that insert take longer than the others. A multiprocessor has many blocks, with fewer registers
// each, because they wait for memory.
constexpr u32 WARPS = FIND_THREADS / WARP;

// Counts the ids of a warp that have no record. If a commit may insert their keys, returns the sorted numbers of their candidates; otherwise 0.
// `at`: the place of the lane's id. `is_absent`: whether it has no record. This is called seldom: so it is a function of its own, which takes no
// registers from `find_records`.
__device__ __noinline__ u32 take_absent(
    const Table* tables, const Found& found, const Feature& f, u64 key, u32 at, bool is_absent, LaneList& list) {
  const Table& t = tables[f.table];
  const u32 count = __popc(__ballot_sync(ALL, is_absent));
  if (lane() == 0) {
    if (found.values && !(f.absent & ABSENT_LATER)) atomicAdd(&t.index.counters->dropped, (u64)count);
    if (f.absent & ABSENT_UNKNOWN) atomicAdd(&t.index.counters->unknown, (u64)count);
  }
  if (!(f.absent & ABSENT_LATER)) return NO_RECORD;
  bool is_new;
  const u32 candidate = find_or_insert(tables[t.candidates], is_absent, true, key, at, found.overflow, list, is_new);
  return candidate == NO_RECORD ? NO_RECORD : f.first_candidate + candidate;
}

// Finds the records of all ids of a call. Inserts keys without a record where the feature inserts. Also sets `found.zeros` to 0.
extern "C" __global__ void __launch_bounds__(FIND_THREADS, 20) find_records(
    const __grid_constant__ Call call, const __grid_constant__ Found found) {
  begin();
  __shared__ LaneList lists[WARPS];
  for (u32 k = blockIdx.x * FIND_THREADS + threadIdx.x; k < found.num_zeros; k += gridDim.x * FIND_THREADS) found.zeros[k] = 0;
  const u32 number = feature_at(call.first_find, call.num_features, blockIdx.x);
  const Feature& feature = call.features[number];
  const u32 first = (blockIdx.x - call.first_find[number]) * FIND_THREADS;
  // The host may not know how many ids there are.
  if (first >= feature.num_ids || feature.is_silent) return;
  const Table& t = call.tables[feature.table];
  const u32 i = first + threadIdx.x, at = feature.first_id + i;
  const bool is_id = i < feature.num_ids;
  const u64 key = is_id ? key_at(feature, i) : 0;
  bool is_wanted = is_id, is_new;
  if (feature.has_roles && is_id) {
    is_wanted = is_active(feature, t, key, i);
    if (feature.refuses && key > t.last_key && !(feature.has_padding && key == feature.padding_key))
      report(found.fault, OUTSIDE_VOCABULARY, number, feature.table, key);
  }
  LaneList& list = lists[threadIdx.x / WARP];
  const u32 record = find_or_insert(t, is_wanted, feature.inserts, key, at, found.overflow, list, is_new);
  const bool is_absent = is_wanted && record == NO_RECORD;
  u32 candidate = NO_RECORD;
  if (!feature.inserts && __any_sync(ALL, is_absent))
    candidate = take_absent(call.tables, found, feature, key, at, is_absent, list);
  if (!is_id) return;
  found.records[at] = record;
  if (found.numbers) found.numbers[at] = is_absent ? candidate : record;
  if (!found.values) return;
  // If splits are wrong, an id may be in no bag. Its coefficient then stays 0.
  const u32 name = number << call.shift | bag_of(feature, i);
  found.values[at] = found.named ? at : name;
  if (found.named) found.named[at] = {name, 0};
}

// Inserts the keys and the candidates for which `find_records` found no room.
extern "C" __global__ void __launch_bounds__(FIND_THREADS) settle_records(
    const __grid_constant__ Call call, const __grid_constant__ Found found) {
  begin();
  const LaneGroup<MOVERS> group;
  if (group.number == group.PER_WARP) return;
  const u32 n = *found.overflow.count, warp = blockIdx.x * WARPS + threadIdx.x / WARP;
  for (u32 k = warp * group.PER_WARP + group.number; k < n; k += gridDim.x * WARPS * group.PER_WARP) {
    const u32 at = found.overflow.ids[k];
    u32 number = 0;
    for (u32 start = 0; start < call.num_features; start += MOVERS) {
      const u32 f = start + group.at;
      const u32 has_it = group.ballot(f < call.num_features && at - call.features[f].first_id < call.features[f].num_ids);
      if (has_it) number = start + __ffs(has_it) - 1;
    }
    const Feature& feature = call.features[number];
    const Table& t = call.tables[feature.table];
    const u64 key = key_at(feature, at - feature.first_id);
    const u32 record = find_room(feature.inserts ? t : call.tables[t.candidates], group, key);
    if (!group.leads()) continue;
    if (record == NO_RECORD) report(found.fault, NO_PLACE, number, feature.table, key);
    else if (feature.inserts) found.records[at] = record;
    if (found.numbers) found.numbers[at] = record == NO_RECORD || feature.inserts ? record : feature.first_candidate + record;
  }
}

// Finds the records of the out-of-vocabulary keys of all tables, which `make_rows` and `weight_gradients` read. A search in `make_rows`
// itself would cost it registers, so that fewer blocks would share a multiprocessor.
extern "C" __global__ void __launch_bounds__(FIND_THREADS) find_out_of_vocabulary(const Table* tables, u32 num_tables) {
  begin();
  const u32 table = blockIdx.x * FIND_THREADS + threadIdx.x;
  if (table >= num_tables || !tables[table].has_out_of_vocabulary_key) return;
  const Index& index = tables[table].index;
  index.counters->out_of_vocabulary = find_alone(index, tables[table].out_of_vocabulary_key);
}

// The pipeline of rows in shared memory. In each turn, a lane starts to load four columns of ROWS rows. It starts the loads of the next
// turn before it reads the columns of this one.
template <u32 ROWS> using RowStage = Stage<ROWS, ROWS_THREADS>;
// ROWS for rows that are copied, and for rows that are summed.
constexpr u32 GATHERED = 4, POOLED = 2;

// Writes the rows of ids without a record, where each id is a bag. `missing`: mask of the warp's bags, from bag `first` on. A group of
// lanes writes a row. This is a function of its own, because otherwise `gather` would reserve registers for it.
template <u32 ROW> __device__ __noinline__ void write_missing(const Table& t, const Feature& f, u32 first, u32 missing) {
  constexpr u32 LANES = lanes_of(ROW), GROUPS = WARP / LANES;
  for (u32 k = 0; k < lane() / LANES; ++k) missing &= missing - 1;
  while (missing) {
    const u32 bag = first + __ffs(missing) - 1;
    const u64 key = key_at(f, bag);
    const bool is_padding = f.has_padding && key == f.padding_key;
    for (u32 quad = lane() % LANES; quad < quads_of(ROW); quad += LANES)
      store_columns<ROW>(f.rows, bag, quad, is_padding ? make_float4(0, 0, 0, 0) : missing_columns(t, key, quad));
    for (u32 k = 0; k < GROUPS; ++k) missing &= missing - 1;
  }
}

// Copies the rows of bags of one id each. A warp copies as many bags as it has lanes.
template <u32 ROW, u32 PLACES>
__device__ __forceinline__ void gather(
    const Table& t, const Feature& f, const Rows& rows, const RowStage<PLACES>& stage, u32 block) {
  constexpr u32 ROWS = PLACES * quads_of_place(ROW);
  constexpr u32 QUADS = quads_of(ROW), LANES = lanes_of(ROW), GROUPS = WARP / LANES;
  // A row takes PIECES turns, because a group of lanes copies 4 * LANES columns in a turn. All bags of the warp take TURNS turns.
  constexpr u32 PIECES = (QUADS + LANES - 1) / LANES, TURNS = (WARP + GROUPS * ROWS - 1) / (GROUPS * ROWS) * PIECES;
  const u32 group = lane() / LANES, column = lane() % LANES;
  const u32 first = block * ROWS_THREADS + threadIdx.x / WARP * WARP, bag = first + lane();
  // The host may not know how many bags there are.
  if (block * ROWS_THREADS >= f.num_bags) return;
  const bool is_bag = bag < f.num_bags;
  const u32 record = is_bag ? rows.records[f.first_id + bag] : 0;
  if (is_bag && rows.named) rows.named[f.first_id + bag].coefficient = f.scale;
  const u32 missing = __ballot_sync(ALL, is_bag && record == 0);
  const auto each = [&](u32 turn, const auto& with) {
    const u32 start = turn / PIECES * GROUPS * ROWS, quad = turn % PIECES * LANES + column;
#pragma unroll
    for (u32 k = 0; k < ROWS; ++k) {
      const u32 at = start + k * GROUPS + group, r = __shfl_sync(ALL, record, at % WARP);
      if (r && at < WARP && quad < QUADS) with(k, at, quad, r);
    }
  };
  const auto start = [&](u32 turn) {
    each(turn, [&](u32 k, u32, u32 quad, u32 r) { start_quad<ROW>(stage, turn, k, f.records + (u64)r * f.stride, quad); });
  };
  start(0);
  stage.end();
#pragma unroll 4
  for (u32 turn = 0; turn < TURNS; ++turn) {
    if (turn + 1 < TURNS) start(turn + 1);
    stage.end();
    stage.wait();
    each(turn, [&](u32 k, u32 at, u32 quad, u32) { store_columns<ROW>(f.rows, first + at, quad, quad_of<ROW>(stage, turn, k)); });
  }
  if (missing) write_missing<ROW>(t, f, first, missing);
}

// Keeps what the backward pass needs of a bag's ids: their coefficients and, for gradients of weights, their keys, weights and records and
// the splits. `scale`: the factor of the bag's sum.
template <u32 LANES>
__device__ __noinline__ void keep_bag(const Feature& f, const Rows& rows, u32 bag, u32 begin, u32 end, float scale) {
  const u32 column = threadIdx.x % LANES;
  for (u32 i = begin + column; i < end; i += LANES) {
    const float weight = f.weights ? f.weights[i] : 1.0f;
    const u32 at = f.first_id + i;
    rows.named[at].coefficient = weight * scale;
    if (!f.weights) continue;
    const u64 key = key_at(f, i);
    const u32 record = rows.records[at];
    rows.kept.keys[at] = key, rows.kept.weights[at] = weight;
    rows.kept.records[at] = record == NO_RECORD && f.has_padding && key == f.padding_key ? PADDING : record;
  }
  if (!f.weights || !f.splits || column != 0) return;
  rows.kept.splits[f.first_split + bag] = begin;
  if (bag + 1 == f.num_bags) rows.kept.splits[f.first_split + bag + 1] = end;
}

// Returns four times -0, to which any number can be added without a change, also a zero of either sign.
__device__ __forceinline__ float4 nothing() { return make_float4(-0.0f, -0.0f, -0.0f, -0.0f); }

__device__ __forceinline__ void add(float4& sum, const float4& row, float weight) {
  sum.x += row.x * weight, sum.y += row.y * weight, sum.z += row.z * weight, sum.w += row.w * weight;
}

// Stores four columns of a bag's sum, multiplied by `scale`. An empty bag has a row of zeros.
template <u32 ROW>
__device__ __forceinline__ void store_sum(const Feature& f, u32 bag, u32 quad, float4 sum, bool is_empty, float scale) {
  if (is_empty) sum = make_float4(0, 0, 0, 0);
  else if (scale != 1.0f) sum.x *= scale, sum.y *= scale, sum.z *= scale, sum.w *= scale;
  store_columns<ROW>(f.rows, bag, quad, sum);
}

// Pools the rows of a bag, with a group of lanes. ROLES: ids may have weights, or no record. This takes twice the registers.
template <u32 ROW, u32 ROWS, bool ROLES>
__device__ __forceinline__ void pool(
    const Table& t, const Feature& f, const Rows& rows, const RowStage<ROWS>& stage, u32 bag, u32 begin, u32 end) {
  constexpr u32 QUADS = quads_of(ROW), LANES = lanes_of(ROW);
  const u32 column = threadIdx.x % LANES, count = end - begin;
  const u32* records = rows.records + f.first_id + begin;
  float scale = 1;
  if (!ROLES) scale = f.splits ? scale_of(f, (float)count, (float)count) : f.scale;
#pragma unroll 1
  for (u32 piece = 0; piece < QUADS; piece += LANES) {
    // A lane without columns of its own adds up the weights like the others.
    const u32 quad = min(piece + column, QUADS - 1);
    float4 sum = nothing();
    float total = 0, squares = 0, weights[ROWS];
    u32 next[ROWS];
    bool is_empty = true;
#pragma unroll
    for (u32 k = 0; k < ROWS; ++k) next[k] = k < count ? records[k] : NO_RECORD;
    const auto start = [&](u32 turn, float (&weights)[ROWS]) {
#pragma unroll
      for (u32 k = 0; k < ROWS; ++k) {
        const u32 at = turn * ROWS + k;
        if (at >= count) continue;
        if (ROLES) weights[k] = f.weights ? f.weights[begin + at] : 1.0f;
        // Without ROLES, an id has no record only if there was no room for its key, which the host will report. Record 0 has memory.
        if (!ROLES || next[k]) {
          start_quad<ROW>(stage, turn, k, f.records + (u64)next[k] * f.stride, quad);
        } else if (weights[k] != 0) {
          const u64 key = key_at(f, begin + at);
          // Padding is treated like an id of weight 0, which does not count.
          if (f.has_padding && key == f.padding_key) weights[k] = 0;
          else put_quad<ROW>(stage, turn, k, missing_columns(t, key, quad));
        }
      }
      stage.end();
#pragma unroll
      for (u32 k = 0; k < ROWS; ++k)
        if ((turn + 1) * ROWS + k < count) next[k] = records[(turn + 1) * ROWS + k];
    };
    float next_weights[ROWS];
    start(0, next_weights);
    for (u32 turn = 0; turn * ROWS < count; ++turn) {
#pragma unroll
      for (u32 k = 0; k < ROWS; ++k) weights[k] = next_weights[k];
      start(turn + 1, next_weights);
      stage.wait();
#pragma unroll
      for (u32 k = 0; k < ROWS; ++k) {
        if (turn * ROWS + k >= count) break;
        if (ROLES && weights[k] == 0) continue;
        if (ROLES) total += weights[k], squares += weights[k] * weights[k];
        add(sum, quad_of<ROW>(stage, turn, k), ROLES ? weights[k] : 1.0f);
        is_empty = false;
      }
    }
    if (ROLES) scale = scale_of(f, total, squares);
    if (piece + column < QUADS) store_sum<ROW>(f, bag, quad, sum, is_empty, scale);
  }
  if (rows.named) keep_bag<LANES>(f, rows, bag, begin, end, scale);
}

// Pools the rows of the bags of a block.
template <u32 ROW, u32 ROWS, bool ROLES>
__device__ __forceinline__ void combine(
    const Table& t, const Feature& f, const Rows& rows, const RowStage<ROWS>& stage, u32 number, u32 block) {
  constexpr u32 LANES = lanes_of(ROW);
  const u32 bag = block * (ROWS_THREADS / LANES) + threadIdx.x / LANES;
  if (bag >= f.num_bags) return;
  if (f.splits && threadIdx.x % LANES == 0) check_split(f, rows.fault, number, bag);
  const u32 begin = f.splits ? split_at(f, bag) : bag * f.hotness;
  const u32 end = max(begin, f.splits ? split_at(f, bag + 1) : begin + f.hotness);
  pool<ROW, ROWS, ROLES>(t, f, rows, stage, bag, begin, end);
}

// Writes the rows, (bags, dim), of all features whose kind is among `kinds`, with the rows ROW. A sum waits for each
// of its rows, so more blocks of SUMMED share a multiprocessor.
template <u32 BAGS, u32... ROW>
__global__ void __launch_bounds__(ROWS_THREADS, BAGS == EACH     ? 6
                                                : BAGS == SUMMED ? 8
                                                                 : 4)
make_rows(const __grid_constant__ Call call, const __grid_constant__ Rows rows, const Kinds kinds) {
  begin();
  typedef RowStage<BAGS == EACH ? GATHERED : POOLED> StageType;
  __shared__ typename StageType::Memory memory;
  const StageType stage{memory};
  const u32 number = feature_at(call.first_rows, call.num_features, blockIdx.x);
  const Feature& f = call.features[number];
  // Of a replicated table a rank writes its own rows alone.
  if (!f.rows || (kinds.has_others && f.kind - kinds.first >= sizeof...(ROW))) return;
  const Table& t = call.tables[f.table];
  const u32 block = blockIdx.x - call.first_rows[number];
  with_row<ROW...>(f.kind - kinds.first, [&](auto row) {
    constexpr u32 R = decltype(row)::value;
    if (BAGS == EACH || f.is_gather) gather<R>(t, f, rows, stage, block);
    else if constexpr (BAGS != EACH) combine<R, POOLED, BAGS == ANY>(t, f, rows, stage, number, block);
  });
}
