// Keys without a row that lookups of training have met, the candidates. The commit that takes the gradients of a lookup counts their sights, and
// inserts those that the table's admission policy admits.
//
// A lookup sorts the ids of a candidate like those of a record, by a number that comes after those of all records, and lists its candidates. A
// commit of one lookup is `admit_candidates` and `settle_admitted`. Of several lookups, it is `count_sights` for each, these two for each, and
// `end_admission` for each, because a candidate of several lookups is admitted by all their sights.
#include "lists.cuh"
#include "step.cuh"

constexpr u32 WARPS = TABLE_THREADS / WARP;

// The candidates of one section of a lookup, of which a launch has `blocks` blocks for each.
struct OfSection {
  Section section;
  const Listed* listed;
  // Number of its candidates; 0 if the commit does not take the lookup. Block of the section, and of so many.
  u32 count, block, blocks;
  __device__ __forceinline__ explicit OfSection(const Admitting& a) : blocks(a.blocks) {
    const u32 number = blockIdx.x / a.blocks;
    const bool is_due = a.row == RING || (a.resolved->is_due && !(a.resolved->weights[a.row] == 0));
    block = blockIdx.x % a.blocks, section = a.sections[number], listed = a.listed + section.first;
    count = is_due && section.first_candidate ? a.num_listed[number] : 0;
  }
  // Calls `body` with the place in the list of each candidate, or `count`. All lanes of a warp call it together.
  template <class Body> __device__ __forceinline__ void for_each(const Body& body) const {
    for (u32 start = block * blockDim.x; start < count; start += blocks * blockDim.x) body(min(start + threadIdx.x, count));
  }
};

// A candidate of a lookup: its sorted ids, and its number among those of its table.
struct Met {
  u32 first, count, number;
  bool is_one;
  // A later push of a lookup finds that its candidates were decided on.
  __device__ __forceinline__ Met(const Admitting& a, const OfSection& of, u32 place)
      : first(0), count(0), number(0), is_one(false) {
    if (place >= of.count) return;
    const u32 sorted = a.sorted[of.listed[place].first].record;
    if (!is_candidate(of.section, sorted)) return;
    first = of.listed[place].first, count = of.listed[place].count, number = sorted - of.section.first_candidate, is_one = true;
  }
};

// Returns the number of sights that a lookup adds to a candidate.
__device__ __forceinline__ u32 sights_of(const Admitting& a, const Table& t, const Met& met) {
  if (!t.admission.counts_ids) return 1;
  if (!a.of_keys.counts) return met.count;
  u64 sum = 0;
  for (u32 i = met.first; i < met.first + met.count; ++i) sum += num_ids_at(a.of_keys, a.sorted[i].value);
  return (u32)min(sum, (u64)ALL);
}

// Returns a number of sights with more sights. It stays at the highest number that fits.
__device__ __forceinline__ u32 sum_of_sights(u32 sights, u32 more) { return sights + more < sights ? ALL : sights + more; }

// Returns the hash of a number, as `key.rs` of the core computes it.
__device__ __forceinline__ u64 mix(u64 x) { return hash(0, x); }

// Whether a key gets a record, with so many sights, as `policy/admission.rs` of the core says.
__device__ __forceinline__ bool admits(const Table& t, u64 key, u32 sights) {
  if (sights < t.admission.threshold) return false;
  if (t.admission.chance >> 53) return true;
  const u64 bits = mix(mix(mix(t.initializer.seed) ^ key) + mix(t.admission.step));
  return bits >> 11 < t.admission.chance;
}

