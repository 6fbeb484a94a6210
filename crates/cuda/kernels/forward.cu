// The forward of a step: records of all ids of a call, then their rows, pooled.
#include "stage.cuh"
#include "step.cuh"

// Few warps a block: those that insert take longer than the others. Many blocks a multiprocessor, in fewer registers: they wait for memory.
constexpr u32 BLOCK = 64, WARPS = BLOCK / WARP;

// Where the ids of a call are told apart.
struct Found {
  // By id: its record, NO_RECORD if none is to learn from it; what is sorted beside it: the name of its gradient row, or its place if
  // coefficients differ from id to id.
  u32 *records, *values;
  // By place, if coefficients differ: the name of its gradient row.
  u32* names;
  // Words to be set to 0 meanwhile.
  u32* zeros;
  u32 num_zeros, pad;
  Homeless homeless;
  Fault* fault;
};
static_assert(sizeof(Found) == 64, "as crates/cuda/src/layout.rs has it");

// What is to become of an id: looked up, inserted if need be, and its row gets a gradient.
__device__ __forceinline__ bool is_active(const Feature& f, const Table& t, u64 key, u32 i) {
  return key <= t.last_key && !(f.has_padding && key == f.padding_key) && !(f.weights && f.weights[i] == 0);
}

extern "C" __global__ void __launch_bounds__(BLOCK, 20) find_records(const __grid_constant__ Call call, const __grid_constant__ Found found) {
  begin();
  __shared__ LaneList lists[WARPS];
  for (u32 k = blockIdx.x * BLOCK + threadIdx.x; k < found.num_zeros; k += gridDim.x * BLOCK) found.zeros[k] = 0;
  const u32 number = feature_at(call.first_find, call.num_features, blockIdx.x);
  const Feature& feature = call.features[number];
  const Table& t = call.tables[feature.table];
  const u32 i = (blockIdx.x - call.first_find[number]) * BLOCK + threadIdx.x, at = feature.first_id + i;
  const bool is_id = i < feature.num_ids;
  const u64 key = is_id ? key_at(feature, i) : 0;
  bool is_wanted = is_id, is_new;
  if (feature.has_roles && is_id) {
    is_wanted = is_active(feature, t, key, i);
    if (feature.refuses && key > t.last_key && !(feature.has_padding && key == feature.padding_key)) report(found.fault, OUTSIDE_VOCABULARY, number, feature.table, key);
  }
  const u32 record = find_or_insert(t, is_wanted, feature.inserts, key, at, found.homeless, lists[threadIdx.x / WARP], is_new);
  if (!feature.inserts && found.values) {
    const u32 dropped = __popc(__ballot_sync(ALL, is_wanted && record == NO_RECORD));
    if (lane() == 0 && dropped) atomicAdd(&t.index.counters->dropped, dropped);
  }
  if (!is_id) return;
  found.records[at] = record;
  if (!found.values) return;
  const u32 name = number << call.shift | bag_of(feature, i);
  found.values[at] = found.names ? at : name;
  if (found.names) found.names[at] = name;
}

// The records of keys for which there was no room.
extern "C" __global__ void __launch_bounds__(BLOCK) settle_records(const __grid_constant__ Call call, const __grid_constant__ Found found) {
  begin();
  const u32 n = *found.homeless.count;
  for (u32 k = blockIdx.x * WARPS + threadIdx.x / WARP; k < n; k += gridDim.x * WARPS) {
    const u32 at = found.homeless.ids[k];
    u32 number = 0;
    for (u32 start = 0; start < call.num_features; start += WARP) {
      const u32 has_it = __ballot_sync(ALL, start + lane() < call.num_features && at - call.features[start + lane()].first_id < call.features[start + lane()].num_ids);
      if (has_it) number = start + __ffs(has_it) - 1;
    }
    const Feature& feature = call.features[number];
    const Table& t = call.tables[feature.table];
    const u64 key = key_at(feature, at - feature.first_id);
    const u32 record = find_room(t, key);
    if (lane() != 0) continue;
    if (record != NO_RECORD) found.records[at] = record;
    else report(found.fault, NO_PLACE, number, feature.table, key);
  }
}

