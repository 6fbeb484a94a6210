// Small kernels of a step: they deliver descriptors, write and read tickets, and compute the scalars and norms of an update.
#include "optimizer.cuh"
#include "step.cuh"

// Words that travel to the device in the parameters of a launch, so that no copy from the host is needed.
template <u32 N> struct Payload {
  u32 words[N];
};
// Writes the words of the payload, sets `zeros` to 0, and writes the number of a lookup if `number_to` is not null.
template <u32 N>
__global__ void __launch_bounds__(1024) deliver(const __grid_constant__ Delivery d, const __grid_constant__ Payload<N> payload) {
  begin();
  for (u32 i = threadIdx.x; i < d.count; i += 1024) d.to[i] = payload.words[i];
  for (u32 i = threadIdx.x; i < d.num_zeros; i += 1024) d.zeros[i] = 0;
  if (d.number_to && threadIdx.x < 2) d.number_to[threadIdx.x] = d.number[threadIdx.x];
}

// ---- tickets, as in crates/core/src/contract/ticket.rs

constexpr float UNIT = 1.0f / (1 << 20);

template <u32 N> struct GradientList {
  Gradients of[N];
};
// Sets `is_bad` to 1 if a gradient, a number of TYPE, is not finite. Block b reads gradients of entry b % num of the list.
template <u32 N, u32 TYPE>
__global__ void __launch_bounds__(256) check_finite(const __grid_constant__ GradientList<N> all, u32 num, u32* is_bad) {
  begin();
  const Gradients& of = all.of[blockIdx.x % num];
  const u64 stride = (u64)gridDim.x / num * 256, first = (u64)(blockIdx.x / num) * 256 + threadIdx.x;
  constexpr u32 INFINITY_BITS = TYPE == FLOAT32 ? 0x7f800000 : TYPE == FLOAT16 ? 0x7c00 : 0x7f80;
  u32 largest = 0;
#pragma unroll 4
  for (u64 i = first; i < of.count; i += stride) {
    const u32 magnitude = TYPE == FLOAT32 ? ((const u32*)of.from)[i] & 0x7fffffff : ((const unsigned short*)of.from)[i] & 0x7fff;
    largest = max(largest, magnitude);
  }
  if (largest >= INFINITY_BITS) *is_bad = 1;
}

// Writes the words of the payload and the ticket of a push.
template <u32 N>
__global__ void __launch_bounds__(1024) write_ticket(
    const __grid_constant__ NewTicket t, const __grid_constant__ Delivery d, const __grid_constant__ Payload<N> payload) {
  begin();
  for (u32 i = threadIdx.x; i < d.count; i += 1024) d.to[i] = payload.words[i];
  if (threadIdx.x >= 2 * RING) return;
  if (threadIdx.x == 0 && t.number && (t.number[0] != t.expected[0] || t.number[1] != t.expected[1]))
    report(t.fault, WRONG_LOOKUP, 0, 0, t.number[0]);
  float x = 0;
  if (threadIdx.x / 2 == t.row) x = threadIdx.x % 2 ? UNIT * t.mark : UNIT;
  if (threadIdx.x / 2 == t.row && t.is_bad && *t.is_bad) x = __int_as_float(0x7fc00000);
  __syncwarp();
  if (threadIdx.x == 2 * t.row && t.is_bad) *t.is_bad = 0;
  t.ticket[threadIdx.x] = x;
}

// The result of a commit, in memory that the host reads.
struct Report : ReportHead {
  // By table.
  TableCounts counts[1];
};
template <u32 N> struct Groups {
  Committed groups[N];
};

// Returns the mark of a push, as `mark` of crates/core/src/contract/ticket.rs.
__device__ __forceinline__ float mark_of(u64 number) {
  const double turns = (double)(number / RING) * 0.618033988749895;
  return (float)(0.5 + (turns - floor(turns)));
}

// Finds which pushes the tickets name, for all groups of an optimizer. One block, with one thread for each row of a ticket. If one
// ticket is wrong, no group is due. `norm`: is set to 0 where no norm is needed; null otherwise.
template <u32 N>
__global__ void __launch_bounds__(RING) resolve(const __grid_constant__ Groups<N> all, u32 num_groups, float* norm) {
  begin();
  const u32 row = threadIdx.x;
  if (norm && row == 0) *norm = 0;
  bool is_good = true;
  for (u32 g = 0; g < num_groups; ++g) {
    const Committed& c = all.groups[g];
    const float weight = c.ticket[2 * row], proof = c.ticket[2 * row + 1];
    const bool is_named = !(weight == 0 && proof == 0);
    const u32 since = (row + RING - (u32)(c.oldest % RING)) % RING;
    const bool is_pending = c.pending >> since & 1;
    const double off = (double)proof / (double)weight - (double)mark_of(c.oldest + since);
    const bool is_proven = is_pending && (!isfinite(weight) || fabs(off) <= 3e-6);
    is_good &= !is_named || is_proven;
  }
  const bool is_due = __syncthreads_and(is_good);
  for (u32 g = 0; g < num_groups; ++g) {
    const Committed& c = all.groups[g];
    const float weight = c.ticket[2 * row], proof = c.ticket[2 * row + 1];
    const bool is_named = !(weight == 0 && proof == 0);
    c.resolved->weights[row] = is_named ? weight / UNIT : 0;
    c.report->weights[row] = is_named ? weight / UNIT : 0;
    const u32 named = __ballot_sync(ALL, is_named);
    if (lane() == 0) ((u32*)&c.report->named)[row / WARP] = named;
    if (row == 0) c.resolved->is_due = c.report->is_due = is_due;
    if (!is_good && is_named) c.report->bad_row = row, c.report->bad_weight = weight / UNIT;
    for (u32 t = row; t < c.num_tables; t += RING) {
      const Counters* counters = c.tables[t].index.counters;
      // A table may have no candidates.
      if (!counters) continue;
      c.report->counts[t] = counts_of(counters);
    }
    __threadfence_system();
    __syncthreads();
    if (row == 0) *(volatile u64*)&c.report->commit = c.commit;
  }
}

