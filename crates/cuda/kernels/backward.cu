// The backward of a step: each key's gradients are summed and its record updated.
//
// The order of a sum is that of crates/core/src/merge.rs: runs of 64 ids counted from the key's own first, then the runs.
#include "keys.cuh"
#include "optimizer.cuh"
#include "sort.cuh"
#include "stage.cuh"
#include "step.cuh"

constexpr u32 UPDATE_THREADS = 128;

// Gradients of all features go to where their sides, which come before them, have them. Blocks take turns: one for each feature.
extern "C" __global__ void __launch_bounds__(UPDATE_THREADS) copy_gradients(const Side* sides, u32 num_features) {
  begin();
  const u32 feature = blockIdx.x % num_features;
  const Gradients of = ((const Gradients*)(sides + num_features))[feature];
  float* to = (float*)sides[feature].gradients;
  const u64 stride = (u64)gridDim.x / num_features * UPDATE_THREADS, first = (u64)(blockIdx.x / num_features) * UPDATE_THREADS + threadIdx.x;
  const u64 quads = (u64)of.from % sizeof(float4) == 0 ? of.count / 4 : 0;
#pragma unroll 4
  for (u64 i = first; i < quads; i += stride) ((float4*)to)[i] = __ldcs((const float4*)of.from + i);
  for (u64 i = 4 * quads + first; i < of.count; i += stride) to[i] = of.from[i];
}

// Keys that a group of lanes takes.
constexpr u32 PER_SEVERAL = 4, PER_SINGLE = 8;
static_assert(2 * PER_SEVERAL >= PER_SINGLE && HOT >= PER_SINGLE, "a launch has a block for so many ids, whatever their keys");

// Where the gradients of keys come from: the framework's rows, each whole; the same, each times a coefficient of its id; sums of
// earlier merges.
enum Source : u32 { ROWS, WEIGHTED_ROWS, SUMS };

// A merged gradient, and the record that it belongs to.
struct Entry {
  const float4* sum;
  float weight;
  // Which, of which table.
  u32 record, table, pad[3];
};
static_assert(sizeof(Entry) == 32, "as crates/cuda/src/layout.rs has it");

// What a step's scalars make of a rule, written by `prepare`.
struct Prepared {
  // 0: nothing is to be done.
  u32 is_due;
  // Of the push.
  float weight;
  Conditioning conditioning;
  Scalars scalars;
};

template <u32 KINDS> struct Work {
  // Of each feature.
  const Side* sides;
  const Table* tables;
  const Entry* entries;
  // By place of the sort; the value is the name of a gradient row, the place of an id or the number of an entry.
  const Sorted* sorted;
  const Named* named;
  const Prepared* prepared;
  // By table: what gradients are multiplied by besides; null: nothing.
  const float* factors;
  u32 shift, pad;
  Keys kinds[KINDS];
};