// Ends the decision on the candidates of a warp: stores their sights, and gives their ids the numbers of their records. `sights`: those of the
// candidate if it gets no record. All lanes of a warp must call this.
__device__ __forceinline__ void decide(const Admitting& a, const Table& t, bool is_one, const Met& met, u32 record, u32 sights) {
  if (is_one) candidate_at(a.tables[t.candidates], met.number)->sights = record == NO_RECORD && t.admission.threshold ? sights : 0;
  const u32 dropped = sum_of_warp(is_one && record == NO_RECORD ? met.count : 0);
  if (lane() == 0 && dropped) atomicAdd(&t.index.counters->dropped, (u64)dropped);
  const bool is_hot = is_one && met.count > HOT;
  if (is_one && !is_hot)
    for (u32 i = met.first; i < met.first + met.count; ++i) a.sorted[i].record = record;
  for (u32 hot = __ballot_sync(ALL, is_hot); hot; hot &= hot - 1) {
    const u32 from = __ffs(hot) - 1, of_hot = __shfl_sync(ALL, record, from);
    const u32 first = __shfl_sync(ALL, met.first, from), end = first + __shfl_sync(ALL, met.count, from);
    for (u32 i = first + lane(); i < end; i += WARP) a.sorted[i].record = of_hot;
  }
}

// Adds the sights of a lookup to those of the commit in progress.
extern "C" __global__ void __launch_bounds__(FIND_THREADS) count_sights(const __grid_constant__ Admitting a) {
  begin();
  const OfSection of(a);
  const Table& t = a.tables[of.section.table];
  of.for_each([&](u32 place) {
    const Met met(a, of, place);
    if (!met.is_one) return;
    Candidate* candidate = candidate_at(a.tables[t.candidates], met.number);
    if (t.admission.counts_ids) atomicAdd(&candidate->more, sights_of(a, t, met));
    else store_shared(&candidate->more, 1u);
  });
}

// Gives records to the candidates of a lookup that are admitted, unless their table is closed, and lists their keys like those that the lookup has
// found. A key for which there is no slot is added to `a.overflow`.
extern "C" __global__ void __launch_bounds__(FIND_THREADS) admit_candidates(const __grid_constant__ Admitting a) {
  begin();
  __shared__ LaneList lists[FIND_THREADS / WARP];
  LaneList& list = lists[threadIdx.x / WARP];
  const OfSection of(a);
  const Table& t = a.tables[of.section.table];
  u32 filtered = 0, inserted = 0;
  of.for_each([&](u32 place) {
    const Met met(a, of, place);
    Candidate* candidate = candidate_at(a.tables[t.candidates], met.number);
    u64 key = 0;
    u32 sights = 0;
    if (met.is_one) {
      const Candidate now = *candidate;
      key = now.key, sights = sum_of_sights(now.sights, a.is_counted ? now.more : sights_of(a, t, met));
    }
    const u64 h = hash(t.index, key);
    u32 record = find(t.index, key, h, met.is_one, list);
    const bool is_absent = met.is_one && record == NO_RECORD, is_admitted = is_absent && admits(t, key, sights);
    const bool is_missing = is_admitted && !t.admission.is_closed;
    bool is_overflow = false;
    if (__any_sync(ALL, is_missing)) {
      const u32 got = insert_missing(t, t.index, is_missing, key, h, list);
      if (is_missing) record = got;
      is_overflow = is_missing && record == NO_RECORD;
      const u32 to = take(a.overflow.count, is_overflow);
      if (is_overflow) a.overflow.ids[to] = of.section.first + place;
    }
    inserted += is_missing && !is_overflow, filtered += is_absent && !is_admitted;
    list_lanes(a.kinds[of.section.kind], a.sorted, record, met.first, record == NO_RECORD ? 0 : met.count);
    if (!a.is_counted) decide(a, t, met.is_one && !is_overflow, met, record, sights);
    else if (met.is_one) candidate->record = record;
  });
  filtered = sum_of_warp(filtered), inserted = sum_of_warp(inserted);
  if (lane() != 0) return;
  if (filtered) atomicAdd(&t.index.counters->filtered, (u64)filtered);
  // Keys that are new do not count as found.
  if (inserted) atomicAdd(&t.index.counters->distinct, (u64)inserted);
}

