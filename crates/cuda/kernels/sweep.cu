// Sweeps: a full table removes the rows with the lowest scores. One launch chooses them, for all tables that have too many rows, and one
// removes them. The host learns later which rows went.
#include "removal.cuh"

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
// A part of a list has PART rows. A part of the records of a table has AT_ONCE groups of records for each thread.
constexpr u32 PART = SWEEP_THREADS, PART_OF_RECORDS = AT_ONCE * SWEEP_THREADS * FLOOR_RECORDS;
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
  // By warp: groups of records whose floors are low.
  u32 groups[SWEEP_THREADS / WARP][WARP + AT_ONCE * WARP];
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

// How many samples have ranks up to that of the row that is number `wanted` of all, with four standard deviations to spare.
__device__ __forceinline__ u64 num_low_samples(const Sweep& s, const Choice& c) {
  const float expected = (float)c.wanted * SAMPLES / (float)num_numbers(s.index.counters);
  return (u64)(expected + 4 * sqrtf(expected) + 8);
}

__device__ __forceinline__ bool is_sampled(const Sweep& s) { return num_numbers(s.index.counters) >= SAMPLED_FROM; }

// Takes samples of the rows that may go, in the parts of this block, of which the first starts at `begin`.
__device__ __forceinline__ void take_samples(const Sweep& s, u64 begin) {
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
    s.samples[place] = {score, s.keys[record], record};
    measure.add(score);
  }
  __syncwarp();
  measure.give(s.choice);
}

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

// Returns a floor that holds for rows that come later.
__device__ __forceinline__ Rank floor_of_later(const Sweep& s) { return {s.scoring == STEPS ? s.progress->step : ~0ull, 0}; }

// Lists the rows that may go and have ranks up to that which the samples gave, in the parts of this block, of which the first starts at `begin`.
// Groups of records with a higher floor have none. The other groups get floors for the rows that are not listed.
__device__ __forceinline__ void list_low(Listing& memory, const Sweep& s, u64 begin) {
  Choice* choice = s.choice;
  const u64 *scores = s.scores, *keys = s.keys;
  const u32 end = num_numbers(s.index.counters), num_groups = (end + FLOOR_RECORDS - 1) / FLOOR_RECORDS;
  const Rank high = {choice->high_score, choice->high_key}, later = floor_of_later(s);
  Measure measure;
  Staged staged(memory.places);
  const auto load = [&](u32 record, Ranked& row) {
    row = {scores[record], keys[record], record};
    return true;
  };
  const auto write = [&](const Ranked& row, u32 i, bool is_in) {
    if (!is_in) return;
    measure.add(row.score);
    if (i < s.low_room) s.low[i] = row;
  };
  u32* groups = memory.groups[threadIdx.x / WARP];
  u32 count = 0;
  const auto load_group = [&](const u64* all, u32 group, u64* to) {
#pragma unroll
    for (u32 k = 0; k < FLOOR_RECORDS; k += 2) {
      const Pair pair = load_pair(all + (u64)group * FLOOR_RECORDS + k);
      to[k] = pair.low, to[k + 1] = pair.high;
    }
  };
  // Examines the last groups of the warp's list, one by each lane.
  const auto examine = [&]() {
    __syncwarp();
    const u32 num = min(count, WARP);
    count -= num;
    const bool is_one = lane() < num;
    const u32 group = is_one ? groups[count + lane()] : 0;
    __syncwarp();
    u64 score[FLOOR_RECORDS], key[FLOOR_RECORDS] = {};
    // A bit for each record of the group.
    u32 present = 0, removable = 0, low = 0, ties = 0;
    if (is_one) {
      load_group(scores, group, score);
      // Record 0 belongs to no key.
      const u32 first = group * FLOOR_RECORDS, records = (1u << min(end - first, FLOOR_RECORDS)) - 1 & ~(first == 0);
      present = ~((const unsigned char*)s.vacant)[group] & records, removable = ~((const unsigned char*)s.marks)[group] & records;
#pragma unroll
      for (u32 k = 0; k < FLOOR_RECORDS; ++k) low |= (u32)(score[k] < high.score) << k, ties |= (u32)(score[k] == high.score) << k;
      if (ties & present) {
        load_group(keys, group, key);
#pragma unroll
        for (u32 k = 0; k < FLOOR_RECORDS; ++k) low |= ties & (u32)(key[k] <= high.key) << k;
      }
      low &= removable;
      Rank floor = later;
#pragma unroll
      for (u32 k = 0; k < FLOOR_RECORDS; ++k) {
        const Rank rank = {score[k], key[k]};
        if ((present & ~low) >> k & 1 && rank < floor) floor = rank;
      }
      s.floor_scores[group] = floor.score, s.floor_keys[group] = floor.key;
    }
#pragma unroll 1
    for (u32 k = 0; k < FLOOR_RECORDS; ++k) staged.add(low >> k & 1, group * FLOOR_RECORDS + k, &choice->num_low, load, write);
  };
  // The floors of the next groups are loaded while these are examined.
  u64 floors[AT_ONCE];
  const auto load_floors = [&](u64 first) {
#pragma unroll
    for (u32 k = 0; k < AT_ONCE; ++k) {
      const u64 group = first + k * SWEEP_THREADS + threadIdx.x;
      floors[k] = group < num_groups ? load_shared(s.floor_scores + group) : ~0ull;
    }
  };
  const u64 step = stride<PART_OF_RECORDS>() / FLOOR_RECORDS;
  u64 first = begin / FLOOR_RECORDS;
  load_floors(first);
  for (; first < num_groups; first += step) {
#pragma unroll
    for (u32 k = 0; k < AT_ONCE; ++k) {
      const u64 group = first + k * SWEEP_THREADS + threadIdx.x;
      const bool is_tie = floors[k] == high.score && floors[k] && group < num_groups;
      const bool is_low = group < num_groups && (is_tie ? s.floor_keys[group] <= high.key : floors[k] < high.score || !floors[k]);
      const u32 all = __ballot_sync(ALL, is_low);
      if (is_low) groups[count + __popc(all & lanes_below())] = (u32)group;
      count += __popc(all);
    }
    load_floors(first + step);
    while (count >= WARP) examine();
  }
  while (count) examine();
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
    // The list of low rows is too long, too short or was not made.
    if (!is_low) lower_floor(s.floor_scores, place);
    if (!is_low && (place == 0 || must_stay(s, place))) return false;
    row = is_low ? s.low[place] : Ranked{s.scores[place], s.keys[place], place};
    const bool is_chosen = !(high < Rank{row.score, row.key});
    // This row was left out of its group's floor, and stays.
    if (!is_chosen) lower_floor(s.floor_scores, (u32)row.record);
    return is_chosen;
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
  shares.for_each(num, [&](u32 a, u64 begin) { take_samples(sweeps[shared.active[a]], begin); });
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
  shares.for_each<PART_OF_RECORDS>(num, [&](u32 a, u64 begin) { list_low(shared.listing, sweeps[shared.active[a]], begin); });
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
