// Lookups and commits of tables that ranks share. Ranks read and write each other's memory.
//
// A lookup makes the ids of a rank distinct by a set of keys that lives for this call. The keys are then ordered by owner, merge block
// and first id, so the order does not depend on the order of threads. Their owners read them where they are, and write the rows to where
// they are pooled.
#include "peers.cuh"
#include "step.cuh"

constexpr u64 EMPTY = ~0ull;
// Marks an id that asks for no row, in place of its slot.
constexpr u32 NO_SLOT = ~0u;
// Bit of a slot's number: the id is the first one of its key; until `count_firsts`, it may be.
constexpr u32 FIRST = 1u << 31;
constexpr u32 WARPS = REQUEST_THREADS / WARP, TURNS = REQUEST_BLOCK / REQUEST_THREADS;

// Returns the rank that owns a key, as `owner` of crates/core/src/exchange/placement.rs.
__device__ __forceinline__ u32 owner_of(const Request& r, u32 world_size, u64 key) {
  if (r.owner == REMAINDER) return (u32)(key % world_size);
  if (r.owner != HASHED) return r.home;
  const u64 mixed = hash(0, key) * 0x9e3779b97f4a7c15ull >> 32;
  return (u32)(mixed * world_size >> 32);
}

// Whether the ids of a call were made distinct before it, so that nothing is left to do.
__device__ __forceinline__ bool are_known(const Requests& all) { return all.differs && !load_shared(all.differs); }

// Notes if the keys of a call are not those of which copies were kept. Has the grid of `find_records`.
extern "C" __global__ void __launch_bounds__(FIND_THREADS) compare_keys(
    const __grid_constant__ Call call, const __grid_constant__ Requests all) {
  begin();
  const u32 number = feature_at(call.first_find, call.num_features, blockIdx.x);
  const Feature& feature = call.features[number];
  const u32 i = (blockIdx.x - call.first_find[number]) * FIND_THREADS + threadIdx.x;
  if (i < feature.num_ids && key_at(feature, i) != all.copies[feature.first_id + i]) store_shared(all.differs, 1u);
}

// Sets the slots of all sets to empty. `count`: their number.
extern "C" __global__ void __launch_bounds__(256) clear_slots(KeySlot* slots, u32 count, const __grid_constant__ Requests all) {
  begin();
  if (are_known(all)) return;
  for (u32 i = blockIdx.x * 256 + threadIdx.x; i < count; i += gridDim.x * 256) *(uint4*)(slots + i) = make_uint4(~0u, ~0u, ~0u, 0);
}

// Returns the slot of a key in the set of a merge block, and notes the place of an id of the key. Has `FIRST` if no earlier id was noted.
__device__ __forceinline__ u32 claim(const Request& r, u64 secret, u32 block, u64 key, u32 at) {
  const u32 first_slot = block * (r.num_slots + 1);
  KeySlot* slots = r.slots + first_slot;
  u32 slot = r.num_slots;
  if (key != EMPTY) {
    slot = (u32)((hash(secret, key) >> 32) * r.num_slots >> 32);
    while (true) {
      u64 there = load_shared(&slots[slot].key);
      if (there == key) break;
      if (there == EMPTY) {
        there = atomicCAS(&slots[slot].key, EMPTY, key);
        if (there == EMPTY || there == key) break;
      }
      slot = slot + 1 == r.num_slots ? 0 : slot + 1;
    }
  }
  const bool may_be_first = load_shared(&slots[slot].first) > at;
  if (may_be_first) atomicMin(&slots[slot].first, at);
  return first_slot + slot | (may_be_first ? FIRST : 0);
}

// Returns the merge block of a bag: block b has the bags from `num_bags * b / blocks` on.
__device__ __forceinline__ u32 merge_block_of(const Feature& f, u32 bag, u32 blocks) {
  return blocks == 1 ? 0 : (u32)((((u64)bag + 1) * blocks - 1) / f.num_bags);
}

