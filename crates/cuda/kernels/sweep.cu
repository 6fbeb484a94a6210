// Sweeps: a full table removes the rows with the lowest scores. One launch chooses them, for all tables that have too many rows, and one
// removes them. The host learns later which rows went.
#include "removal.cuh"
#include "stage.cuh"

// A number of 128 bits: a score and a key.
struct Rank {
  u64 score, key;
};
__device__ __forceinline__ bool operator<(const Rank& a, const Rank& b) {
  return a.score < b.score || (a.score == b.score && a.key < b.key);
}
// Returns `bin << shift`.
__device__ __forceinline__ Rank start_of(u64 bin, u32 shift) {
  if (shift >= 64) return {bin << (shift - 64), 0};
  return {shift ? bin >> (64 - shift) : 0, bin << shift};
}
__device__ __forceinline__ Rank sum(const Rank& a, const Rank& b) {
  const u64 key = a.key + b.key;
  return {a.score + b.score + (key < a.key), key};
}
__device__ __forceinline__ Rank difference(const Rank& a, const Rank& b) {
  return {a.score - b.score - (a.key < b.key), a.key - b.key};
}
// Returns the bin of a rank that is not below `low`, or RANK_BINS if it is beyond the last one.
__device__ __forceinline__ u32 bin_of(const Rank& rank, const Rank& low, u32 shift) {
  const Rank d = difference(rank, low);
  const u64 high = shift >= 64 ? 0 : d.score >> shift;
  const u64 bin = shift >= 64 ? d.score >> (shift - 64) : shift ? d.score << (64 - shift) | d.key >> shift : d.key;
  return high || bin >= RANK_BINS ? RANK_BINS : (u32)bin;
}
// Returns the rank below the start of bin 1, if `low` is that of bin 0.
__device__ __forceinline__ Rank end_of(const Rank& low, u32 shift) { return difference(sum(low, start_of(1, shift)), {0, 1}); }

// Number of rows that a thread reads at once.
constexpr u32 AT_ONCE = 4;
// Scores that a thread requests at a time in advance, when it looks for low ranks.
constexpr u32 LOADS = 4;
typedef Stage<LOADS / 2, SWEEP_THREADS> ScoreStage;
// A part of a list has PART rows. A part of the records of a table has PART_OF_RECORDS of them.
constexpr u32 PART = SWEEP_THREADS, PART_OF_RECORDS = 16 * SWEEP_THREADS;
// A table with fewer records is read whole instead of a sample.
constexpr u64 SAMPLED_FROM = 8 * SAMPLES;

// Returns how many rows of a table go. The counts of the table do not change during the launch.
__device__ __forceinline__ u64 num_wanted(const Sweep& s) {
  const Counters* counters = s.index.counters;
  const u64 len = counters->taken - counters->gone, rows = len + s.new_keys;
  return rows <= s.capacity ? 0 : min(min(max(rows - s.capacity, s.capacity / 64), len), s.most);
}

// The blocks of a launch that are all on the device at the same time.
struct Meeting {
  u32* arrived;
  u32 goal;
  // Waits until all blocks have come here. What they wrote before can be read after.
  __device__ __forceinline__ void wait() {
    __syncthreads();
    if (threadIdx.x == 0) {
      goal += gridDim.x;
      __threadfence();
      atomicAdd(arrived, 1);
      while (acquire(arrived) < goal) __nanosleep(64);
    }
    __syncthreads();
  }
  // Sets the counter back, when all blocks have come here.
  __device__ __forceinline__ void end() {
    if (threadIdx.x == 0 && atomicAdd(arrived, 1) == goal + gridDim.x - 1) *arrived = 0;
  }
};

