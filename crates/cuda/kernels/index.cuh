// The index: a hash table from keys to record numbers.
//
// A bucket is a cache line of 64 bytes: five slots (SLOTS), each with a key and its record number, and one word. A key has two
// buckets. The word of the first bucket contains the lock, the stash bit and a filter of 30 bits. The filter says which keys of this
// first bucket may be in their second bucket, so a find reads 1.0 to 1.2 lines. Record number 0 marks an empty slot, as on the host.
// Records are stored elsewhere, dense, and never move. To make room, and to grow the index, only entries of 12 bytes are moved.
//
// A find takes no lock. A thread that inserts or moves a key holds the lock of the key's first bucket, so no other thread inserts or
// moves the same key. A slot is claimed by a compare-and-swap of its record number.
//
// A find that runs beside insertions reads a line in four loads, and a slot may be filled between two of them. Therefore an empty
// slot holds a key that is never looked up in its bucket. Entries are moved in a launch of their own. The finds of that launch hold
// the lock and read a key twice. A key that a find has missed is looked up again under the lock before it is inserted. The record
// number of a new key is written once its warp has taken one. Until then the slot reads CLAIMED.
#pragma once
#include "types.cuh"

constexpr u32 NO_RECORD = 0;
// Record number of a slot that a thread has claimed and not filled yet.
constexpr u32 CLAIMED = 0xffffffffu;
// Bit of a bucket's word: the bucket is locked.
constexpr u32 LOCKED = 1u << 31;
// Bit of a bucket's word: a key that has this first bucket was put into the stash.
constexpr u32 STASHED = 1u << 30;
// Number of filter bits in a bucket's word.
constexpr u32 FILTER_BITS = 30;
// A new key goes to its first bucket if that holds fewer keys than this, otherwise to the emptier one of its two buckets.
constexpr u32 LEAN = 4;

__device__ __forceinline__ u64 hash(const Index& index, u64 key) { return hash(index.secret, key); }

// A bucket in registers.
struct Line {
  u64 keys[SLOTS];
  u32 records[SLOTS];
  u32 word;
};

// Loads a bucket from the L2 cache, where the stores of other blocks are visible.
__device__ __forceinline__ Line load_line(const Bucket* bucket) {
  Pair p[4];
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    const char* at = (const char*)bucket + 16 * i;
    p[i] = load_pair_shared(at);
  }
  Line l;
  l.keys[0] = p[0].low, l.keys[1] = p[0].high, l.keys[2] = p[1].low, l.keys[3] = p[1].high, l.keys[4] = p[2].low;
  l.records[0] = (u32)p[2].high, l.records[1] = (u32)(p[2].high >> 32), l.records[2] = (u32)p[3].low;
  l.records[3] = (u32)(p[3].low >> 32), l.records[4] = (u32)p[3].high, l.word = (u32)(p[3].high >> 32);
  return l;
}

// Returns the slot of a key, or SLOTS if the key is not in the line. The slot's record number may still be CLAIMED.
__device__ __forceinline__ u32 place_of(const Line& line, u64 key) {
  u32 place = SLOTS;
#pragma unroll
  for (u32 i = 0; i < SLOTS; ++i)
    if (line.keys[i] == key && line.records[i] != NO_RECORD) place = i;
  return place;
}

// `range` maps a word to a number below n. The other functions map a hash to its first bucket, to a different second bucket, and to its
// bit in the filter.
__device__ __forceinline__ u32 range(u32 word, u32 n) { return (u32)(((u64)word * n) >> 32); }
__device__ __forceinline__ u32 first_of(u64 h, u32 n) { return range((u32)(h >> 32), n); }
__device__ __forceinline__ u32 second_of(u64 h, u32 n) {
  const u32 first = first_of(h, n), second = range((u32)h, n);
  return second != first ? second : first + 1 == n ? 0 : first + 1;
}
__device__ __forceinline__ u32 filter_bit(u64 h) { return 1u << range((u32)h << 16, FILTER_BITS); }