// Finds the slot of each id of a call in the set of distinct keys, in place of a record. Has the grid of `find_records`, and sets
// `found.zeros` to 0.
extern "C" __global__ void __launch_bounds__(FIND_THREADS) claim_keys(
    const __grid_constant__ Call call, const __grid_constant__ Found found, const __grid_constant__ Requests all) {
  begin();
  if (are_known(all)) return;
  for (u32 k = blockIdx.x * FIND_THREADS + threadIdx.x; k < found.num_zeros; k += gridDim.x * FIND_THREADS) found.zeros[k] = 0;
  const u32 number = feature_at(call.first_find, call.num_features, blockIdx.x);
  const Feature& feature = call.features[number];
  const Table& t = call.tables[feature.table];
  const u32 i = (blockIdx.x - call.first_find[number]) * FIND_THREADS + threadIdx.x, at = feature.first_id + i;
  if (i >= feature.num_ids) return;
  const u64 key = key_at(feature, i);
  if (all.copies && !all.differs) all.copies[at] = key;
  const Request& r = all.requests[feature.table];
  if (r.ids) r.ids[at - r.first] = key;
  const u32 bag = bag_of(feature, i);
  bool is_wanted = true, is_silent = false;
  if (feature.has_roles) {
    const bool is_padding = feature.has_padding && key == feature.padding_key;
    is_silent = feature.weights && feature.weights[i] == 0;
    is_wanted = key <= t.last_key && !is_padding && (all.asks_silent || !is_silent);
    if (feature.refuses && key > t.last_key && !is_padding) report(found.fault, OUTSIDE_VOCABULARY, number, feature.table, key);
  }
  // If splits are wrong, an id may be in no bag. It is then taken for one of the last.
  const u32 block = is_silent ? all.merge_blocks : merge_block_of(feature, min(bag, feature.num_bags - 1), all.merge_blocks);
  found.records[at] = is_wanted ? claim(r, t.index.secret, block, key, at) : NO_SLOT;
  if (!found.values) return;
  const u32 name = number << call.shift | bag;
  found.values[at] = found.named ? at : name;
  if (found.named) found.named[at] = {name, 0};
}

// Number of classes of the keys of an owner: by merge block, then the keys of ids of weight 0.
__device__ __forceinline__ u32 classes_of_owner(const Requests& all) { return all.merge_blocks + 1; }

// Returns the table that a block of ids belongs to. All lanes of a warp must call this.
__device__ __forceinline__ const Request& request_at(const Requests& all, u32 block) {
  u32 number = 0;
  for (u32 start = 0; start < all.num_tables; start += WARP) {
    const u32 i = start + lane();
    const bool has_it = i < all.num_tables && block - all.requests[i].first_block < all.requests[i].num_blocks;
    const u32 found = __ballot_sync(ALL, has_it);
    if (found) number = start + __ffs(found) - 1;
  }
  return all.requests[number];
}

// Returns the number of a thread's id among those of its table.
__device__ __forceinline__ u32 id_at(u32 block, u32 turn) { return block * REQUEST_BLOCK + turn * REQUEST_THREADS + threadIdx.x; }

// Returns the class of a key. `slot`: its slot.
__device__ __forceinline__ u32 class_of(const Requests& all, const Request& r, u32 slot, u64 key) {
  return owner_of(r, all.world_size, key) * classes_of_owner(all) + slot / (r.num_slots + 1);
}

