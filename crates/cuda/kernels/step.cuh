// What the launches of a training step share: the features of a layer's call.
#pragma once
#include "records.cuh"

// Threads of a block that makes rows of bags, or goes through the same bags again.
constexpr u32 ROWS_THREADS = 256;

enum KeyType : u32 { WIDE, SIGNED, UNSIGNED, WORDS };
enum Combiner : u32 { SUM, MEAN, SQRTN };

struct Feature {
  // Of `key_type`; `high`: the high words, if ids come in two.
  const void *ids, *high;
  // Where bags end in the ids, (bags + 1,); null: `hotness` ids in each.
  const void* splits;
  // One an id, or null.
  const float* weights;
  // (bags, dim)
  float* rows;
  // Of its table, as there.
  float4* records;
  u64 padding_key;
  u32 stride, table, kind, num_ids, num_bags, hotness;
  u32 key_type, combiner;
  // Ids are sorted by what is to happen to them.
  u32 has_padding, wide_splits, has_roles;
  // Keys without a record get one.
  u32 inserts;
  // An id outside the vocabulary is an error.
  u32 refuses;
  // A row an id, no weights.
  u32 is_gather;
  // Bags are combined.
  u32 pools;
  // What sums of bags are multiplied by, and gradients of each of their ids, if it is the same for all.
  float scale;
  // Places of its first id, and of its first split among those that are kept.
  u32 first_id, first_split;
};
static_assert(sizeof(Feature) == 128, "as crates/cuda/src/layout.rs has it");

struct Call {
  const Table* tables;
  const Feature* features;
  // Of each feature: blocks of the features before it, in `find_records` and in `make_rows`.
  const u32 *first_find, *first_rows;
  u32 num_features;
  // A gradient row's name is feature << shift | bag.
  u32 shift;
};
static_assert(sizeof(Call) == 40, "as crates/cuda/src/layout.rs has it");

// What a bag's sum is multiplied by; 0 where a division by 0 would be.
__device__ __forceinline__ float scale_of(const Feature& f, float weights, float squares) {
  if (!f.pools || f.combiner == SUM) return 1;
  const float divisor = f.combiner == MEAN ? weights : sqrtf(squares);
  return divisor == 0 ? 0 : 1.0f / divisor;
}

// In place of the record of padding.
constexpr u32 PADDING = ~0u;

// What the gradients of weights need of a call's inputs, in memory of ours: a framework's may be gone by then. By place of an id, and
// of a split.
struct Kept {
  u64* keys;
  float* weights;
  u32 *records, *splits;
};
static_assert(sizeof(Kept) == 32, "as crates/cuda/src/layout.rs has it");

// Of an id whose coefficient is its own: the name of its bag's gradient row, and what that is multiplied by.
struct __align__(8) Named {
  u32 name;
  float coefficient;
};

// What the backward needs of a feature.
struct Side {
  const float* gradients;
  float4* records;
  u32 stride, table;
  float scale;
  u32 pad;
};
static_assert(sizeof(Side) == 32, "as crates/cuda/src/layout.rs has it");

// Gradients of a feature as the framework gives them.
struct Gradients {
  const float* from;
  u64 count;
};
static_assert(sizeof(Gradients) == 16, "as crates/cuda/src/layout.rs has it");

// The last feature that begins at or before `place`, if each begins at `firsts`. A whole warp comes here.
__device__ __forceinline__ u32 feature_at(const u32* firsts, u32 n, u32 place) {
  u32 number = 0;
  for (u32 start = 0; start < n; start += WARP) {
    const u32 begun = __ballot_sync(ALL, start + lane() < n && firsts[start + lane()] <= place);
    number += __popc(begun);
    if (begun != ALL) break;
  }
  return number - 1;
}

__device__ __forceinline__ u64 key_at(const Feature& f, u32 i) {
  switch (f.key_type) {
    case WIDE: return load_once((const u64*)f.ids + i);
    case SIGNED: return (u64)(long long)((const int*)f.ids)[i];
    case UNSIGNED: return ((const u32*)f.ids)[i];
    default: return (u64)((const u32*)f.ids)[i] | (u64)((const u32*)f.high)[i] << 32;
  }
}

// Where bag `b` begins among the ids of its feature, with splits that may be wrong kept within them.
__device__ __forceinline__ u32 split_at(const Feature& f, u32 b) {
  const long long split = f.wide_splits ? ((const long long*)f.splits)[b] : ((const int*)f.splits)[b];
  return split < 0 ? 0 : split > f.num_ids ? f.num_ids : (u32)split;
}

// The bag of an id.
__device__ __forceinline__ u32 bag_of(const Feature& f, u32 i) {
  if (f.hotness == 1) return i;
  if (!f.splits) return i / f.hotness;
  u32 low = 0, high = f.num_bags;
  while (low + 1 < high) {
    const u32 middle = (low + high) / 2;
    if (split_at(f, middle) <= i) low = middle;
    else high = middle;
  }
  return low;
}

// What went wrong in a call, in memory that the host reads; the first to come stays.
struct Fault {
  // 0: nothing; then what, and of which feature; the id.
  u32 taken, kind, feature, table;
  u64 id;
};
enum FaultKind : u32 { NO_FAULT, OUTSIDE_VOCABULARY, BAD_SPLITS, NO_PLACE, WRONG_LOOKUP };

__device__ __noinline__ void report(Fault* fault, u32 kind, u32 feature, u32 table, u64 id) {
  if (atomicCAS(&fault->taken, 0, 1) != 0) return;
  fault->feature = feature, fault->table = table, fault->id = id;
  __threadfence_system();
  *(volatile u32*)&fault->kind = kind;
}
