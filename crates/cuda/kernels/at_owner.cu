// Bags of a table on one rank, which that rank pools for others.
//
// The rank that asks makes its ids distinct, as for other tables, and gives each id the number of its row. The owner finds the records of
// the distinct keys. By the numbers it pools the bags, and later merges their gradients, as the other rank would.
#include "step.cuh"

// Copies numbers of four bytes. `blocks` blocks work on each copy.
extern "C" __global__ void __launch_bounds__(256) copy_all(const WordCopy* copies, u32 blocks) {
  begin();
  const WordCopy& copy = copies[blockIdx.x / blocks];
  copy_words(copy.from, copy.to, copy.count, blockIdx.x % blocks * 256 + threadIdx.x, blocks * 256);
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