// Counts the first ids of each block by class, and leaves only them marked. `slots`: by place of an id, as `claim_keys` wrote them.
extern "C" __global__ void __launch_bounds__(REQUEST_THREADS) count_firsts(u32* slots, const __grid_constant__ Requests all) {
  begin();
  if (are_known(all)) return;
  __shared__ u32 counts[MAX_CLASSES];
  const Request& r = request_at(all, blockIdx.x);
  const u32 block = blockIdx.x - r.first_block, classes = all.world_size * classes_of_owner(all);
  for (u32 c = threadIdx.x; c < classes; c += REQUEST_THREADS) counts[c] = 0;
  __syncthreads();
#pragma unroll
  for (u32 turn = 0; turn < TURNS; ++turn) {
    const u32 i = id_at(block, turn), at = r.first + i;
    const u32 marked = i < r.num_ids ? slots[at] : NO_SLOT, slot = marked & ~FIRST;
    if (marked == NO_SLOT || !(marked & FIRST)) continue;
    const KeySlot key = r.slots[slot];
    if (key.first == at) atomicAdd(&counts[class_of(all, r, slot, key.key)], 1);
    else slots[at] = slot;
  }
  __syncthreads();
  for (u32 c = threadIdx.x; c < classes; c += REQUEST_THREADS) r.counts[c * r.num_blocks + block] = counts[c];
}

// Turns the counts of first ids into places. One block for each table.
extern "C" __global__ void __launch_bounds__(REQUEST_THREADS) place_firsts(const __grid_constant__ Requests all) {
  begin();
  if (are_known(all)) return;
  __shared__ u32 starts[MAX_CLASSES + 1];
  const Request& r = all.requests[blockIdx.x];
  const u32 warp = threadIdx.x / WARP, classes = all.world_size * classes_of_owner(all);
  if (!r.starts) return;
  for (u32 c = warp; c < classes; c += WARPS) {
    u32 sum = 0;
    for (u32 b = lane(); b < r.num_blocks; b += WARP) sum += r.counts[c * r.num_blocks + b];
    sum = __reduce_add_sync(ALL, sum);
    if (lane() == 0) starts[c] = sum;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    u32 start = 0;
    for (u32 c = 0; c < classes; ++c) {
      const u32 count = starts[c];
      starts[c] = start, start += count;
    }
    starts[classes] = start;
    if (r.num_ids) store_shared(r.distinct, (u64)start << 32 | r.num_ids);
  }
  __syncthreads();
  for (u32 rank = threadIdx.x; rank <= all.world_size; rank += REQUEST_THREADS) {
    r.starts[2 * rank] = starts[rank * classes_of_owner(all)];
    if (rank < all.world_size) r.starts[2 * rank + 1] = starts[rank * classes_of_owner(all) + all.merge_blocks];
  }
  for (u32 c = warp; c < classes; c += WARPS) {
    u32 start = starts[c];
    for (u32 first = 0; first < r.num_blocks; first += WARP) {
      const u32 b = first + lane();
      u32* at = r.counts + c * r.num_blocks + b;
      const u32 count = b < r.num_blocks ? *at : 0, sum = sum_to(count);
      if (b < r.num_blocks) *at = start + sum - count;
      start += __shfl_sync(ALL, sum, WARP - 1);
    }
  }
}

// Writes the distinct keys to their places.
extern "C" __global__ void __launch_bounds__(REQUEST_THREADS) write_keys(const u32* slots, const __grid_constant__ Requests all) {
  begin();
  if (are_known(all)) return;
  __shared__ u32 next[MAX_CLASSES], of_warps[WARPS][MAX_CLASSES];
  const Request& r = request_at(all, blockIdx.x);
  const u32 block = blockIdx.x - r.first_block, classes = all.world_size * classes_of_owner(all), warp = threadIdx.x / WARP;
  for (u32 c = threadIdx.x; c < classes; c += REQUEST_THREADS) {
    next[c] = r.counts[c * r.num_blocks + block];
    for (u32 w = 0; w < WARPS; ++w) of_warps[w][c] = 0;
  }
  for (u32 turn = 0; turn < TURNS; ++turn) {
    const u32 i = id_at(block, turn), marked = i < r.num_ids ? slots[r.first + i] : NO_SLOT;
    const bool is_first = marked != NO_SLOT && marked & FIRST;
    const u32 slot = marked & ~FIRST;
    const u64 key = is_first ? r.slots[slot].key : 0;
    const u32 of_key = is_first ? class_of(all, r, slot, key) : MAX_CLASSES;
    const u32 same = __match_any_sync(ALL, of_key), rank = __popc(same & lanes_below());
    __syncthreads();
    if (is_first && rank == 0) of_warps[warp][of_key] = __popc(same);
    __syncthreads();
    if (is_first) {
      u32 place = next[of_key] + rank;
      for (u32 w = 0; w < warp; ++w) place += of_warps[w][of_key];
      r.keys[place] = key;
      if (r.id_counts) r.id_counts[place] = 0;
      if (r.scores) r.scores[place] = 0;
      r.slots[slot].place = place;
    }
    __syncthreads();
    for (u32 c = threadIdx.x; c < classes; c += REQUEST_THREADS)
      for (u32 w = 0; w < WARPS; ++w) next[c] += of_warps[w][c], of_warps[w][c] = 0;
  }
}