// ---- scalars of an update

template <u32 N> struct Preparations {
  Preparation of[N];
};

// Computes what the update of a group needs, and the new value of its trigger. One block for each group. All groups have the same rule.
template <u32 N, class RULE> __global__ void __launch_bounds__(2 * RING) prepare(const __grid_constant__ Preparations<N> all) {
  begin();
  const Preparation& p = all.of[blockIdx.x];
  // The next lookup depends on the new value, so it comes after this launch. A refused ticket leaves the value unchanged.
  const bool counts = threadIdx.x == 0 && p.new_trigger && p.resolved->is_due;
  if (p.new_trigger) p.new_trigger[threadIdx.x] = p.trigger[threadIdx.x] + (counts ? 1.0f : 0.0f);
  for (u32 t = threadIdx.x; t < p.num_tables; t += blockDim.x)
    if (p.tables[t].commits && p.resolved->is_due) p.tables[t].progress->settled_commit = p.commit;
  if (threadIdx.x != 0) return;
  const float learning_rate = p.scalars[0], step = p.scalars[1], factor = p.scalars[3];
  const float weight = p.row == RING ? 1.0f : p.resolved->weights[p.row];
  Prepared now;
  // A push that is not named has weight 0. A push with a gradient that is not finite has weight NaN.
  now.is_due = p.row == RING || (p.resolved->is_due && !(weight == 0));
  now.weight = weight, now.step = (u32)(u64)step;
  now.conditioning = p.conditioning;
  now.conditioning.factor = factor, now.conditioning.learning_rate = learning_rate;
  for (u32 i = 0; i < NUM_SCALARS; ++i) now.scalars[i] = p.formula[i];
  RULE::prepare(now.scalars, learning_rate, (u64)step);
  *p.prepared = now;
}

// Writes the fields of `Prepared` that a norm needs, when the scalars of the step are not known yet.
extern "C" __global__ void prepare_weight(const Resolved* resolved, u32 row, Prepared* prepared) {
  begin();
  const float weight = row == RING ? 1.0f : resolved->weights[row];
  prepared->is_due = row == RING || (resolved->is_due && !(weight == 0));
  prepared->weight = weight;
}

// ---- norms

// Computes the squared norm of each table from its totals by exponent, (tables, 256), with one thread for each table. Then adds those of the
// tables that the model's optimizer updates to `total`, in the order of the tables.
extern "C" __global__ void finish_norms(
    const u64* __restrict__ totals, const Table* tables, u32 num_tables, float* norms, double* total) {
  begin();
  for (u32 t = threadIdx.x; t < num_tables; t += blockDim.x) {
    const u64* of = totals + (u64)t * EXPONENTS;
    double sum = 0;
    for (u32 e = 0; e < EXPONENTS - 1; ++e) sum += (double)of[e] * bits_as_double((u64)(1023 - 127 - 23 + max(e, 1)) << 52);
    if (of[EXPONENTS - 1]) sum = bits_as_double(0x7ff8000000000000ull);
    ((double*)(totals + (u64)num_tables * EXPONENTS))[t] = sum;
    norms[t] = (float)sum;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  double sum = 0;
  for (u32 t = 0; t < num_tables; ++t)
    if (tables[t].optimizer == 0) sum += ((const double*)(totals + (u64)num_tables * EXPONENTS))[t];
  *total += sum;
}

// Writes the squared norm as float32, as the framework gets it.
extern "C" __global__ void give_norm(const double* total, float* out) {
  begin();
  *out = (float)*total;
}

// Computes the factor that clips the gradients of each table by the table's own norm.
extern "C" __global__ void clip_factors(
    const float* __restrict__ norms, u32 num_tables, const float* __restrict__ scalars, float clipnorm, float* factors) {
  begin();
  for (u32 t = threadIdx.x; t < num_tables; t += blockDim.x) {
    const float factor = scalars[3], norm = sqrtf(norms[t] * factor * factor);
    factors[t] = norm <= clipnorm ? 1.0f : clipnorm / norm;
  }
}
