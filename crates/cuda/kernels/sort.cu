// Stable radix sort of pairs of 32-bit words, from the lowest digit up: a count of all digits, then one launch a digit in which
// blocks learn from those before them where their pairs go ("onesweep": A. Adinets and D. Merrill, 2022). As most of them run at
// once, they tell each other in groups: a block asks its fellows and the groups before, not all blocks before it.
#include "types.cuh"

constexpr u32 DIGIT_BITS = 9;
constexpr u32 DIGITS = 1u << DIGIT_BITS, THREADS = 512, WARPS = THREADS / WARP;
constexpr u32 MOST_PASSES = 4;
// Tiles of a group.
constexpr u32 FELLOWS = 16;
// Of what tiles and groups tell of a digit: nothing yet, how many they have, how many all up to them have.
constexpr u32 COUNT = 1u << 30, TOTAL = 2u << 30, VALUE = COUNT - 1;

// Counts and starts of the digits of a sort, and what blocks tell each other.
struct SortState {
  // Blocks of `count_digits` that are done; the next tile of each pass.
  u32 done, next[MOST_PASSES];
  u32 pad[27];
  // By pass and digit: how many, then where they start.
  u32 starts[MOST_PASSES][DIGITS];
};

__device__ __forceinline__ u32 digit_of(u32 key, u32 pass) { return key >> pass * DIGIT_BITS & (DIGITS - 1); }

// Inclusive sum over a block of one number a thread.
__device__ __forceinline__ u32 block_sum(u32 x, u32* of_warps) {
  const u32 warp = threadIdx.x / WARP;
  for (u32 by = 1; by < WARP; by *= 2) {
    const u32 y = __shfl_up_sync(ALL, x, by);
    if (lane() >= by) x += y;
  }
  if (lane() == WARP - 1) of_warps[warp] = x;
  __syncthreads();
  u32 before = 0;
  for (u32 w = 0; w < warp; ++w) before += of_warps[w];
  __syncthreads();
  return before + x;
}

// Rows of `told` that tiles and their groups have in a pass.
__device__ __forceinline__ u32 rows_of(u32 tiles) { return tiles + (tiles + FELLOWS - 1) / FELLOWS; }

// What some tiles or groups have of a digit, from the one at `last` back to the one at `first`: the sum up to one that tells a total.
// `told`: of the digit, by tile or group. They are asked eight at a time.
__device__ __forceinline__ u32 ask(const u32* told, u32 first, u32 last) {
  constexpr u32 ASKED = 8;
  u32 sum = 0;
  for (u32 left = last - first; left > 0;) {
    u32 said[ASKED];
#pragma unroll
    for (u32 k = 0; k < ASKED; ++k) said[k] = k < left ? load_shared(told + (u64)(first + left - 1 - k) * DIGITS) : TOTAL;
    u32 known = 0;
#pragma unroll
    for (u32 k = 0; k < ASKED; ++k) {
      if (known != k || !(said[k] & ~VALUE)) continue;
      sum += said[k] & VALUE;
      known = said[k] & TOTAL ? ALL : k + 1;
    }
    if (known == ALL) break;
    left -= known;
    if (known == 0) __nanosleep(100);
  }
  return sum;
}

// `state` is zeros but for what blocks tell each other, which this clears: `told`, by pass, tile or group, and digit. The last block to
// end turns counts into starts.
extern "C" __global__ void __launch_bounds__(THREADS) count_digits(const u32* __restrict__ keys, u32 n, SortState* state, u32* told, u32 tiles, u32 passes) {
  begin();
  __shared__ u32 counts[MOST_PASSES][DIGITS];
  __shared__ u32 of_warps[WARPS];
  __shared__ bool is_last;
  for (u32 i = threadIdx.x; i < passes * DIGITS; i += THREADS) (&counts[0][0])[i] = 0;
  __syncthreads();
  const u32 stride = gridDim.x * THREADS;
  constexpr u32 AHEAD = 4;
  for (u32 start = blockIdx.x * THREADS; start < n; start += AHEAD * stride) {
    u32 key[AHEAD];
#pragma unroll
    for (u32 k = 0; k < AHEAD; ++k) {
      const u32 i = start + k * stride + threadIdx.x;
      key[k] = i < n ? keys[i] : ALL;
    }
#pragma unroll
    for (u32 k = 0; k < AHEAD; ++k) {
      const bool is_key = start + k * stride + threadIdx.x < n;
      for (u32 pass = 0; pass < passes; ++pass) {
        const u32 digit = digit_of(key[k], pass), of_first = __shfl_sync(ALL, digit, 0);
        // High digits are often those of one table: one addition a warp.
        if (__all_sync(ALL, is_key && digit == of_first)) {
          if (lane() == 0) atomicAdd(&counts[pass][digit], WARP);
        } else if (is_key) {
          atomicAdd(&counts[pass][digit], 1);
        }
      }
    }
  }
  for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < passes * rows_of(tiles) * DIGITS; i += stride) told[i] = 0;
  __syncthreads();
  for (u32 i = threadIdx.x; i < passes * DIGITS; i += THREADS)
    if (const u32 count = (&counts[0][0])[i]) atomicAdd(&(&state->starts[0][0])[i], count);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(&state->done, 1) == gridDim.x - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  for (u32 pass = 0; pass < passes; ++pass) {
    u32 before = 0;
    for (u32 first = 0; first < DIGITS; first += THREADS) {
      const u32 digit = first + threadIdx.x;
      const u32 count = digit < DIGITS ? load_shared(&state->starts[pass][digit]) : 0;
      const u32 sum = block_sum(count, of_warps);
      if (digit < DIGITS) state->starts[pass][digit] = before + sum - count;
      before += __shfl_sync(ALL, sum, WARP - 1);
      static_assert(DIGITS <= THREADS, "one round");
    }
  }
}

