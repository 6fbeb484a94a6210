// The backward pass of a step: merges the gradients of each key and updates its record.
//
// Gradients are added in the order of crates/core/src/host/merge.rs: in runs of 64 ids, counted from the key's first id, then the sums
// of the runs.
#include "merged.cuh"
#include "sort.cuh"
#include "stage.cuh"

// Copies the gradients of all features, numbers of BYTES, to the addresses in `sides`. The array of `Gradients` follows `sides` in memory. Block b
// copies gradients of feature b % num_features.
template <u32 BYTES> __global__ void __launch_bounds__(UPDATE_THREADS) copy_gradients(const Side* sides, u32 num_features) {
  begin();
  const u32 feature = blockIdx.x % num_features;
  const Gradients of = ((const Gradients*)(sides + num_features))[feature];
  const u64 stride = (u64)gridDim.x / num_features * UPDATE_THREADS,
            first = (u64)(blockIdx.x / num_features) * UPDATE_THREADS + threadIdx.x;
  typedef typename NumberOf<BYTES>::type Number;
  copy_numbers((const Number*)of.from, (Number*)sides[feature].gradients, of.count, first, stride);
}

// Number of keys of several ids that a group of lanes processes.
constexpr u32 PER_SEVERAL = 4;
static_assert(2 * PER_SEVERAL >= PER_SINGLE && HOT >= PER_SINGLE, "a launch has a block for so many ids, whatever their keys");