// Inserts the keys for which `admit_candidates` found no slot. One warp per key.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) settle_admitted(const __grid_constant__ Admitting a) {
  begin();
  const u32 n = *a.overflow.count;
  for (u32 k = blockIdx.x * WARPS + threadIdx.x / WARP; k < n; k += gridDim.x * WARPS) {
    const u32 at = a.overflow.ids[k];
    u32 number = 0;
    while (number + 1 < a.num_sections && at >= a.sections[number + 1].first) ++number;
    const Section section = a.sections[number];
    const Table& t = a.tables[section.table];
    const Listed listed = a.listed[at];
    // Another launch may have processed the section of the entry.
    if (at < section.first || at >= section.first + section.count) continue;
    const u32 sorted = a.sorted[listed.first].record;
    if (!is_candidate(section, sorted)) continue;
    Candidate* candidate = candidate_at(a.tables[t.candidates], sorted - section.first_candidate);
    const u32 record = find_room(t, LaneGroup<WARP>(), candidate->key);
    if (lane() == 0) {
      if (record == NO_RECORD) report(a.fault, NO_PLACE, 0, section.table, candidate->key);
      else atomicAdd(&t.index.counters->distinct, 1ull);
      candidate->record = record;
      if (!a.is_counted) candidate->sights = 0;
    }
    list_lanes(a.kinds[section.kind], a.sorted, record, listed.first, lane() == 0 && record != NO_RECORD ? listed.count : 0);
    if (a.is_counted) continue;
    __syncwarp();
    for (u32 i = listed.first + lane(); i < listed.first + listed.count; i += WARP) a.sorted[i].record = record;
  }
}

// Ends the decision on the candidates of a lookup, if others were counted with it.
extern "C" __global__ void __launch_bounds__(FIND_THREADS) end_admission(const __grid_constant__ Admitting a) {
  begin();
  const OfSection of(a);
  const Table& t = a.tables[of.section.table];
  of.for_each([&](u32 place) {
    const Met met(a, of, place);
    Candidate* candidate = candidate_at(a.tables[t.candidates], met.number);
    u32 record = NO_RECORD, sights = 0;
    if (met.is_one) {
      record = candidate->record, sights = candidate->sights;
      // The first of the lookups that have met a candidate adds the sights of all.
      const u32 more = atomicExch(&candidate->more, 0);
      if (more) sights = sum_of_sights(sights, more);
    }
    decide(a, t, met.is_one, met, record, sights);
  });
}

// Lists the ids of the candidates of a section of a lookup, in any order.
extern "C" __global__ void __launch_bounds__(LIST_THREADS) list_absent(
    const Table* tables, const Section* of, const u32* numbers, const u32* counts, u32* num_listed, AbsentId* listed) {
  begin();
  const Section section = *of;
  const Table& candidates = tables[tables[section.table].candidates];
  for (u32 k = blockIdx.x * LIST_THREADS + threadIdx.x; k < (section.count + WARP - 1) / WARP * WARP;
      k += gridDim.x * LIST_THREADS) {
    const u32 place = section.first + k, number = k < section.count ? numbers[place] : NO_RECORD;
    const bool is_one = is_candidate(section, number);
    const u32 to = take(num_listed, is_one);
    if (!is_one) continue;
    const Candidate* candidate = candidate_at(candidates, number - section.first_candidate);
    listed[to] = {candidate->key, place, counts ? counts[place] : 1, candidate->sights, 0};
  }
}

// Halves the sights of all candidates, rounded down, if the tickets were valid.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) halve_sights(
    const __grid_constant__ Table candidates, const Resolved* resolved) {
  begin();
  if (!resolved->is_due) return;
  const u32 numbers = num_numbers(candidates.index.counters);
  for (u32 i = 1 + blockIdx.x * TABLE_THREADS + threadIdx.x; i < numbers; i += gridDim.x * TABLE_THREADS)
    candidate_at(candidates, i)->sights /= 2;
}

