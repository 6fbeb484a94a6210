// Stable radix sort of ids by their records, from the lowest digit up ("onesweep": A. Adinets and D. Merrill, 2022). Each section is
// sorted by itself. The first launch counts the histograms of all digits. Then each pass is one launch that sorts by one digit: a block
// learns by decoupled look-back where the ids of its tile go. A block publishes its aggregate before it ranks its ids, so that other
// blocks need not wait for the ranking. The sixteen tiles of a group (SORT_GROUP) also publish a common aggregate and inclusive prefix.
#include "sort.cuh"

typedef unsigned short u16;
constexpr u32 WARPS = SORT_THREADS / WARP;
// Maximum number of digit values of all passes together: three digits of 11 bits.
constexpr u32 MAX_DIGITS = 3 << 11;
// What a tile or a group has published so far. AGGREGATE: its own number of ids by digit. PREFIX: its inclusive prefix, the number of
// ids by digit in all groups of the section up to and including this one. Tiles publish no prefix.
enum TileStatus : u32 { INVALID, AGGREGATE, PREFIX };

// Returns the number of the first row in `Sort::published` that belongs to groups of a section. The array has the rows of all tiles first,
// then two rows for each group: its aggregate and its inclusive prefix. A group has tiles of one section only.
__device__ __forceinline__ u32 first_group_row(const Sort& sort, u32 section, const Section& of) {
  return sort.tiles + 2 * (of.first_tile / SORT_GROUP + section);
}

// Loads a status with acquire semantics.
__device__ __forceinline__ u32 load_flag(const u32* at) {
  u32 x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}

// A cache policy that keeps lines in the L2 cache, and a store with it. Ids are stored one by one until a line is full. Because rows
// stream through the L2 cache at the same time, a line would otherwise be written to memory half full, and read again for the rest.
__device__ __forceinline__ u64 kept_policy() {
  u64 policy = 0;
#if __CUDA_ARCH__ >= 800
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}
__device__ __forceinline__ void store_kept(Sorted* at, const Sorted& x, u64 policy) {
#if __CUDA_ARCH__ >= 800
  asm volatile("st.global.L2::cache_hint.v2.b32 [%0], {%1, %2}, %3;" ::"l"(at), "r"(x.record), "r"(x.value), "l"(policy)
      : "memory");
#else
  *at = x;
#endif
}

// Increments the count of each lane's digit, for lanes that have an id. All lanes of a warp must call this. The ids of a table often
// have the same high digit, so all lanes with the digit of lane 0 are added at once.
__device__ __forceinline__ void count_digit(u32* counts, u32 digit, bool is_id) {
  const u32 of_first = __shfl_sync(ALL, digit, 0);
  const u32 same = __ballot_sync(ALL, is_id && digit == of_first);
  if (lane() == 0 ? same != 0 : is_id && digit != of_first) atomicAdd(&counts[digit], lane() == 0 ? __popc(same) : 1);
}

// Adds the histograms of all digits of a tile to `sort.counts`, which are zeros before the launch. `tile`: ids of a tile.
extern "C" __global__ void __launch_bounds__(SORT_THREADS) count_digits(
    const u32* __restrict__ records, const __grid_constant__ Sort sort, u32 tile) {
  begin();
  __shared__ u32 counts[MAX_DIGITS];
  const u32 digits = 1u << sort.bits, all = sort.passes * digits;
  u32 number;
  const Section section =
      section_at(sort.sections, sort.num_sections, blockIdx.x, number, [](const Section& s) { return s.first_tile; });
  for (u32 i = threadIdx.x; i < all; i += SORT_THREADS) counts[i] = 0;
  __syncthreads();
  // The host may not know how many ids there are, so the last tiles of a section may have none.
  const u32 first = (blockIdx.x - section.first_tile) * tile, size = first < section.count ? min(tile, section.count - first) : 0;
  constexpr u32 AHEAD = 4;
  for (u32 start = 0; start < size; start += AHEAD * SORT_THREADS) {
    u32 record[AHEAD];
#pragma unroll
    for (u32 k = 0; k < AHEAD; ++k) {
      const u32 i = start + k * SORT_THREADS + threadIdx.x;
      record[k] = i < size ? records[section.first + first + i] : 0;
    }
#pragma unroll
    for (u32 k = 0; k < AHEAD; ++k) {
      const bool is_id = start + k * SORT_THREADS + threadIdx.x < size;
      for (u32 pass = 0; pass < sort.passes; ++pass)
        count_digit(counts + pass * digits, record[k] >> pass * sort.bits & (digits - 1), is_id);
    }
  }
  __syncthreads();
  for (u32 i = threadIdx.x; i < all; i += SORT_THREADS)
    if (const u32 count = counts[i]) atomicAdd(&sort.counts[number * all + i], count);
}

