// From a key to the number of its record.
//
// A bucket is a 64-byte line of five keys, their record numbers and one word. A key has two buckets; the word of the first
// tells by 30 bits which of its keys may be in their second one, so that a find reads 1.0 to 1.2 lines. Record number 0 is
// "empty", as on the host. Records lie elsewhere, dense, and never move: room is made and the index grows by moving
// entries of 12 bytes.
//
// Finds take no lock. Who inserts a key, or moves one, holds the lock of that key's first bucket, so that nobody else
// inserts or moves the same key; places are claimed by compare-and-swap of the record number. A find beside insertions reads a
// line in four loads, between which a place may be filled: so an empty place holds a key that nobody looks for there, and
// entries are moved in a launch of their own, whose finds are under the lock and read a key twice. What a find misses is looked
// for again under the lock. The record number of a new key is written once its warp has one; until then it reads CLAIMED.
#pragma once
#include "types.cuh"

constexpr u32 PLACES = 5;
constexpr u32 NO_RECORD = 0;
// A place that somebody is about to fill.
constexpr u32 CLAIMED = 0xffffffffu;
constexpr u32 LOCKED = 1u << 31;
// A key of this first bucket is in the stash.
constexpr u32 STASHED = 1u << 30;
constexpr u32 FILTER_BITS = 30;
// Keys in the first bucket from which on the emptier one is taken.
constexpr u32 LEAN = 4;

struct alignas(64) Bucket {
  u64 keys[PLACES];
  u32 records[PLACES];
  u32 word;
};

// Keys for which no room could be made: hardly ever one, unless keys were made for that.
constexpr u32 STASH = 1024;
struct Stash {
  u64 keys[STASH];
  u32 records[STASH];
};

// Counts of a table, each on a line of its own.
struct Counters {
  // Record numbers given out since the table was told which are released.
  u32 taken, pad0[31];
  u32 stashed, pad1[31];
  // Ids whose gradient goes nowhere, since their key has no record; distinct keys of calls that were to learn.
  u32 dropped, pad2[31];
  u32 distinct, pad3[31];
};

struct Index {
  Bucket* buckets;
  Stash* stash;
  Counters* counters;
  // Of the process: keys made to share buckets under a public hash would fill them and the stash.
  u64 secret;
  u32 num_buckets, pad;
};
static_assert(sizeof(Index) == 40, "as crates/cuda/src/layout.rs has it");

__device__ __forceinline__ u64 hash(const Index& index, u64 key) { return hash(index.secret, key); }

struct Line {
  u64 keys[PLACES];
  u32 records[PLACES];
  u32 word;
};

// A line as it is now, whoever wrote it.
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

// The place of a key that is in the line, be its record number known or not yet; else PLACES.
__device__ __forceinline__ u32 place_of(const Line& line, u64 key) {
  u32 place = PLACES;
#pragma unroll
  for (u32 i = 0; i < PLACES; ++i)
    if (line.keys[i] == key && line.records[i] != NO_RECORD) place = i;
  return place;
}

__device__ __forceinline__ u32 range(u32 word, u32 n) { return (u32)(((u64)word * n) >> 32); }
__device__ __forceinline__ u32 first_of(u64 h, u32 n) { return range((u32)(h >> 32), n); }
__device__ __forceinline__ u32 second_of(u64 h, u32 n) {
  const u32 first = first_of(h, n), second = range((u32)h, n);
  return second != first ? second : first + 1 == n ? 0 : first + 1;
}
__device__ __forceinline__ u32 filter_bit(u64 h) { return 1u << range((u32)h << 16, FILTER_BITS); }

// Where the record number of a key in the stash is; null if it is not there.
__device__ __noinline__ u32* find_stashed(Stash* stash, const u32* stashed, u64 key) {
  const u32 n = min(load_shared(stashed), STASH);
  for (u32 i = 0; i < n; ++i)
    // An entry that is not written yet has record number 0.
    if (load_shared(&stash->keys[i]) == key && load_shared(&stash->records[i]) != NO_RECORD) return &stash->records[i];
  return nullptr;
}

struct Probe {
  u32 record, word;
};

