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

// Returns the first of a group's two rows in `Sort::published`: its aggregate, then its inclusive prefix. The rows of all tiles come
// before those of the groups. All tiles of a group belong to one section.
__device__ __forceinline__ u32 group_row(const Sort& sort, u32 section, const Section& of, u32 group) {
  return sort.tiles + 2 * (of.first_tile / SORT_GROUP + section + group);
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
  const u32 first = (blockIdx.x - section.first_tile) * tile, size = min(tile, section.count - first);
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

// Returns the exclusive prefix sum of `x` over the threads of a block. `of_warps`: shared memory for a sum of each warp.
__device__ __forceinline__ u64 sum_before(u64 x, u64* of_warps) {
  u64 sum = x;
  for (u32 by = 1; by < WARP; by *= 2) {
    const u64 y = __shfl_up_sync(ALL, sum, by);
    if (lane() >= by) sum += y;
  }
  if (lane() == WARP - 1) of_warps[threadIdx.x / WARP] = sum;
  __syncthreads();
  u64 before = sum - x;
  for (u32 w = 0; w < threadIdx.x / WARP; ++w) before += of_warps[w];
  return before;
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

// Ranks an id among the ids of its warp that have the same digit. `of_warp`: counts of the warp's ids by digit, which it raises.
template <u32 BITS> __device__ __forceinline__ u32 rank_in_warp(u16* of_warp, u32 digit) {
  const u32 peers = peers_of<BITS>(digit);
  const u32 less = of_warp[digit];
  __syncwarp();
  if ((peers & lanes_below()) == 0) of_warp[digit] = less + __popc(peers);
  __syncwarp();
  return less + __popc(peers & lanes_below());
}

// Sorts by the digit of one pass. A block takes one tile: ITEMS ids for each thread. `records`, `values`: one of an id in every STRIDE
// words. `next_pass`: the output if another pass follows; the last pass of a section writes to `sort.sorted`.
template <u32 ITEMS, u32 BITS, u32 STRIDE>
__global__ void __launch_bounds__(SORT_THREADS, 2) sort_pass(
    const u32* records, const u32* values, Sorted* next_pass, const __grid_constant__ Sort sort, u32 pass) {
  begin();
  constexpr u32 TILE = SORT_THREADS * ITEMS, DIGITS = 1u << BITS, OWN = DIGITS / SORT_THREADS;
  const u32 shift = pass * BITS;
  // Shared memory: counts by warp and digit, and later in the same place the tile in its new order. After it, by digit: the number of
  // ids of the tile, and later where they go.
  extern __shared__ uint4 memory[];
  u16* counts = (u16*)memory;
  Sorted* tile = (Sorted*)memory;
  constexpr u32 BYTES = WARPS * DIGITS * sizeof(u16) > TILE * sizeof(Sorted) ? WARPS * DIGITS * sizeof(u16) : TILE * sizeof(Sorted);
  u32* starts = (u32*)((char*)memory + BYTES);
  __shared__ u64 of_warps[WARPS];
  __shared__ u32 taken, nearest;
  const u32 warp = threadIdx.x / WARP, thread = threadIdx.x;
  // Blocks take tiles in order, so the tiles before this one are already being processed.
  if (thread == 0) taken = atomicAdd(&sort.next[pass], 1);
#pragma unroll
  for (u32 i = thread; i < WARPS * DIGITS / 8; i += SORT_THREADS) memory[i] = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (u32 i = thread; i < DIGITS; i += SORT_THREADS) starts[i] = 0;
  __syncthreads();
  const u32 number = taken;
  u32 section_number;
  const Section section =
      section_at(sort.sections, sort.num_sections, number, section_number, [](const Section& s) { return s.first_tile; });
  const u32 passes = passes_of(sort, section_number, DIGITS, section.count);
  if (pass >= passes) return;
  Sorted* sorted = pass + 1 == passes ? sort.sorted : next_pass;
  const u32 in_section = number - section.first_tile, size = min(TILE, section.count - in_section * TILE);
  const u32 mine = warp * WARP * ITEMS + lane();
  records += (u64)(section.first + in_section * TILE + mine) * STRIDE,
      values += (u64)(section.first + in_section * TILE + mine) * STRIDE;
  // The digit is computed anew at each use, because keeping it would take one register for each id.
  const auto digit_of = [&](u32 x) {
    u32 high;
    asm volatile("shr.u32 %0, %1, %2;" : "=r"(high) : "r"(x), "r"(shift));
    return high & (DIGITS - 1);
  };
  u32 key[ITEMS], place[ITEMS];
  // A position without an id gets the highest digit, so it ranks after all ids.
#pragma unroll
  for (u32 k = 0; k < ITEMS; ++k) key[k] = mine + k * WARP < size ? records[k * WARP * STRIDE] : ALL;
#pragma unroll
  for (u32 k = 0; k < ITEMS; ++k) count_digit(starts, digit_of(key[k]), mine + k * WARP < size);
  Digits<OWN> own;
  own.load(sort.counts + (u64)(section_number * sort.passes + pass) * DIGITS + OWN * thread);
  u64 sum = (u64)own.sum() << 32;
  u32* published = sort.published + (u64)pass * sort.rows * DIGITS + OWN * thread;
  u32* flags = sort.flags + pass * sort.rows;
  __syncthreads();
  own.load_shared(starts + OWN * thread);
  own.store(published + (u64)number * DIGITS);
  const u64 before = sum_before(sum + own.sum(), of_warps);
  __syncthreads();
  if (thread == 0) release(&flags[number], AGGREGATE);
  u16* of_warp = counts + warp * DIGITS;
#pragma unroll
  for (u32 k = 0; k < ITEMS; ++k) place[k] = rank_in_warp<BITS>(of_warp, digit_of(key[k]));
  const u32 group = in_section / SORT_GROUP, in_group = in_section % SORT_GROUP;
  // The last warp waits until all tiles before this one in the group have published their aggregates.
  if (warp == WARPS - 1) {
    bool is_known;
    do is_known = lane() >= in_group || load_flag(&flags[number - in_group + lane()]) != INVALID;
    while (!__all_sync(ALL, is_known));
  }
  __syncthreads();
  // Computes where the ids of each digit start in the tile, warp by warp. With several digits per thread, a word holds two of them.
  own.load_shared(starts + OWN * thread);
  own.start_at((u32)before);
  if constexpr (OWN == 1) {
    u32 next = own.of[0];
#pragma unroll
    for (u32 w = 0; w < WARPS; ++w) {
      u16& at = counts[w * DIGITS + thread];
      const u32 has = at;
      at = next, next += has;
    }
  } else {
    u32 next[OWN / 2];
#pragma unroll
    for (u32 k = 0; k < OWN / 2; ++k) next[k] = own.of[2 * k] | own.of[2 * k + 1] << 16;
#pragma unroll
    for (u32 w = 0; w < WARPS; ++w) {
      u32* at = (u32*)(counts + w * DIGITS) + OWN / 2 * thread;
#pragma unroll
      for (u32 k = 0; k < OWN / 2; ++k) {
        const u32 has = at[k];
        at[k] = next[k], next[k] += has;
      }
    }
  }
  Digits<OWN> less = {};
  less.add_rows(published + (u64)(number - in_group) * DIGITS, in_group, DIGITS);
  if (section.count > SORT_GROUP * TILE) {
    const u32 first_group = group_row(sort, section_number, section, 0);
    u32* of_group = published + (u64)(first_group + 2 * group) * DIGITS;
    const bool is_last = in_group == SORT_GROUP - 1;
    if (is_last) {
      own.load_shared(starts + OWN * thread), own.add(less);
      own.store(of_group + (group ? 0 : DIGITS));
      __syncthreads();
      if (thread == 0) release(&flags[first_group + 2 * group], group ? AGGREGATE : PREFIX);
    }
    if (group) {
      // Look-back to the nearest group that has published its inclusive prefix. All groups after it have published their aggregates.
      if (warp == WARPS - 1) {
        u32 totals;
        bool is_known;
        do {
          const u32 flag = lane() < group ? load_flag(&flags[first_group + 2 * (group - 1 - lane())]) : INVALID;
          totals = __ballot_sync(ALL, flag == PREFIX);
          const u32 needed = totals ? __ffs(totals) : 0;
          is_known = needed && __all_sync(ALL, lane() >= needed || flag != INVALID);
        } while (!is_known);
        if (lane() == 0) nearest = group - __ffs(totals);
      }
      __syncthreads();
      const u32* rows = published + (u64)(first_group + 2 * nearest) * DIGITS;
      less.add_rows(rows + DIGITS, 1, DIGITS);
      less.add_rows(rows + 2 * DIGITS, group - 1 - nearest, 2 * DIGITS);
      if (is_last) {
        own.load_shared(starts + OWN * thread), own.add(less);
        own.store(of_group + DIGITS);
        __syncthreads();
        if (thread == 0) release(&flags[first_group + 2 * group], PREFIX);
      }
    }
  }
  // Computes where the tile's ids of each digit go in the output, minus where they start in the tile.
  own.load(sort.counts + (u64)(section_number * sort.passes + pass) * DIGITS + OWN * thread);
  own.start_at(section.first + (u32)(before >> 32));
  less.add(own);
  own.load_shared(starts + OWN * thread);
  own.start_at((u32)before);
#pragma unroll
  for (u32 k = 0; k < OWN; ++k) less.of[k] -= own.of[k];
  less.store(starts + OWN * thread);
  __syncthreads();
#pragma unroll
  for (u32 k = 0; k < ITEMS; ++k) place[k] += of_warp[digit_of(key[k])];
  __syncthreads();
#pragma unroll
  for (u32 k = 0; k < ITEMS; ++k) tile[place[k]] = {key[k], mine + k * WARP < size ? values[k * WARP * STRIDE] : 0};
  __syncthreads();
  const u64 kept = kept_policy();
#pragma unroll
  for (u32 k = 0; k < ITEMS; ++k) {
    const u32 at = k * SORT_THREADS + thread;
    if (at >= size) continue;
    const Sorted moved = tile[at];
    store_kept(sorted + (starts[digit_of(moved.record)] + at), moved, kept);
  }
}
