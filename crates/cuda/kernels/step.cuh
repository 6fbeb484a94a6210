// What the launches of a training step share: the features of a layer's call.
#pragma once
#include "records.cuh"

struct Feature {
  const u64* ids;
  // (bags, dim)
  float* rows;
  const float* gradients;
  // Of its table, as there.
  float4* records;
  u32 stride, first_record;
  u32 table, num_bags, hotness;
  // Of the features before it: ids, blocks of `find_records`, blocks of the launch that makes rows.
  u32 first_id, first_find, first_forward;
};

struct Call {
  const Table* tables;
  const Feature* features;
  // By block of `find_records`, and of the launch that makes rows.
  const u32 *find_features, *forward_features;
  u32 num_features;
  // A gradient row's name is feature << shift | bag.
  u32 shift;
};
