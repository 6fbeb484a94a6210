// The forward of a step: records of all ids of a call, then their rows, pooled.
#include "step.cuh"

constexpr u32 BLOCK = 128, WARPS = BLOCK / WARP;

// Ids whose keys have found both of their buckets full: places in the call.
struct Homeless {
  u32* count;
  u32* ids;
};

// Each id's record among those of all tables, and the gradient row that is its own.
template <u32 ROW, bool INSERT> __global__ void __launch_bounds__(BLOCK) find_records(Call call, u32* __restrict__ records, u32* __restrict__ gradient_rows, Homeless homeless) {
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
      const u32 inserted = insert_missing<ROW, WARPS>(t, index, is_missing, key, h, list, is_new);
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
template <u32 ROW> __global__ void __launch_bounds__(BLOCK) settle_records(Call call, u32* __restrict__ records, const u32* __restrict__ gradient_rows, Homeless homeless) {
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
    for (u32 c = lane(); c < t.stride; c += WARP) store_once(to + c, c < ROW ? first_values(t.initializer, key, c) : make_float4(0, 0, 0, 0));
  }
}

// Rows of ids, one a bag: four of them in flight in each group of lanes.
template <u32 ROW> __global__ void __launch_bounds__(2 * BLOCK) gather(Call call, const u32* __restrict__ records) {
  constexpr u32 LANES = lanes_of(ROW), GROUPS = 2 * BLOCK / LANES, ROWS = 4;
  const Feature feature = call.features[call.forward_features[blockIdx.x]];
  const u32 group = threadIdx.x / LANES, column = threadIdx.x % LANES;
  const u32 bag = ((blockIdx.x - feature.first_forward) * GROUPS + group) * ROWS;
  u32 mine = 0;
  if (column < ROWS && bag + column < feature.num_bags) mine = records[feature.first_id + bag + column] - feature.first_record;
  float4 row[ROWS];
#pragma unroll
  for (u32 k = 0; k < ROWS; ++k) {
    const u32 record = __shfl_sync(ALL, mine, k, LANES);
    if (bag + k < feature.num_bags) row[k] = load_row(feature.records + (u64)record * feature.stride + column);
  }
#pragma unroll
  for (u32 k = 0; k < ROWS; ++k)
    if (bag + k < feature.num_bags) store_once(feature.rows + (u64)(bag + k) * ROW + column, row[k]);
}

// Sums of the rows of bags, all of one length: a group of lanes a bag.
template <u32 ROW> __global__ void __launch_bounds__(2 * BLOCK) pool(Call call, const u32* __restrict__ records) {
  constexpr u32 LANES = lanes_of(ROW), GROUPS = 2 * BLOCK / LANES, ROWS = 4;
  const Feature feature = call.features[call.forward_features[blockIdx.x]];
  const u32 column = threadIdx.x % LANES, hotness = feature.hotness;
  const u32 bag = (blockIdx.x - feature.first_forward) * GROUPS + threadIdx.x / LANES;
  const bool is_bag = bag < feature.num_bags;
  const u32 first = feature.first_id + bag * hotness;
  float4 sum = make_float4(0, 0, 0, 0);
  for (u32 start = 0; start < hotness; start += LANES) {
    const u32 n = min(LANES, hotness - start);
    const u32 mine = is_bag && column < n ? records[first + start + column] - feature.first_record : NO_RECORD;
    for (u32 k = 0; k < n; k += ROWS) {
      float4 row[ROWS];
#pragma unroll
      for (u32 j = 0; j < ROWS; ++j) {
        const u32 record = __shfl_sync(ALL, mine, (k + j) % LANES, LANES);
        if (is_bag && k + j < n) row[j] = feature.records[(u64)record * feature.stride + column];
      }
#pragma unroll
      for (u32 j = 0; j < ROWS; ++j) {
        if (k + j >= n) break;
        // A sum starts with its first row, so that it keeps the sign of zeros.
        if (start + k + j == 0) sum = row[j];
        else sum.x += row[j].x, sum.y += row[j].y, sum.z += row[j].z, sum.w += row[j].w;
      }
    }
  }
  if (is_bag) store_once(feature.rows + (u64)bag * ROW + column, sum);
}