// The counts or positions of the N digits that belong to a thread.
template <u32 N> struct Digits {
  static_assert(N == 1 || N == 2 || N == 4, "moved at once from memory");
  u32 of[N];

  // Loads from the L2 cache, where the stores of other blocks are visible.
  __device__ __forceinline__ void load(const u32* at) {
    if constexpr (N == 1) {
      of[0] = __ldcg(at);
    } else if constexpr (N == 2) {
      const uint2 x = __ldcg((const uint2*)at);
      of[0] = x.x, of[1] = x.y;
    } else {
      const uint4 x = __ldcg((const uint4*)at);
      of[0] = x.x, of[1] = x.y, of[2] = x.z, of[3] = x.w;
    }
  }
  __device__ __forceinline__ void load_shared(const u32* at) {
    if constexpr (N == 1) {
      of[0] = at[0];
      return;
    }
#pragma unroll
    for (u32 k = 0; k + 1 < N; k += 2) {
      const uint2 x = *(const uint2*)(at + k);
      of[k] = x.x, of[k + 1] = x.y;
    }
  }
  __device__ __forceinline__ void store(u32* at) const {
    if constexpr (N == 1) {
      at[0] = of[0];
      return;
    }
#pragma unroll
    for (u32 k = 0; k + 1 < N; k += 2) *(uint2*)(at + k) = make_uint2(of[k], of[k + 1]);
  }
  __device__ __forceinline__ void add(const Digits& other) {
#pragma unroll
    for (u32 k = 0; k < N; ++k) of[k] += other.of[k];
  }
  __device__ __forceinline__ void subtract(const Digits& other) {
#pragma unroll
    for (u32 k = 0; k < N; ++k) of[k] -= other.of[k];
  }
  __device__ __forceinline__ u32 sum() const {
    u32 sum = 0;
#pragma unroll
    for (u32 k = 0; k < N; ++k) sum += of[k];
    return sum;
  }
  // Turns counts into start positions. The first digit starts at `at`.
  __device__ __forceinline__ void start_at(u32 at) {
#pragma unroll
    for (u32 k = 0; k < N; ++k) {
      const u32 count = of[k];
      of[k] = at, at += count;
    }
  }
  // Adds `count` published rows, which are `stride` words apart.
  __device__ __forceinline__ void add_rows(const u32* published, u32 count, u32 stride) {
    constexpr u32 AHEAD = 4;
#pragma unroll 1
    for (u32 start = 0; start < count; start += AHEAD) {
      Digits row[AHEAD] = {};
#pragma unroll
      for (u32 k = 0; k < AHEAD; ++k)
        if (start + k < count) row[k].load(published + (u64)(start + k) * stride);
#pragma unroll
      for (u32 k = 0; k < AHEAD; ++k) add(row[k]);
    }
  }
};

// Returns a digit of a record number, which begins at bit `shift`. It is computed anew at each use, because keeping it would take one
// register for each id.
template <u32 BITS> __device__ __forceinline__ u32 digit_of(u32 record, u32 shift) {
  u32 high;
  asm volatile("shr.u32 %0, %1, %2;" : "=r"(high) : "r"(record), "r"(shift));
  return high & ((1u << BITS) - 1);
}

// Returns the mask of the lanes that have the same digit as this lane.
template <u32 BITS> __device__ __forceinline__ u32 peers_of(u32 digit) {
  u32 peers = ALL;
#pragma unroll
  for (u32 bit = 0; bit < BITS; ++bit) {
    u32 same;
    asm volatile(
        "{ .reg .pred p; and.b32 %0, %1, %2; setp.ne.u32 p, %0, 0; vote.sync.ballot.b32 %0, p, 0xffffffff; @!p not.b32 %0, %0; }"
        : "=r"(same)
        : "r"(digit), "r"(1u << bit));
    peers &= same;
  }
  return peers;
}

// Returns the number of passes that a section needs. The last passes are skipped if all ids have 0 as their digit.
__device__ __forceinline__ u32 passes_of(const Sort& sort, u32 section, u32 digits, u32 ids) {
  u32 needed = sort.passes;
  while (needed > 1 && sort.counts[((u64)section * sort.passes + needed - 1) * digits] == ids) --needed;
  return needed;
}