// How the blocks share the work on several lists.
struct Shares {
  // Where the parts of each list begin.
  u32 first[MAX_SWEEPS + 1];
  // Divides lists, of which `len` returns the lengths, into parts of LEN rows.
  template <u32 LEN = PART, class Len> __device__ __forceinline__ void divide(u32 num, const Len& len) {
    __syncthreads();
    for (u32 i = threadIdx.x; i < num; i += SWEEP_THREADS) first[i + 1] = (u32)((len(i) + LEN - 1) / LEN);
    __syncthreads();
    if (threadIdx.x < WARP) {
      u32 before = 0;
      for (u32 start = 0; start < num; start += WARP) {
        const u32 x = sum_to(start + lane() < num ? first[start + lane() + 1] : 0);
        if (start + lane() < num) first[start + lane() + 1] = before + x;
        before += __shfl_sync(ALL, x, WARP - 1);
      }
      if (lane() == 0) first[0] = 0;
    }
    __syncthreads();
  }
  // Calls `body` with the number of each list of which this block has parts, and where its first part begins. Its other parts are `stride`
  // apart, so that rows which belong together are shared by many blocks. All threads call it.
  template <u32 LEN = PART, class Body> __device__ __forceinline__ void for_each(u32 num, const Body& body) {
    for (u32 i = 0; i < num; ++i) {
      const u32 before = first[i] % gridDim.x,
                skipped = blockIdx.x < before ? blockIdx.x + gridDim.x - before : blockIdx.x - before;
      if (skipped < first[i + 1] - first[i]) body(i, (u64)skipped * LEN);
    }
  }
};
// From a part of LEN rows to the next one of the same block.
template <u32 LEN = PART> __device__ __forceinline__ u64 stride() { return (u64)gridDim.x * LEN; }

// Calls `load` with the numbers below `end` in the parts of this block, and `body` with each number and its value. The first part starts at `begin`,
// the next ones `by` further. A thread loads several values before it uses the first.
template <class Load, class Body>
__device__ __forceinline__ void for_each_at_once(u64 begin, u64 end, const Load& load, const Body& body, u64 by = stride()) {
  for (u64 start = begin + threadIdx.x; start < end; start += AT_ONCE * by) {
    decltype(load(start)) values[AT_ONCE];
#pragma unroll
    for (u32 k = 0; k < AT_ONCE; ++k)
      if (start + k * by < end) values[k] = load(start + k * by);
#pragma unroll
    for (u32 k = 0; k < AT_ONCE; ++k)
      if (start + k * by < end) body(start + k * by, values[k]);
  }
}

// Returns whether a record has no row, or one that must stay.
__device__ __forceinline__ bool must_stay(const Sweep& s, u64 record) { return s.marks[record / WARP] >> record % WARP & 1; }

// Returns whether all rows that go are in the list of rows with low ranks.
__device__ __forceinline__ bool has_low(const Sweep& s) {
  return s.choice->num_low >= s.choice->wanted && s.choice->num_low <= s.low_room;
}
// Returns the length of that list, or above all record numbers if it does not have all rows that go.
__device__ __forceinline__ u64 num_places(const Sweep& s) { return has_low(s) ? s.choice->num_low : num_numbers(s.index.counters); }

// Calls `body` with the rank of each row that may go, in the parts of this block, of which the first starts at `begin`.
template <class Body> __device__ __forceinline__ void for_each_removable(const Sweep& s, u64 begin, const Body& body) {
  const u64 end = num_numbers(s.index.counters);
  for (u64 record = begin + threadIdx.x; record < end; record += stride()) {
    // Record 0 belongs to no key.
    if (record != 0 && !must_stay(s, record)) body(Rank{s.scores[record], s.keys[record]});
  }
}

// Calls `body` with the rank of each row of a list, in the parts of this block: the first starts at `begin`, the next ones `by` further.
template <class Body>
__device__ __forceinline__ void for_each_of(const Ranked* list, u32 len, u64 begin, u64 by, const Body& body) {
  for_each_at_once(
      begin, len, [&](u64 i) { return Rank{list[i].score, list[i].key}; }, [&](u64, const Rank& rank) { body(rank); }, by);
}