// Replaces the slot of each id by the place of its key plus 1, which is the number of its row among the rows that come.
extern "C" __global__ void __launch_bounds__(REQUEST_THREADS) number_rows(u32* slots, const __grid_constant__ Requests all) {
  begin();
  if (are_known(all)) return;
  const Request& r = request_at(all, blockIdx.x);
#pragma unroll
  for (u32 turn = 0; turn < TURNS; ++turn) {
    const u32 i = id_at(blockIdx.x - r.first_block, turn);
    if (i >= r.num_ids) continue;
    const u32 marked = slots[r.first + i], slot = marked & ~FIRST, row = marked == NO_SLOT ? 0 : r.slots[slot].place + 1;
    slots[r.first + i] = row;
    if (r.numbers) r.numbers[i] = row;
    const bool is_active = row && slot / (r.num_slots + 1) < all.merge_blocks;
    if (r.id_counts && is_active) atomicAdd(r.id_counts + row - 1, 1ull);
    if (r.scores && all.given && is_active) atomicMax(r.scores + row - 1, all.given[r.first + i].score);
    if (all.active) all.active[r.first + i] = is_active ? row : 0;
  }
}

// Tells the other ranks that this one has come as far as a call, and waits until they have, too.
extern "C" __global__ void __launch_bounds__(MAX_RANKS) meet(const __grid_constant__ Peers p, u32 flag, u64 call) {
  begin_meeting();
  raise(p, flag, call);
  wait_for(p, flag, call);
}

// Completes a feature whose keys are those from `start` to `end` that a rank asks for. `first`: place of its first id in the call.
__device__ __forceinline__ void complete(const Serving& s, u32 number, u32 start, u32 end, u32 first) {
  Feature& f = s.features[number];
  if (s.begins) s.begins[number] = start, s.firsts[number] = first;
  f.ids = (const u64*)f.ids + start;
  if (f.rows) f.rows += (u64)start * 4 * s.tables[f.table].quads;
  f.num_ids = f.num_bags = end - start;
  f.first_id = first;
}

