// What holds a step together: descriptors in, tickets out and in, scalars of the update.
#include "optimizer.cuh"
#include "step.cuh"

// Words that a launch carries to the device in its parameters, so that nothing is copied from the host.
template <u32 N> struct Payload {
  u32 words[N];
};
struct Delivery {
  u32 *to, *zeros;
  u32 count, num_zeros;
  // Where the number of a lookup goes, as two words; or null.
  u32* number_to;
  u32 number[2], pad[2];
};
static_assert(sizeof(Delivery) == 48, "as crates/cuda/src/layout.rs has it");
template <u32 N> __global__ void __launch_bounds__(1024) deliver(const __grid_constant__ Delivery d, const __grid_constant__ Payload<N> payload) {
  begin();
  for (u32 i = threadIdx.x; i < d.count; i += 1024) d.to[i] = payload.words[i];
  for (u32 i = threadIdx.x; i < d.num_zeros; i += 1024) d.zeros[i] = 0;
  if (d.number_to && threadIdx.x < 2) d.number_to[threadIdx.x] = d.number[threadIdx.x];
}

// ---- tickets, as crates/core/src/ticket.rs has them

constexpr u32 RING = 64;
constexpr float UNIT = 1.0f / (1 << 20);

template <u32 N> struct GradientList {
  Gradients of[N];
};
// Whether gradients are finite: sets `is_bad` if not. Blocks take turns: one for each of the list.
template <u32 N> __global__ void __launch_bounds__(256) check_finite(const __grid_constant__ GradientList<N> all, u32 num, u32* is_bad) {
  begin();
  const Gradients& of = all.of[blockIdx.x % num];
  const u64 stride = (u64)gridDim.x / num * 256, first = (u64)(blockIdx.x / num) * 256 + threadIdx.x;
  u32 largest = 0;
#pragma unroll 4
  for (u64 i = first; i < of.count; i += stride) largest = max(largest, __float_as_uint(of.from[i]) & 0x7fffffff);
  if (largest >= 0x7f800000) *is_bad = 1;
}

struct NewTicket {
  float* ticket;
  // Set if a gradient is not finite, which is then told once; null if nobody asks.
  u32* is_bad;
  u32 row;
  float mark;
  // Of the lookup: where the framework has its number, as two words, and what it must be; null if that is known.
  const u32* number;
  u32 expected[2];
  Fault* fault;
};
static_assert(sizeof(NewTicket) == 48, "as crates/cuda/src/layout.rs has it");
// As `deliver`, and writes the ticket of a push.
template <u32 N> __global__ void __launch_bounds__(1024) write_ticket(const __grid_constant__ NewTicket t, const __grid_constant__ Delivery d, const __grid_constant__ Payload<N> payload) {
  begin();
  for (u32 i = threadIdx.x; i < d.count; i += 1024) d.to[i] = payload.words[i];
  if (threadIdx.x >= 2 * RING) return;
  if (threadIdx.x == 0 && t.number && (t.number[0] != t.expected[0] || t.number[1] != t.expected[1])) report(t.fault, WRONG_LOOKUP, 0, 0, t.number[0]);
  float x = 0;
  if (threadIdx.x / 2 == t.row) x = threadIdx.x % 2 ? UNIT * t.mark : UNIT;
  if (threadIdx.x / 2 == t.row && t.is_bad && *t.is_bad) x = __int_as_float(0x7fc00000);
  __syncwarp();
  if (threadIdx.x == 2 * t.row && t.is_bad) *t.is_bad = 0;
  t.ticket[threadIdx.x] = x;
}

// What a ticket names, on the device; `is_due`: it was good, and those of all other groups of the optimizer were.
struct Resolved {
  u32 is_due, pad;
  // By row of the ring; 0: not named.
  float weights[RING];
};
// The same in memory that the host reads, with what else it is to learn without waiting. `commit` is written last.
struct Report {
  u64 commit;
  u32 is_due;
  // Of a row that is wrong, and its weight.
  u32 bad_row;
  float bad_weight;
  u32 pad;
  u64 named;
  float weights[RING];
  // By table: `taken`, `distinct` and `dropped` of its counters.
  u32 counts[1][3];
};
struct Committed {
  const float* ticket;
  Resolved* resolved;
  Report* report;
  const Table* tables;
  u64 commit;
  // The oldest push that is pending, and by bit the others from it on.
  u64 oldest, pending;
  u32 num_tables, pad;
};
static_assert(sizeof(Committed) == 64, "as crates/cuda/src/layout.rs has it");
template <u32 N> struct Groups {
  Committed groups[N];
};

__device__ __forceinline__ float mark_of(u64 number) {
  const double turns = (double)(number / RING) * 0.618033988749895;
  return (float)(0.5 + (turns - floor(turns)));
}