typedef StagedRows<SWEEP_THREADS, Ranked> Staged;

// Memory of a block while it lists rows.
struct Listing {
  ScoreStage::Memory scores;
  u32 places[Staged::WORDS];
};

// Memory of a block.
struct Choosing {
  Shares shares;
  // Indices of the sweeps that remove rows.
  u32 active[MAX_SWEEPS];
  u32 num_active;
  u32 of_warps[SWEEP_THREADS / WARP];
  union {
    // Counts of bins.
    u32 bins[RANK_BINS];
    Listing listing;
  };
};

// Counts rows among which a sweep will choose, and their lowest and highest scores.
struct Measure {
  u64 count = 0, lowest = ~0ull, highest = 0;
  __device__ __forceinline__ void add(u64 score) { ++count, lowest = min(lowest, score), highest = max(highest, score); }
  __device__ __forceinline__ void give(Choice* choice) {
    for (u32 by = WARP / 2; by; by /= 2) {
      count += __shfl_down_sync(ALL, count, by);
      lowest = min(lowest, __shfl_down_sync(ALL, lowest, by)), highest = max(highest, __shfl_down_sync(ALL, highest, by));
    }
    if (lane() != 0 || !count) return;
    atomicAdd(&choice->num_ranked, count), atomicMax(&choice->highest, highest);
    // Zeros are the first values of all fields, so this one is kept inverted.
    atomicMax(&choice->inverse_of_lowest, ~lowest);
  }
};

// Prepares the search for the row with the `target`-th lowest rank of the measured rows.
__device__ __forceinline__ void start_search(Choice& c, u64 target) {
  const u64 lowest = ~c.inverse_of_lowest, highest = c.highest;
  const u32 bits = 64 + (highest > lowest ? 64 - __clzll(highest - lowest) : 0);
  c.high_score = ~0ull, c.high_key = ~0ull;
  c.low_score = lowest, c.low_key = 0, c.below = 0, c.shift = bits - RANK_BITS;
  c.is_done = c.num_ranked <= target;
  c.num_ranked = 0, c.inverse_of_lowest = 0, c.highest = 0;
}

// How many samples have ranks up to that of the row that is number `wanted` of all, with so many to spare that they nearly always have.
__device__ __forceinline__ u64 num_low_samples(const Sweep& s, const Choice& c) {
  const float expected = (float)c.wanted * SAMPLES / (float)num_numbers(s.index.counters);
  return (u64)(expected + 6 * sqrtf(expected) + 16);
}

__device__ __forceinline__ bool is_sampled(const Sweep& s) { return num_numbers(s.index.counters) >= SAMPLED_FROM; }

// Counts rows in bins. `for_each`: calls a function with their ranks. All threads of the block call it.
template <class ForEach> __device__ __forceinline__ void count_in_bins(u32* bins, const Choice& c, const ForEach& for_each) {
  for (u32 b = threadIdx.x; b < RANK_BINS; b += SWEEP_THREADS) bins[b] = 0;
  __syncthreads();
  const Rank low = {c.low_score, c.low_key};
  const u32 shift = c.shift;
  for_each([&](const Rank& rank) {
    if (rank < low) return;
    const u32 bin = bin_of(rank, low, shift);
    if (bin < RANK_BINS) atomicAdd(bins + bin, 1);
  });
  __syncthreads();
}