// What the lanes that are `on` find of their keys, each in its bucket. Four lanes read a line, so that all of it moves at
// once; the lines of all keys are asked for before the first is looked at.
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
    // Parts of a line: keys 0, 1; keys 2, 3; key 4, records 0, 1; records 2, 3, 4, word.
    const u32 lows = __ballot_sync(ALL, part < 3 && low == k) >> (lane() - part);
    const u32 highs = __ballot_sync(ALL, part < 2 && high == k) >> (lane() - part);
    const u32 place = lows & 1 ? 0 : highs & 1 ? 1 : lows & 2 ? 2 : highs & 2 ? 3 : lows & 4 ? 4 : PLACES;
    const u32 of_part_2 = place == 0 ? (u32)high : (u32)(high >> 32);
    const u32 of_part_3 = place == 2 ? (u32)low : place == 3 ? (u32)(low >> 32) : (u32)high;
    const u32 from_part_2 = __shfl_sync(ALL, of_part_2, lane() - part + 2);
    const u32 record = place < 2 ? from_part_2 : place < PLACES ? of_part_3 : NO_RECORD;
    const u32 holder = rank % GROUPS * LANES + 3;
    const u32 my_record = __shfl_sync(ALL, record, holder), my_word = __shfl_sync(ALL, (u32)(high >> 32), holder);
    if (on && rank / GROUPS == round) mine = {my_record, my_word};
  }
  if (mine.record == CLAIMED) mine.record = NO_RECORD;
  return mine;
}

// Record numbers of the lanes' keys. The whole warp comes here.
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

// The record number of one key, for a lane alone.
__device__ __noinline__ u32 find_alone(Index index, u64 key) {
  const u64 h = hash(index, key);
  const Bucket* first = index.buckets + first_of(h, index.num_buckets);
  const Line line = load_line(first);
  u32 place = place_of(line, key);
  if (place < PLACES) return line.records[place];
  if (!(line.word & filter_bit(h))) return NO_RECORD;
  const Line further = load_line(index.buckets + second_of(h, index.num_buckets));
  place = place_of(further, key);
  if (place < PLACES) return further.records[place];
  const u32* at = line.word & STASHED ? find_stashed(index.stash, &index.counters->stashed, key) : nullptr;
  return at ? *at : NO_RECORD;
}

// A key that nobody looks for in bucket `at`: 0, but in the two buckets of 0 the next that hashes elsewhere.
__device__ __forceinline__ u64 nobodys_key(const Index& index, u32 at) {
  for (u64 key = 0;; ++key) {
    const u64 h = hash(index, key);
    if (first_of(h, index.num_buckets) != at && second_of(h, index.num_buckets) != at) return key;
  }
}

// ---- insertion

__device__ __forceinline__ u32 free_places(const Line& line) {
  u32 free = 0;
#pragma unroll
  for (u32 i = 0; i < PLACES; ++i) free |= (u32)(line.records[i] == NO_RECORD) << i;
  return free;
}

// A place of the bucket for the caller alone, or PLACES.
__device__ __forceinline__ u32 claim(Bucket* bucket, u32 free) {
  for (; free; free &= free - 1) {
    const u32 place = __ffs(free) - 1;
    if (atomicCAS(&bucket->records[place], NO_RECORD, CLAIMED) == NO_RECORD) return place;
  }
  return PLACES;
}

// A place for a key in one of its buckets, with the key in it; null if both are full. `word`: of the first one, locked.
__device__ __forceinline__ u32* put(Bucket* first, Bucket* second, u64 h, u64 key, u32 in_first, u32& word) {
  Bucket* bucket = first;
  u32 place = PLACES;
  if (PLACES - __popc(in_first) < LEAN) place = claim(first, in_first);
  if (place == PLACES) {
    const u32 in_second = free_places(load_line(second));
    const bool prefers_second = __popc(in_second) > __popc(in_first);
    place = claim(bucket = prefers_second ? second : first, prefers_second ? in_second : in_first);
    if (place == PLACES) place = claim(bucket = prefers_second ? first : second, prefers_second ? in_first : in_second);
    if (place == PLACES) return nullptr;
  }
  store_shared(&bucket->keys[place], key);
  if (bucket == second) word |= filter_bit(h);
  return &bucket->records[place];
}

// Where the number of a key's record is, or will be.
struct Claim {
  // Null: both buckets are full.
  u32* record;
  // The caller is to write it, since the key is new; others wait for it.
  bool is_mine;
};

// Puts in a key that the caller's find missed, unless another thread has done so since. In a launch without moves.
__device__ __forceinline__ Claim claim_key(const Index& index, u64 key, u64 h) {
  Bucket* first = index.buckets + first_of(h, index.num_buckets);
  Bucket* second = index.buckets + second_of(h, index.num_buckets);
  for (;;) {
    u32 word = acquire_or(&first->word, LOCKED);
    if (word & LOCKED) continue;
    const Line line = load_line(first);
    Claim claim = {nullptr, false};
    u32 place = place_of(line, key);
    if (place < PLACES) claim.record = &first->records[place];
    if (!claim.record && (word & filter_bit(h))) {
      place = place_of(load_line(second), key);
      if (place < PLACES) claim.record = &second->records[place];
      if (!claim.record && (word & STASHED)) claim.record = find_stashed(index.stash, &index.counters->stashed, key);
    }
    if (!claim.record) {
      claim.record = put(first, second, h, key, free_places(line), word);
      claim.is_mine = claim.record != nullptr;
    }
    release(&first->word, word & ~LOCKED);
    return claim;
  }
}