// If more than `max` candidates have sights, chooses the highest number of sights that is forgotten, so that at most `stays` candidates
// keep theirs. Numbers from `top` on are equal.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) choose_forgotten(
    const __grid_constant__ Table candidates, const Resolved* resolved, u32 top, u32 max, u32 stays, Forgetting* forgetting) {
  begin();
  if (!resolved->is_due) return;
  constexpr u32 PER_THREAD = NUM_COUNTS / TABLE_THREADS;
  static_assert(NUM_COUNTS % TABLE_THREADS == 0, "each thread of the last block sums up the same number of counts");
  __shared__ u32 num_by_count[NUM_COUNTS];
  for (u32 c = threadIdx.x; c < NUM_COUNTS; c += TABLE_THREADS) num_by_count[c] = 0;
  __syncthreads();
  const u32 numbers = num_numbers(candidates.index.counters);
  for (u32 i = 1 + blockIdx.x * TABLE_THREADS + threadIdx.x; i < numbers; i += gridDim.x * TABLE_THREADS) {
    const u32 sights = candidate_at(candidates, i)->sights;
    if (sights) atomicAdd(num_by_count + min(sights, top), 1);
  }
  __syncthreads();
  for (u32 c = threadIdx.x; c < NUM_COUNTS; c += TABLE_THREADS)
    if (num_by_count[c]) atomicAdd(forgetting->num_by_count + c, num_by_count[c]);
  if (!is_last_block(&forgetting->blocks_done, gridDim.x)) return;
  __shared__ u32 of_threads[TABLE_THREADS];
  u32 mine[PER_THREAD], sum = 0;
  for (u32 k = 0; k < PER_THREAD; ++k) {
    u32* of_count = forgetting->num_by_count + threadIdx.x * PER_THREAD + k;
    sum += mine[k] = load_shared(of_count);
    *of_count = 0;
  }
  of_threads[threadIdx.x] = sum;
  __syncthreads();
  u32 below = 0, all = 0;
  for (u32 t = 0; t < TABLE_THREADS; ++t) all += of_threads[t], below += t < threadIdx.x ? of_threads[t] : 0;
  if (all <= max) {
    if (threadIdx.x == 0) forgetting->highest = 0;
    return;
  }
  for (u32 k = 0; k < PER_THREAD; ++k, below += mine[k - 1])
    // True for one count of one thread.
    if (below < all - stays && below + mine[k] >= all - stays) forgetting->highest = threadIdx.x * PER_THREAD + k;
}

// Forgets the sights that `choose_forgotten` has chosen.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) forget_lowest(
    const __grid_constant__ Table candidates, const Resolved* resolved, u32 top, const Forgetting* forgetting) {
  begin();
  if (!resolved->is_due || !forgetting->highest) return;
  const u32 numbers = num_numbers(candidates.index.counters), highest = forgetting->highest;
  for (u32 i = 1 + blockIdx.x * TABLE_THREADS + threadIdx.x; i < numbers; i += gridDim.x * TABLE_THREADS) {
    Candidate* candidate = candidate_at(candidates, i);
    if (min(candidate->sights, top) <= highest) candidate->sights = 0;
  }
}

// `Candidate::record` of a candidate that was erased.
constexpr u32 ERASED = ~0u;

// Lists the keys of candidates with sights, and their sights. With `forgotten`, lists the keys of those without, which the host then erases.
extern "C" __global__ void __launch_bounds__(TABLE_THREADS) list_candidates(
    const __grid_constant__ Table candidates, u32 forgotten, u32* num_listed, u64* keys, u32* sights) {
  begin();
  const u32 numbers = num_numbers(candidates.index.counters), end = 1 + (numbers + WARP - 1) / WARP * WARP;
  for (u32 i = 1 + blockIdx.x * TABLE_THREADS + threadIdx.x; i < end; i += gridDim.x * TABLE_THREADS) {
    Candidate* candidate = candidate_at(candidates, i < numbers ? i : 0);
    bool is_one = i < numbers && candidate->record != ERASED && (candidate->sights == 0) == (forgotten != 0);
    // `count_sights` has marked the candidates that lookups refer to.
    if (forgotten && i < numbers && candidate->more) candidate->more = 0, is_one = false;
    const u32 to = take(num_listed, is_one);
    if (!is_one) continue;
    keys[to] = candidate->key;
    if (forgotten) candidate->record = ERASED;
    else sights[to] = candidate->sights;
  }
}