// Continues a search in the bin with the row that is number `target`. `bins`: how many rows are in each. Sets them to zeros. All threads of
// the block call it.
__device__ __forceinline__ void enter_bin(Choosing& shared, u32* bins, Choice* choice, u64 target) {
  constexpr u32 PER_THREAD = RANK_BINS / SWEEP_THREADS;
  const Rank low = {choice->low_score, choice->low_key};
  const u32 shift = choice->shift;
  u32 mine[PER_THREAD], all = 0;
  for (u32 k = 0; k < PER_THREAD; ++k) {
    u32* bin = bins + threadIdx.x * PER_THREAD + k;
    all += mine[k] = load_shared(bin);
    *bin = 0;
  }
  u64 below = choice->below + sum_before(all, shared.of_warps);
  __syncthreads();
  for (u32 k = 0; k < PER_THREAD; ++k, below += mine[k - 1]) {
    // True for one bin of one thread.
    if (below >= target || below + mine[k] < target) continue;
    const Rank start = sum(low, start_of(threadIdx.x * PER_THREAD + k, shift)), high = end_of(start, shift);
    choice->low_score = start.score, choice->low_key = start.key;
    choice->high_score = high.score, choice->high_key = high.key;
    choice->below = below;
    choice->is_done = shift == 0 || below + mine[k] == target;
    choice->shift = shift > RANK_BITS ? shift - RANK_BITS : 0;
  }
  __syncthreads();
}

// Searches among the samples of a table, until it has found the rank of number `target` or one with no other sample between. All threads of
// the block call it.
__device__ __forceinline__ void search_samples(Choosing& shared, const Sweep& s) {
  Choice* choice = s.choice;
  const u64 target = num_low_samples(s, *choice);
  while (!load_shared(&choice->is_done)) {
    count_in_bins(
        shared.bins, *choice, [&](const auto& body) { for_each_of(s.samples, choice->num_samples, 0, SWEEP_THREADS, body); });
    enter_bin(shared, shared.bins, choice, target);
  }
}

// Searches among the rows of all tables, until it has found the ranks of the last rows that go or ranks with no other row between. All
// blocks call it.
__device__ __forceinline__ void search(const Sweep* sweeps, Choosing& shared, Meeting& meeting) {
  const u32 num = shared.num_active;
  for (;;) {
    bool is_open = false;
    for (u32 a = threadIdx.x; a < num; a += SWEEP_THREADS) is_open |= !sweeps[shared.active[a]].choice->is_done;
    if (!__syncthreads_or(is_open)) return;
    shared.shares.divide(num, [&](u32 a) {
      const Sweep& s = sweeps[shared.active[a]];
      return s.choice->is_done ? 0 : num_places(s);
    });
    shared.shares.for_each(num, [&](u32 a, u64 begin) {
      const Sweep& s = sweeps[shared.active[a]];
      count_in_bins(shared.bins, *s.choice, [&](const auto& body) {
        if (has_low(s)) for_each_of(s.low, s.choice->num_low, begin, stride(), body);
        else for_each_removable(s, begin, body);
      });
      for (u32 b = threadIdx.x; b < RANK_BINS; b += SWEEP_THREADS)
        if (shared.bins[b]) atomicAdd(s.bins + b, shared.bins[b]);
      __syncthreads();
    });
    meeting.wait();
    for (u32 a = blockIdx.x; a < num; a += gridDim.x) {
      const Sweep& s = sweeps[shared.active[a]];
      if (!s.choice->is_done) enter_bin(shared, s.bins, s.choice, s.choice->wanted);
    }
    meeting.wait();
  }
}

