// Sweeps: a full table removes the rows with the lowest scores. One launch chooses them, for all tables that have too many rows, and one
// removes them. The host learns later which rows went.
#include "records.cuh"

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

// Number of records that a thread reads at once.
constexpr u32 AT_ONCE = 4;
// Units of work in which the blocks share it.
constexpr u32 PART = SWEEP_THREADS * AT_ONCE;
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
  // Divides lists, of which `len` returns the lengths.
  template <class Len> __device__ __forceinline__ void divide(u32 num, const Len& len) {
    __syncthreads();
    for (u32 i = threadIdx.x; i < num; i += SWEEP_THREADS) first[i + 1] = (u32)((len(i) + PART - 1) / PART);
    __syncthreads();
    if (threadIdx.x < WARP) {
      u32 before = 0;
      for (u32 start = 0; start < num; start += WARP) {
        u32 x = start + lane() < num ? first[start + lane() + 1] : 0;
        for (u32 by = 1; by < WARP; by *= 2) {
          const u32 y = __shfl_up_sync(ALL, x, by);
          if (lane() >= by) x += y;
        }
        if (start + lane() < num) first[start + lane() + 1] = before + x;
        before += __shfl_sync(ALL, x, WARP - 1);
      }
      if (lane() == 0) first[0] = 0;
    }
    __syncthreads();
  }
  // Calls `body` with the number of each list of which this block has parts, and where they begin and end. All threads call it.
  template <class Body> __device__ __forceinline__ void for_each(u32 num, const Body& body) {
    const u64 all = first[num];
    const u32 begin = (u32)(all * blockIdx.x / gridDim.x), end = (u32)(all * (blockIdx.x + 1) / gridDim.x);
    for (u32 i = 0; i < num && first[i] < end; ++i) {
      const u32 from = max(begin, first[i]), to = min(end, first[i + 1]);
      if (from < to) body(i, (u64)(from - first[i]) * PART, (u64)(to - first[i]) * PART);
    }
  }
};

struct Choosing {
  Shares shares;
  // Indices of the sweeps that remove rows.
  u32 active[MAX_SWEEPS];
  u32 num_active;
  u32 bins[RANK_BINS];
  u32 of_threads[SWEEP_THREADS];
};

__device__ __forceinline__ bool is_used(const Sweep& s, u64 record) { return s.marks[record / WARP] >> record % WARP & 1; }

// Calls `body` with the number and the use of each record between `from` and `to` whose row may go.
template <class Body> __device__ __forceinline__ void for_each_removable(const Sweep& s, u64 from, u64 to, const Body& body) {
  const u64 end = min(to, (u64)num_numbers(s.index.counters)), settled = s.progress->settled_commit;
  for (u64 start = from; start < end; start += PART) {
    Pair pair[AT_ONCE];
#pragma unroll
    for (u32 k = 0; k < AT_ONCE; ++k) {
      const u64 record = start + k * SWEEP_THREADS + threadIdx.x;
      // A record without a row has the largest number of a commit. Record 0 belongs to no key.
      pair[k] = record > 0 && record < end ? load_pair(s.uses + record) : Pair{0, NO_ROW};
    }
#pragma unroll
    for (u32 k = 0; k < AT_ONCE; ++k) {
      const u64 record = start + k * SWEEP_THREADS + threadIdx.x;
      if (pair[k].high <= settled && !is_used(s, record)) body(record, Use{pair[k].low, pair[k].high});
    }
  }
}

// Calls `body` with the ranks of a list between `from` and `to`.
template <class Body> __device__ __forceinline__ void for_each_of(const Ranked* list, u32 len, u64 from, u64 to, const Body& body) {
  for (u64 i = from + threadIdx.x; i < min(to, (u64)len); i += SWEEP_THREADS) {
    const Ranked one = list[i];
    body(Rank{one.score, one.key}, one.record);
  }
}

// Among which rows a sweep chooses.
enum From : u32 { FROM_SAMPLES, FROM_LOW, FROM_ALL };
__device__ __forceinline__ From source_of(const Sweep& s, const Choice& c) {
  // All rows that go are in the list of rows with low ranks.
  return c.num_low >= c.wanted && c.num_low <= s.low_room ? FROM_LOW : FROM_ALL;
}
__device__ __forceinline__ u64 len_of(const Sweep& s, const Choice& c, From from) {
  return from == FROM_SAMPLES ? c.num_samples : from == FROM_LOW ? c.num_low : num_numbers(s.index.counters);
}
// Calls `body` with the ranks and records of a source between `begin` and `end`.
template <class Body>
__device__ __forceinline__ void for_each_from(const Sweep& s, const Choice& c, From from, u64 begin, u64 end, const Body& body) {
  if (from == FROM_SAMPLES) for_each_of(s.samples, c.num_samples, begin, end, body);
  else if (from == FROM_LOW) for_each_of(s.low, c.num_low, begin, end, body);
  else for_each_removable(s, begin, end, [&](u64 record, const Use& use) { body(Rank{use.score, s.keys[record]}, record); });
}

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