constexpr u32 ROWS_THREADS = 256;

// A lane asks for ROWS rows of four columns, then for ROWS more before it reads the first.
template <u32 ROWS> using RowStage = Stage<ROWS, ROWS_THREADS>;
// Of rows that are copied, and of those that are summed up.
constexpr u32 GATHERED = 4, POOLED = 2;

struct Rows {
  const u32* records;
  // By id: what the gradient of its bag is multiplied by; null if nobody asks.
  float* coefficients;
  Fault* fault;
};

// Rows that ids without a record get, in bags of their own: those of the warp's bags that are `missing`. Apart from `gather`, which would
// keep room for its registers.
template <u32 DIM> __device__ __noinline__ void write_missing(const Table& t, const Feature& f, u32 first, u32 missing) {
  for (; missing; missing &= missing - 1) {
    const u32 bag = first + __ffs(missing) - 1;
    for (u32 quad = lane(); quad < quads_of(DIM); quad += WARP) store_columns<DIM>(f.rows, bag, quad, missing_columns(t, key_at(f, bag), quad));
  }
}

// Rows of ids, one a bag: a warp takes as many bags as it has lanes.
template <u32 DIM, u32 ROWS> __device__ __forceinline__ void gather(const Table& t, const Feature& f, const Rows& rows, const RowStage<ROWS>& stage, u32 block) {
  constexpr u32 QUADS = quads_of(DIM), LANES = lanes_of(DIM), GROUPS = WARP / LANES;
  // Turns for all bags, each for as many columns as a group has lanes for.
  constexpr u32 PIECES = (QUADS + LANES - 1) / LANES, TURNS = (WARP + GROUPS * ROWS - 1) / (GROUPS * ROWS) * PIECES;
  const u32 group = lane() / LANES, column = lane() % LANES;
  const u32 first = block * ROWS_THREADS + threadIdx.x / WARP * WARP, bag = first + lane();
  const bool is_bag = bag < f.num_bags;
  const u32 record = is_bag ? rows.records[f.first_id + bag] : 0;
  if (is_bag && rows.coefficients) rows.coefficients[f.first_id + bag] = f.scale;
  const u32 missing = __ballot_sync(ALL, is_bag && record == 0);
  const auto each = [&](u32 turn, const auto& with) {
    const u32 start = turn / PIECES * GROUPS * ROWS, quad = turn % PIECES * LANES + column;
#pragma unroll
    for (u32 k = 0; k < ROWS; ++k) {
      const u32 at = start + k * GROUPS + group, r = __shfl_sync(ALL, record, at % WARP);
      if (r && at < WARP && quad < QUADS) with(k, at, quad, r);
    }
  };
  const auto ask = [&](u32 turn) {
    each(turn, [&](u32 k, u32, u32 quad, u32 r) { stage.ask(turn, k, f.records + (u64)r * f.stride + quad); });
  };
  ask(0);
  stage.end();
#pragma unroll 4
  for (u32 turn = 0; turn < TURNS; ++turn) {
    if (turn + 1 < TURNS) ask(turn + 1);
    stage.end();
    stage.wait();
    each(turn, [&](u32 k, u32 at, u32 quad, u32) { store_columns<DIM>(f.rows, first + at, quad, stage.at(turn, k)); });
  }
  if (missing) write_missing<DIM>(t, f, first, missing);
}