// ---- where both buckets are full

// The place of a key that may be moved away while it is looked for: its line is read in four loads, so the key is read again.
__device__ __forceinline__ u32* find_settled(Bucket* bucket, const Line& line, u64 key) {
  const u32 place = place_of(line, key);
  return place < PLACES && load_shared(&bucket->keys[place]) == key ? &bucket->records[place] : nullptr;
}

// Moves the entry at a place to its other bucket, if that has room; its place is then the caller's, claimed. `held` is the
// bucket whose lock the caller has, and `word` that bucket's word.
__device__ __noinline__ bool move_away(Index index, Bucket* from, u32 place, Bucket* held, u32& word) {
  const u64 key = load_shared(&from->keys[place]);
  const u32 record = load_shared(&from->records[place]);
  if (record == NO_RECORD || record == CLAIMED) return false;
  const u64 h = hash(index, key);
  Bucket* first = index.buckets + first_of(h, index.num_buckets);
  Bucket* second = index.buckets + second_of(h, index.num_buckets);
  if (from != first && from != second) return false;  // it changed between the two loads
  Bucket* to = from == first ? second : first;
  if (!free_places(load_line(to))) return false;
  u32 of_first = word;
  if (first != held) {
    of_first = acquire_or(&first->word, LOCKED);
    if (of_first & LOCKED) return false;
  }
  bool moved = false;
  if (load_shared(&from->keys[place]) == key && load_shared(&from->records[place]) == record) {
    const u32 room = claim(to, free_places(load_line(to)));
    if (room < PLACES) {
      store_shared(&to->keys[room], key);
      release(&to->records[room], record);
      if (to == second) of_first |= filter_bit(h);
      if (first == held) word = of_first;
      // Nobody who gets the lock next takes the place for the key's.
      store_shared(&from->keys[place], nobodys_key(index, (u32)(from - index.buckets)));
      release(&from->records[place], CLAIMED);
      moved = true;
    }
  }
  if (first != held) release(&first->word, of_first & ~LOCKED);
  return moved;
}

// Frees a place of the bucket by one move, or by two: an entry of the other bucket of one of its entries goes first.
__device__ __noinline__ u32 make_room(Index index, Bucket* bucket, Bucket* held, u32& word) {
  for (u32 place = 0; place < PLACES; ++place)
    if (move_away(index, bucket, place, held, word)) return place;
  for (u32 place = 0; place < PLACES; ++place) {
    const u64 h = hash(index, load_shared(&bucket->keys[place]));
    Bucket* first = index.buckets + first_of(h, index.num_buckets);
    Bucket* other = first == bucket ? index.buckets + second_of(h, index.num_buckets) : first;
    if (other == held || other == bucket) continue;
    for (u32 further = 0; further < PLACES; ++further)
      if (move_away(index, other, further, held, word)) {
        release(&other->records[further], NO_RECORD);
        if (move_away(index, bucket, place, held, word)) return place;
      }
  }
  return PLACES;
}

// Of the ten entries of a key's two full buckets, one that has room in its other bucket, found by ten lanes at once: bucket << 8 |
// place; ALL if there is none. The whole warp comes here; what it finds may be gone by the time that it is moved.
__device__ __forceinline__ u32 movable(const Index& index, const Bucket* first, const Bucket* second) {
  bool has_room = false;
  const u32 side = lane() / PLACES, place = lane() % PLACES;
  if (side < 2) {
    const Bucket* bucket = side ? second : first;
    const u64 h = hash(index, load_shared(&bucket->keys[place]));
    const Bucket* one = index.buckets + first_of(h, index.num_buckets);
    const Bucket* other = one == bucket ? index.buckets + second_of(h, index.num_buckets) : one;
    has_room = free_places(load_line(other)) != 0;
  }
  const u32 all = __ballot_sync(ALL, has_room);
  return all ? (__ffs(all) - 1) / PLACES << 8 | (__ffs(all) - 1) % PLACES : ALL;
}

// As `claim_key`, in a launch of its own: moves others away, first the one that `movable` found, and puts into the stash what still
// finds no place.
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
      claim.record = put(first, second, h, key, free_places(line), word);
      for (u32 side = hint == ALL ? 0 : hint >> 8, tries = 0; tries < 3 && !claim.record; side = tries++ % 2) {
        Bucket* bucket = side ? second : first;
        u32 place = PLACES;
        if (tries > 0 || hint == ALL) place = make_room(index, bucket, first, word);
        else if (move_away(index, bucket, hint & 0xff, first, word)) place = hint & 0xff;
        if (place == PLACES) continue;
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