// Divides the bin with the row that is number `target`, until it has found its rank or a rank with no other row between. `is_sampling`: it
// searches among samples. All blocks call it.
__device__ __forceinline__ void search(const Sweep* sweeps, Choosing& shared, Meeting& meeting, bool is_sampling) {
  const u32 num = shared.num_active;
  const auto from_of = [&](const Sweep& s) { return is_sampling ? FROM_SAMPLES : source_of(s, *s.choice); };
  const auto is_done = [&](const Sweep& s) { return s.choice->is_done || (is_sampling && !is_sampled(s)); };
  for (;;) {
    bool is_open = false;
    for (u32 a = threadIdx.x; a < num; a += SWEEP_THREADS) is_open |= !is_done(sweeps[shared.active[a]]);
    if (!__syncthreads_or(is_open)) return;
    shared.shares.divide(num, [&](u32 a) {
      const Sweep& s = sweeps[shared.active[a]];
      return is_done(s) ? 0 : len_of(s, *s.choice, from_of(s));
    });
    shared.shares.for_each(num, [&](u32 a, u64 begin, u64 end) {
      const Sweep& s = sweeps[shared.active[a]];
      const Choice& c = *s.choice;
      for (u32 b = threadIdx.x; b < RANK_BINS; b += SWEEP_THREADS) shared.bins[b] = 0;
      __syncthreads();
      const Rank low = {c.low_score, c.low_key};
      const u32 shift = c.shift;
      for_each_from(s, c, from_of(s), begin, end, [&](const Rank& rank, u64) {
        if (rank < low) return;
        const u32 bin = bin_of(rank, low, shift);
        if (bin < RANK_BINS) atomicAdd(shared.bins + bin, 1);
      });
      __syncthreads();
      for (u32 b = threadIdx.x; b < RANK_BINS; b += SWEEP_THREADS)
        if (shared.bins[b]) atomicAdd(s.bins + b, shared.bins[b]);
      __syncthreads();
    });
    meeting.wait();
    for (u32 a = blockIdx.x; a < num; a += gridDim.x) {
      const Sweep& s = sweeps[shared.active[a]];
      if (is_done(s)) continue;
      constexpr u32 PER_THREAD = RANK_BINS / SWEEP_THREADS;
      Choice* choice = s.choice;
      const u64 target = is_sampling ? num_low_samples(s, *choice) : choice->wanted;
      const Rank low = {choice->low_score, choice->low_key};
      const u32 shift = choice->shift;
      u32 mine[PER_THREAD], all = 0;
      for (u32 k = 0; k < PER_THREAD; ++k) {
        u32* bin = s.bins + threadIdx.x * PER_THREAD + k;
        all += mine[k] = load_shared(bin);
        *bin = 0;
      }
      shared.of_threads[threadIdx.x] = all;
      __syncthreads();
      u64 below = choice->below;
      for (u32 t = 0; t < threadIdx.x; ++t) below += shared.of_threads[t];
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
    meeting.wait();
  }
}

// Chooses the rows that go, of all tables that have too many rows, and writes their numbers and keys to the ring, after its end. All blocks
// of the launch are on the device at the same time. `arrived`: counts them; 0 before and after.
extern "C" __global__ void __launch_bounds__(SWEEP_THREADS, 2) choose_rows(
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
  shares.divide(num, [&](u32 a) { return (num_numbers(sweeps[shared.active[a]].index.counters) + WARP - 1) / WARP; });
  shares.for_each(num, [&](u32 a, u64 begin, u64 end) {
    const Sweep& s = sweeps[shared.active[a]];
    const u64 words = (num_numbers(s.index.counters) + WARP - 1) / WARP;
    for (u64 i = begin + threadIdx.x; i < min(end, words); i += SWEEP_THREADS) s.marks[i] = 0;
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
    shares.for_each(num_some, [&](u32 u, u64 begin, u64 end) {
      const Used& used = some[u];
      u32* marks = sweeps[used.sweep].marks;
      for (u64 i = begin + threadIdx.x; i < min(end, (u64)count_of(used)); i += SWEEP_THREADS) {
        const u32 record = used.records[i * used.stride] & ~NEW;
        if (record && record < used.end) atomicOr(marks + record / WARP, 1u << record % WARP);
      }
    });
  }
  meeting.wait();

  // A sample of the rows gives a rank above that of the last row that goes. Rows above it need not be examined again.
  shares.divide(num, [&](u32 a) { return is_sampled(sweeps[shared.active[a]]) ? SAMPLES : 0; });
  shares.for_each(num, [&](u32 a, u64 begin, u64 end) {
    const Sweep& s = sweeps[shared.active[a]];
    const u64 numbers = num_numbers(s.index.counters), settled = s.progress->settled_commit;
    Measure measure;
    for (u64 i = begin + threadIdx.x; i < min(end, (u64)SAMPLES); i += SWEEP_THREADS) {
      // A random record of each of equal ranges.
      const u64 from = i * numbers / SAMPLES, range = (i + 1) * numbers / SAMPLES - from;
      const u64 record = from + hash(s.number, i) % range;
      const Pair use = record ? load_pair(s.uses + record) : Pair{0, NO_ROW};
      if (use.high > settled || is_used(s, record)) continue;
      s.samples[atomicAdd(&s.choice->num_samples, 1)] = {use.low, s.keys[record], record};
      measure.add(use.low);
    }
    __syncwarp();
    measure.give(s.choice);
  });
  meeting.wait();
  for (u32 a = blockIdx.x * SWEEP_THREADS + threadIdx.x; a < num; a += gridDim.x * SWEEP_THREADS) {
    const Sweep& s = sweeps[shared.active[a]];
    if (is_sampled(s)) start_search(*s.choice, num_low_samples(s, *s.choice));
  }
  meeting.wait();
  search(sweeps, shared, meeting, true);

  // Lists the rows whose ranks are low enough for removal.
  shares.divide(num, [&](u32 a) { return num_numbers(sweeps[shared.active[a]].index.counters); });
  shares.for_each(num, [&](u32 a, u64 begin, u64 end) {
    const Sweep& s = sweeps[shared.active[a]];
    Choice* choice = s.choice;
    const Rank high = {choice->high_score, choice->high_key};
    const bool lists = is_sampled(s);
    Measure measure;
    u64 count = 0;
    for_each_removable(s, begin, end, [&](u64 record, const Use& use) {
      ++count;
      if (!lists) {
        measure.add(use.score);
        return;
      }
      if (use.score > high.score) return;
      const u64 key = s.keys[record];
      if (use.score == high.score && key > high.key) return;
      measure.add(use.score);
      const u32 place = atomicAdd(&choice->num_low, 1);
      if (place < s.low_room) s.low[place] = {use.score, key, record};
    });
    __syncwarp();
    for (u32 by = WARP / 2; by; by /= 2) count += __shfl_down_sync(ALL, count, by);
    if (lane() == 0 && count) atomicAdd(&choice->count, count);
    measure.give(choice);
  });
  meeting.wait();
  for (u32 a = blockIdx.x * SWEEP_THREADS + threadIdx.x; a < num; a += gridDim.x * SWEEP_THREADS) {
    const Sweep& s = sweeps[shared.active[a]];
    Choice& c = *s.choice;
    if (source_of(s, c) == FROM_ALL && is_sampled(s)) {
      // The list does not help. The scores of the other rows may be any.
      c.num_ranked = c.count, c.inverse_of_lowest = ~0ull, c.highest = ~0ull;
    }
    start_search(c, c.wanted);
  }
  meeting.wait();
  search(sweeps, shared, meeting, false);

  shares.divide(num, [&](u32 a) {
    const Sweep& s = sweeps[shared.active[a]];
    return len_of(s, *s.choice, source_of(s, *s.choice));
  });
  shares.for_each(num, [&](u32 a, u64 begin, u64 end) {
    const Sweep& s = sweeps[shared.active[a]];
    Choice* choice = s.choice;
    const Rank high = {choice->high_score, choice->high_key};
    const u64 first = s.index.counters->released.end;
    for_each_from(s, *choice, source_of(s, *choice), begin, end, [&](const Rank& rank, u64 record) {
      if (high < rank) return;
      const u64 place = (first + atomicAdd(&choice->num_listed, 1)) & s.ring_mask;
      s.released[place] = (u32)record, s.departed_keys[place] = rank.key;
      if (s.changes) s.departed_changes[place] = s.changes[record];
    });
  });
  meeting.end();
}

// Removes the rows that `choose_rows` has chosen. The launch has `blocks` blocks for each sweep.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) remove_chosen(const Sweep* sweeps, u32 blocks) {
  begin();
  const Sweep& s = sweeps[blockIdx.x / blocks];
  Choice* choice = s.choice;
  Counters* counters = s.index.counters;
  Released* released = &counters->released;
  const u32 n = choice->num_listed;
  const u64 first = released->end;
  for (u32 i = blockIdx.x % blocks * TABLE_THREADS + threadIdx.x; i < n; i += blocks * TABLE_THREADS) {
    const u64 place = (first + i) & s.ring_mask;
    erase_distinct(s.index, s.departed_keys[place]);
    s.uses[s.released[place]].commit = NO_ROW;
  }
  if (!is_last_block(&choice->blocks_done, blocks) || threadIdx.x != 0) return;
  counters->gone += n, counters->evicted += n;
  // What was given out since the last sweep.
  const u64 taken = counters->taken, given = taken - released->base, of_ring = min(given, released->count);
  released->base = taken, released->fresh += given - of_ring;
  released->first += of_ring, released->count -= of_ring, released->end = first + n;
  s.notes[s.number % SWEEP_NOTES] = {s.progress->step, first + n};
  if (s.usable != ~0ull) {
    const u64 end = s.notes[s.usable % SWEEP_NOTES].end;
    if (end > released->first + released->count) released->count = end - released->first;
  }
  *choice = {};
}