__device__ __forceinline__ float4 add(const float4& a, const float4& b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
__device__ __forceinline__ float4 scaled(const float4& a, float by) { return make_float4(a.x * by, a.y * by, a.z * by, a.w * by); }

template <u32 SOURCE, class W> __device__ __forceinline__ const Side& side_of(const W& w, u32 value) {
  return w.sides[(SOURCE == WEIGHTED_ROWS ? w.named[value].name : value) >> w.shift];
}

// Where a record of a table is. `value`: of one of its ids.
template <u32 SOURCE, class W> __device__ __forceinline__ float4* record_at(const W& w, u32 record, u32 value) {
  if (SOURCE == SUMS) {
    const Entry& entry = w.entries[value];
    return w.tables[entry.table].records + (u64)entry.record * w.tables[entry.table].stride;
  }
  const Side& side = side_of<SOURCE>(w, value);
  return side.records + (u64)record * side.stride;
}

template <u32 SOURCE, class W> __device__ __forceinline__ float factor_of(const W& w, u32 value) {
  if (!w.factors) return 1.0f;
  return w.factors[SOURCE == SUMS ? w.entries[value].table : side_of<SOURCE>(w, value).table];
}

// Where the gradient of an id is, and what it is to be multiplied by.
struct Gradient {
  const float* rows;
  u32 row;
  float scale;
};
template <u32 SOURCE, class W> __device__ __forceinline__ Gradient gradient_of(const W& w, u32 value) {
  if (SOURCE == SUMS) {
    const Entry& entry = w.entries[value];
    return {(const float*)entry.sum, 0, entry.weight};
  }
  const Named named = SOURCE == WEIGHTED_ROWS ? w.named[value] : Named{value, 0};
  const Side& side = w.sides[named.name >> w.shift];
  return {side.gradients, named.name & ((1u << w.shift) - 1), SOURCE == WEIGHTED_ROWS ? named.coefficient : side.scale};
}

// Four columns of a gradient. Rows of bags are read AGAIN and again, others once.
template <u32 SOURCE, u32 DIM, bool AGAIN, class W> __device__ __forceinline__ float4 load_gradient(const W& w, u32 value, u32 quad) {
  const Gradient g = gradient_of<SOURCE>(w, value);
  return scaled(SOURCE == SUMS ? __ldcs((const float4*)g.rows + quad) : load_columns<DIM, !AGAIN>(g.rows, g.row, quad), g.scale);
}

// Asks for what `load_gradient` would, and gives what it is to be multiplied by.
template <u32 SOURCE, u32 DIM, class S, class W> __device__ __forceinline__ float ask_gradient(const S& stage, u32 turn, u32 k, const W& w, u32 value, u32 quad) {
  const Gradient g = gradient_of<SOURCE>(w, value);
  if (SOURCE == SUMS) stage.ask(turn, k, (const float4*)g.rows + quad);
  else stage.template ask_columns<DIM>(turn, k, g.rows, g.row, quad);
  return g.scale;
}

// A group of lanes at work on one key: each lane has four columns, or several times four of a row that is wider than a warp.
template <u32 SOURCE, u32 DIM, class RULE, bool AGAIN, class W> struct Group {
  static constexpr u32 QUADS = quads_of(DIM), LANES = lanes_of(DIM), CHUNKS = (QUADS + LANES - 1) / LANES, FLIGHT = 4, PARTS = 1 + RULE::STATES;
  const W& w;
  const Prepared& now;
  u32 column, mask;
  float factor;
  float4 sum[CHUNKS];

  __device__ __forceinline__ Group(const W& work, const Prepared& prepared, u32 column_of, u32 mask_of) : w(work), now(prepared), column(column_of), mask(mask_of) {}

  __device__ __forceinline__ bool is_mine(u32 chunk) const { return QUADS % LANES == 0 || chunk * LANES + column < QUADS; }

  // Adds the gradients of ids `done` to `count` to the sum; the first starts it.
  __device__ __forceinline__ void add_run(const Sorted* ids, u32 done, u32 count) {
    u32 next[FLIGHT];
#pragma unroll
    for (u32 k = 0; k < FLIGHT; ++k) next[k] = done + k < count ? ids[done + k].value : 0;
    for (u32 start = done; start < count; start += FLIGHT) {
      u32 value[FLIGHT];
#pragma unroll
      for (u32 k = 0; k < FLIGHT; ++k) {
        value[k] = next[k];
        if (start + FLIGHT + k < count) next[k] = ids[start + FLIGHT + k].value;
      }
      add_rows(value, start == 0, count - start);
    }
  }

  // Adds up to four rows.
  __device__ __forceinline__ void add_rows(const u32 (&value)[FLIGHT], bool starts, u32 count) {
#pragma unroll
    for (u32 chunk = 0; chunk < CHUNKS; ++chunk) {
      if (!is_mine(chunk)) continue;
      float4 row[FLIGHT];
#pragma unroll
      for (u32 k = 0; k < FLIGHT; ++k)
        if (k < count) row[k] = load_gradient<SOURCE, DIM, AGAIN>(w, value[k], chunk * LANES + column);
#pragma unroll
      for (u32 k = 0; k < FLIGHT; ++k)
        if (k < count) sum[chunk] = starts && k == 0 ? row[k] : add(sum[chunk], row[k]);
    }
  }

  // What of the record is asked for before the gradients are there: its first chunk.
  struct Ahead {
    float4 parts[PARTS];
  };
  __device__ __forceinline__ void update_columns(float4* at, u32 quad, const float4& gradient, const Ahead& before) {
    float4 after[PARTS];
    const float* g = (const float*)&gradient;
#pragma unroll
    for (u32 c = 0; c < 4; ++c) {
      float states[3];
#pragma unroll
      for (u32 k = 0; k < RULE::STATES; ++k) states[k] = ((const float*)&before.parts[1 + k])[c];
      ((float*)&after[0])[c] = RULE::step(now.scalars, now.conditioning.value(((const float*)&before.parts[0])[c]), states, now.conditioning.gradient(g[c], factor));
#pragma unroll
      for (u32 k = 0; k < RULE::STATES; ++k) ((float*)&after[1 + k])[c] = states[k];
    }
#pragma unroll
    for (u32 p = 0; p < PARTS; ++p) __stcs(at + p * QUADS + quad, after[p]);
  }

  __device__ __forceinline__ void load(const float4* at, u32 chunk, Ahead& ahead) const {
    if (!is_mine(chunk)) return;
#pragma unroll
    for (u32 p = 0; p < PARTS; ++p) ahead.parts[p] = __ldcs(at + p * QUADS + chunk * LANES + column);
  }

  // What a push's weight and its table's norm make of the sum.
  __device__ __forceinline__ void weigh(float clip) {
    factor = now.conditioning.factor * clip;
#pragma unroll
    for (u32 chunk = 0; chunk < CHUNKS; ++chunk) sum[chunk] = scaled(sum[chunk], now.weight);
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
template <u32 SOURCE, u32 DIM, bool AGAIN, class W> struct Group<SOURCE, DIM, RowWiseAdagrad, AGAIN, W> : Group<SOURCE, DIM, Sgd, AGAIN, W> {
  typedef Group<SOURCE, DIM, Sgd, AGAIN, W> Base;
  using Base::CHUNKS, Base::LANES, Base::QUADS, Base::column, Base::factor, Base::mask, Base::now, Base::sum, Base::w;
  using Base::Base;
  typedef typename Base::Ahead Ahead;
  __device__ __forceinline__ void update(float4* at, const Ahead& first) {
    float lanes[8] = {};
#pragma unroll
    for (u32 quad = 0; quad < QUADS; ++quad) {
      const float4& mine = sum[quad / LANES];
#pragma unroll
      for (u32 c = 0; c < 4; ++c) {
        const float g = now.conditioning.gradient(((const float*)&mine)[c], factor), x = __shfl_sync(mask, g, quad % LANES, LANES);
        if (4 * quad + c < DIM) lanes[4 * (quad % 2) + c] += x * x;
      }
    }
    const float squares = ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
    float* accumulator = (float*)(at + QUADS);
    const float total = *accumulator + squares / (float)DIM, divisor = sqrtf(total + now.scalars.d);
    __syncwarp(mask);
    if (column == 0) *accumulator = total;
#pragma unroll
    for (u32 chunk = 0; chunk < CHUNKS; ++chunk) {
      Ahead later;
      if (chunk) this->load(at, chunk, later);
      if (!this->is_mine(chunk)) continue;
      float4 x = chunk ? later.parts[0] : first.parts[0];
#pragma unroll
      for (u32 c = 0; c < 4; ++c) {
        float& value = ((float*)&x)[c];
        value = RowWiseAdagrad::step(now.scalars, now.conditioning.value(value), divisor, now.conditioning.gradient(((const float*)&sum[chunk])[c], factor));
      }
      __stcs(at + chunk * LANES + column, x);
    }
  }
};

// What becomes of a key's sum: into its record, by the optimizer's rule.
template <u32 SOURCE, u32 DIM, class RULE, bool AGAIN, class W> struct Update {
  typedef Group<SOURCE, DIM, RULE, AGAIN, W> Of;
  typedef typename Of::Ahead Ahead;
  // Parts of a record and a gradient.
  typedef Stage<Of::PARTS + 1, UPDATE_THREADS> Ways;
  typedef typename Ways::Memory Memory;
  float4* at;
  Ahead ahead;
  const Keys& keys;
  const Ways ways;
  __device__ __forceinline__ Update(const Keys& of, Memory& memory) : keys(of), ways{memory} {}
  __device__ __forceinline__ float4* place(Of& group, u32 record, u32 value, u32) const { return record_at<SOURCE>(group.w, record, value); }
  __device__ __forceinline__ void begin(Of& group, float4* place) { group.load(at = place, 0, ahead); }
  __device__ __forceinline__ void end(Of& group, u32 value) {
    group.weigh(factor_of<SOURCE>(group.w, value));
    group.update(at, ahead);
  }

  // A key of one id on its way: where its record is, and what its gradient is to be multiplied by.
  struct Asked {
    float4* record;
    float scale;
  };
  __device__ __forceinline__ Asked ask(const Of& group, u32 turn, const Single& key) const {
    float4* record = record_at<SOURCE>(group.w, key.record, key.gradient_row);
    if (!group.is_mine(0)) return {record, 0};
#pragma unroll
    for (u32 p = 0; p < Of::PARTS; ++p) ways.ask(turn, p, record + p * Of::QUADS + group.column);
    return {record, ask_gradient<SOURCE, DIM>(ways, turn, Of::PARTS, group.w, key.gradient_row, group.column)};
  }
  // Those of one id from `number` on, every so many: a group asks for the next before it is at work on one.
  __device__ __forceinline__ void singles(Of& group, u32 number, u32 end_of, u32 groups) {
    Single key = keys.singles[number], next = number + groups < end_of ? keys.singles[number + groups] : key;
    Asked asked = ask(group, 0, key);
    ways.end();
    for (u32 turn = 0; number < end_of; ++turn, number += groups) {
      const Asked next_asked = number + groups < end_of ? ask(group, turn + 1, next) : asked;
      ways.end();
      ways.wait();
      const u32 value = key.gradient_row;
#pragma unroll
      for (u32 chunk = 0; chunk < Of::CHUNKS; ++chunk)
        if (group.is_mine(chunk)) group.sum[chunk] = chunk ? load_gradient<SOURCE, DIM, AGAIN>(group.w, value, chunk * Of::LANES + group.column) : scaled(ways.at(turn, Of::PARTS), asked.scale);
#pragma unroll
      for (u32 p = 0; p < Of::PARTS; ++p) ahead.parts[p] = ways.at(turn, p);
      at = asked.record, asked = next_asked;
      key = next;
      if (number + 2 * groups < end_of) next = keys.singles[number + 2 * groups];
      end(group, value);
    }
  }
};

// Of one that asks for nothing ahead.
struct NoMemory {};

// Or into memory, for a push that is applied later.
template <u32 SOURCE, u32 DIM, bool AGAIN, class W> struct Store {
  typedef Group<SOURCE, DIM, Sgd, AGAIN, W> Of;
  typedef NoMemory Memory;
  float4* at;
  const Keys& keys;
  __device__ __forceinline__ Store(const Keys& of, Memory&) : keys(of) {}
  __device__ __forceinline__ float4* place(Of&, u32, u32, u32 number) const { return keys.sums + (u64)number * Of::QUADS; }
  __device__ __forceinline__ void begin(Of&, float4* place) { at = place; }
  __device__ __forceinline__ void end(Of& group, u32) {
#pragma unroll
    for (u32 chunk = 0; chunk < Of::CHUNKS; ++chunk)
      if (group.is_mine(chunk)) __stcs(at + chunk * Of::LANES + group.column, group.sum[chunk]);
  }

  // Those of one id from `number` on, every so many: several in flight.
  __device__ __forceinline__ void singles(Of& group, u32 number, u32 end_of, u32 groups) {
    for (; number < end_of; number += Of::FLIGHT * groups) {
      u32 value[Of::FLIGHT];
#pragma unroll
      for (u32 k = 0; k < Of::FLIGHT; ++k) value[k] = number + k * groups < end_of ? keys.singles[number + k * groups].gradient_row : 0;
#pragma unroll
      for (u32 chunk = 0; chunk < Of::CHUNKS; ++chunk) {
        if (!group.is_mine(chunk)) continue;
        const u32 quad = chunk * Of::LANES + group.column;
        float4 row[Of::FLIGHT];
#pragma unroll
        for (u32 k = 0; k < Of::FLIGHT; ++k)
          if (number + k * groups < end_of) row[k] = load_gradient<SOURCE, DIM, AGAIN>(group.w, value[k], quad);
#pragma unroll
        for (u32 k = 0; k < Of::FLIGHT; ++k)
          if (number + k * groups < end_of) __stcs(keys.sums + (u64)(number + k * groups) * Of::QUADS + quad, row[k]);
      }
    }
  }
};

// Runs of hot keys are bound by the L2 cache, other keys by memory: so runs lie among the first of the others, one part in so many. Not
// among all: a hot key's last sum is a chain of loads, which must not come at the very end.
constexpr u32 MIXED = 5;

// The keys of one dim, if `block` is among its blocks; else takes them off. Blocks in order: runs of hot keys among the first of the
// others, which are keys of several ids and of one id in turn.
template <u32 SOURCE, u32 DIM, bool AGAIN, class Sink, class W> __device__ __forceinline__ bool merge_keys(const W& w, const Keys& keys, const Prepared& now, typename Sink::Memory& memory, u32& block) {
  typedef typename Sink::Of Of;
  constexpr u32 LANES = Of::LANES, GROUPS = UPDATE_THREADS / LANES;
  const u32 column = threadIdx.x % LANES, number_of = threadIdx.x / LANES;
  const u32 mask = LANES == WARP ? ALL : ((1u << LANES % WARP) - 1) << (lane() / LANES * LANES);
  const u32 runs = (u32)keys.lists->hot, several = (u32)(keys.lists->cold >> 32), singles = (u32)keys.lists->cold;
  const u32 hot_blocks = (runs + GROUPS - 1) / GROUPS;
  const u32 several_blocks = (several + GROUPS * PER_SEVERAL - 1) / (GROUPS * PER_SEVERAL);
  const u32 single_blocks = (singles + GROUPS * PER_SINGLE - 1) / (GROUPS * PER_SINGLE);
  if (block >= hot_blocks + several_blocks + single_blocks) {
    block -= hot_blocks + several_blocks + single_blocks;
    return false;
  }
  Of group(w, now, column, mask);
  Sink sink(keys, memory);
  const u32 mixed = hot_blocks + (several_blocks + single_blocks) / MIXED;
  const u32 in_hot = block < mixed ? (u32)((u64)block * hot_blocks / mixed) : hot_blocks;
  if (block < mixed && (u32)((u64)(block + 1) * hot_blocks / mixed) > in_hot) {
    const u32 number = in_hot * GROUPS + number_of;
    if (number >= runs) return true;
    const Run run = keys.runs[number];
    const Sorted* ids = w.sorted + run.first;
    group.add_run(ids, 0, run.count);
#pragma unroll
    for (u32 chunk = 0; chunk < Of::CHUNKS; ++chunk)
      if (group.is_mine(chunk)) __stcg(keys.partial + (u64)number * Of::QUADS + chunk * LANES + column, group.sum[chunk]);
    __threadfence();
    __syncwarp(mask);
    Hot* hot = keys.hot + run.hot;
    u32 done = 0;
    if (column == 0) done = atomicAdd(&hot->done, 1);
    if (__shfl_sync(mask, done, 0, LANES) != hot->runs - 1) return true;
    // The last run to arrive sums all, in their order. The list may be merged again.
    __threadfence();
    if (column == 0) hot->done = 0;
    sink.begin(group, sink.place(group, hot->record, ids->value, singles + several + run.hot));
#pragma unroll
    for (u32 chunk = 0; chunk < Of::CHUNKS; ++chunk) {
      if (!group.is_mine(chunk)) continue;
      const float4* partial = keys.partial + (u64)hot->first_run * Of::QUADS + chunk * LANES + column;
      const u32 num_runs = hot->runs;
      float4 sum = __ldcg(partial);
#pragma unroll 8
      for (u32 k = 1; k < num_runs; ++k) sum = add(sum, __ldcg(partial + (u64)k * Of::QUADS));
      group.sum[chunk] = sum;
    }
    sink.end(group, ids->value);
    return true;
  }
  block -= in_hot;
  const u32 in_several = (u32)((u64)block * several_blocks / (several_blocks + single_blocks));
  if ((u32)((u64)(block + 1) * several_blocks / (several_blocks + single_blocks)) > in_several) {
    u32 number = in_several * GROUPS * PER_SEVERAL + number_of;
    const u32 end = min(several, (in_several + 1) * GROUPS * PER_SEVERAL);
    if (number >= end) return true;
    const Several none = {0, 0, 0, 0};
    Several key = keys.several[number], next = number + GROUPS < end ? keys.several[number + GROUPS] : none;
    u32 value[Of::FLIGHT], next_value[Of::FLIGHT];
#pragma unroll
    for (u32 k = 0; k < Of::FLIGHT; ++k) value[k] = k < key.count ? w.sorted[key.first + k].value : 0;
    float4* place = sink.place(group, key.record, key.name, singles + number);
    for (; number < end; number += GROUPS) {
      sink.begin(group, place);
      group.add_rows(value, true, key.count);
#pragma unroll
      for (u32 k = 0; k < Of::FLIGHT; ++k) next_value[k] = k < next.count ? w.sorted[next.first + k].value : 0;
      const Several after = number + 2 * GROUPS < end ? keys.several[number + 2 * GROUPS] : none;
      if (next.count) place = sink.place(group, next.record, next.name, singles + number + GROUPS);
      if (key.count > Of::FLIGHT) group.add_run(w.sorted + key.first, Of::FLIGHT, key.count);
      sink.end(group, key.name);
      key = next, next = after;
#pragma unroll
      for (u32 k = 0; k < Of::FLIGHT; ++k) value[k] = next_value[k];
    }
  } else {
    const u32 in_singles = block - in_several;
    u32 number = in_singles * GROUPS * PER_SINGLE + number_of;
    const u32 end = min(singles, (in_singles + 1) * GROUPS * PER_SINGLE);
    if (number >= end) return true;
    sink.singles(group, number, end, GROUPS);
  }
  return true;
}

__host__ __device__ constexpr u32 largest(u32 a) { return a; }
template <class... Others> __host__ __device__ constexpr u32 largest(u32 a, u32 b, Others... others) { return largest(a > b ? a : b, others...); }

// Merge and update. Gradients that are read AGAIN come from the L2 cache: one block more has them on their way.
template <u32 SOURCE, class RULE, bool AGAIN, u32... DIM> __global__ void __launch_bounds__(UPDATE_THREADS, largest(DIM...) <= 128 ? (AGAIN ? 7 : 6) : 1) update(const __grid_constant__ Work<sizeof...(DIM)> w) {
  begin();
  typedef Work<sizeof...(DIM)> W;
  __shared__ typename Update<SOURCE, 1, RULE, AGAIN, W>::Memory memory;
  const Prepared now = *w.prepared;
  if (!now.is_due) return;
  u32 block = blockIdx.x, kind = 0;
  (merge_keys<SOURCE, DIM, AGAIN, Update<SOURCE, DIM, RULE, AGAIN, W>>(w, w.kinds[kind++], now, memory, block) || ...);
}

// Calls `body` with the numbers that are this block's, until it says that there are no more. How many keys there are only the device
// knows: a block for each that there may be would leave most without work.
template <class Body> __device__ __forceinline__ void take_turns(const Body& body) {
  for (u32 block = blockIdx.x; body(block); block += gridDim.x) __syncwarp();
}

// Merge alone: sums of all keys, `Keys::sums`.
template <u32 SOURCE, bool AGAIN, u32... DIM> __global__ void __launch_bounds__(UPDATE_THREADS) merge(const __grid_constant__ Work<sizeof...(DIM)> w) {
  begin();
  typedef Work<sizeof...(DIM)> W;
  __shared__ Prepared now;
  NoMemory none;
  take_turns([&](u32 block) {
    u32 kind = 0;
    return (merge_keys<SOURCE, DIM, AGAIN, Store<SOURCE, DIM, AGAIN, W>>(w, w.kinds[kind++], now, none, block) || ...);
  });
}

// A key by the place of its sum.
struct Summed {
  u32 record, value;
};
template <class W> __device__ __forceinline__ Summed summed(const W& w, const Keys& keys, u32 singles, u32 several, u32 number) {
  if (number < singles) return {keys.singles[number].record, keys.singles[number].gradient_row};
  if (number < singles + several) return {keys.several[number - singles].record, keys.several[number - singles].name};
  const Hot& hot = keys.hot[number - singles - several];
  return {hot.record, w.sorted[keys.runs[hot.first_run].first].value};
}

constexpr u32 PER_SUM = 4;

template <u32 SOURCE, u32 DIM, class RULE, class W> __device__ __forceinline__ bool update_summed(const W& w, const Keys& keys, const Prepared& now, u32& block) {
  typedef Group<SOURCE, DIM, RULE, false, W> Of;
  constexpr u32 LANES = Of::LANES, GROUPS = UPDATE_THREADS / LANES;
  const u32 singles = (u32)keys.lists->cold, several = (u32)(keys.lists->cold >> 32), total = singles + several + (u32)(keys.lists->hot >> 32);
  const u32 blocks = (total + GROUPS * PER_SUM - 1) / (GROUPS * PER_SUM);
  if (block >= blocks) {
    block -= blocks;
    return false;
  }
  const u32 column = threadIdx.x % LANES;
  const u32 mask = LANES == WARP ? ALL : ((1u << LANES % WARP) - 1) << (lane() / LANES * LANES);
  Of group(w, now, column, mask);
  u32 number = block * GROUPS * PER_SUM + threadIdx.x / LANES;
  const u32 end = min(total, (block + 1) * GROUPS * PER_SUM);
  if (number >= end) return true;
  Summed key = summed(w, keys, singles, several, number);
  for (; number < end; number += GROUPS) {
    float4* at = record_at<SOURCE>(w, key.record, key.value);
    typename Of::Ahead ahead;
    group.load(at, 0, ahead);
#pragma unroll
    for (u32 chunk = 0; chunk < Of::CHUNKS; ++chunk)
      if (group.is_mine(chunk)) group.sum[chunk] = __ldcs(keys.sums + (u64)number * Of::QUADS + chunk * LANES + column);
    const float factor = factor_of<SOURCE>(w, key.value);
    if (number + GROUPS < end) key = summed(w, keys, singles, several, number + GROUPS);
    group.weigh(factor);
    group.update(at, ahead);
  }
  return true;
}

// Updates the records of sums that were merged before.
template <u32 SOURCE, class RULE, u32... DIM> __global__ void __launch_bounds__(UPDATE_THREADS, largest(DIM...) <= 128 ? 6 : 1) update_sums(const __grid_constant__ Work<sizeof...(DIM)> w) {
  begin();
  const Prepared now = *w.prepared;
  if (!now.is_due) return;
  take_turns([&](u32 block) {
    u32 kind = 0;
    return (update_summed<SOURCE, DIM, RULE>(w, w.kinds[kind++], now, block) || ...);
  });
}

// Exact sums of squares, as crates/core/src/exact_sum.rs has them: mantissas as integers, one total an exponent.
constexpr u32 EXPONENTS = 256;

template <u32 SOURCE, u32 DIM, class W> __device__ __forceinline__ void add_squares(const W& w, const Keys& keys, u64* totals) {
  const u32 singles = (u32)keys.lists->cold, several = (u32)(keys.lists->cold >> 32), total = singles + several + (u32)(keys.lists->hot >> 32);
  // Eight lanes a key, each with the columns that are its own.
  const u32 part = threadIdx.x % 8, mask = 0xffu << (lane() & ~7u);
  for (u32 number = (blockIdx.x * UPDATE_THREADS + threadIdx.x) / 8; number < total; number += gridDim.x * UPDATE_THREADS / 8) {
    const Summed key = summed(w, keys, singles, several, number);
    const float* sum = (const float*)(keys.sums + (u64)number * quads_of(DIM));
    float squares = 0;
    for (u32 column = part; column < DIM; column += 8) {
      const float x = sum[column] * w.prepared->weight;
      squares += x * x;
    }
    // ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7))
    squares += __shfl_down_sync(mask, squares, 4, 8);
    squares += __shfl_down_sync(mask, squares, 2, 8);
    squares += __shfl_down_sync(mask, squares, 1, 8);
    if (part != 0) continue;
    const u32 bits = __float_as_uint(squares) & 0x7fffffff, exponent = bits >> 23;
    const u32 table = SOURCE == SUMS ? w.entries[key.value].table : side_of<SOURCE>(w, key.value).table;
    atomicAdd(totals + table * EXPONENTS + exponent, (u64)((bits & 0x7fffff) | (exponent ? 1u << 23 : 0)));
  }
}

// `totals`, (tables, 256), zeros at first.
template <u32 SOURCE, u32... DIM> __global__ void __launch_bounds__(UPDATE_THREADS) sum_squares(const __grid_constant__ Work<sizeof...(DIM)> w, u64* totals) {
  begin();
  if (!w.prepared->is_due) return;
  u32 kind = 0;
  (add_squares<SOURCE, DIM>(w, w.kinds[kind++], totals), ...);
}

// Entries of the keys of a merge: their records as those of a dim's tables are numbered, one table after the other, and where their sums
// are.
struct Renumbering {
  // By table: what its record 0 is; GONE if it has lost the records that it had.
  const u32* firsts;
  float weight;
  // Entries before this merge's.
  u32 first;
};
constexpr u32 GONE = ALL;
template <u32 SOURCE, u32... DIM> __global__ void __launch_bounds__(UPDATE_THREADS) list_entries(const __grid_constant__ Work<sizeof...(DIM)> w, u32 kind, const __grid_constant__ Renumbering r, Entry* entries, u32* records, u32* values) {
  begin();
  const Keys& keys = w.kinds[kind];
  const u32 singles = (u32)keys.lists->cold, several = (u32)(keys.lists->cold >> 32), total = singles + several + (u32)(keys.lists->hot >> 32);
  const u32 number = blockIdx.x * UPDATE_THREADS + threadIdx.x;
  if (number >= total) return;
  const Summed key = summed(w, keys, singles, several, number);
  u32 quads = 0, at = 0;
  ((at++ == kind ? (quads = quads_of(DIM)) : 0), ...);
  Entry entry = {};
  if (SOURCE == SUMS) {
    entry = w.entries[key.value];
  } else {
    const Side& side = side_of<SOURCE>(w, key.value);
    entry.table = side.table, entry.record = key.record;
  }
  const u32 first = r.firsts[entry.table], now = first == GONE ? 0 : first + entry.record;
  entry.sum = keys.sums + (u64)number * quads, entry.weight = r.weight;
  entries[r.first + number] = entry, records[r.first + number] = now, values[r.first + number] = r.first + number;
}
