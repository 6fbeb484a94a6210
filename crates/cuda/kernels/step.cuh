// Functions that the kernels of a training step share: they read the features of a layer's call.
#pragma once
#include "records.cuh"

// Returns the factor of a bag's sum; 0 instead of a division by 0. `weights`: the sum of the weights of the bag's ids. `squares`: the
// sum of their squares.
__device__ __forceinline__ float scale_of(const Feature& f, float weights, float squares) {
  if (!f.pools || f.combiner == SUM) return 1;
  const float divisor = f.combiner == MEAN ? weights : sqrtf(squares);
  return divisor == 0 ? 0 : 1.0f / divisor;
}

// Returns four columns of the row of a key without a record, as `missing_columns` of records.cuh. A call needs few registers of its caller,
// which seldom comes here.
__device__ __noinline__ float4 missing_columns(const Table& t, u64 key, u32 quad) {
  return missing_columns(t, key, quad, t.index.counters->out_of_vocabulary);
}

// Marks a padding id, in place of its record number.
constexpr u32 PADDING = ~0u;

// Returns the last feature that begins at or before `place`. `firsts`: where each feature begins. All lanes of a warp must call this.
__device__ __forceinline__ u32 feature_at(const u32* firsts, u32 n, u32 place) {
  u32 number = 0;
  for (u32 start = 0; start < n; start += WARP) {
    const u32 begun = __ballot_sync(ALL, start + lane() < n && firsts[start + lane()] <= place);
    number += __popc(begun);
    if (begun != ALL) break;
  }
  return number - 1;
}

// Returns the key of id `i` of a feature.
__device__ __forceinline__ u64 key_at(const Feature& f, u32 i) {
  switch (f.key_type) {
    case WIDE: return load_once((const u64*)f.ids + i);
    case SIGNED: return (u64)(long long)((const int*)f.ids)[i];
    case UNSIGNED: return ((const u32*)f.ids)[i];
    default: return (u64)((const u32*)f.ids)[i] | (u64)((const u32*)f.high)[i] << 32;
  }
}

// Returns whether an id is looked up, inserted if necessary, and its row gets a gradient: if it is in the vocabulary, is not padding and
// has no weight of 0.
__device__ __forceinline__ bool is_active(const Feature& f, const Table& t, u64 key, u32 i) {
  return key <= t.last_key && !(f.has_padding && key == f.padding_key) && !(f.weights && f.weights[i] == 0);
}

// Returns where bag `b` begins among the ids of its feature. A wrong split is clamped to 0 to `num_ids`.
__device__ __forceinline__ u32 split_at(const Feature& f, u32 b) {
  const long long split = f.wide_splits ? ((const long long*)f.splits)[b] : ((const int*)f.splits)[b];
  return split < 0 ? 0 : split > f.num_ids ? f.num_ids : (u32)split;
}

// Returns the bag of id `i` of a feature.
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

// Reports an error of a call in memory that the host reads. Only the first report is kept.
__device__ __noinline__ void report(Fault* fault, u32 kind, u32 feature, u32 table, u64 id) {
  if (atomicCAS(&fault->taken, 0, 1) != 0) return;
  fault->feature = feature, fault->table = table, fault->id = id;
  __threadfence_system();
  *(volatile u32*)&fault->kind = kind;
}

// Reports splits that do not begin at 0, that fall, or that do not end at the number of ids.
__device__ __noinline__ void check_split(const Feature& f, const Fault* fault, u32 number, u32 bag) {
  const bool wide = f.wide_splits;
  const long long begin = wide ? ((const long long*)f.splits)[bag] : ((const int*)f.splits)[bag];
  const long long end = wide ? ((const long long*)f.splits)[bag + 1] : ((const int*)f.splits)[bag + 1];
  if (begin > end || (bag == 0 && begin != 0) || (bag + 1 == f.num_bags && end != f.num_ids))
    report((Fault*)fault, BAD_SPLITS, number, f.table, bag);
}

// Unsigned integers of BYTES.
template <u32 BYTES> struct NumberOf;
template <> struct NumberOf<2> {
  typedef unsigned short type;
};
template <> struct NumberOf<4> {
  typedef u32 type;
};
// Copies numbers. The threads of a copy have the numbers from `first` on, with `stride` between them.
template <class T> __device__ __forceinline__ void copy_numbers(const T* from, T* to, u64 count, u64 first, u64 stride) {
  constexpr u32 AT_ONCE = sizeof(uint4) / sizeof(T);
  const u64 quads = ((u64)from | (u64)to) % sizeof(uint4) == 0 ? count / AT_ONCE : 0;
#pragma unroll 4
  for (u64 i = first; i < quads; i += stride) ((uint4*)to)[i] = __ldcs((const uint4*)from + i);
  for (u64 i = AT_ONCE * quads + first; i < count; i += stride) to[i] = from[i];
}
