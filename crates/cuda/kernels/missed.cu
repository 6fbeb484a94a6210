// The steps that rows have missed: under an update mode other than local, rows without a gradient take each step with a gradient of zero. The
// same as crates/core/src/host/missed_steps.rs.
#include "merged.cuh"

// Lets a record take the steps from number `from` to `now`. A group of lanes calls this, each for its columns.
template <u32 ROW, class RULE>
__device__ __forceinline__ void take_steps(const Table& t, float4* at, const Missed& missed, u32 from, u32 now) {
  constexpr u32 QUADS = quads_of(ROW), LANES = lanes_of(ROW), CHUNKS = (QUADS + LANES - 1) / LANES, STATES = RULE::STATES;
  const u32 column = threadIdx.x % LANES, mask = group_mask<LANES>();
  float4 x[CHUNKS], states[CHUNKS][STATES + 1];
  const auto is_mine = [&](u32 chunk) { return QUADS % LANES == 0 || chunk * LANES + column < QUADS; };
  const auto state = [&](u32 k) { return at + states_of(ROW) + k * QUADS; };
#pragma unroll
  for (u32 chunk = 0; chunk < CHUNKS; ++chunk) {
    x[chunk] = make_float4(0, 0, 0, 0);
    if (!is_mine(chunk)) continue;
    x[chunk] = load_quad<ROW>(at, chunk * LANES + column);
#pragma unroll
    for (u32 k = 0; k < STATES; ++k) states[chunk][k] = state(k)[chunk * LANES + column];
  }
  float of_row = RULE::REDUCES ? *(const float*)state(STATES) : 0;
  // A record that misses more steps is one that no row has.
  for (u32 step = max(from, now - min(now, MISSED_STEPS)); step < now; ++step) {
    const Prepared& p = missed.steps[step % MISSED_STEPS];
    const float gradient = conditioned(p.conditioning, 0, p.conditioning.factor);
    float reduced = 0;
    if constexpr (RULE::REDUCES) reduced = RULE::reduce(p.scalars, of_row, gradient * gradient);
    float4 direction[CHUNKS];
    const auto each = [&](const auto& body) {
#pragma unroll
      for (u32 chunk = 0; chunk < CHUNKS; ++chunk)
#pragma unroll
        for (u32 c = 0; c < 4; ++c) {
          float of_column[3];
#pragma unroll
          for (u32 k = 0; k < STATES; ++k) of_column[k] = ((const float*)&states[chunk][k])[c];
          body(((float*)&x[chunk])[c], of_column, ((float*)&direction[chunk])[c]);
#pragma unroll
          for (u32 k = 0; k < STATES; ++k) ((float*)&states[chunk][k])[c] = of_column[k];
        }
    };
    if constexpr (RULE::DIRECTS) {
      each([&](float& value, float (&of_column)[3], float& d) {
        d = RULE::direct(p.scalars, of_column, gradient);
        value = decayed(p.conditioning, value);
      });
      const float ratio = RULE::ratio(p.scalars, sum_of_squares<ROW>(x, mask, t.dim), sum_of_squares<ROW>(direction, mask, t.dim));
      each([&](float& value, float (&)[3], float& d) {
        float none[3];
        value = RULE::step(p.scalars, value, none, d, ratio);
      });
    } else {
      each([&](float& value, float (&of_column)[3], float&) {
        value = RULE::step(p.scalars, decayed(p.conditioning, value), of_column, gradient, reduced);
      });
    }
    if constexpr (type_of(ROW) != FLOAT32) {
#pragma unroll
      for (u32 chunk = 0; chunk < CHUNKS; ++chunk)
        if (is_mine(chunk))
          x[chunk] =
              widen(type_of(ROW), narrow_updated<ROW>(at, chunk * LANES + column, x[chunk], Chance{t.initializer.seed, p.step}));
    }
  }
#pragma unroll
  for (u32 chunk = 0; chunk < CHUNKS; ++chunk) {
    if (!is_mine(chunk)) continue;
    store_quad<ROW>(at, chunk * LANES + column, x[chunk]);
#pragma unroll
    for (u32 k = 0; k < STATES; ++k) state(k)[chunk * LANES + column] = states[chunk][k];
  }
  if (RULE::REDUCES && column == 0) *(float*)state(STATES) = of_row;
}