// Combined rows of bags whose ids all count once: a group of lanes a bag. Gives false, and has written no row, if an id has no record:
// what is written for it would take twice the registers.
template <u32 DIM, u32 ROWS> __device__ __forceinline__ bool pool(const Feature& f, const Rows& rows, const RowStage<ROWS>& stage, u32 bag, u32 begin, u32 end) {
  constexpr u32 QUADS = quads_of(DIM), LANES = lanes_of(DIM);
  const u32 column = threadIdx.x % LANES, count = end - begin;
  const u32* records = rows.records + f.first_id + begin;
  const float scale = f.splits ? f.combiner == SUM ? 1.0f : f.combiner == MEAN ? 1.0f / (float)count : 1.0f / sqrtf((float)count) : f.scale;
  if (rows.coefficients)
    for (u32 k = column; k < count; k += LANES) rows.coefficients[f.first_id + begin + k] = scale;
#pragma unroll 1
  for (u32 quad = column; quad < QUADS; quad += LANES) {
    float4 sum = make_float4(0, 0, 0, 0);
    u32 next[ROWS];
    bool is_whole = true;
#pragma unroll
    for (u32 k = 0; k < ROWS; ++k) next[k] = k < count ? records[k] : 0;
    const auto ask = [&](u32 turn) {
      const u32 start = turn * ROWS;
#pragma unroll
      for (u32 k = 0; k < ROWS; ++k) {
        if (start + k >= count) continue;
        if (next[k]) stage.ask(turn, k, f.records + (u64)next[k] * f.stride + quad);
        else is_whole = false;
      }
      stage.end();
#pragma unroll
      for (u32 k = 0; k < ROWS; ++k)
        if (start + ROWS + k < count) next[k] = records[start + ROWS + k];
    };
    ask(0);
    for (u32 turn = 0; turn * ROWS < count; ++turn) {
      ask(turn + 1);
      stage.wait();
#pragma unroll
      for (u32 k = 0; k < ROWS; ++k) {
        if (turn * ROWS + k >= count) break;
        const float4 row = stage.at(turn, k);
        // A sum starts with its first row, so that it keeps the sign of zeros.
        if (turn * ROWS + k == 0) sum = row;
        else sum.x += row.x, sum.y += row.y, sum.z += row.z, sum.w += row.w;
      }
    }
    if (!is_whole) return false;
    if (scale != 1.0f && count) sum.x *= scale, sum.y *= scale, sum.z *= scale, sum.w *= scale;
    store_columns<DIM>(f.rows, bag, quad, sum);
  }
  return true;
}

// The record that an id's row is read from. An id of weight 0 sees what the whole call has inserted.
__device__ __forceinline__ u32 record_of(const Table& t, const Feature& f, const Rows& rows, u32 i) {
  const u32 record = rows.records[f.first_id + i];
  return record || !f.weights || f.weights[i] != 0 ? record : find_alone(t.index, key_at(f, i));
}