// Waits for the keys of all ranks, and completes the features that read them.
extern "C" __global__ void __launch_bounds__(256) connect(
    const __grid_constant__ Peers p, u64 call, const __grid_constant__ Serving s) {
  begin_meeting();
  raise(p, KEYS_READY, call);
  const bool have_come = wait_for(p, KEYS_READY, call);
  for (u32 k = threadIdx.x; k < s.num_tables; k += 256) {
    Feature* features = s.features + k * p.world_size;
    const u32 number = features->table;
    u32 start[MAX_RANKS], middle[MAX_RANKS], end[MAX_RANKS];
#pragma unroll
    for (u32 r = 0; r < MAX_RANKS; ++r) {
      // Each rank has the keys of a replicated table under its own number.
      const u32 owner = s.requests[number].owner == EVERY_RANK ? r : p.rank;
      const u32* starts = (const u32*)s.starts[r] + number * (2 * p.world_size + 1) + 2 * owner;
      const bool is_rank = r < p.world_size && have_come;
      start[r] = is_rank ? load_shared(starts) : 0;
      middle[r] = is_rank ? load_shared(starts + 1) : 0;
      end[r] = is_rank ? load_shared(starts + 2) : 0;
    }
    u32 first = features->first_id;
#pragma unroll
    for (u32 r = 0; r < MAX_RANKS; ++r) {
      if (r >= p.world_size) break;
      complete(s, k * p.world_size + r, start[r], middle[r], first);
      first += middle[r] - start[r];
      const u32 silent = (s.num_tables + k) * p.world_size + r;
      if (s.has_silent) complete(s, silent, middle[r], end[r], s.features[silent].first_id);
    }
    if (s.sections) s.sections[k].count = first - s.sections[k].first;
  }
  // The blocks that have ids come first, so that all others end at once.
  __syncthreads();
  if (threadIdx.x >= WARP) return;
  const u32 num_features = s.num_tables * p.world_size;
  u32 before = 0;
  for (u32 start = 0; start < num_features; start += WARP) {
    const u32 number = start + lane();
    const u32 blocks = number < num_features ? (s.features[number].num_ids + FIND_THREADS - 1) / FIND_THREADS : 0;
    const u32 sum = sum_to(blocks);
    if (number < num_features) s.first_find[number] = before + sum - blocks;
    before += __shfl_sync(ALL, sum, WARP - 1);
  }
}

// Copies how many ids each key stands for. `from`: by feature, where that is, before `begins`; null for tables whose policy does not count
// ids. `begins`: by feature, or null. Has the grid of `find_records`.
extern "C" __global__ void __launch_bounds__(FIND_THREADS) keep_id_counts(
    const __grid_constant__ Call call, const u64* const* from, const u32* begins, u32* counts) {
  begin();
  const u32 number = feature_at(call.first_find, call.num_features, blockIdx.x);
  const Feature& feature = call.features[number];
  const u32 i = (blockIdx.x - call.first_find[number]) * FIND_THREADS + threadIdx.x;
  if (i >= feature.num_ids || !from[number]) return;
  const u64 count = load_once(from[number] + (begins ? begins[number] : 0) + i);
  counts[feature.first_id + i] = (u32)count;
}

// Finds the records of the keys of ids of weight 0, after all insertions. Has the grid of `find_records`.
extern "C" __global__ void __launch_bounds__(FIND_THREADS) find_silent(
    const __grid_constant__ Call call, const __grid_constant__ Found found) {
  begin();
  const u32 number = feature_at(call.first_find, call.num_features, blockIdx.x);
  const Feature& feature = call.features[number];
  const u32 i = (blockIdx.x - call.first_find[number]) * FIND_THREADS + threadIdx.x;
  if (!feature.is_silent || i >= feature.num_ids) return;
  found.records[feature.first_id + i] = find_alone(call.tables[feature.table].index, key_at(feature, i));
}

// Gives all ranks the rows of the out-of-vocabulary keys that this rank owns. One block for each table.
extern "C" __global__ void __launch_bounds__(WARP) share_out_of_vocabulary(
    const __grid_constant__ Peers p, const __grid_constant__ SharedRows s) {
  begin();
  const Table& t = s.tables[blockIdx.x];
  const Request& r = s.requests[blockIdx.x];
  if (!t.has_out_of_vocabulary_key || owner_of(r, p.world_size, t.out_of_vocabulary_key) != p.rank) return;
  const u32 record = find_alone(t.index, t.out_of_vocabulary_key);
  for (u32 quad = lane(); quad < t.quads; quad += WARP) {
    const float4 row = record == NO_RECORD ? rounded(t.row_type, first_values(t.initializer, t.out_of_vocabulary_key, quad))
                                           : row_columns(t, record, quad);
    for (u32 rank = 0; rank < p.world_size; ++rank)
      if (r.owner != EVERY_RANK || rank == p.rank) ((float4*)s.of_ranks[rank])[(u64)blockIdx.x * s.stride + quad] = row;
  }
}