// Begins a step. The rows with gradients take the steps that they have missed, before the update takes this one.
template <u32 SOURCE, class RULE, u32 ROW, class W>
__device__ __forceinline__ void begin_step_of(const W& w, const Keys& keys, const Missed& missed, u32 now) {
  constexpr u32 LANES = lanes_of(ROW);
  const Counts counts(*keys.lists);
  const u32 column = threadIdx.x % LANES, groups = gridDim.x * UPDATE_THREADS / LANES;
  for (u32 number = (blockIdx.x * UPDATE_THREADS + threadIdx.x) / LANES; number < counts.keys(); number += groups) {
    const Summed key = summed(w, keys, counts, number);
    u32 table, record;
    if (SOURCE == SUMS) {
      table = w.entries[key.value].table, record = w.entries[key.value].record;
    } else {
      const Side& side = side_of<SOURCE>(w, key.value);
      if (!side.stride) continue;
      table = side.table, record = key.record;
    }
    const Table& t = w.tables[table];
    if (!t.taken || !record) continue;
    const u32 from = t.taken[record];
    __syncwarp(group_mask<LANES>());
    if (from < now) take_steps<ROW, RULE>(t, t.records + (u64)record * t.stride, missed, from, now);
    if (column == 0) t.taken[record] = now + 1;
  }
}
template <u32 SOURCE, class RULE, u32... ROW>
__global__ void __launch_bounds__(UPDATE_THREADS) begin_steps(
    const __grid_constant__ Work<sizeof...(ROW)> w, const __grid_constant__ Missed missed) {
  begin();
  if (!w.prepared->is_due) return;
  const u32 now = *missed.now;
  u32 kind = 0;
  (begin_step_of<SOURCE, RULE, ROW>(w, w.kinds[kind++], missed, now), ...);
}

// Notes a step of the optimizer, if the tickets were valid. `prepared`: by optimizer. `steps`: MISSED_STEPS of each. One block.
extern "C" __global__ void __launch_bounds__(UPDATE_THREADS) note_step(
    const Resolved* resolved, const Prepared* prepared, u32 num_optimizers, Prepared* steps, u32* now) {
  begin();
  if (!resolved->is_due) return;
  for (u32 o = threadIdx.x; o < num_optimizers; o += UPDATE_THREADS) steps[o * MISSED_STEPS + *now % MISSED_STEPS] = prepared[o];
  __syncthreads();
  if (threadIdx.x == 0) ++*now;
}

// Lets the records of a warp take the steps that they have missed. `is_behind`: whether this lane has such a record, which no other has. All lanes
// of the warp must call this.
template <u32 ROW, class RULE>
__device__ __forceinline__ void catch_up(
    const Table& t, const Missed& missed, bool is_behind, u32 record, u32 from, u32 now, LaneList& list) {
  constexpr u32 LANES = lanes_of(ROW), GROUPS = WARP / LANES;
  if (is_behind) note_change(t, record);
  const u32 n = list.take(is_behind), group = lane() / LANES;
  for (u32 start = 0; start < n; start += GROUPS) {
    const bool is_one = start + group < n;
    const u32 of = is_one ? list.lanes[start + group] : 0;
    const u32 number = __shfl_sync(ALL, record, of), first = __shfl_sync(ALL, from, of);
    if (is_one) take_steps<ROW, RULE>(t, t.records + (u64)number * t.stride, missed, first, now);
  }
}

// Lets the rows of all ids of a call take the steps that they have missed.
template <class RULE, u32... ROW>
__global__ void __launch_bounds__(FIND_THREADS) catch_up_found(
    const __grid_constant__ Call call, const u32* records, const Kinds kinds, const __grid_constant__ Missed missed) {
  begin();
  __shared__ LaneList lists[FIND_THREADS / WARP];
  const u32 number = feature_at(call.first_find, call.num_features, blockIdx.x), now = *missed.now;
  const Feature& f = call.features[number];
  const u32 i = (blockIdx.x - call.first_find[number]) * FIND_THREADS + threadIdx.x;
  const Table& t = call.tables[f.table];
  if (!t.taken || f.kind - kinds.first >= sizeof...(ROW)) return;
  const u32 record = i < f.num_ids ? records[f.first_id + i] : NO_RECORD;
  u32 from = now;
  // Of the ids of a row one takes its steps.
  if (record != NO_RECORD && load_shared(t.taken + record) != now) from = atomicExch(t.taken + record, now);
  with_row<ROW...>(f.kind - kinds.first, [&](auto row) {
    catch_up<decltype(row)::value, RULE>(t, missed, from != now, record, from, now, lists[threadIdx.x / WARP]);
  });
}

// Lets all rows of a table take the steps that they have missed.
template <class RULE, u32 ROW>
__global__ void __launch_bounds__(UPDATE_THREADS) catch_up_all(
    const __grid_constant__ Table t, const __grid_constant__ Missed missed) {
  begin();
  __shared__ LaneList lists[UPDATE_THREADS / WARP];
  const u32 now = *missed.now, numbers = num_numbers(t.index.counters);
  for (u32 start = blockIdx.x * UPDATE_THREADS; start < numbers; start += gridDim.x * UPDATE_THREADS) {
    const u32 record = start + threadIdx.x;
    // A row that has expired may be read by the host.
    const bool is_record = record > 0 && record < numbers && !(t.scores && is_vacant(t, record));
    const u32 from = is_record ? t.taken[record] : now;
    if (from != now) t.taken[record] = now;
    catch_up<ROW, RULE>(t, missed, from != now, record, from, now, lists[threadIdx.x / WARP]);
  }
}

// Notes that the rows with record numbers below `numbers` have missed no step.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) start_rows(const __grid_constant__ Table t, u32 numbers) {
  begin();
  for (u32 record = blockIdx.x * TABLE_THREADS + threadIdx.x; record < numbers; record += gridDim.x * TABLE_THREADS)
    t.taken[record] = *t.now;
}