// Returns the rank of an id among the ids of its warp that have the same digit. `of_warp`: by digit, the number of the warp's ids that are
// ranked so far. The ids of this call are added.
template <u32 BITS> __device__ __forceinline__ u32 rank_in_warp(u16* of_warp, u32 digit) {
  const u32 peers = peers_of<BITS>(digit);
  const u32 ranked = of_warp[digit];
  __syncwarp();
  if ((peers & lanes_below()) == 0) of_warp[digit] = ranked + __popc(peers);
  __syncwarp();
  return ranked + __popc(peers & lanes_below());
}

// Turns the counts of warps by digit into the positions in the tile where the warps' ids start. `own`: where the thread's digits start.
// With several digits for a thread, a word holds two counts.
template <u32 OWN> __device__ __forceinline__ void start_warps(u16* counts, const Digits<OWN>& own) {
  constexpr u32 DIGITS = OWN * SORT_THREADS;
  if constexpr (OWN == 1) {
    u32 next = own.of[0];
#pragma unroll
    for (u32 w = 0; w < WARPS; ++w) {
      u16& at = counts[w * DIGITS + threadIdx.x];
      const u32 has = at;
      at = next, next += has;
    }
  } else {
    u32 next[OWN / 2];
#pragma unroll
    for (u32 k = 0; k < OWN / 2; ++k) next[k] = own.of[2 * k] | own.of[2 * k + 1] << 16;
#pragma unroll
    for (u32 w = 0; w < WARPS; ++w) {
      u32* at = (u32*)(counts + w * DIGITS) + OWN / 2 * threadIdx.x;
#pragma unroll
      for (u32 k = 0; k < OWN / 2; ++k) {
        const u32 has = at[k];
        at[k] = next[k], next[k] += has;
      }
    }
  }
}

// Waits until the first `count` tiles of a group have published their aggregates. A warp calls this.
__device__ __forceinline__ void wait_for_tiles(const u32* flags, u32 count) {
  bool is_known;
  do is_known = lane() >= count || load_flag(&flags[lane()]) != INVALID;
  while (!__all_sync(ALL, is_known));
}

// Returns the nearest group before `group` that has published its inclusive prefix, as soon as all groups after it have published their
// aggregates. `flags`: two for each group of the section. A warp calls this.
__device__ __forceinline__ u32 nearest_prefix(const u32* flags, u32 group) {
  u32 prefixes;
  bool is_known;
  do {
    const u32 flag = lane() < group ? load_flag(&flags[2 * (group - 1 - lane())]) : INVALID;
    prefixes = __ballot_sync(ALL, flag == PREFIX);
    const u32 needed = prefixes ? __ffs(prefixes) : 0;
    is_known = needed && __all_sync(ALL, lane() >= needed || flag != INVALID);
  } while (!is_known);
  return group - __ffs(prefixes);
}

// The counts by digit that tiles and groups publish in a pass. A row has the counts of one tile or group; a thread reads and writes the
// OWN digits that belong to it.
template <u32 DIGITS> struct Published {
  static constexpr u32 OWN = DIGITS / SORT_THREADS;
  // The thread's digits of row 0. Rows are DIGITS words apart.
  u32* rows;
  // By row, its `TileStatus`.
  u32* flags;

  // Returns the thread's digits of a row.
  __device__ __forceinline__ u32* row(u32 number) const { return rows + (u64)number * DIGITS; }

  // Adds the ids in all groups of the section before `group` to `before_tile`, by decoupled look-back. The last tile of a group publishes
  // the group's aggregate before the look-back and its inclusive prefix after it. `first`: the section's first row of groups. `is_last`:
  // whether the tile is the last of its group. `in_tile`: the tile's ids by digit. `before_tile`: at first, the ids of the group's earlier
  // tiles; at the end, the ids of all earlier tiles of the section. A block calls this.
  __device__ __forceinline__ void look_back(
      u32 first, u32 group, bool is_last, const u32* in_tile, Digits<OWN>& before_tile) const {
    __shared__ u32 nearest;
    if (is_last) publish(first + 2 * group, group ? AGGREGATE : PREFIX, in_tile, before_tile);
    if (!group) return;
    if (threadIdx.x / WARP == WARPS - 1) {
      const u32 found = nearest_prefix(flags + first, group);
      if (lane() == 0) nearest = found;
    }
    __syncthreads();
    const u32* prefix = row(first + 2 * nearest + 1);
    before_tile.add_rows(prefix, 1, DIGITS);
    before_tile.add_rows(prefix + DIGITS, group - 1 - nearest, 2 * DIGITS);
    if (is_last) publish(first + 2 * group, PREFIX, in_tile, before_tile);
  }

  // Publishes the sum of `in_tile` and `before_tile` for a group. `first`: the first row of the group. `status`: AGGREGATE or PREFIX, which
  // says what the sum is. A block calls this.
  __device__ __forceinline__ void publish(u32 first, u32 status, const u32* in_tile, const Digits<OWN>& before_tile) const {
    Digits<OWN> sum;
    sum.load_shared(in_tile), sum.add(before_tile);
    sum.store(row(first + (status == PREFIX)));
    __syncthreads();
    if (threadIdx.x == 0) release(&flags[first], status);
  }
};