// Returns the address of the record number of a key in the stash, or null if the key is not there.
__device__ __noinline__ u32* find_stashed(Stash* stash, const u32* stashed, u64 key) {
  const u32 n = min(load_shared(stashed), STASH);
  for (u32 i = 0; i < n; ++i)
    // An entry that is not written yet has record number 0.
    if (load_shared(&stash->keys[i]) == key && load_shared(&stash->records[i]) != NO_RECORD) return &stash->records[i];
  return nullptr;
}

// What a lane reads in one bucket: the record number of its key, or NO_RECORD, and the word of the bucket.
struct Probe {
  u32 record, word;
};

// Looks up the keys of the lanes that are `on`, each in one bucket. Four lanes read a line together, so that the whole line is
// requested at once. The lines of all keys are requested before the first one is examined. All lanes of a warp must call this.
__device__ __forceinline__ Probe probe(const Bucket* buckets, u32 bucket, u64 key, bool on, LaneList& list) {
  constexpr u32 LANES = 4, GROUPS = WARP / LANES;
  const u32 n = list.take(on), group = lane() / LANES, part = lane() % LANES;
  const u32 rank = __popc(__ballot_sync(ALL, on) & lanes_below());
  Pair parts[LANES];
#pragma unroll
  for (u32 round = 0; round < LANES; ++round) {
    if (round * GROUPS >= n) break;
    const u32 at = round * GROUPS + group;
    const u32 b = __shfl_sync(ALL, bucket, list.lanes[min(at, n - 1)]);
    parts[round] = load_pair((const char*)(buckets + b) + 16 * part);
  }
  Probe mine = {NO_RECORD, 0};
#pragma unroll
  for (u32 round = 0; round < LANES; ++round) {
    if (round * GROUPS >= n) break;
    const u64 k = __shfl_sync(ALL, key, list.lanes[min(round * GROUPS + group, n - 1)]);
    const u64 low = parts[round].low, high = parts[round].high;
    // The four parts of a line: keys 0, 1; keys 2, 3; key 4, records 0, 1; records 2, 3, 4, word.
    const u32 lows = __ballot_sync(ALL, part < 3 && low == k) >> (lane() - part);
    const u32 highs = __ballot_sync(ALL, part < 2 && high == k) >> (lane() - part);
    const u32 place = lows & 1 ? 0 : highs & 1 ? 1 : lows & 2 ? 2 : highs & 2 ? 3 : lows & 4 ? 4 : SLOTS;
    const u32 of_part_2 = place == 0 ? (u32)high : (u32)(high >> 32);
    const u32 of_part_3 = place == 2 ? (u32)low : place == 3 ? (u32)(low >> 32) : (u32)high;
    const u32 from_part_2 = __shfl_sync(ALL, of_part_2, lane() - part + 2);
    const u32 record = place < 2 ? from_part_2 : place < SLOTS ? of_part_3 : NO_RECORD;
    const u32 holder = rank % GROUPS * LANES + 3;
    const u32 my_record = __shfl_sync(ALL, record, holder), my_word = __shfl_sync(ALL, (u32)(high >> 32), holder);
    if (on && rank / GROUPS == round) mine = {my_record, my_word};
  }
  if (mine.record == CLAIMED) mine.record = NO_RECORD;
  return mine;
}

// Returns the record number of each lane's key, or NO_RECORD. All lanes of a warp must call this.
__device__ __forceinline__ u32 find(const Index& index, u64 key, u64 h, bool on, LaneList& list) {
  Probe found = probe(index.buckets, first_of(h, index.num_buckets), key, on, list);
  const bool is_further = on && found.record == NO_RECORD && (found.word & filter_bit(h));
  if (__any_sync(ALL, is_further)) {
    const Probe further = probe(index.buckets, second_of(h, index.num_buckets), key, is_further, list);
    if (is_further) {
      found.record = further.record;
      if (found.record == NO_RECORD && (found.word & STASHED)) {
        const u32* at = find_stashed(index.stash, &index.counters->stashed, key);
        if (at) found.record = *at;
      }
    }
  }
  return found.record;
}