// A tile is what a block takes: ITEMS pairs a thread.
template <u32 ITEMS> __global__ void __launch_bounds__(THREADS, 2) sort_pass(const u32* __restrict__ keys, const u32* __restrict__ values, u32* __restrict__ sorted_keys, u32* __restrict__ sorted_values, u32 n,
                                                     SortState* state, u32* told, u32 pass) {
  begin();
  constexpr u32 TILE = THREADS * ITEMS;
  // Counts by warp and digit; then, in the same memory, the tile in its new order.
  __shared__ union {
    u32 counts[WARPS][DIGITS];
    u32 tile[TILE];
  } shared;
  __shared__ u32 starts[DIGITS];
  __shared__ u32 of_warps[WARPS];
  __shared__ u32 number;
  const u32 warp = threadIdx.x / WARP, thread = threadIdx.x;
  // Tiles are taken in order, so that those before it are at work already.
  if (thread == 0) number = atomicAdd(&state->next[pass], 1);
  for (u32 i = thread; i < WARPS * DIGITS; i += THREADS) (&shared.counts[0][0])[i] = 0;
  __syncthreads();
  const u32 first = number * TILE, begin = first + warp * WARP * ITEMS + lane();
  const u32 size = min(TILE, n - first);
  u32 key[ITEMS], place[ITEMS];
#pragma unroll
  for (u32 k = 0; k < ITEMS; ++k) key[k] = begin + k * WARP < n ? keys[begin + k * WARP] : ALL;
#pragma unroll
  for (u32 k = 0; k < ITEMS; ++k) {
    const u32 digit = digit_of(key[k], pass);
    u32 peers = ALL;
#pragma unroll
    for (u32 bit = 0; bit < DIGIT_BITS; ++bit) {
      const u32 ones = __ballot_sync(ALL, digit >> bit & 1);
      peers &= digit >> bit & 1 ? ones : ~ones;
    }
    const u32 before = shared.counts[warp][digit];
    __syncwarp();
    if ((peers & lanes_below()) == 0) shared.counts[warp][digit] = before + __popc(peers);
    __syncwarp();
    place[k] = before + __popc(peers & lanes_below());
  }
  __syncthreads();
  // A thread a digit.
  u32 count = 0;
  if (thread < DIGITS) {
    for (u32 w = 0; w < WARPS; ++w) {
      const u32 of_warp = shared.counts[w][thread];
      shared.counts[w][thread] = count;
      count += of_warp;
    }
    told += (u64)pass * rows_of(gridDim.x) * DIGITS + thread;
    store_shared(told + (u64)number * DIGITS, COUNT | count);
  }
  const u32 start = block_sum(count, of_warps) - count;
  if (thread < DIGITS) {
    const u32 group = number / FELLOWS, first = group * FELLOWS;
    u32* of_groups = told + (u64)gridDim.x * DIGITS;
    u32 before = ask(told, first, number);
    const bool is_last = number + 1 == gridDim.x || number % FELLOWS == FELLOWS - 1;
    const u32 all = before + count;
    if (is_last) store_shared(of_groups + (u64)group * DIGITS, (group ? COUNT : TOTAL) | all);
    const u32 of_others = ask(of_groups, 0, group);
    if (is_last && group) store_shared(of_groups + (u64)group * DIGITS, TOTAL | (of_others + all));
    before += of_others;
    // Where the tile's pairs of this digit go, less where they lie in the tile.
    starts[thread] = state->starts[pass][thread] + before - start;
    for (u32 w = 0; w < WARPS; ++w) shared.counts[w][thread] += start;
  }
  __syncthreads();
#pragma unroll
  for (u32 k = 0; k < ITEMS; ++k) place[k] += shared.counts[warp][digit_of(key[k], pass)];
  __syncthreads();
  u32 value[ITEMS], to[ITEMS];
#pragma unroll
  for (u32 k = 0; k < ITEMS; ++k) {
    shared.tile[place[k]] = key[k];
    value[k] = begin + k * WARP < n ? values[begin + k * WARP] : 0;
  }
  __syncthreads();
#pragma unroll
  for (u32 k = 0; k < ITEMS; ++k) {
    const u32 at = k * THREADS + thread, moved = shared.tile[at];
    to[k] = starts[digit_of(moved, pass)] + at;
    if (at < size) sorted_keys[to[k]] = moved;
  }
  __syncthreads();
#pragma unroll
  for (u32 k = 0; k < ITEMS; ++k) shared.tile[place[k]] = value[k];
  __syncthreads();
#pragma unroll
  for (u32 k = 0; k < ITEMS; ++k) {
    const u32 at = k * THREADS + thread;
    if (at < size) sorted_values[to[k]] = shared.tile[at];
  }
}