// Lists the rows that may go and have ranks up to that which the samples gave, in the parts of this block, of which the first starts at `begin`.
__device__ __forceinline__ void list_low(Listing& memory, const Sweep& s, u32 begin) {
  constexpr u32 TURN = LOADS * SWEEP_THREADS, TURNS = PART_OF_RECORDS / TURN;
  Choice* choice = s.choice;
  const u64 *scores = s.scores, *keys = s.keys;
  const u32 end = num_numbers(s.index.counters);
  const Rank high = {choice->high_score, choice->high_key};
  Measure measure;
  Staged staged(memory.places);
  const auto load = [&](u32 record, Ranked& row) {
    row = {scores[record], keys[record], record};
    return !must_stay(s, record);
  };
  const auto write = [&](const Ranked& row, u32 i, bool is_in) {
    if (!is_in) return;
    measure.add(row.score);
    if (i < s.low_room) s.low[i] = row;
  };
  const ScoreStage stage = {memory.scores};
  const u32 step = (u32)stride<PART_OF_RECORDS>(), turns = (end - begin + step - 1) / step * TURNS;
  const auto first_of = [&](u32 turn) { return begin + turn / TURNS * step + turn % TURNS * TURN + threadIdx.x; };
  // Record 0 belongs to no key.
  const auto valid = [&](u32 record) { return min(max(record, 1u), end - 1); };
  const auto start = [&](u32 turn) {
#pragma unroll
    for (u32 k = 0; k < LOADS; ++k) {
      if (turn < turns) stage.start_half(turn, k, (const uint2*)(scores + valid(first_of(turn) + k * SWEEP_THREADS)));
    }
    stage.end();
  };
  // Many rows may have the score of `high`. A warp that has met some loads the keys of its next rows in advance.
  u64 key[LOADS];
  const auto load_keys = [&](u32 turn, u32 which) {
#pragma unroll
    for (u32 k = 0; k < LOADS; ++k)
      if (which >> k & 1) key[k] = keys[valid(first_of(turn) + k * SWEEP_THREADS)];
  };
  constexpr u32 EACH = (1u << LOADS) - 1;
  u32 loaded = 0;
  start(0);
  for (u32 turn = 0; turn < turns; ++turn) {
    start(turn + 1);
    stage.wait();
    u32 low = 0, ties = 0;
#pragma unroll
    for (u32 k = 0; k < LOADS; ++k) {
      const u64 score = *(const u64*)&stage.half_at(turn, k);
      const u32 record = first_of(turn) + k * SWEEP_THREADS;
      const bool is_there = record == valid(record);
      low |= (u32)(is_there && score < high.score) << k, ties |= (u32)(is_there && score == high.score) << k;
    }
    const bool has_ties = __any_sync(ALL, ties);
    if (has_ties) {
      load_keys(turn, ties & ~loaded);
#pragma unroll
      for (u32 k = 0; k < LOADS; ++k) low |= ties & (u32)(key[k] <= high.key) << k;
    }
    load_keys(turn + 1, loaded = has_ties ? EACH : 0);
    if (!__any_sync(ALL, low)) continue;
#pragma unroll 1
    for (u32 k = 0; k < LOADS; ++k) staged.add(low >> k & 1, first_of(turn) + k * SWEEP_THREADS, &choice->num_low, load, write);
  }
  staged.flush(&choice->num_low, load, write);
  measure.give(choice);
}

// Writes the chosen rows to the ring, from the parts of this block, of which the first starts at `begin`.
__device__ __forceinline__ void list_chosen(u32* memory, const Sweep& s, u64 begin) {
  Choice* choice = s.choice;
  const bool is_low = has_low(s);
  const Rank high = {choice->high_score, choice->high_key};
  const u64 ring_end = s.index.counters->released.end, end = num_places(s);
  Staged staged(memory);
  const auto load = [&](u32 place, Ranked& row) {
    if (!is_low && (place == 0 || must_stay(s, place))) return false;
    row = is_low ? s.low[place] : Ranked{s.scores[place], s.keys[place], place};
    return !(high < Rank{row.score, row.key});
  };
  const auto write = [&](const Ranked& row, u32 i, bool is_in) {
    if (is_in) add_removed(s.removal, ring_end + i, (u32)row.record, row.key, s.changes);
  };
  for (u64 start = begin; start < end; start += stride())
    staged.add(start + threadIdx.x < end, (u32)(start + threadIdx.x), &choice->num_listed, load, write);
  staged.flush(&choice->num_listed, load, write);
}

// Prepares the search for the last row that goes.
__device__ __forceinline__ void start_last_search(const Sweep& s) {
  Choice& c = *s.choice;
  c.count = c.num_ranked;
  start_search(c, c.wanted);
}