// Returns the record number of one key, or NO_RECORD. A single lane may call this.
__device__ __noinline__ u32 find_alone(Index index, u64 key) {
  const u64 h = hash(index, key);
  const Bucket* first = index.buckets + first_of(h, index.num_buckets);
  const Line line = load_line(first);
  u32 place = place_of(line, key);
  if (place < SLOTS) return line.records[place];
  if (!(line.word & filter_bit(h))) return NO_RECORD;
  const Line further = load_line(index.buckets + second_of(h, index.num_buckets));
  place = place_of(further, key);
  if (place < SLOTS) return further.records[place];
  const u32* at = line.word & STASHED ? find_stashed(index.stash, &index.counters->stashed, key) : nullptr;
  return at ? *at : NO_RECORD;
}

// Returns a key that is never looked up in bucket `at`: key 0, or in the two buckets of key 0 the next key that hashes to others.
__device__ __forceinline__ u64 empty_key(const Index& index, u32 at) {
  for (u64 key = 0;; ++key) {
    const u64 h = hash(index, key);
    if (first_of(h, index.num_buckets) != at && second_of(h, index.num_buckets) != at) return key;
  }
}

// ---- insertion

// Returns a mask of the empty slots.
__device__ __forceinline__ u32 free_slots(const Line& line) {
  u32 free = 0;
#pragma unroll
  for (u32 i = 0; i < SLOTS; ++i) free |= (u32)(line.records[i] == NO_RECORD) << i;
  return free;
}

// Claims one of the slots in the mask `free`. Returns SLOTS if other threads have claimed all of them.
__device__ __forceinline__ u32 claim(Bucket* bucket, u32 free) {
  for (; free; free &= free - 1) {
    const u32 place = __ffs(free) - 1;
    if (atomicCAS(&bucket->records[place], NO_RECORD, CLAIMED) == NO_RECORD) return place;
  }
  return SLOTS;
}

// Claims a slot for a key in one of its buckets and writes the key there. Returns the address of the slot's record number, or null if
// both buckets are full. `in_first`: mask of the empty slots of the first bucket. `word`: gets the filter bit of the key if the key
// goes to its second bucket; the caller stores it in the first bucket.
__device__ __forceinline__ u32* put(Bucket* first, Bucket* second, u64 h, u64 key, u32 in_first, u32& word) {
  Bucket* bucket = first;
  u32 place = SLOTS;
  if (SLOTS - __popc(in_first) < LEAN) place = claim(first, in_first);
  if (place == SLOTS) {
    const u32 in_second = free_slots(load_line(second));
    const bool prefers_second = __popc(in_second) > __popc(in_first);
    place = claim(bucket = prefers_second ? second : first, prefers_second ? in_second : in_first);
    if (place == SLOTS) place = claim(bucket = prefers_second ? first : second, prefers_second ? in_first : in_second);
    if (place == SLOTS) return nullptr;
  }
  store_shared(&bucket->keys[place], key);
  if (bucket == second) word |= filter_bit(h);
  return &bucket->records[place];
}

// The slot of a key that is in the index, or that the caller has claimed.
struct Claim {
  // Address of the record number; null if there is no room for the key.
  u32* record;
  // Whether the key is new. The caller must then write the record number, for which other threads wait.
  bool is_mine;
};

