// The forward of a step: records of all ids of a call, then their rows, pooled.
#include "step.cuh"

constexpr u32 BLOCK = 128, WARPS = BLOCK / WARP;

// Ids whose keys have found both of their buckets full: places in the call.
struct Homeless {
  u32* count;
  u32* ids;
};

// Each id's record among those of all tables, and the gradient row that is its own.
template <u32 DIM, bool INSERT> __global__ void __launch_bounds__(BLOCK) find_records(Call call, u32* __restrict__ records, u32* __restrict__ gradient_rows, Homeless homeless) {
  __shared__ LaneList lists[WARPS];
  const u32 number = call.find_features[blockIdx.x];
  const Feature& feature = call.features[number];
  const Table& t = call.tables[feature.table];
  const u32 i = (blockIdx.x - feature.first_find) * BLOCK + threadIdx.x;
  const bool is_id = i < feature.num_bags * feature.hotness;
  const u64 key = is_id ? load_once(feature.ids + i) : 0, h = hash(key);
  LaneList& list = lists[threadIdx.x / WARP];
  const Index index = t.index;
  u32 record = find(index, key, h, is_id, list);
  if (INSERT) {
    const bool is_missing = is_id && record == NO_RECORD;
    if (__syncthreads_or(is_missing)) {
      bool is_new;
      const u32 inserted = insert_missing<DIM, WARPS>(t, index, is_missing, key, h, list, is_new);
      if (is_missing) record = inserted;
      const bool is_homeless = is_missing && record == NO_RECORD;
      if (const u32 all = __ballot_sync(ALL, is_homeless)) {
        u32 base = 0;
        if (lane() == 0) base = atomicAdd(homeless.count, __popc(all));
        base = __shfl_sync(ALL, base, 0);
        if (is_homeless) homeless.ids[base + __popc(all & lanes_below())] = feature.first_id + i;
      }
    }
  }
  if (!is_id) return;
  const u32 at = feature.first_id + i, bag = feature.hotness == 1 ? i : i / feature.hotness;
  records[at] = t.first + record;
  if (INSERT) gradient_rows[at] = number << call.shift | bag;
}

// Finds room for the keys that had none: a warp an id.
template <u32 DIM> __global__ void __launch_bounds__(BLOCK) settle_records(Call call, u32* __restrict__ records, const u32* __restrict__ gradient_rows, Homeless homeless) {
  const u32 n = *homeless.count;
  for (u32 k = blockIdx.x * WARPS + threadIdx.x / WARP; k < n; k += gridDim.x * WARPS) {
    const u32 at = homeless.ids[k];
    const Feature& feature = call.features[gradient_rows[at] >> call.shift];
    const Table& t = call.tables[feature.table];
    const u64 key = feature.ids[at - feature.first_id];
    Claim claim = {nullptr, false};
    u32 record = NO_RECORD;
    if (lane() == 0) {
      const Index index = t.index;
      claim = settle(index, key);
      if (claim.is_mine) store_shared(claim.record, record = atomicAdd(&index.counters->next, 1));
      else if (claim.record)
        while ((record = load_shared(claim.record)) == CLAIMED) {
        }
      records[at] = t.first + record;
    }
    record = __shfl_sync(ALL, record, 0);
    if (!__shfl_sync(ALL, claim.is_mine, 0)) continue;
    float4* to = t.records + (u64)record * t.stride;
    for (u32 quad = lane(); quad < t.stride; quad += WARP) store_once(to + quad, first_columns<DIM>(t, key, quad));
  }
}

constexpr u32 FORWARD_THREADS = 256, ROWS = 4;

// Rows of ids, one a bag: four of them in flight in each group of lanes.
template <u32 DIM> __global__ void __launch_bounds__(FORWARD_THREADS) gather(Call call, const u32* __restrict__ records) {
  constexpr u32 QUADS = quads_of(DIM), LANES = lanes_of(DIM), GROUPS = FORWARD_THREADS / LANES;
  const Feature feature = call.features[call.forward_features[blockIdx.x]];
  const u32 group = threadIdx.x / LANES, column = threadIdx.x % LANES;
  const u32 bag = ((blockIdx.x - feature.first_forward) * GROUPS + group) * ROWS;
  const float4* from[ROWS];
#pragma unroll
  for (u32 k = 0; k < ROWS; ++k)
    if (bag + k < feature.num_bags) from[k] = feature.records + (u64)(records[feature.first_id + bag + k] - feature.first_record) * feature.stride;
#pragma unroll 1
  for (u32 quad = column; quad < QUADS; quad += LANES) {
    float4 row[ROWS];
#pragma unroll
    for (u32 k = 0; k < ROWS; ++k)
      if (bag + k < feature.num_bags) row[k] = load_row(from[k] + quad);
#pragma unroll
    for (u32 k = 0; k < ROWS; ++k)
      if (bag + k < feature.num_bags) store_columns<DIM>(feature.rows, bag + k, quad, row[k]);
  }
}

// Sums of the rows of bags, all of one length: a group of lanes a bag.
template <u32 DIM> __global__ void __launch_bounds__(FORWARD_THREADS) pool(Call call, const u32* __restrict__ records) {
  constexpr u32 QUADS = quads_of(DIM), LANES = lanes_of(DIM), GROUPS = FORWARD_THREADS / LANES;
  const Feature feature = call.features[call.forward_features[blockIdx.x]];
  const u32 column = threadIdx.x % LANES, hotness = feature.hotness;
  const u32 bag = (blockIdx.x - feature.first_forward) * GROUPS + threadIdx.x / LANES;
  if (bag >= feature.num_bags) return;
  records += feature.first_id + bag * hotness;
#pragma unroll 1
  for (u32 quad = column; quad < QUADS; quad += LANES) {
    float4 sum = make_float4(0, 0, 0, 0);
    u32 next[ROWS];
#pragma unroll
    for (u32 k = 0; k < ROWS; ++k) next[k] = k < hotness ? records[k] : 0;
    for (u32 start = 0; start < hotness; start += ROWS) {
      float4 row[ROWS];
#pragma unroll
      for (u32 k = 0; k < ROWS; ++k)
        if (start + k < hotness) row[k] = feature.records[(u64)(next[k] - feature.first_record) * feature.stride + quad];
#pragma unroll
      for (u32 k = 0; k < ROWS; ++k)
        if (start + ROWS + k < hotness) next[k] = records[start + ROWS + k];
#pragma unroll
      for (u32 k = 0; k < ROWS; ++k) {
        if (start + k >= hotness) break;
        // A sum starts with its first row, so that it keeps the sign of zeros.
        if (start + k == 0) sum = row[k];
        else sum.x += row[k].x, sum.y += row[k].y, sum.z += row[k].z, sum.w += row[k].w;
      }
    }
    store_columns<DIM>(feature.rows, bag, quad, sum);
  }
}
