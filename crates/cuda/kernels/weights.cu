// Gradients of the loss with respect to the weights of ids, through the combiner. crates/core/src/host/weight_gradient.rs has the formulas.
#include "step.cuh"

// Number of ids of a bag whose rows are in flight at once.
constexpr u32 AT_ONCE = 4;

// Returns the dot product of four columns of a row and of a gradient. Columns beyond the last do not belong to the row and are ignored.
template <u32 ROW> __device__ __forceinline__ float product(const float4& row, const float4& gradient, u32 quad) {
  const float *x = (const float*)&row, *g = (const float*)&gradient;
  float sum = 0;
#pragma unroll
  for (u32 c = 0; c < 4; ++c)
    if (dim_of(ROW) % 4 == 0 || 4 * quad + c < dim_of(ROW)) sum += x[c] * g[c];
  return sum;
}

// The ids of a group of lanes. Each lane has one.
struct GroupIds {
  // Record number and key of this lane's id.
  u32 record;
  u64 key;
  // Mask of the group's lanes whose ids have no record; bit 0 is the group's first lane.
  u32 missing;
  // Mask of the group's lanes in their warp.
  u32 mask;
};

// Adds the products of rows and the bag's gradient to `sums`, this lane's columns only, for the ids of the lanes `first`, `first + 1` and
// so on, below `n`.
template <u32 ROW, u32 IDS>
__device__ __forceinline__ void add_products(
    const Table& t, const Side& side, u32 bag, const GroupIds& ids, u32 first, u32 n, float (&sums)[IDS]) {
  constexpr u32 QUADS = quads_of(ROW), LANES = lanes_of(ROW);
#pragma unroll 1
  for (u32 piece = 0; piece < QUADS; piece += LANES) {
    const u32 quad = piece + threadIdx.x % LANES;
    float4 rows[IDS];
#pragma unroll
    for (u32 k = 0; k < IDS; ++k) {
      rows[k] = make_float4(0, 0, 0, 0);
      const u32 r = __shfl_sync(ids.mask, ids.record, (first + k) % LANES, LANES);
      if (first + k < n && r != NO_RECORD && r != PADDING && quad < QUADS)
        rows[k] = load_quad<ROW>(side.records + (u64)r * side.stride, quad);
    }
    const float4 g = quad < QUADS ? load_columns<ROW, false>(side.gradients, bag, quad) : make_float4(0, 0, 0, 0);
#pragma unroll
    for (u32 k = 0; k < IDS; ++k) {
      if (first + k < n && ids.missing >> (first + k) & 1) {
        const u64 of = __shfl_sync(ids.mask, ids.key, (first + k) % LANES, LANES);
        if (quad < QUADS) rows[k] = missing_columns(t, of, quad);
      }
      sums[k] += product<ROW>(rows[k], g, quad);
    }
  }
}

// Turns dot products into gradients of weights, for a combiner that divides by the weights. `weights`, `squares`, `total`: sums over the
// bag of its weights, of their squares, and of weights times products.
template <u32 LANES>
__device__ __forceinline__ void divide_by_weights(
    const Feature& f, const Kept& kept, float* products, u32 begin, u32 end, float weights, float squares, float total) {
  const float scale = scale_of(f, weights, squares);
  for (u32 i = begin + threadIdx.x % LANES; i < end; i += LANES) {
    const float product = products[i];
    products[i] = kept.records[i] == PADDING ? 0
                  : f.combiner == MEAN       ? (product - total * scale) * scale
                                             : (product - kept.weights[i] * total * scale * scale) * scale;
  }
}

// Computes the gradients of the weights of a bag's ids, with a group of lanes. `kept`: begins at the feature's first id and split.
// `products`: takes the gradients, by id of the feature.
template <u32 ROW>
__device__ __forceinline__ void of_bag(
    const Table& t, const Feature& f, const Side& side, const Kept& kept, float* products, u32 bag) {
  constexpr u32 LANES = lanes_of(ROW), IDS = LANES < AT_ONCE ? LANES : AT_ONCE;
  const u32 column = threadIdx.x % LANES, before = lane() / LANES * LANES, mask = group_mask<LANES>();
  const u32 begin = f.splits ? kept.splits[bag] : bag * f.hotness;
  const u32 end = max(begin, f.splits ? kept.splits[bag + 1] : begin + f.hotness);
  // The table has lost its records since the lookup.
  if (side.stride == 0) {
    for (u32 i = begin + column; i < end; i += LANES) products[i] = 0;
    return;
  }
  float weights = 0, squares = 0, total = 0;
  for (u32 start = begin; start < end; start += LANES) {
    const u32 n = min(LANES, end - start);
    u32 record = PADDING;
    float weight = 0;
    u64 key = 0;
    if (column < n) {
      record = kept.records[start + column], weight = kept.weights[start + column];
      if (record == NO_RECORD) {
        key = kept.keys[start + column];
        // The lookup has not looked up ids of weight 0.
        if (weight == 0 && key <= t.last_key) record = find_alone(t.index, key);
      }
    }
    const u32 missing = __ballot_sync(mask, record == NO_RECORD) >> before;
    for (u32 first = 0; first < n; first += IDS) {
      float sums[IDS] = {};
      add_products<ROW>(t, side, bag, {record, key, missing, mask}, first, n, sums);
#pragma unroll
      for (u32 k = 0; k < IDS; ++k) {
        if (first + k >= n) break;
#pragma unroll
        for (u32 by = LANES / 2; by > 0; by /= 2) sums[k] += __shfl_xor_sync(mask, sums[k], by, LANES);
        if (column == 0) products[start + first + k] = sums[k];
        const float x = __shfl_sync(mask, weight, first + k, LANES);
        if (__shfl_sync(mask, record, first + k, LANES) == PADDING) continue;
        weights += x, squares += x * x;
        if (x != 0) total += x * sums[k];
      }
    }
  }
  __syncwarp(mask);
  if (f.pools && f.combiner != SUM) divide_by_weights<LANES>(f, kept, products, begin, end, weights, squares, total);
}

// Computes the gradients of weights, for all features of a call that have weights and whose kind is among `kinds`, with
// the rows ROW. The grid is that of `make_rows`. `all`: by feature, the address that takes them.
template <u32... ROW>
__global__ void __launch_bounds__(ROWS_THREADS, 4) weight_gradients(
    const __grid_constant__ Call call, const __grid_constant__ Kept kept, const Side* sides, float* const* all, const Kinds kinds) {
  begin();
  const u32 number = feature_at(call.first_rows, call.num_features, blockIdx.x);
  const Feature& f = call.features[number];
  if (!f.weights || (kinds.has_others && f.kind - kinds.first >= sizeof...(ROW))) return;
  const Kept of = {kept.keys + f.first_id, kept.weights + f.first_id, kept.records + f.first_id, kept.splits + f.first_split};
  const Side side = sides[number];
  with_row<ROW...>(f.kind - kinds.first, [&](auto row) {
    constexpr u32 R = decltype(row)::value;
    const u32 bag = (blockIdx.x - call.first_rows[number]) * (ROWS_THREADS / lanes_of(R)) + threadIdx.x / lanes_of(R);
    if (bag < f.num_bags) of_bag<R>(call.tables[f.table], f, side, of, all[number], bag);
  });
}