// Inserts a key that the caller's find has missed, unless another thread has inserted it since. No entry may be moved in the same
// launch.
__device__ __forceinline__ Claim claim_key(const Index& index, u64 key, u64 h) {
  Bucket* first = index.buckets + first_of(h, index.num_buckets);
  Bucket* second = index.buckets + second_of(h, index.num_buckets);
  for (;;) {
    u32 word = acquire_or(&first->word, LOCKED);
    if (word & LOCKED) continue;
    const Line line = load_line(first);
    Claim claim = {nullptr, false};
    u32 place = place_of(line, key);
    if (place < SLOTS) claim.record = &first->records[place];
    if (!claim.record && (word & filter_bit(h))) {
      place = place_of(load_line(second), key);
      if (place < SLOTS) claim.record = &second->records[place];
      if (!claim.record && (word & STASHED)) claim.record = find_stashed(index.stash, &index.counters->stashed, key);
    }
    if (!claim.record) {
      claim.record = put(first, second, h, key, free_slots(line), word);
      claim.is_mine = claim.record != nullptr;
    }
    release(&first->word, word & ~LOCKED);
    return claim;
  }
}

// ---- insertion where both buckets are full

// Returns the address of a key's record number, or null if the key is not in the line. For launches that move entries: the line was
// read in four loads, during which the key may have been moved, so the key is read again.
__device__ __forceinline__ u32* find_settled(Bucket* bucket, const Line& line, u64 key) {
  const u32 place = place_of(line, key);
  return place < SLOTS && load_shared(&bucket->keys[place]) == key ? &bucket->records[place] : nullptr;
}

// Moves the entry of a slot to its other bucket, if that has room. Returns whether it was moved; the slot is then claimed for the
// caller. `held`: the bucket whose lock the caller holds. `word`: the word of that bucket.
__device__ __noinline__ bool move_away(Index index, Bucket* from, u32 place, Bucket* held, u32& word) {
  const u64 key = load_shared(&from->keys[place]);
  const u32 record = load_shared(&from->records[place]);
  if (record == NO_RECORD || record == CLAIMED) return false;
  const u64 h = hash(index, key);
  Bucket* first = index.buckets + first_of(h, index.num_buckets);
  Bucket* second = index.buckets + second_of(h, index.num_buckets);
  if (from != first && from != second) return false;  // the slot changed between the two loads
  Bucket* to = from == first ? second : first;
  if (!free_slots(load_line(to))) return false;
  u32 of_first = word;
  if (first != held) {
    of_first = acquire_or(&first->word, LOCKED);
    if (of_first & LOCKED) return false;
  }
  bool moved = false;
  if (load_shared(&from->keys[place]) == key && load_shared(&from->records[place]) == record) {
    const u32 room = claim(to, free_slots(load_line(to)));
    if (room < SLOTS) {
      store_shared(&to->keys[room], key);
      release(&to->records[room], record);
      if (to == second) of_first |= filter_bit(h);
      if (first == held) word = of_first;
      // The next holder of the lock must not find the key in this slot.
      store_shared(&from->keys[place], empty_key(index, (u32)(from - index.buckets)));
      release(&from->records[place], CLAIMED);
      moved = true;
    }
  }
  if (first != held) release(&first->word, of_first & ~LOCKED);
  return moved;
}

// Frees a slot of the bucket and returns it, claimed, or returns SLOTS. Tries one move; then two: an entry leaves the other bucket of
// one of this bucket's entries, and that entry moves there.
__device__ __noinline__ u32 make_room(Index index, Bucket* bucket, Bucket* held, u32& word) {
  for (u32 place = 0; place < SLOTS; ++place)
    if (move_away(index, bucket, place, held, word)) return place;
  for (u32 place = 0; place < SLOTS; ++place) {
    const u64 h = hash(index, load_shared(&bucket->keys[place]));
    Bucket* first = index.buckets + first_of(h, index.num_buckets);
    Bucket* other = first == bucket ? index.buckets + second_of(h, index.num_buckets) : first;
    if (other == held || other == bucket) continue;
    for (u32 further = 0; further < SLOTS; ++further)
      if (move_away(index, other, further, held, word)) {
        release(&other->records[further], NO_RECORD);
        if (move_away(index, bucket, place, held, word)) return place;
      }
  }
  return SLOTS;
}

// Number of lanes that look for an entry of a key's two buckets which can be moved.
constexpr u32 MOVERS = 2 * SLOTS;