// One block: all groups of an optimizer, of which none is due if one ticket is wrong. A thread a row. `norm`: takes 0, if nobody asks
// for one; else null.
template <u32 N> __global__ void __launch_bounds__(RING) resolve(const __grid_constant__ Groups<N> all, u32 num_groups, float* norm) {
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
      c.report->counts[t][0] = counters->taken, c.report->counts[t][1] = counters->distinct, c.report->counts[t][2] = counters->dropped;
    }
    __threadfence_system();
    __syncthreads();
    if (row == 0) *(volatile u64*)&c.report->commit = c.commit;
  }
}

// ---- scalars of an update

enum RuleKind : u32 { PLAIN, ADAM, FTRL };

// A rule's own numbers; those that depend on the step are made here, as crates/core/src/optimizer.rs does.
struct RuleNumbers {
  u32 kind;
  // ADAM: the betas. FTRL: l2, beta.
  float first, second;
  // Those that a step does not change; `a` is the learning rate, with both bias corrections for Adam.
  Scalars scalars;
  float clipvalue, weight_decay;
  u32 decays;
};
struct Prepared {
  u32 is_due;
  float weight;
  Conditioning conditioning;
  Scalars scalars;
};
struct Preparation {
  // Learning rate, step, is_update, factor.
  const float* scalars;
  const Resolved* resolved;
  Prepared* prepared;
  const float* trigger;
  float* new_trigger;
  RuleNumbers rule;
  // Row of the push that is to be applied; RING: sums of several, with their weights in them.
  u32 row, pad;
};
static_assert(sizeof(Preparation) == 96, "as crates/cuda/src/layout.rs has it");
template <u32 N> struct Preparations {
  Preparation of[N];
};

// As `math::whole_power`: by squaring, in double.
__device__ double whole_power(double base, u64 exponent) {
  double result = 1;
  for (double square = base; exponent; exponent >>= 1, square *= square)
    if (exponent & 1) result *= square;
  return result;
}

__device__ __forceinline__ Scalars scalars_now(const RuleNumbers& rule, float learning_rate, u64 step) {
  Scalars now = rule.scalars;
  now.a = learning_rate;
  if (rule.kind == ADAM) {
    const float second = (float)whole_power((double)rule.second, step), first = (float)whole_power((double)rule.first, step);
    now.a = learning_rate * sqrtf(1.0f - second) / (1.0f - first);
  } else if (rule.kind == FTRL) {
    now.c = 2.0f * (rule.first + rule.second / (2.0f * learning_rate));
  }
  return now;
}

// A block a group: what its update needs, and the new value of its trigger.
template <u32 N> __global__ void __launch_bounds__(2 * RING) prepare(const __grid_constant__ Preparations<N> all) {
  begin();
  const Preparation& p = all.of[blockIdx.x];
  // The next lookup depends on the new value, so it comes after this. A ticket that was refused changes nothing.
  const bool counts = threadIdx.x == 0 && p.new_trigger && p.resolved->is_due;
  if (p.new_trigger) p.new_trigger[threadIdx.x] = p.trigger[threadIdx.x] + (counts ? 1.0f : 0.0f);
  if (threadIdx.x != 0) return;
  const float learning_rate = p.scalars[0], step = p.scalars[1], factor = p.scalars[3];
  const float weight = p.row == RING ? 1.0f : p.resolved->weights[p.row];
  Prepared now;
  // A push that is not named has weight 0; one whose gradient is not finite has none that is a number.
  now.is_due = p.row == RING || (p.resolved->is_due && !(weight == 0));
  now.weight = weight;
  now.conditioning = {factor, p.rule.clipvalue, p.rule.weight_decay, learning_rate, p.rule.decays};
  now.scalars = scalars_now(p.rule, learning_rate, (u64)step);
  *p.prepared = now;
}

// Before the scalars are known: what a norm needs.
extern "C" __global__ void prepare_weight(const Resolved* resolved, u32 row, Prepared* prepared) {
  begin();
  const float weight = row == RING ? 1.0f : resolved->weights[row];
  prepared->is_due = row == RING || (resolved->is_due && !(weight == 0));
  prepared->weight = weight;
}

// ---- norms

constexpr u32 EXPONENTS = 256;

// From totals by exponent, (tables, 256), to each table's squared norm. One thread a table; adds them to `total`, in their order.
extern "C" __global__ void finish_norms(const u64* __restrict__ totals, u32 num_tables, float* norms, double* total) {
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
  for (u32 t = 0; t < num_tables; ++t) sum += ((const double*)(totals + (u64)num_tables * EXPONENTS))[t];
  *total += sum;
}

// The squared norm as the framework gets it.
extern "C" __global__ void give_norm(const double* total, float* out) {
  begin();
  *out = (float)*total;
}

// What clipping by a table's own norm multiplies its gradients by.
extern "C" __global__ void clip_factors(const float* __restrict__ norms, u32 num_tables, const float* __restrict__ scalars, float clipnorm, float* factors) {
  begin();
  for (u32 t = threadIdx.x; t < num_tables; t += blockDim.x) {
    const float factor = scalars[3], norm = sqrtf(norms[t] * factor * factor);
    factors[t] = norm <= clipnorm ? 1.0f : clipnorm / norm;
  }
}