// Combined rows of bags of any kind: with weights, with ids that are not there or are outside the vocabulary.
template <u32 DIM, u32 ROWS> __device__ __noinline__ void pool_roles(const Table& t, const Feature& f, const Rows& rows, const RowStage<ROWS>& stage, u32 bag, u32 begin, u32 end) {
  constexpr u32 QUADS = quads_of(DIM), LANES = lanes_of(DIM);
  const u32 column = threadIdx.x % LANES;
  float scale = 1;
  bool is_empty = true;
#pragma unroll 1
  for (u32 quad = column; quad < QUADS || quad == column; quad += LANES) {
    float4 sum = make_float4(0, 0, 0, 0);
    float weights = 0, squares = 0;
    is_empty = true;
    // Gives which ids of the turn have a record, by bit.
    const auto ask = [&](u32 turn) {
      u32 found = 0;
      for (u32 k = 0; k < ROWS; ++k) {
        const u32 i = begin + turn * ROWS + k, record = i < end && quad < QUADS ? record_of(t, f, rows, i) : 0;
        if (!record) continue;
        stage.ask(turn, k, f.records + (u64)record * f.stride + quad);
        found |= 1u << k;
      }
      stage.end();
      return found;
    };
    u32 found_next = ask(0);
    for (u32 turn = 0; begin + turn * ROWS < end; ++turn) {
      const u32 found = found_next;
      found_next = ask(turn + 1);
      stage.wait();
      for (u32 k = 0; k < ROWS; ++k) {
        const u32 i = begin + turn * ROWS + k;
        if (i >= end) break;
        const u64 key = key_at(f, i);
        if (f.has_padding && key == f.padding_key) continue;
        const float weight = f.weights ? f.weights[i] : 1.0f;
        weights += weight, squares += weight * weight;
        float4 row = make_float4(0, 0, 0, 0);
        if (key <= t.last_key && quad < QUADS) row = found >> k & 1 ? stage.at(turn, k) : missing_columns(t, key, quad);
        row.x *= weight, row.y *= weight, row.z *= weight, row.w *= weight;
        if (is_empty) sum = row;
        else sum.x += row.x, sum.y += row.y, sum.z += row.z, sum.w += row.w;
        is_empty = false;
      }
    }
    if (f.pools && f.combiner != SUM) {
      const float divisor = f.combiner == MEAN ? weights : sqrtf(squares);
      scale = divisor == 0 ? 0 : 1.0f / divisor;
    }
    if (scale != 1.0f && !is_empty) sum.x *= scale, sum.y *= scale, sum.z *= scale, sum.w *= scale;
    if (quad < QUADS) store_columns<DIM>(f.rows, bag, quad, sum);
  }
  if (rows.coefficients)
    for (u32 i = begin + column; i < end; i += LANES) rows.coefficients[f.first_id + i] = (f.weights ? f.weights[i] : 1.0f) * scale;
}

__device__ __noinline__ void check_split(const Feature& f, const Fault* fault, u32 number, u32 bag) {
  const bool wide = f.wide_splits;
  const long long begin = wide ? ((const long long*)f.splits)[bag] : ((const int*)f.splits)[bag];
  const long long end = wide ? ((const long long*)f.splits)[bag + 1] : ((const int*)f.splits)[bag + 1];
  if (begin > end || (bag == 0 && begin != 0) || (bag + 1 == f.num_bags && end != f.num_ids)) report((Fault*)fault, BAD_SPLITS, number, f.table, bag);
}

// Combined rows of the bags of a block.
template <u32 DIM, u32 ROWS> __device__ __forceinline__ void combine(const Table& t, const Feature& f, const Rows& rows, const RowStage<ROWS>& stage, u32 number, u32 block) {
  constexpr u32 LANES = lanes_of(DIM);
  const u32 bag = block * (ROWS_THREADS / LANES) + threadIdx.x / LANES;
  if (bag >= f.num_bags) return;
  if (f.splits && threadIdx.x % LANES == 0) check_split(f, rows.fault, number, bag);
  const u32 begin = f.splits ? split_at(f, bag) : bag * f.hotness;
  const u32 end = max(begin, f.splits ? split_at(f, bag + 1) : begin + f.hotness);
  if (f.has_roles || !pool<DIM>(f, rows, stage, bag, begin, end)) pool_roles<DIM>(t, f, rows, stage, bag, begin, end);
}

// Rows of all features, (bags, dim). GATHERS: none has bags to combine. Sums wait for each of their rows, so more blocks take turns.
template <bool GATHERS, u32... DIM> __global__ void __launch_bounds__(ROWS_THREADS, GATHERS ? 6 : 8) make_rows(const __grid_constant__ Call call, const __grid_constant__ Rows rows) {
  begin();
  typedef RowStage<GATHERS ? GATHERED : POOLED> Ways;
  __shared__ typename Ways::Memory memory;
  const Ways stage{memory};
  const u32 number = feature_at(call.first_rows, call.num_features, blockIdx.x);
  const Feature& f = call.features[number];
  const Table& t = call.tables[f.table];
  const u32 block = blockIdx.x - call.first_rows[number];
  with_dim<DIM...>(f.kind, [&](auto dim) {
    constexpr u32 D = decltype(dim)::value;
    if (GATHERS || f.is_gather) gather<D>(t, f, rows, stage, block);
    else if constexpr (!GATHERS) combine<D>(t, f, rows, stage, number, block);
  });
}