// A group of N neighbouring lanes of a warp.
template <u32 N> struct LaneGroup {
  static constexpr u32 PER_WARP = WARP / N;
  // Number of the group in its warp, and of the lane in the group. The last lanes of a warp may be in no group.
  u32 number = lane() / N, at = lane() % N;
  u32 first = number * N, mask = (u32)((1ull << N) - 1) << first;
  __device__ __forceinline__ bool leads() const { return at == 0; }
  // Returns which lanes have a condition, the group's first lane in bit 0.
  __device__ __forceinline__ u32 ballot(bool condition) const { return __ballot_sync(mask, condition) >> first; }
  // Returns the value that the first lane has.
  template <class T> __device__ __forceinline__ T from_first(T value) const { return __shfl_sync(mask, value, first); }
};

// Looks for one of the ten entries of a key's two full buckets whose other bucket has room. Ten lanes examine one entry each. Returns
// bucket << 8 | slot, with bucket 0 or 1, or ALL if there is none. All lanes of the group must call this. The result is a hint: the entry or
// the room may be gone when the entry is moved.
template <u32 N>
__device__ __forceinline__ u32 movable(const Index& index, const LaneGroup<N>& group, const Bucket* first, const Bucket* second) {
  static_assert(N >= MOVERS, "each entry has a lane");
  bool has_room = false;
  const u32 side = group.at / SLOTS, place = group.at % SLOTS;
  if (side < 2) {
    const Bucket* bucket = side ? second : first;
    const u64 h = hash(index, load_shared(&bucket->keys[place]));
    const Bucket* one = index.buckets + first_of(h, index.num_buckets);
    const Bucket* other = one == bucket ? index.buckets + second_of(h, index.num_buckets) : one;
    has_room = free_slots(load_line(other)) != 0;
  }
  const u32 all = group.ballot(has_room);
  return all ? (__ffs(all) - 1) / SLOTS << 8 | (__ffs(all) - 1) % SLOTS : ALL;
}

// As `claim_key`, in a launch of its own. If both buckets are full, moves other entries away, first the one that `movable` has found
// (`hint`). If that gives no slot, puts the key into the stash.
__device__ __noinline__ Claim settle(Index index, u64 key, u32 hint) {
  const u64 h = hash(index, key);
  Bucket* first = index.buckets + first_of(h, index.num_buckets);
  Bucket* second = index.buckets + second_of(h, index.num_buckets);
  for (;;) {
    u32 word = acquire_or(&first->word, LOCKED);
    if (word & LOCKED) {
      __nanosleep(32);
      continue;
    }
    const Line line = load_line(first);
    Claim claim = {find_settled(first, line, key), false};
    if (!claim.record && (word & filter_bit(h))) {
      claim.record = find_settled(second, load_line(second), key);
      if (!claim.record && (word & STASHED)) claim.record = find_stashed(index.stash, &index.counters->stashed, key);
    }
    if (!claim.record) {
      claim.record = put(first, second, h, key, free_slots(line), word);
      for (u32 side = hint == ALL ? 0 : hint >> 8, tries = 0; tries < 3 && !claim.record; side = tries++ % 2) {
        Bucket* bucket = side ? second : first;
        u32 place = SLOTS;
        if (tries > 0 || hint == ALL) place = make_room(index, bucket, first, word);
        else if (move_away(index, bucket, hint & 0xff, first, word)) place = hint & 0xff;
        if (place == SLOTS) continue;
        store_shared(&bucket->keys[place], key);
        if (side) word |= filter_bit(h);
        claim.record = &bucket->records[place];
      }
      if (!claim.record) {
        const u32 at = atomicAdd(&index.counters->stashed, 1);
        if (at < STASH) {
          store_shared(&index.stash->keys[at], key);
          release(&index.stash->records[at], CLAIMED);
          word |= STASHED | filter_bit(h);
          claim.record = &index.stash->records[at];
        }
      }
      claim.is_mine = claim.record != nullptr;
    }
    release(&first->word, word & ~LOCKED);
    return claim;
  }
}