// ---- commits

template <u32 N> struct AgreedPushes {
  AgreedPush of[N];
};

// Writes this rank's verdict where NCCL takes it from. One block, with a thread for each row of a ticket.
extern "C" __global__ void __launch_bounds__(RING) write_verdict(
    const __grid_constant__ Peers p, const __grid_constant__ Agreement a) {
  begin();
  float* verdict = (float*)a.verdicts[p.rank] + p.rank * (RING + 1);
  verdict[threadIdx.x] = a.resolved->weights[threadIdx.x];
  if (threadIdx.x == 0) ((u32*)verdict)[RING] = a.resolved->is_due;
}

// Agrees with all ranks on a commit: tells them the weights of this rank's pushes, waits for theirs, and writes the ticket of the shard. A
// push counts with the weight of all ranks. If their weights differ, the gradients of each rank are multiplied by its own. `N`: room for
// pushes. One block, with a thread for each row of a ticket.
template <u32 N>
__global__ void __launch_bounds__(RING) agree(const __grid_constant__ Peers p, u64 commit, const __grid_constant__ Agreement a,
    const __grid_constant__ AgreedPushes<N> pushes) {
  begin_meeting();
  const u32 thread = threadIdx.x;
  const float own = a.resolved->weights[thread];
  for (u32 r = 0; r < p.world_size; ++r) {
    float* verdict = (float*)a.verdicts[r] + p.rank * (RING + 1);
    store_shared(verdict + thread, own);
    if (thread == 0) store_shared((u32*)verdict + RING, a.resolved->is_due);
  }
  raise(p, GRADIENTS_READY, commit);
  bool have_come = wait_for(p, GRADIENTS_READY, commit);
  const float* verdicts = (const float*)a.verdicts[p.rank];
  bool is_due = true, is_common = true;
  float weights[MAX_RANKS];
  const AgreedPush& push = pushes.of[min(thread, N - 1)];
  const bool is_push = thread < a.num_pushes;
#pragma unroll
  for (u32 r = 0; r < MAX_RANKS; ++r) {
    weights[r] = is_push && r < p.world_size ? load_shared(verdicts + r * (RING + 1) + push.row) : 0;
    if (r < p.world_size) {
      is_due &= load_shared((const u32*)verdicts + r * (RING + 1) + RING) != 0;
      is_common &= __float_as_uint(weights[r]) == __float_as_uint(weights[0]);
    }
  }
  __shared__ bool common[RING];
  __shared__ float of_ranks[RING][MAX_RANKS];
  common[thread] = is_common;
#pragma unroll
  for (u32 r = 0; r < MAX_RANKS; ++r) of_ranks[thread][r] = weights[r];
  raise(p, AGREED, commit);
  have_come &= wait_for(p, AGREED, commit);
  a.ticket[2 * thread] = a.ticket[2 * thread + 1] = 0;
  __syncthreads();
  if (!have_come) return;
  // If a rank's ticket is refused, that of the shard names nothing.
  if (is_due && is_push) {
    const float weight = is_common ? weights[0] : 1.0f, unit = 1.0f / (1 << 20);
    a.ticket[2 * push.shard_row] = weight * unit, a.ticket[2 * push.shard_row + 1] = weight * unit * push.shard_mark;
  }
  for (u32 k = 0; k < a.num_pushes; ++k) {
    const AgreedPush& of = pushes.of[k];
    for (u32 n = thread; n < of.num_sides; n += RING) {
      Side& side = of.sides[n];
      const u32 rank = n % p.world_size;
      side.gradients += (u64)of.begins[n] * 4 * a.tables[side.table].quads;
      side.scale = common[k] ? 1.0f : of_ranks[k][rank];
    }
  }
}

