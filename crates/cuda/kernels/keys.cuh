// The keys of a step, by how many ids they have.
#pragma once
#include "types.cuh"

// Ids that one group of lanes sums: a run. Keys with more are hot, and their runs are summed apart.
constexpr u32 RUN = 64;
constexpr u32 HOT = 16;

struct Several {
  // `name`: of the first gradient row.
  u32 record, first, count, name;
};
struct Single {
  u32 record, gradient_row;
};
struct Hot {
  u32 record, first_run, runs, done;
};
struct Run {
  u32 first, count, hot, pad;
};

struct Lists {
  // Several << 32 | singles; hot << 32 | runs.
  u64 cold, pad0[15], hot, pad1[15];
};

// The keys of the tables of one dim.
struct Keys {
  Lists* lists;
  Single* singles;
  Several* several;
  Hot* hot;
  Run* runs;
  // (runs, dim)
  float4* partial;
  // (keys, dim): merged gradients of singles, then several, then hot.
  float4* sums;
};
static_assert(sizeof(Keys) == 56, "as crates/cuda/src/layout.rs has it");