// Erases a key. Returns the record number that it had, 0 if it was not there. Of equal keys, one gets the number. Only erasures may run in
// the launch.
__device__ __forceinline__ u32 erase_key(const Index& index, u64 key) {
  const u64 h = hash(index, key);
  Bucket* first = index.buckets + first_of(h, index.num_buckets);
  Bucket* second = index.buckets + second_of(h, index.num_buckets);
  u32 record = NO_RECORD;
  for (bool is_done = false; !is_done;) {
    const u32 word = acquire_or(&first->word, LOCKED);
    if (word & LOCKED) {
      __nanosleep(32);
      continue;
    }
    for (u32 side = 0; side < 2 && record == NO_RECORD; ++side) {
      Bucket* bucket = side ? second : first;
      const u32 place = place_of(load_line(bucket), key);
      if (place == SLOTS) continue;
      record = load_shared(&bucket->records[place]);
      store_shared(&bucket->keys[place], empty_key(index, (u32)(bucket - index.buckets)));
      __threadfence();
      store_shared(&bucket->records[place], NO_RECORD);
    }
    if (record == NO_RECORD && (word & STASHED)) {
      if (u32* at = find_stashed(index.stash, &index.counters->stashed, key)) record = *at, store_shared(at, NO_RECORD);
    }
    release(&first->word, word & ~LOCKED);
    is_done = true;
  }
  return record;
}

// Erases keys from buckets. Each lane that is `on` has a key, and a bucket that may contain it. Returns whether the bucket contained it. Four lanes
// read a line together, as in `probe`. No other thread erases these keys, and only erasures may run in the launch. All lanes of a warp must
// call this.
__device__ __forceinline__ bool erase_from(const Index& index, u32 bucket, u64 key, bool on) {
  constexpr u32 LANES = 4, GROUPS = WARP / LANES;
  const u32 group = lane() / LANES, part = lane() % LANES, wanted = __ballot_sync(ALL, on);
  Bucket* buckets[LANES];
  Pair parts[LANES];
#pragma unroll
  for (u32 round = 0; round < LANES; ++round) {
    const u32 from = round * GROUPS + group;
    buckets[round] = index.buckets + __shfl_sync(ALL, bucket, from);
    if (wanted >> from & 1) parts[round] = load_pair_shared((const char*)buckets[round] + 16 * part);
  }
  bool is_erased = false;
#pragma unroll
  for (u32 round = 0; round < LANES; ++round) {
    const u32 from = round * GROUPS + group;
    const u64 k = __shfl_sync(ALL, key, from);
    // The parts of a line are as in `probe`. An empty slot has another key.
    const bool is_on = wanted >> from & 1, is_low = is_on && part < 3 && parts[round].low == k,
               is_high = is_on && part < 2 && parts[round].high == k;
    if (is_low || is_high) {
      const u32 place = 2 * part + is_high;
      store_shared(&buckets[round]->keys[place], empty_key(index, (u32)(buckets[round] - index.buckets)));
      store_shared(&buckets[round]->records[place], NO_RECORD);
    }
    const u32 hits = __ballot_sync(ALL, is_low || is_high);
    if (lane() / GROUPS == round) is_erased = hits >> lane() % GROUPS * LANES & (1u << LANES) - 1;
  }
  return is_erased;
}

// Erases the keys of the lanes that are `on`. They are in the index, and no other thread erases them. Only erasures may run in the launch. All
// lanes of a warp must call this.
__device__ __forceinline__ void erase_distinct(const Index& index, u64 key, bool on) {
  const u64 h = hash(index, key);
  const bool is_in_first = erase_from(index, first_of(h, index.num_buckets), key, on), is_left = on && !is_in_first;
  if (!__any_sync(ALL, is_left)) return;
  const bool is_in_second = erase_from(index, second_of(h, index.num_buckets), key, is_left);
  if (!is_left || is_in_second) return;
  if (u32* at = find_stashed(index.stash, &index.counters->stashed, key)) store_shared(at, NO_RECORD);
}