// Sets N values in shared memory to zero. A block calls this.
template <u32 N, class T> __device__ __forceinline__ void set_to_zero(T* memory) {
#pragma unroll
  for (u32 i = threadIdx.x; i < N; i += SORT_THREADS) memory[i] = T{};
}

// A tile of a pass and its section.
struct Tile {
  Section section;
  // `number`: among all tiles. `in_section`: among the section's tiles. `size`: ids of the tile. `passes`: passes of the section.
  u32 section_number, number, in_section, size, passes;
};

// Returns the tile of a pass with a number. `max_size`: ids of a full tile. All lanes of a warp must call this.
__device__ __forceinline__ Tile tile_at(const Sort& sort, u32 number, u32 digits, u32 max_size) {
  Tile t;
  t.number = number;
  t.section = section_at(sort.sections, sort.num_sections, number, t.section_number, [](const Section& s) { return s.first_tile; });
  t.passes = passes_of(sort, t.section_number, digits, t.section.count);
  t.in_section = number - t.section.first_tile;
  const u32 first = t.in_section * max_size;
  t.size = first < t.section.count ? min(max_size, t.section.count - first) : 0;
  return t;
}

// The ITEMS ids of a thread in a tile.
template <u32 ITEMS, u32 BITS> struct ThreadIds {
  // Positions in the tile: `first` and every WARP-th after it. Those from `size` on have no id.
  u32 first, size;
  // Position of the digit in a record number, in bits.
  u32 shift;
  // Record numbers, and the positions of the ids in the sorted tile.
  u32 record[ITEMS], place[ITEMS];

  __device__ __forceinline__ bool is_id(u32 k) const { return first + k * WARP < size; }

  __device__ __forceinline__ u32 digit(u32 of) const { return digit_of<BITS>(of, shift); }

  // Loads the records. A position without an id gets the highest digit, so it ranks after all ids.
  template <u32 STRIDE> __device__ __forceinline__ void load(const u32* records) {
#pragma unroll
    for (u32 k = 0; k < ITEMS; ++k) record[k] = is_id(k) ? records[k * WARP * STRIDE] : ALL;
  }

  // Adds the ids to `counts`, by digit.
  __device__ __forceinline__ void count(u32* counts) const {
#pragma unroll
    for (u32 k = 0; k < ITEMS; ++k) count_digit(counts, digit(record[k]), is_id(k));
  }

  // Sets the places of the ids to their ranks in the warp. `of_warp`: zeros, which become the counts of the warp's ids by digit.
  __device__ __forceinline__ void rank(u16* of_warp) {
#pragma unroll
    for (u32 k = 0; k < ITEMS; ++k) place[k] = rank_in_warp<BITS>(of_warp, digit(record[k]));
  }

  // Turns the places from ranks in the warp into positions in the sorted tile. `starts`: by digit, where the warp's ids start.
  __device__ __forceinline__ void add_starts(const u16* starts) {
#pragma unroll
    for (u32 k = 0; k < ITEMS; ++k) place[k] += starts[digit(record[k])];
  }

  // Writes the ids to their places in the sorted tile. `values`: the values of the thread's ids, one in every STRIDE words.
  template <u32 STRIDE> __device__ __forceinline__ void move(const u32* values, Sorted* tile) const {
#pragma unroll
    for (u32 k = 0; k < ITEMS; ++k) tile[place[k]] = {record[k], is_id(k) ? values[k * WARP * STRIDE] : 0};
  }
};

// Writes a sorted tile to the output. `size`: its number of ids. `shift`: as in `ThreadIds`. `offsets`: by digit, the difference of an id's
// positions in the output and in the tile.
template <u32 ITEMS, u32 BITS>
__device__ __forceinline__ void store_tile(const Sorted* tile, u32 size, u32 shift, const u32* offsets, Sorted* sorted) {
  const u64 kept = kept_policy();
#pragma unroll
  for (u32 k = 0; k < ITEMS; ++k) {
    const u32 at = k * SORT_THREADS + threadIdx.x;
    if (at >= size) continue;
    const Sorted moved = tile[at];
    store_kept(sorted + (offsets[digit_of<BITS>(moved.record, shift)] + at), moved, kept);
  }
}

