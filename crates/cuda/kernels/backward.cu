// The backward of a step: sorted ids become keys, each key's gradients are summed and its record updated.
//
// The order of a sum is that of crates/core/src/merge.rs: runs of 64 ids counted from the key's own first, then the runs.
#include "optimizer.cuh"
#include "step.cuh"

// Ids that one group of lanes sums: a run. Keys with more are hot, and their runs are summed apart.
constexpr u32 RUN = 64;
constexpr u32 HOT = 16;
// Positions of a thread of `list_keys`.
constexpr u32 POSITIONS = 4, LIST_THREADS = 1024;

// Keys of a step by how many ids they have.
struct Several {
  // `name`: of the first gradient row.
  u32 record, first, count, name;
};
struct Single {
  u32 record, gradient_row;
};
struct Hot {
  u32 record, first_run, runs, done;
};
static_assert(HOT <= WARP, "how many ids a key has is counted over two warps' positions");
struct Run {
  u32 first, count, hot, pad;
};

struct Lists {
  // Several << 32 | singles; hot << 32 | runs.
  u64 cold, pad0[15], hot, pad1[15];
};

struct Keys {
  Lists* lists;
  Single* singles;
  Several* several;
  Hot* hot;
  Run* runs;
  // (runs, dim)
  float4* partial;
};

// Each distinct record of sorted ids onto its list.
extern "C" __global__ void __launch_bounds__(LIST_THREADS) list_keys(Keys keys, const u32* __restrict__ records, const u32* __restrict__ gradient_rows, u32 n) {
  __shared__ u32 of_warps[4][WARP];
  __shared__ u32 first[4];
  const u32 warp = threadIdx.x / WARP, at = (blockIdx.x * WARP + warp) * (WARP * POSITIONS);
  u32 record[POSITIONS + 1], count[POSITIONS], singles = 0, several = 0, hot = 0, runs = 0;
#pragma unroll
  for (u32 r = 0; r <= POSITIONS; ++r) {
    const u32 i = at + r * WARP + lane();
    record[r] = i < n ? records[i] : ALL;
  }
  u32 left = at && at < n ? records[at - 1] : ALL;
#pragma unroll
  for (u32 r = 0; r < POSITIONS; ++r) {
    const u32 start = at + r * WARP, i = start + lane();
    u32 before = __shfl_up_sync(ALL, record[r], 1);
    if (lane() == 0) before = left;
    left = __shfl_sync(ALL, record[r], WARP - 1);
    const bool is_head = i < n && record[r] != before;
    const u32 heads = __ballot_sync(ALL, is_head);
    count[r] = 0;
    if (heads) {
      const u32 last = WARP - 1 - __clz(heads);
      const u32 tail = __popc(__ballot_sync(ALL, record[r + 1] == __shfl_sync(ALL, record[r], last)));
      if (is_head) count[r] = lane() == last ? min(WARP, n - start) - last + tail : __ffs(heads >> (lane() + 1));
    }
    if (count[r] > HOT) {
      // Where it ends: strides that double, then halves.
      u32 low = i + count[r] - 1, stride = WARP;
      while (low + stride < n && records[low + stride] == record[r]) low += stride, stride *= 2;
      u32 high = min(low + stride, n);
      while (low + 1 < high) {
        const u32 middle = (low + high) / 2;
        if (records[middle] == record[r]) low = middle;
        else high = middle;
      }
      count[r] = high - i;
      runs += (count[r] + RUN - 1) / RUN;
    }
    singles += __popc(__ballot_sync(ALL, count[r] == 1));
    several += __popc(__ballot_sync(ALL, count[r] > 1 && count[r] <= HOT));
    hot += __popc(__ballot_sync(ALL, count[r] > HOT));
  }
  u32 runs_here = runs;
  if (hot)
    for (u32 by = 1; by < WARP; by *= 2) {
      const u32 x = __shfl_up_sync(ALL, runs_here, by);
      if (lane() >= by) runs_here += x;
    }
  if (lane() == WARP - 1) of_warps[0][warp] = singles, of_warps[1][warp] = several, of_warps[2][warp] = hot, of_warps[3][warp] = runs_here;
  __syncthreads();
  if (warp < 4) {
    const u32 mine = of_warps[warp][lane()];
    u32 sum = mine;
    for (u32 by = 1; by < WARP; by *= 2) {
      const u32 x = __shfl_up_sync(ALL, sum, by);
      if (lane() >= by) sum += x;
    }
    of_warps[warp][lane()] = sum - mine;
    if (lane() == WARP - 1) first[warp] = sum;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const u64 cold = atomicAdd(&keys.lists->cold, (u64)first[1] << 32 | first[0]);
    const u64 of_hot = first[2] ? atomicAdd(&keys.lists->hot, (u64)first[2] << 32 | first[3]) : 0;
    first[0] = (u32)cold, first[1] = (u32)(cold >> 32), first[3] = (u32)of_hot, first[2] = (u32)(of_hot >> 32);
  }
  __syncthreads();
  u32 single_at = first[0] + of_warps[0][warp], several_at = first[1] + of_warps[1][warp], hot_at = first[2] + of_warps[2][warp];
  u32 run_at = first[3] + of_warps[3][warp] + runs_here - runs;
#pragma unroll
  for (u32 r = 0; r < POSITIONS; ++r) {
    const u32 i = at + r * WARP + lane();
    const u32 one = __ballot_sync(ALL, count[r] == 1), many = __ballot_sync(ALL, count[r] > 1 && count[r] <= HOT), most = __ballot_sync(ALL, count[r] > HOT);
    if (count[r] == 1) {
      keys.singles[single_at + __popc(one & lanes_below())] = {record[r], gradient_rows[i]};
    } else if (count[r] > HOT) {
      const u32 h = hot_at + __popc(most & lanes_below()), of_key = (count[r] + RUN - 1) / RUN;
      keys.hot[h] = {record[r], run_at, of_key, 0};
      for (u32 k = 0; k < of_key; ++k) keys.runs[run_at + k] = {i + k * RUN, min(RUN, count[r] - k * RUN), h, 0};
      run_at += of_key;
    } else if (count[r]) {
      keys.several[several_at + __popc(many & lanes_below())] = {record[r], i, count[r], gradient_rows[i]};
    }
    single_at += __popc(one), several_at += __popc(many), hot_at += __popc(most);
  }
}