// What the gradients of a feature's weights need of its inputs, in memory of ours: a framework's may be gone by then.
struct Kept {
  u64* keys;
  float* weights;
  int* splits;
};
extern "C" __global__ void __launch_bounds__(ROWS_THREADS) keep_inputs(const __grid_constant__ Call call, u32 number, const __grid_constant__ Kept kept) {
  begin();
  const Feature& f = call.features[number];
  const u32 i = blockIdx.x * ROWS_THREADS + threadIdx.x;
  if (i < f.num_ids) kept.keys[i] = key_at(f, i), kept.weights[i] = f.weights[i];
  if (f.splits && i <= f.num_bags) kept.splits[i] = split_at(f, i);
}

// The gradient of weights: how the loss moves with each, through the combiner; the formulas are in
// crates/core/src/weight_gradient.rs. A group of lanes a bag of a feature that has weights.
template <u32... DIM> __global__ void __launch_bounds__(ROWS_THREADS) weight_gradients(const __grid_constant__ Call call, u32 number, const __grid_constant__ Kept kept, const float* __restrict__ gradients, float* __restrict__ products) {
  begin();
  Feature f = call.features[number];
  f.ids = kept.keys, f.key_type = WIDE, f.weights = kept.weights, f.wide_splits = 0;
  if (f.splits) f.splits = kept.splits;
  // Records may have been laid out anew since.
  const Table& t = call.tables[f.table];
  f.records = t.records, f.stride = t.stride;
  with_dim<DIM...>(f.kind, [&](auto dim) {
    constexpr u32 D = decltype(dim)::value, QUADS = quads_of(D), LANES = lanes_of(D), GROUPS = ROWS_THREADS / LANES;
    const u32 bag = blockIdx.x * GROUPS + threadIdx.x / LANES, column = threadIdx.x % LANES;
    if (bag >= f.num_bags) return;
    const u32 mask = LANES == WARP ? ALL : ((1u << LANES % WARP) - 1) << (lane() / LANES * LANES);
    const u32 begin = f.splits ? split_at(f, bag) : bag * f.hotness;
    const u32 end = max(begin, f.splits ? split_at(f, bag + 1) : begin + f.hotness);
    float weights = 0, squares = 0, total = 0;
    for (u32 i = begin; i < end; ++i) {
      const u64 key = key_at(f, i);
      const bool is_padding = f.has_padding && key == f.padding_key;
      float product = 0;
      if (!is_padding && key <= t.last_key) {
        const u32 record = find_alone(t.index, key);
        for (u32 quad = column; quad < QUADS; quad += LANES) {
          const float4 x = record ? f.records[(u64)record * f.stride + quad] : missing_columns(t, key, quad);
          const float4 g = load_columns<D, false>(gradients, bag, quad);
          product += x.x * g.x + x.y * g.y + x.z * g.z + x.w * g.w;
        }
#pragma unroll
        for (u32 by = LANES / 2; by > 0; by /= 2) product += __shfl_xor_sync(mask, product, by, LANES);
      }
      if (column == 0) products[i] = product;
      if (is_padding) continue;
      const float weight = f.weights[i];
      weights += weight, squares += weight * weight, total += weight * product;
    }
    __syncwarp(mask);
    if (!f.pools || f.combiner == SUM) return;
    const float divisor = f.combiner == MEAN ? weights : sqrtf(squares), scale = divisor == 0 ? 0 : 1.0f / divisor;
    for (u32 i = begin + column; i < end; i += LANES) {
      const bool is_padding = f.has_padding && key_at(f, i) == f.padding_key;
      const float product = products[i];
      products[i] = is_padding ? 0 : f.combiner == MEAN ? (product - total * scale) * scale : (product - f.weights[i] * total * scale * scale) * scale;
    }
  });
}