// Chooses the rows that go, of all tables that have too many rows, and writes their numbers and keys to the ring, after its end. All blocks
// of the launch are on the device at the same time. `arrived`: counts them; 0 before and after.
extern "C" __global__ void __launch_bounds__(SWEEP_THREADS, 1) choose_rows(
    const Sweep* sweeps, u32 num_sweeps, const Used* all_used, u32 num_used, u32* arrived) {
  begin();
  __shared__ Choosing shared;
  if (threadIdx.x == 0) shared.num_active = 0;
  bool is_needed = false;
  for (u32 i = threadIdx.x; i < num_sweeps; i += SWEEP_THREADS) is_needed |= num_wanted(sweeps[i]) > 0;
  if (!__syncthreads_or(is_needed)) return;
  // In the order of the tables, so that all blocks divide the work alike.
  if (threadIdx.x < WARP)
    for (u32 start = 0; start < num_sweeps; start += WARP) {
      const u32 i = start + lane();
      const bool is_active = i < num_sweeps && num_wanted(sweeps[i]) > 0;
      const u32 all = __ballot_sync(ALL, is_active), before = shared.num_active;
      __syncwarp();
      if (is_active) shared.active[before + __popc(all & lanes_below())] = i;
      if (lane() == 0) shared.num_active = before + __popc(all);
      __syncwarp();
    }
  __syncthreads();
  const u32 num = shared.num_active;
  Meeting meeting = {arrived, 0};
  Shares& shares = shared.shares;

  // Marks the rows that must stay.
  const auto num_quads = [&](const Sweep& s) { return (num_numbers(s.index.counters) + 4 * WARP - 1) / (4 * WARP); };
  shares.divide(num, [&](u32 a) { return num_quads(sweeps[shared.active[a]]); });
  shares.for_each(num, [&](u32 a, u64 begin) {
    const Sweep& s = sweeps[shared.active[a]];
    for_each_at_once(
        begin, num_quads(s), [&](u64 i) { return ((const uint4*)s.vacant)[i]; },
        [&](u64 i, const uint4& quad) { ((uint4*)s.marks)[i] = quad; });
  });
  for (u32 a = blockIdx.x * SWEEP_THREADS + threadIdx.x; a < num; a += gridDim.x * SWEEP_THREADS) {
    const Sweep& s = sweeps[shared.active[a]];
    s.choice->wanted = num_wanted(s);
  }
  meeting.wait();
  const auto count_of = [&](const Used& used) { return used.counted ? min(*used.counted, used.count) : used.count; };
  for (u32 start = 0; start < num_used; start += MAX_SWEEPS) {
    const Used* some = all_used + start;
    const u32 num_some = min(num_used - start, MAX_SWEEPS);
    shares.divide(num_some, [&](u32 u) {
      const Used& used = some[u];
      if (num_wanted(sweeps[used.sweep]) == 0) return 0u;
      return used.resolved && used.resolved->is_due && used.resolved->weights[used.row] != 0 ? 0u : count_of(used);
    });
    shares.for_each(num_some, [&](u32 u, u64 begin) {
      const Used& used = some[u];
      u32* marks = sweeps[used.sweep].marks;
      for_each_at_once(
          begin, count_of(used), [&](u64 i) { return used.records[i * used.stride] & ~NEW; },
          [&](u64, u32 record) {
            if (record && record < used.end) atomicOr(marks + record / WARP, 1u << record % WARP);
          });
    });
  }
  meeting.wait();

  // A sample of the rows gives a rank above that of the last row that goes. Rows above it need not be examined again.
  shares.divide(num, [&](u32 a) { return is_sampled(sweeps[shared.active[a]]) ? SAMPLES : 0; });
  shares.for_each(num, [&](u32 a, u64 begin) {
    const Sweep& s = sweeps[shared.active[a]];
    const u64 numbers = num_numbers(s.index.counters);
    Measure measure;
    for (u64 i = begin + threadIdx.x; i < SAMPLES; i += stride()) {
      // A random record of each of equal ranges.
      const u64 from = i * numbers / SAMPLES, range = (i + 1) * numbers / SAMPLES - from;
      const u64 record = from + hash(s.removal.sweep, i) % range;
      const bool is_one = record && !must_stay(s, record);
      const u32 place = take(&s.choice->num_samples, is_one);
      if (!is_one) continue;
      const u64 score = s.scores[record];
      s.samples[place] = {score, s.keys[record], (u32)record};
      measure.add(score);
    }
    __syncwarp();
    measure.give(s.choice);
  });
  meeting.wait();
  for (u32 a = blockIdx.x; a < num; a += gridDim.x) {
    const Sweep& s = sweeps[shared.active[a]];
    if (!is_sampled(s)) continue;
    if (threadIdx.x == 0) start_search(*s.choice, num_low_samples(s, *s.choice));
    __syncthreads();
    search_samples(shared, s);
  }
  meeting.wait();

  // Lists the rows whose ranks are low enough for removal.
  shares.divide<PART_OF_RECORDS>(
      num, [&](u32 a) { return is_sampled(sweeps[shared.active[a]]) ? num_numbers(sweeps[shared.active[a]].index.counters) : 0; });
  shares.for_each<PART_OF_RECORDS>(num, [&](u32 a, u64 begin) { list_low(shared.listing, sweeps[shared.active[a]], (u32)begin); });
  meeting.wait();

  // Where there is no such list, all rows are examined again.
  shares.divide(num, [&](u32 a) {
    const Sweep& s = sweeps[shared.active[a]];
    return has_low(s) ? 0 : num_numbers(s.index.counters);
  });
  if (shares.first[num]) {
    for (u32 a = blockIdx.x * SWEEP_THREADS + threadIdx.x; a < num; a += gridDim.x * SWEEP_THREADS) {
      const Sweep& s = sweeps[shared.active[a]];
      Choice& c = *s.choice;
      if (!has_low(s)) c.num_ranked = 0, c.inverse_of_lowest = 0, c.highest = 0;
    }
    meeting.wait();
    shares.for_each(num, [&](u32 a, u64 begin) {
      const Sweep& s = sweeps[shared.active[a]];
      Measure measure;
      for_each_removable(s, begin, [&](const Rank& rank) { measure.add(rank.score); });
      __syncwarp();
      measure.give(s.choice);
    });
    meeting.wait();
  }
  for (u32 a = blockIdx.x * SWEEP_THREADS + threadIdx.x; a < num; a += gridDim.x * SWEEP_THREADS)
    start_last_search(sweeps[shared.active[a]]);
  meeting.wait();
  search(sweeps, shared, meeting);

  shares.divide(num, [&](u32 a) { return num_places(sweeps[shared.active[a]]); });
  shares.for_each(num, [&](u32 a, u64 begin) { list_chosen(shared.listing.places, sweeps[shared.active[a]], begin); });
  meeting.end();
}

// Removes the rows that `choose_rows` has chosen. The launch has `blocks` blocks for each sweep.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) remove_chosen(const Sweep* sweeps, u32 blocks) {
  begin();
  const Sweep& s = sweeps[blockIdx.x / blocks];
  Choice* choice = s.choice;
  Counters* counters = s.index.counters;
  const u32 n = choice->num_listed;
  const u64 ring_end = counters->released.end;
  for (u32 start = blockIdx.x % blocks * TABLE_THREADS + threadIdx.x - lane(); start < n; start += blocks * TABLE_THREADS) {
    const u32 i = start + lane();
    const u64 place = (ring_end + i) & s.removal.mask;
    erase_distinct(s.index, i < n ? s.removal.keys[place] : 0, i < n);
    if (i < n) vacate(s.vacant, s.commits, s.removal.numbers[place]);
  }
  if (!is_last_block(&choice->blocks_done, blocks) || threadIdx.x != 0) return;
  counters->gone += n, counters->evicted += n;
  end_removal(counters, s.removal, s.progress->step, n);
  *choice = {};
}