// The gradient of an id: its address, its row there, and what the row must be multiplied by.
struct Gradient {
  const void* rows;
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

// Loads four columns of a gradient and multiplies them. AGAIN: the rows are gradients of bags, which are read several times. Other rows
// are read once.
template <u32 SOURCE, u32 ROW, bool AGAIN, class W>
__device__ __forceinline__ float4 load_gradient(const W& w, u32 value, u32 quad) {
  const Gradient g = gradient_of<SOURCE>(w, value);
  return scaled(SOURCE == SUMS ? __ldcs((const float4*)g.rows + quad) : load_columns<ROW, !AGAIN>(g.rows, g.row, quad), g.scale);
}

// Requests the columns that `load_gradient` would load. Returns what they must be multiplied by.
template <u32 SOURCE, u32 ROW, class S, class W>
__device__ __forceinline__ float start_gradient(const S& stage, u32 turn, u32 k, const W& w, u32 value, u32 quad) {
  const Gradient g = gradient_of<SOURCE>(w, value);
  if (SOURCE == SUMS) stage.start(turn, k, (const float4*)g.rows + quad);
  else start_columns<ROW>(stage, turn, k, g.rows, g.row, quad);
  return g.scale;
}
// Returns the columns that have come.
template <u32 SOURCE, u32 ROW, class S> __device__ __forceinline__ float4 started_gradient(const S& stage, u32 turn, u32 k) {
  if constexpr (SOURCE == SUMS) return stage.at(turn, k);
  else return columns_of<ROW>(stage, turn, k);
}

// The rule of a merge without an update.
struct NoRule {
  static constexpr u32 STATES = 0;
  static constexpr bool REDUCES = false;
  static constexpr bool DIRECTS = false;
};

// A group of lanes that processes one key. Each lane has four columns of the row. In a row that is wider than a warp, it has four columns
// in each of several chunks.
template <u32 SOURCE, u32 ROW, class RULE, bool AGAIN, class W> struct Group {
  static constexpr u32 QUADS = quads_of(ROW), LANES = lanes_of(ROW), CHUNKS = (QUADS + LANES - 1) / LANES, FLIGHT = 4,
                       PARTS = 1 + RULE::STATES, FIRST_STATE = states_of(ROW);
  const W& w;
  const Prepared& now;
  // Number of columns of the row, without those that fill its last group of four.
  u32 column, mask, width;
  float factor;
  Chance chance;
  float4 sum[CHUNKS];

  __device__ __forceinline__ Group(const W& work, const Keys& keys, const Prepared& prepared)
      : w(work), now(prepared), column(threadIdx.x % LANES), mask(group_mask<LANES>()), width(keys.width) {}

  __device__ __forceinline__ bool is_mine(u32 chunk) const { return QUADS % LANES == 0 || chunk * LANES + column < QUADS; }

  // Adds the gradients of `ids[done]` to `ids[count - 1]` to the sum. The gradient of `ids[0]` starts the sum.
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

  // Adds the gradients of the first `count` of four values. With `starts`, the first gradient starts the sum.
  __device__ __forceinline__ void add_rows(const u32 (&value)[FLIGHT], bool starts, u32 count) {
#pragma unroll
    for (u32 chunk = 0; chunk < CHUNKS; ++chunk) {
      if (!is_mine(chunk)) continue;
      float4 row[FLIGHT];
#pragma unroll
      for (u32 k = 0; k < FLIGHT; ++k)
        if (k < count) row[k] = load_gradient<SOURCE, ROW, AGAIN>(w, value[k], chunk * LANES + column);
#pragma unroll
      for (u32 k = 0; k < FLIGHT; ++k)
        if (k < count) sum[chunk] = starts && k == 0 ? row[k] : add(sum[chunk], row[k]);
    }
  }

  // A chunk of a record, row and states. The first chunk is loaded before the gradients have arrived.
  struct Ahead {
    float4 parts[PARTS];
  };
  // Updates four columns of a record. `before`: their values so far. `reduced`: the result of `reduce`.
  __device__ __forceinline__ void update_columns(float4* at, u32 quad, const float4& gradient, const Ahead& before, float reduced) {
    float4 after[PARTS];
    const float* g = (const float*)&gradient;
#pragma unroll
    for (u32 c = 0; c < 4; ++c) {
      float states[3];
#pragma unroll
      for (u32 k = 0; k < RULE::STATES; ++k) states[k] = ((const float*)&before.parts[1 + k])[c];
      ((float*)&after[0])[c] = RULE::step(now.scalars, decayed(now.conditioning, ((const float*)&before.parts[0])[c]), states,
          conditioned(now.conditioning, g[c], factor), reduced);
#pragma unroll
      for (u32 k = 0; k < RULE::STATES; ++k) ((float*)&after[1 + k])[c] = states[k];
    }
    store_updated<ROW>(at, quad, after[0], chance);
#pragma unroll
    for (u32 k = 0; k < RULE::STATES; ++k) __stcs(state(at, k) + quad, after[1 + k]);
  }

  // Returns the address of a state of a record.
  static __device__ __forceinline__ float4* state(float4* at, u32 k) { return at + FIRST_STATE + k * QUADS; }
  static __device__ __forceinline__ const float4* state(const float4* at, u32 k) { return at + FIRST_STATE + k * QUADS; }

  __device__ __forceinline__ void load(const float4* at, u32 chunk, Ahead& ahead) const {
    if (!is_mine(chunk)) return;
    const u32 quad = chunk * LANES + column;
    ahead.parts[0] = load_quad<ROW>(at, quad);
#pragma unroll
    for (u32 k = 0; k < RULE::STATES; ++k) ahead.parts[1 + k] = __ldcs(state(at, k) + quad);
  }

  // Multiplies the sum by the weight of the push, and sets the factor of the gradients. `clip`: the factor that clips by the table's norm.
  // `of_key`: the chance by which the update rounds.
  __device__ __forceinline__ void weigh(float clip, const Chance& of_key) {
    factor = now.conditioning.factor * clip, chance = of_key;
#pragma unroll
    for (u32 chunk = 0; chunk < CHUNKS; ++chunk) sum[chunk] = scaled(sum[chunk], now.weight);
  }

  // For a rule whose columns depend on each other: reduces the gradient of the whole row to a number, and updates the state that a row
  // has once.
  __device__ __forceinline__ float reduce(float4* at) {
    float4 gradient[CHUNKS];
#pragma unroll
    for (u32 chunk = 0; chunk < CHUNKS; ++chunk)
#pragma unroll
      for (u32 c = 0; c < 4; ++c)
        ((float*)&gradient[chunk])[c] = conditioned(now.conditioning, ((const float*)&sum[chunk])[c], factor);
    const float squares = sum_of_squares<ROW>(gradient, mask, width);
    float* row_state = (float*)state(at, RULE::STATES);
    float state = *row_state;
    const float reduced = RULE::reduce(now.scalars, state, squares / (float)width);
    __syncwarp(mask);
    if (column == 0) *row_state = state;
    return reduced;
  }

  // Makes directions of the gradient of four columns, and updates their states. `x`: receives the values after weight decay.
  __device__ __forceinline__ void direct_columns(float4* at, u32 quad, float4& gradient, const Ahead& before, float4& x) {
    float4 after[PARTS];
#pragma unroll
    for (u32 c = 0; c < 4; ++c) {
      float states[3];
#pragma unroll
      for (u32 k = 0; k < RULE::STATES; ++k) states[k] = ((const float*)&before.parts[1 + k])[c];
      float& g = ((float*)&gradient)[c];
      g = RULE::direct(now.scalars, states, conditioned(now.conditioning, g, factor));
      ((float*)&x)[c] = decayed(now.conditioning, ((const float*)&before.parts[0])[c]);
#pragma unroll
      for (u32 k = 0; k < RULE::STATES; ++k) ((float*)&after[1 + k])[c] = states[k];
    }
#pragma unroll
    for (u32 k = 0; k < RULE::STATES; ++k) __stcs(state(at, k) + quad, after[1 + k]);
  }

  // For a rule that makes a direction of the gradient first: the length of the step depends on the row and on the direction.
  __device__ __forceinline__ void update_directed(float4* at, const Ahead& first) {
    float4 x[CHUNKS];
#pragma unroll
    for (u32 chunk = 0; chunk < CHUNKS; ++chunk) {
      Ahead later;
      if (chunk) load(at, chunk, later);
      if (is_mine(chunk)) direct_columns(at, chunk * LANES + column, sum[chunk], chunk ? later : first, x[chunk]);
    }
    const float ratio = RULE::ratio(now.scalars, sum_of_squares<ROW>(x, mask, width), sum_of_squares<ROW>(sum, mask, width));
#pragma unroll
    for (u32 chunk = 0; chunk < CHUNKS; ++chunk) {
      if (!is_mine(chunk)) continue;
      float4 after;
#pragma unroll
      for (u32 c = 0; c < 4; ++c) {
        float states[3];
        ((float*)&after)[c] = RULE::step(now.scalars, ((const float*)&x[chunk])[c], states, ((const float*)&sum[chunk])[c], ratio);
      }
      store_updated<ROW>(at, chunk * LANES + column, after, chance);
    }
  }

  __device__ __forceinline__ void update(float4* at, const Ahead& first) {
    if constexpr (RULE::DIRECTS) return update_directed(at, first);
    float reduced = 0;
    if constexpr (RULE::REDUCES) reduced = reduce(at);
#pragma unroll
    for (u32 chunk = 0; chunk < CHUNKS; ++chunk) {
      Ahead later;
      if (chunk) load(at, chunk, later);
      if (is_mine(chunk)) update_columns(at, chunk * LANES + column, sum[chunk], chunk ? later : first, reduced);
    }
  }
};

// Sink of `merge_keys`: updates the record of a key by the optimizer's rule.
template <u32 SOURCE, u32 ROW, class RULE, bool AGAIN, class W> struct Update {
  typedef Group<SOURCE, ROW, RULE, AGAIN, W> GroupType;
  typedef typename GroupType::Ahead Ahead;
  // A stage for the parts of a record and a gradient.
  typedef Stage<GroupType::PARTS + 1, UPDATE_THREADS> StageType;
  typedef typename StageType::Memory Memory;
  float4* at;
  Ahead ahead;
  const Keys& keys;
  const StageType stage;
  __device__ __forceinline__ Update(const Keys& of, Memory& memory) : keys(of), stage{memory} {}
  __device__ __forceinline__ float4* place(GroupType& group, u32 record, u32 value, u32) const {
    return record_at<SOURCE>(group.w, record, value);
  }
  __device__ __forceinline__ void begin(GroupType& group, float4* place) { group.load(at = place, 0, ahead); }
  __device__ __forceinline__ void end(GroupType& group, u32 value) {
    group.weigh(factor_of<SOURCE>(group.w, value), chance_of<SOURCE, ROW>(group.w, group.now, value));
    group.update(at, ahead);
  }

  // A requested key of one id: the address of its record, and what its gradient must be multiplied by.
  struct InFlight {
    float4* record;
    float scale;
  };
  __device__ __forceinline__ InFlight start(const GroupType& group, u32 turn, const Single& key) const {
    float4* record = record_at<SOURCE>(group.w, key.record, key.gradient_row);
    if (!group.is_mine(0)) return {record, 0};
    start_quad<ROW>(stage, turn, 0, record, group.column);
#pragma unroll
    for (u32 k = 0; k < RULE::STATES; ++k) stage.start(turn, 1 + k, GroupType::state(record, k) + group.column);
    return {record, start_gradient<SOURCE, ROW>(stage, turn, GroupType::PARTS, group.w, key.gradient_row, group.column)};
  }
  // Updates keys of one id: `number`, `number + groups` and so on, below `end_of`. The group requests the next key before it processes
  // the current one.
  __device__ __forceinline__ void singles(GroupType& group, u32 number, u32 end_of, u32 groups) {
    Single key = keys.singles[number], next = number + groups < end_of ? keys.singles[number + groups] : key;
    InFlight in_flight = start(group, 0, key);
    stage.end();
    for (u32 turn = 0; number < end_of; ++turn, number += groups) {
      const InFlight next_in_flight = number + groups < end_of ? start(group, turn + 1, next) : in_flight;
      stage.end();
      stage.wait();
      const u32 value = key.gradient_row;
#pragma unroll
      for (u32 chunk = 0; chunk < GroupType::CHUNKS; ++chunk)
        if (group.is_mine(chunk))
          group.sum[chunk] = chunk ? load_gradient<SOURCE, ROW, AGAIN>(group.w, value, chunk * GroupType::LANES + group.column)
                                   : scaled(started_gradient<SOURCE, ROW>(stage, turn, GroupType::PARTS), in_flight.scale);
      ahead.parts[0] = quad_of<ROW>(stage, turn, 0);
#pragma unroll
      for (u32 k = 0; k < RULE::STATES; ++k) ahead.parts[1 + k] = stage.at(turn, 1 + k);
      at = in_flight.record, in_flight = next_in_flight;
      key = next;
      if (number + 2 * groups < end_of) next = keys.singles[number + 2 * groups];
      end(group, value);
    }
  }
};

// Shared memory of a sink that requests nothing ahead.
struct NoMemory {};

// Sink of `merge_keys`: stores the sum of a key in memory, for a push that is applied later.
template <u32 SOURCE, u32 ROW, bool AGAIN, class W> struct Store {
  typedef Group<SOURCE, ROW, NoRule, AGAIN, W> GroupType;
  typedef NoMemory Memory;
  float4* at;
  const Keys& keys;
  __device__ __forceinline__ Store(const Keys& of, Memory&) : keys(of) {}
  __device__ __forceinline__ float4* place(GroupType& group, u32 record, u32 value, u32 number) const {
    return group.w.is_placed ? record_at<SOURCE>(group.w, record, value) : keys.sums + (u64)number * GroupType::QUADS;
  }
  __device__ __forceinline__ void begin(GroupType&, float4* place) { at = place; }
  __device__ __forceinline__ void end(GroupType& group, u32) {
#pragma unroll
    for (u32 chunk = 0; chunk < GroupType::CHUNKS; ++chunk)
      if (group.is_mine(chunk)) __stcs(at + chunk * GroupType::LANES + group.column, group.sum[chunk]);
  }

  // Stores the gradients of keys of one id: `number`, `number + groups` and so on, below `end_of`. FLIGHT of them are in flight.
  __device__ __forceinline__ void singles(GroupType& group, u32 number, u32 end_of, u32 groups) {
    for (; number < end_of; number += GroupType::FLIGHT * groups) {
      u32 value[GroupType::FLIGHT];
      float4* to[GroupType::FLIGHT];
#pragma unroll
      for (u32 k = 0; k < GroupType::FLIGHT; ++k) {
        const Single key = number + k * groups < end_of ? keys.singles[number + k * groups] : Single{0, 0};
        value[k] = key.gradient_row;
        to[k] = place(group, key.record, key.gradient_row, number + k * groups);
      }
#pragma unroll
      for (u32 chunk = 0; chunk < GroupType::CHUNKS; ++chunk) {
        if (!group.is_mine(chunk)) continue;
        const u32 quad = chunk * GroupType::LANES + group.column;
        float4 row[GroupType::FLIGHT];
#pragma unroll
        for (u32 k = 0; k < GroupType::FLIGHT; ++k)
          if (number + k * groups < end_of) row[k] = load_gradient<SOURCE, ROW, AGAIN>(group.w, value[k], quad);
#pragma unroll
        for (u32 k = 0; k < GroupType::FLIGHT; ++k)
          if (number + k * groups < end_of) __stcs(to[k] + quad, row[k]);
      }
    }
  }
};

// The blocks of runs are mixed with the first 1 / MIXED of the other blocks, because runs of hot keys are limited by the L2 cache, other
// keys by memory. They are not mixed with all blocks, because the last sum of a hot key is a chain of loads, which must not come at the
// end of the launch.
constexpr u32 MIXED = 5;

// Stores the sum of a run of a hot key, and counts the run as done. Returns whether all runs of the key are done; the count is then reset,
// because the same list may be merged again. `number`: the run's number.
template <class GroupType>
__device__ __forceinline__ bool finish_run(const GroupType& group, const Keys& keys, Hot* hot, u32 number) {
#pragma unroll
  for (u32 chunk = 0; chunk < GroupType::CHUNKS; ++chunk)
    if (group.is_mine(chunk))
      __stcg(keys.partial + (u64)number * GroupType::QUADS + chunk * GroupType::LANES + group.column, group.sum[chunk]);
  __threadfence();
  __syncwarp(group.mask);
  u32 done = 0;
  if (group.column == 0) done = atomicAdd(&hot->done, 1);
  if (__shfl_sync(group.mask, done, 0, GroupType::LANES) != hot->runs - 1) return false;
  __threadfence();
  if (group.column == 0) hot->done = 0;
  return true;
}

// Merges one run of a hot key. The group that finishes the key's last run adds the sums of all its runs, in their order, and gives the
// result to the sink. `number`: the run's number. `first_sum`: the number of the first hot key's sum.
template <class Sink, class GroupType>
__device__ __forceinline__ void merge_run(GroupType& group, Sink& sink, const Keys& keys, u32 number, u32 first_sum) {
  const Run run = keys.runs[number];
  const Sorted* ids = group.w.sorted + run.first;
  group.add_run(ids, 0, run.count);
  Hot* hot = keys.hot + run.hot;
  if (!finish_run(group, keys, hot, number)) return;
  sink.begin(group, sink.place(group, hot->record, ids->value, first_sum + run.hot));
#pragma unroll
  for (u32 chunk = 0; chunk < GroupType::CHUNKS; ++chunk) {
    if (!group.is_mine(chunk)) continue;
    const float4* partial = keys.partial + (u64)hot->first_run * GroupType::QUADS + chunk * GroupType::LANES + group.column;
    const u32 num_runs = hot->runs;
    float4 sum = __ldcg(partial);
#pragma unroll 8
    for (u32 k = 1; k < num_runs; ++k) sum = add(sum, __ldcg(partial + (u64)k * GroupType::QUADS));
    group.sum[chunk] = sum;
  }
  sink.end(group, ids->value);
}

// Merges keys of several ids: `number`, `number + groups` and so on, below `end`. The group loads the next key's values before it
// merges the current one. `first_sum`: the number of the first such key's sum.
template <class Sink, class GroupType>
__device__ __forceinline__ void merge_several(
    GroupType& group, Sink& sink, const Keys& keys, u32 number, u32 end, u32 groups, u32 first_sum) {
  const Sorted* sorted = group.w.sorted;
  const Several none = {0, 0, 0, 0};
  Several key = keys.several[number], next = number + groups < end ? keys.several[number + groups] : none;
  u32 value[GroupType::FLIGHT], next_value[GroupType::FLIGHT];
#pragma unroll
  for (u32 k = 0; k < GroupType::FLIGHT; ++k) value[k] = k < key.count ? sorted[key.first + k].value : 0;
  float4* place = sink.place(group, key.record, key.name, first_sum + number);
  for (; number < end; number += groups) {
    sink.begin(group, place);
    group.add_rows(value, true, key.count);
#pragma unroll
    for (u32 k = 0; k < GroupType::FLIGHT; ++k) next_value[k] = k < next.count ? sorted[next.first + k].value : 0;
    const Several after = number + 2 * groups < end ? keys.several[number + 2 * groups] : none;
    if (next.count) place = sink.place(group, next.record, next.name, first_sum + number + groups);
    if (key.count > GroupType::FLIGHT) group.add_run(sorted + key.first, GroupType::FLIGHT, key.count);
    sink.end(group, key.name);
    key = next, next = after;
#pragma unroll
    for (u32 k = 0; k < GroupType::FLIGHT; ++k) value[k] = next_value[k];
  }
}

// Processes block `block` of the keys of one dim and returns true. If the dim has fewer blocks, subtracts their number from `block` and
// returns false. Order of the blocks: runs of hot keys, mixed with the first of the others. Those are blocks of keys of several ids, mixed
// with blocks of keys of one id.
template <class Sink, class W>
__device__ __forceinline__ bool merge_keys(
    const W& w, const Keys& keys, const Prepared& now, typename Sink::Memory& memory, u32& block) {
  typedef typename Sink::GroupType GroupType;
  constexpr u32 LANES = GroupType::LANES, GROUPS = UPDATE_THREADS / LANES;
  const u32 number_of = threadIdx.x / LANES;
  const Counts counts(*keys.lists);
  const u32 runs = counts.runs, several = counts.several, singles = counts.singles;
  const u32 hot_blocks = (runs + GROUPS - 1) / GROUPS;
  const u32 several_blocks = (several + GROUPS * PER_SEVERAL - 1) / (GROUPS * PER_SEVERAL);
  const u32 single_blocks = (singles + GROUPS * PER_SINGLE - 1) / (GROUPS * PER_SINGLE);
  if (block >= hot_blocks + several_blocks + single_blocks) {
    block -= hot_blocks + several_blocks + single_blocks;
    return false;
  }
  GroupType group(w, keys, now);
  Sink sink(keys, memory);
  const u32 mixed = hot_blocks + (several_blocks + single_blocks) / MIXED;
  const u32 in_hot = block < mixed ? (u32)((u64)block * hot_blocks / mixed) : hot_blocks;
  if (block < mixed && (u32)((u64)(block + 1) * hot_blocks / mixed) > in_hot) {
    const u32 number = in_hot * GROUPS + number_of;
    if (number < runs) merge_run(group, sink, keys, number, singles + several);
    return true;
  }
  block -= in_hot;
  const u32 in_several = (u32)((u64)block * several_blocks / (several_blocks + single_blocks));
  if ((u32)((u64)(block + 1) * several_blocks / (several_blocks + single_blocks)) > in_several) {
    const u32 number = in_several * GROUPS * PER_SEVERAL + number_of, end = min(several, (in_several + 1) * GROUPS * PER_SEVERAL);
    if (number < end) merge_several(group, sink, keys, number, end, GROUPS, singles);
  } else {
    const u32 in_singles = block - in_several, number = in_singles * GROUPS * PER_SINGLE + number_of;
    const u32 end = min(singles, (in_singles + 1) * GROUPS * PER_SINGLE);
    if (number < end) sink.singles(group, number, end, GROUPS);
  }
  return true;
}

__host__ __device__ constexpr u32 largest(u32 a) { return a; }
template <class... Others> __host__ __device__ constexpr u32 largest(u32 a, u32 b, Others... others) {
  return largest(a > b ? a : b, others...);
}

// Merges gradients and updates records. Gradients that are read AGAIN come from the L2 cache. There, one block more per multiprocessor
// has gradients in flight.
template <u32 SOURCE, class RULE, bool AGAIN, u32... ROW>
__global__ void __launch_bounds__(UPDATE_THREADS, largest(dim_of(ROW)...) <= 128 ? (AGAIN ? 7 : 6) : 1) update(
    const __grid_constant__ Work<sizeof...(ROW)> w) {
  begin();
  typedef Work<sizeof...(ROW)> W;
  __shared__ typename Update<SOURCE, 1, RULE, AGAIN, W>::Memory memory;
  const Prepared now = *w.prepared;
  if (!now.is_due) return;
  u32 block = blockIdx.x, kind = 0;
  (merge_keys<Update<SOURCE, ROW, RULE, AGAIN, W>>(w, w.kinds[kind++], now, memory, block) || ...);
}

// Calls `body` with the numbers of this block, `gridDim.x` apart, until it returns false. Only the device knows the number of keys. A grid
// for the largest possible number would leave most blocks without work.
template <class Body> __device__ __forceinline__ void take_turns(const Body& body) {
  for (u32 block = blockIdx.x; body(block); block += gridDim.x) __syncwarp();
}

// The same, where the host does not know the number of ids: most of as many blocks as there may be would have nothing to do.
template <u32 SOURCE, class RULE, bool AGAIN, u32... ROW>
__global__ void __launch_bounds__(UPDATE_THREADS, largest(dim_of(ROW)...) <= 128 ? 6 : 1) update_in_turns(
    const __grid_constant__ Work<sizeof...(ROW)> w) {
  begin();
  typedef Work<sizeof...(ROW)> W;
  __shared__ typename Update<SOURCE, 1, RULE, AGAIN, W>::Memory memory;
  const Prepared now = *w.prepared;
  if (!now.is_due) return;
  take_turns([&](u32 block) {
    u32 kind = 0;
    return (merge_keys<Update<SOURCE, ROW, RULE, AGAIN, W>>(w, w.kinds[kind++], now, memory, block) || ...);
  });
}

// Merges gradients without an update. Writes the sums of all keys to `Keys::sums`.
template <u32 SOURCE, bool AGAIN, u32... ROW>
__global__ void __launch_bounds__(UPDATE_THREADS) merge(const __grid_constant__ Work<sizeof...(ROW)> w) {
  begin();
  typedef Work<sizeof...(ROW)> W;
  __shared__ Prepared now;
  NoMemory none;
  take_turns([&](u32 block) {
    u32 kind = 0;
    return (merge_keys<Store<SOURCE, ROW, AGAIN, W>>(w, w.kinds[kind++], now, none, block) || ...);
  });
}

// Updates the records of one block of merged keys of a dim. `block` and the result are as in `merge_keys`.
template <u32 SOURCE, u32 ROW, class RULE, class W>
__device__ __forceinline__ bool update_summed(const W& w, const Keys& keys, const Prepared& now, u32& block) {
  typedef Group<SOURCE, ROW, RULE, false, W> GroupType;
  constexpr u32 LANES = GroupType::LANES, GROUPS = UPDATE_THREADS / LANES;
  const Counts counts(*keys.lists);
  const u32 blocks = (counts.keys() + GROUPS * PER_SUM - 1) / (GROUPS * PER_SUM);
  if (block >= blocks) {
    block -= blocks;
    return false;
  }
  GroupType group(w, keys, now);
  u32 number = block * GROUPS * PER_SUM + threadIdx.x / LANES;
  const u32 end = min(counts.keys(), (block + 1) * GROUPS * PER_SUM);
  if (number >= end) return true;
  Summed key = summed(w, keys, counts, number);
  for (; number < end; number += GROUPS) {
    float4* at = record_at<SOURCE>(w, key.record, key.value);
    typename GroupType::Ahead ahead;
    group.load(at, 0, ahead);
#pragma unroll
    for (u32 chunk = 0; chunk < GroupType::CHUNKS; ++chunk)
      if (group.is_mine(chunk))
        group.sum[chunk] = __ldcs(keys.sums + (u64)number * GroupType::QUADS + chunk * LANES + group.column);
    const float factor = factor_of<SOURCE>(w, key.value);
    const Chance chance = chance_of<SOURCE, ROW>(w, now, key.value);
    if (number + GROUPS < end) key = summed(w, keys, counts, number + GROUPS);
    group.weigh(factor, chance);
    group.update(at, ahead);
  }
  return true;
}

// Updates the records of keys whose gradients were merged before.
template <u32 SOURCE, class RULE, u32... ROW>
__global__ void __launch_bounds__(UPDATE_THREADS, largest(dim_of(ROW)...) <= 128 ? 6 : 1) update_sums(
    const __grid_constant__ Work<sizeof...(ROW)> w) {
  begin();
  const Prepared now = *w.prepared;
  if (!now.is_due) return;
  take_turns([&](u32 block) {
    u32 kind = 0;
    return (update_summed<SOURCE, ROW, RULE>(w, w.kinds[kind++], now, block) || ...);
  });
}

// Adds the squared norm of each merged gradient of a dim to `totals`, by table and exponent. The mantissas of squared norms with the same
// exponent are added as integers, which is exact.
template <u32 SOURCE, u32 ROW, class W> __device__ __forceinline__ void add_squares(const W& w, const Keys& keys, u64* totals) {
  const Counts counts(*keys.lists);
  // Eight lanes share a key. Each takes every eighth column.
  const u32 part = threadIdx.x % 8, mask = 0xffu << (lane() & ~7u);
  for (u32 number = (blockIdx.x * UPDATE_THREADS + threadIdx.x) / 8; number < counts.keys();
      number += gridDim.x * UPDATE_THREADS / 8) {
    const Summed key = summed(w, keys, counts, number);
    const float* sum = (const float*)(keys.sums + (u64)number * quads_of(ROW));
    float squares = 0;
    for (u32 column = part; column < dim_of(ROW); column += 8) {
      const float x = sum[column] * w.prepared->weight;
      squares += x * x;
    }
    // The order is ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)).
    squares += __shfl_down_sync(mask, squares, 4, 8);
    squares += __shfl_down_sync(mask, squares, 2, 8);
    squares += __shfl_down_sync(mask, squares, 1, 8);
    if (part != 0) continue;
    const u32 bits = __float_as_uint(squares) & 0x7fffffff, exponent = bits >> 23;
    const u32 table = SOURCE == SUMS ? w.entries[key.value].table : side_of<SOURCE>(w, key.value).table;
    atomicAdd(totals + table * EXPONENTS + exponent, (u64)((bits & 0x7fffff) | (exponent ? 1u << 23 : 0)));
  }
}

// Adds the squares of the merged gradients of all dims. `totals`: (tables, 256), zeros before the launch.
template <u32 SOURCE, u32... ROW>
__global__ void __launch_bounds__(UPDATE_THREADS) sum_squares(const __grid_constant__ Work<sizeof...(ROW)> w, u64* totals) {
  begin();
  if (!w.prepared->is_due) return;
  u32 kind = 0;
  (add_squares<SOURCE, ROW>(w, w.kinds[kind++], totals), ...);
}

// Writes an entry for each merged key of one dim. For the next sort, also writes the entry's renumbered record and the entry's index.
template <u32 SOURCE, u32... ROW>
__global__ void __launch_bounds__(UPDATE_THREADS) list_entries(const __grid_constant__ Work<sizeof...(ROW)> w, u32 kind,
    const __grid_constant__ Renumbering r, Entry* entries, u32* records, u32* values) {
  begin();
  const Keys& keys = w.kinds[kind];
  const Counts counts(*keys.lists);
  const u32 number = blockIdx.x * UPDATE_THREADS + threadIdx.x;
  if (number >= counts.keys()) return;
  const Summed key = summed(w, keys, counts, number);
  u32 quads = 0, at = 0;
  ((at++ == kind ? (quads = quads_of(ROW)) : 0), ...);
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