// Writes this rank's squared norms to all ranks.
extern "C" __global__ void __launch_bounds__(256) send_norms(
    const __grid_constant__ Peers p, const __grid_constant__ SharedNorms n) {
  begin();
  const u32 count = n.num_tables * EXPONENTS;
  for (u32 i = blockIdx.x * 256 + threadIdx.x; i < count; i += gridDim.x * 256)
    for (u32 r = 0; r < p.world_size; ++r) ((u64*)n.of_ranks[r])[(u64)p.rank * count + i] = n.totals[i];
}

// Adds the squared norms of all ranks. All ranks have the same ones of a replicated table, so they count once.
extern "C" __global__ void __launch_bounds__(1024) add_norms(
    const __grid_constant__ Peers p, u64 commit, const __grid_constant__ SharedNorms n) {
  begin_meeting();
  raise(p, NORMS_READY, commit);
  if (!wait_for(p, NORMS_READY, commit)) return;
  const u32 count = n.num_tables * EXPONENTS;
  const u64* of_ranks = (const u64*)n.of_ranks[p.rank];
  for (u32 i = threadIdx.x; i < count; i += 1024) {
    if (n.requests[i / EXPONENTS].owner == EVERY_RANK) continue;
    u64 sum = 0;
    for (u32 r = 0; r < p.world_size; ++r) sum += load_shared(of_ranks + (u64)r * count + i);
    n.totals[i] = sum;
  }
}

// Calls `copy` for each word of the parts of messages. `blocks` blocks work on each part.
template <class Copy> __device__ __forceinline__ void each_word(const PartCopy* parts, u32 blocks, const Copy& copy) {
  const PartCopy part = parts[blockIdx.x / blocks];
#pragma unroll 4
  for (u64 i = blockIdx.x % blocks * 256 + threadIdx.x; i < part.words; i += blocks * 256) copy(part.from, part.to, i);
}

// Copies the parts of messages.
extern "C" __global__ void __launch_bounds__(256) copy_parts(const PartCopy* parts, u32 blocks) {
  begin();
  each_word(parts, blocks, [](const u64* from, u64* to, u64 i) { to[i] = from[i]; });
}
// Copies float32 to bfloat16, four numbers a word.
extern "C" __global__ void __launch_bounds__(256) narrow_parts(const PartCopy* parts, u32 blocks) {
  begin();
  each_word(parts, blocks, [](const u64* from, u64* to, u64 i) { ((uint2*)to)[i] = narrow(BFLOAT16, ((const float4*)from)[i]); });
}
// Copies bfloat16 to float32, four numbers a word.
extern "C" __global__ void __launch_bounds__(256) widen_parts(const PartCopy* parts, u32 blocks) {
  begin();
  each_word(parts, blocks, [](const u64* from, u64* to, u64 i) { ((float4*)to)[i] = widen(BFLOAT16, ((const uint2*)from)[i]); });
}
// Copies float32 and rounds it to bfloat16, four numbers a word.
extern "C" __global__ void __launch_bounds__(256) round_parts(const PartCopy* parts, u32 blocks) {
  begin();
  each_word(parts, blocks, [](const u64* from, u64* to, u64 i) { ((float4*)to)[i] = rounded(BFLOAT16, ((const float4*)from)[i]); });
}

// Adds this rank's part of the vectors of all ranks, in the order of the ranks, and writes the sums to all of them.
extern "C" __global__ void __launch_bounds__(256) add_vectors(
    const __grid_constant__ Peers p, const __grid_constant__ SharedSum s) {
  begin();
  const u64 end = s.quads * (p.rank + 1) / p.world_size, stride = (u64)gridDim.x * 256;
#pragma unroll 2
  for (u64 i = s.quads * p.rank / p.world_size + blockIdx.x * 256 + threadIdx.x; i < end; i += stride) {
    float4 sum = __ldcs((const float4*)s.vectors[0] + i);
    for (u32 r = 1; r < p.world_size; ++r) {
      const float4 x = __ldcs((const float4*)s.vectors[r] + i);
      sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
    }
    for (u32 r = 0; r < p.world_size; ++r) store_once((float4*)s.vectors[r] + s.quads + i, sum);
  }
}
