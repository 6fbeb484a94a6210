// Bags of a table on one rank, which that rank pools for others.
//
// The rank that asks makes its ids distinct, as for other tables, and gives each id the number of its row. The owner finds the records of
// the distinct keys. By the numbers it pools the bags, and later merges their gradients, as the other rank would.
#include "step.cuh"

// Copies numbers of four bytes. `blocks` blocks work on each copy.
extern "C" __global__ void __launch_bounds__(256) copy_all(const NumberCopy* copies, u32 blocks) {
  begin();
  const NumberCopy& copy = copies[blockIdx.x / blocks];
  copy_numbers((const u32*)copy.from, (u32*)copy.to, copy.count, blockIdx.x % blocks * 256 + threadIdx.x, blocks * 256);
}

// Calls `one` with each number of a copy, and `four` with each group of four. `half`: the array whose numbers have 16 bits.
template <class Four, class One>
__device__ __forceinline__ void each_number(
    const NumberCopy& copy, const void* wide, const void* half, u32 blocks, const Four& four, const One& one) {
  const u64 first = blockIdx.x % blocks * 256 + threadIdx.x, stride = blocks * 256;
  const u64 quads = (u64)wide % sizeof(float4) == 0 && (u64)half % sizeof(uint2) == 0 ? copy.count / 4 : 0;
#pragma unroll 4
  for (u64 i = first; i < quads; i += stride) four(i);
  for (u64 i = 4 * quads + first; i < copy.count; i += stride) one(i);
}
// Copies float32, rounded to numbers of TYPE, which has 16 bits.
template <u32 TYPE> __global__ void __launch_bounds__(256) narrow_all(const NumberCopy* copies, u32 blocks) {
  begin();
  const NumberCopy& copy = copies[blockIdx.x / blocks];
  const float* from = (const float*)copy.from;
  each_number(
      copy, copy.from, copy.to, blocks, [&](u64 i) { ((uint2*)copy.to)[i] = narrow(TYPE, __ldcs((const float4*)from + i)); },
      [&](u64 i) { ((unsigned short*)copy.to)[i] = narrow(TYPE, make_float4(from[i], 0, 0, 0)).x; });
}
// Copies numbers of TYPE, which has 16 bits, as float32.
template <u32 TYPE> __global__ void __launch_bounds__(256) widen_all(const NumberCopy* copies, u32 blocks) {
  begin();
  const NumberCopy& copy = copies[blockIdx.x / blocks];
  each_number(
      copy, copy.to, copy.from, blocks, [&](u64 i) { ((float4*)copy.to)[i] = widen(TYPE, __ldcs((const uint2*)copy.from + i)); },
      [&](u64 i) { ((float*)copy.to)[i] = widen(TYPE, make_uint2(((const unsigned short*)copy.from)[i], 0)).x; });
}

// Checks row splits, and copies them for the owner. `to`: by feature, where they go; null for features that keep theirs. `blocks` blocks
// work on each feature.
extern "C" __global__ void __launch_bounds__(256) share_splits(
    const __grid_constant__ Call call, u32* const* to, Fault* fault, u32 blocks) {
  begin();
  const u32 number = blockIdx.x / blocks;
  const Feature& f = call.features[number];
  if (!to[number]) return;
  for (u32 bag = blockIdx.x % blocks * 256 + threadIdx.x; bag <= f.num_bags; bag += blocks * 256) {
    if (bag < f.num_bags) check_split(f, fault, number, bag);
    to[number][bag] = split_at(f, bag);
  }
}

// Finds the records of the ids of other ranks by the numbers of their rows, in place of their keys. Has the grid of `find_records`, and
// sets `found.zeros` to 0.
extern "C" __global__ void __launch_bounds__(FIND_THREADS) number_pooled(
    const __grid_constant__ Call call, const __grid_constant__ Found found, const __grid_constant__ Pooled pooled) {
  begin();
  for (u32 k = blockIdx.x * FIND_THREADS + threadIdx.x; k < found.num_zeros; k += gridDim.x * FIND_THREADS) found.zeros[k] = 0;
  const u32 number = feature_at(call.first_find, call.num_features, blockIdx.x);
  const Feature& feature = call.features[number];
  const PooledFeature& p = pooled.features[number];
  const u32 i = (blockIdx.x - call.first_find[number]) * FIND_THREADS + threadIdx.x, at = feature.first_id + i;
  if (i >= feature.num_ids) return;
  const u32 row = p.numbers[i], first_key = p.first_key ? *p.first_key : p.known_first_key;
  found.records[at] = row ? pooled.records[first_key + row - 1] : NO_RECORD;
  pooled.rows[at] = row ? p.first_row + row : 0;
  if (!found.values) return;
  const u32 name = number << call.shift | bag_of(feature, i);
  found.values[at] = found.named ? at : name;
  if (found.named) found.named[at] = {name, 0};
}