constexpr u32 UPDATE_THREADS = 128;
// Keys that a group of lanes takes.
constexpr u32 PER_SEVERAL = 4, PER_SINGLE = 8;

struct Work {
  Call call;
  Keys keys;
  const u32* gradient_rows;
  Conditioning conditioning;
  Scalars scalars;
};

__device__ __forceinline__ float4 add(const float4& a, const float4& b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// Where a record is. `number`: among the records of all tables; `name`: of a gradient row of its table.
__device__ __forceinline__ float4* record_at(const Work& w, u32 number, u32 name) {
  const Feature& feature = w.call.features[name >> w.call.shift];
  return feature.records + (u64)(number - feature.first_record) * feature.stride;
}

// Four columns of a gradient row. Rows of bags are read AGAIN and again, others once.
template <u32 DIM, bool AGAIN> __device__ __forceinline__ float4 load_gradient(const Work& w, u32 name, u32 quad) {
  const u32 bag = name & ((1u << w.call.shift) - 1);
  return load_columns<DIM, !AGAIN>(w.call.features[name >> w.call.shift].gradients, bag, quad);
}

// A group of lanes at work on one key: each lane has four columns, or several times four of a row that is wider than a warp.
template <u32 DIM, class RULE, bool AGAIN> struct Group {
  static constexpr u32 QUADS = quads_of(DIM), LANES = lanes_of(DIM), CHUNKS = (QUADS + LANES - 1) / LANES, FLIGHT = 4;
  const Work& w;
  u32 column, mask;
  float4 sum[CHUNKS];

  __device__ __forceinline__ Group(const Work& work, u32 column_of, u32 mask_of) : w(work), column(column_of), mask(mask_of) {}

  __device__ __forceinline__ bool is_mine(u32 chunk) const { return QUADS % LANES == 0 || chunk * LANES + column < QUADS; }

  // Adds the gradients of ids `done` to `count`, whose names are `names`, to the sum; the first starts it.
  __device__ __forceinline__ void add_run(const u32* names, u32 done, u32 count) {
    u32 next[FLIGHT];
#pragma unroll
    for (u32 k = 0; k < FLIGHT; ++k) next[k] = done + k < count ? names[done + k] : 0;
    for (u32 start = done; start < count; start += FLIGHT) {
      u32 name[FLIGHT];
#pragma unroll
      for (u32 k = 0; k < FLIGHT; ++k) {
        name[k] = next[k];
        if (start + FLIGHT + k < count) next[k] = names[start + FLIGHT + k];
      }
      add_rows(name, start == 0, count - start);
    }
  }

  // Adds up to four rows.
  __device__ __forceinline__ void add_rows(const u32 (&name)[FLIGHT], bool starts, u32 count) {
#pragma unroll
    for (u32 chunk = 0; chunk < CHUNKS; ++chunk) {
      if (!is_mine(chunk)) continue;
      float4 row[FLIGHT];
#pragma unroll
      for (u32 k = 0; k < FLIGHT; ++k)
        if (k < count) row[k] = load_gradient<DIM, AGAIN>(w, name[k], chunk * LANES + column);
#pragma unroll
      for (u32 k = 0; k < FLIGHT; ++k)
        if (k < count) sum[chunk] = starts && k == 0 ? row[k] : add(sum[chunk], row[k]);
    }
  }

  // What of the record is asked for before the gradients are there: its first chunk.
  struct Ahead {
    float4 parts[1 + RULE::STATES];
  };
  __device__ __forceinline__ void update_columns(float4* at, u32 quad, const float4& gradient, const Ahead& before) {
    float4 now[1 + RULE::STATES];
    const float* g = (const float*)&gradient;
#pragma unroll
    for (u32 c = 0; c < 4; ++c) {
      float states[3];
#pragma unroll
      for (u32 k = 0; k < RULE::STATES; ++k) states[k] = ((const float*)&before.parts[1 + k])[c];
      ((float*)&now[0])[c] = RULE::step(w.scalars, w.conditioning.value(((const float*)&before.parts[0])[c]), states, w.conditioning.gradient(g[c]));
#pragma unroll
      for (u32 k = 0; k < RULE::STATES; ++k) ((float*)&now[1 + k])[c] = states[k];
    }
#pragma unroll
    for (u32 p = 0; p <= RULE::STATES; ++p) __stcs(at + p * QUADS + quad, now[p]);
  }

  __device__ __forceinline__ void load(const float4* at, u32 chunk, Ahead& ahead) const {
    if (!is_mine(chunk)) return;
#pragma unroll
    for (u32 p = 0; p <= RULE::STATES; ++p) ahead.parts[p] = __ldcs(at + p * QUADS + chunk * LANES + column);
  }

  __device__ __forceinline__ void update(float4* at, const Ahead& first) {
#pragma unroll
    for (u32 chunk = 0; chunk < CHUNKS; ++chunk) {
      Ahead later;
      if (chunk) load(at, chunk, later);
      if (is_mine(chunk)) update_columns(at, chunk * LANES + column, sum[chunk], chunk ? later : first);
    }
  }
};

// Its columns are divided by what the whole row's gradient makes of the accumulator, whose sum of squares goes in eight lanes, as
// crates/core/src/math.rs has it.
template <u32 DIM, bool AGAIN> struct Group<DIM, RowWiseAdagrad, AGAIN> : Group<DIM, Sgd, AGAIN> {
  typedef Group<DIM, Sgd, AGAIN> Base;
  using Base::CHUNKS, Base::LANES, Base::QUADS, Base::column, Base::mask, Base::sum, Base::w;
  using Base::Base;
  typedef typename Base::Ahead Ahead;
  __device__ __forceinline__ void update(float4* at, const Ahead& first) {
    float lanes[8] = {};
#pragma unroll
    for (u32 quad = 0; quad < QUADS; ++quad) {
      const float4& mine = sum[quad / LANES];
#pragma unroll
      for (u32 c = 0; c < 4; ++c) {
        const float g = w.conditioning.gradient(((const float*)&mine)[c]), x = __shfl_sync(mask, g, quad % LANES, LANES);
        if (4 * quad + c < DIM) lanes[4 * (quad % 2) + c] += x * x;
      }
    }
    const float squares = ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
    float* accumulator = (float*)(at + QUADS);
    const float now = *accumulator + squares / (float)DIM, divisor = sqrtf(now + w.scalars.d);
    __syncwarp(mask);
    if (column == 0) *accumulator = now;
#pragma unroll
    for (u32 chunk = 0; chunk < CHUNKS; ++chunk) {
      Ahead later;
      if (chunk) this->load(at, chunk, later);
      if (!this->is_mine(chunk)) continue;
      float4 x = chunk ? later.parts[0] : first.parts[0];
#pragma unroll
      for (u32 c = 0; c < 4; ++c) {
        float& value = ((float*)&x)[c];
        value = RowWiseAdagrad::step(w.scalars, w.conditioning.value(value), divisor, w.conditioning.gradient(((const float*)&sum[chunk])[c]));
      }
      __stcs(at + chunk * LANES + column, x);
    }
  }
};

// Merge and update. Blocks in order: runs of hot keys, then keys of several ids and of one id in turn; each group asks for the
// names of its next key before it is through with this one.
template <u32 DIM, class RULE, bool AGAIN> __global__ void __launch_bounds__(UPDATE_THREADS, DIM <= 128 ? 6 : 1) update(Work w) {
  typedef Group<DIM, RULE, AGAIN> Of;
  constexpr u32 LANES = Of::LANES, GROUPS = UPDATE_THREADS / LANES;
  const u32 column = threadIdx.x % LANES, number_of = threadIdx.x / LANES;
  const u32 mask = LANES == WARP ? ALL : ((1u << LANES % WARP) - 1) << (lane() / LANES * LANES);
  Of group(w, column, mask);
  const Keys& keys = w.keys;
  const u32 runs = (u32)keys.lists->hot, several = (u32)(keys.lists->cold >> 32), singles = (u32)keys.lists->cold;
  const u32 hot_blocks = (runs + GROUPS - 1) / GROUPS;
  const u32 several_blocks = (several + GROUPS * PER_SEVERAL - 1) / (GROUPS * PER_SEVERAL);
  const u32 single_blocks = (singles + GROUPS * PER_SINGLE - 1) / (GROUPS * PER_SINGLE);
  u32 block = blockIdx.x;
  if (block < hot_blocks) {
    const u32 number = block * GROUPS + number_of;
    if (number >= runs) return;
    const Run run = keys.runs[number];
    const u32* names = w.gradient_rows + run.first;
    group.add_run(names, 0, run.count);
#pragma unroll
    for (u32 chunk = 0; chunk < Of::CHUNKS; ++chunk)
      if (group.is_mine(chunk)) __stcg(keys.partial + (u64)number * Of::QUADS + chunk * LANES + column, group.sum[chunk]);
    __threadfence();
    __syncwarp(mask);
    Hot* hot = keys.hot + run.hot;
    u32 done = 0;
    if (column == 0) done = atomicAdd(&hot->done, 1);
    if (__shfl_sync(mask, done, 0, LANES) != hot->runs - 1) return;
    // The last run to arrive sums all, in their order.
    __threadfence();
    float4* at = record_at(w, hot->record, names[0]);
    typename Of::Ahead ahead;
    group.load(at, 0, ahead);
#pragma unroll
    for (u32 chunk = 0; chunk < Of::CHUNKS; ++chunk) {
      if (!group.is_mine(chunk)) continue;
      const float4* partial = keys.partial + (u64)hot->first_run * Of::QUADS + chunk * LANES + column;
      float4 sum = __ldcg(partial);
#pragma unroll 4
      for (u32 k = 1; k < hot->runs; ++k) sum = add(sum, __ldcg(partial + (u64)k * Of::QUADS));
      group.sum[chunk] = sum;
    }
    group.update(at, ahead);
    return;
  }
  block -= hot_blocks;
  if (block >= several_blocks + single_blocks) return;
  const u32 in_several = (u32)((u64)block * several_blocks / (several_blocks + single_blocks));
  if ((u32)((u64)(block + 1) * several_blocks / (several_blocks + single_blocks)) > in_several) {
    u32 number = in_several * GROUPS * PER_SEVERAL + number_of;
    const u32 end = min(several, (in_several + 1) * GROUPS * PER_SEVERAL);
    const Several none = {0, 0, 0, 0};
    Several key = number < end ? keys.several[number] : none, next = number + GROUPS < end ? keys.several[number + GROUPS] : none;
    u32 name[Of::FLIGHT], next_name[Of::FLIGHT];
#pragma unroll
    for (u32 k = 0; k < Of::FLIGHT; ++k) name[k] = k < key.count ? w.gradient_rows[key.first + k] : 0;
    float4* at = record_at(w, key.record, key.name);
    for (; number < end; number += GROUPS) {
      typename Of::Ahead ahead;
      group.load(at, 0, ahead);
      group.add_rows(name, true, key.count);
#pragma unroll
      for (u32 k = 0; k < Of::FLIGHT; ++k) next_name[k] = k < next.count ? w.gradient_rows[next.first + k] : 0;
      const Several after = number + 2 * GROUPS < end ? keys.several[number + 2 * GROUPS] : none;
      float4* next_at = record_at(w, next.record, next.name);
      if (key.count > Of::FLIGHT) group.add_run(w.gradient_rows + key.first, Of::FLIGHT, key.count);
      group.update(at, ahead);
      key = next, next = after, at = next_at;
#pragma unroll
      for (u32 k = 0; k < Of::FLIGHT; ++k) name[k] = next_name[k];
    }
  } else {
    const u32 in_singles = block - in_several;
    u32 number = in_singles * GROUPS * PER_SINGLE + number_of;
    const u32 end = min(singles, (in_singles + 1) * GROUPS * PER_SINGLE);
    const Single none = {0, 0};
    Single key = number < end ? keys.singles[number] : none, next = number + GROUPS < end ? keys.singles[number + GROUPS] : none;
    float4* at = record_at(w, key.record, key.gradient_row);
    for (; number < end; number += GROUPS) {
      typename Of::Ahead ahead;
      group.load(at, 0, ahead);
#pragma unroll
      for (u32 chunk = 0; chunk < Of::CHUNKS; ++chunk)
        if (group.is_mine(chunk)) group.sum[chunk] = load_gradient<DIM, AGAIN>(w, key.gradient_row, chunk * LANES + column);
      float4* next_at = record_at(w, next.record, next.gradient_row);
      key = next;
      if (number + 2 * GROUPS < end) next = keys.singles[number + 2 * GROUPS];
      group.update(at, ahead);
      at = next_at;
    }
  }
}