// Sorts by the digit of one pass. A block takes one tile: ITEMS ids for each thread. `records`, `values`: one of an id in every STRIDE
// words. `next_pass`: the output if another pass follows; the last pass of a section writes to `sort.sorted`.
template <u32 ITEMS, u32 BITS, u32 STRIDE>
__global__ void __launch_bounds__(SORT_THREADS, 2) sort_pass(
    const u32* records, const u32* values, Sorted* next_pass, const __grid_constant__ Sort sort, u32 pass) {
  begin();
  constexpr u32 TILE = SORT_THREADS * ITEMS, DIGITS = 1u << BITS, OWN = DIGITS / SORT_THREADS;
  constexpr u32 BYTES = WARPS * DIGITS * sizeof(u16) > TILE * sizeof(Sorted) ? WARPS * DIGITS * sizeof(u16) : TILE * sizeof(Sorted);
  // Counts by warp and digit, and later in the same place the tile in its new order. After it, by digit: the number of ids of the tile,
  // and later where they go.
  extern __shared__ uint4 memory[];
  __shared__ u64 of_warps[WARPS];
  __shared__ u32 taken;
  u32* starts = (u32*)((char*)memory + BYTES);
  const u32 warp = threadIdx.x / WARP, first_own = OWN * threadIdx.x;
  // Blocks take tiles in order, so the tiles before this one are already being processed.
  if (threadIdx.x == 0) taken = atomicAdd(&sort.next[pass], 1);
  set_to_zero<WARPS * DIGITS / 8>(memory);
  set_to_zero<DIGITS>(starts);
  __syncthreads();
  const Tile tile = tile_at(sort, taken, DIGITS, TILE);
  if (pass >= tile.passes) return;
  ThreadIds<ITEMS, BITS> ids = {warp * WARP * ITEMS + lane(), tile.size, pass * BITS};
  const u64 at = tile.section.first + tile.in_section * TILE + ids.first;
  ids.template load<STRIDE>(records + at * STRIDE);
  ids.count(starts);
  const u32* of_section = sort.counts + (u64)(tile.section_number * sort.passes + pass) * DIGITS + first_own;
  Digits<OWN> own;
  own.load(of_section);
  const u64 in_section = (u64)own.sum() << 32;
  const Published<DIGITS> published = {sort.published + (u64)pass * sort.rows * DIGITS + first_own, sort.flags + pass * sort.rows};
  __syncthreads();
  own.load_shared(starts + first_own);
  own.store(published.row(tile.number));
  // Positions where the thread's first digit starts: in the section (high half) and in the sorted tile (low half).
  const u64 start = sum_before(in_section + own.sum(), of_warps);
  const u32 start_in_section = (u32)(start >> 32), start_in_tile = (u32)start;
  __syncthreads();
  if (threadIdx.x == 0) release(&published.flags[tile.number], AGGREGATE);
  u16* of_warp = (u16*)memory + warp * DIGITS;
  ids.rank(of_warp);
  const u32 group = tile.in_section / SORT_GROUP, in_group = tile.in_section % SORT_GROUP;
  if (warp == WARPS - 1) wait_for_tiles(published.flags + (tile.number - in_group), in_group);
  __syncthreads();
  own.load_shared(starts + first_own), own.start_at(start_in_tile);
  start_warps<OWN>((u16*)memory, own);
  Digits<OWN> before_tile = {};
  before_tile.add_rows(published.row(tile.number - in_group), in_group, DIGITS);
  if (tile.section.count > SORT_GROUP * TILE)
    published.look_back(first_group_row(sort, tile.section_number, tile.section), group, in_group == SORT_GROUP - 1,
        starts + first_own, before_tile);
  own.load(of_section), own.start_at(tile.section.first + start_in_section);
  Digits<OWN> offsets = before_tile;
  offsets.add(own);
  own.load_shared(starts + first_own), own.start_at(start_in_tile);
  offsets.subtract(own);
  offsets.store(starts + first_own);
  __syncthreads();
  ids.add_starts(of_warp);
  __syncthreads();
  ids.template move<STRIDE>(values + at * STRIDE, (Sorted*)memory);
  __syncthreads();
  store_tile<ITEMS, BITS>((const Sorted*)memory, tile.size, pass * BITS, starts, pass + 1 == tile.passes ? sort.sorted : next_pass);
}
