// Clipping and weight decay, which come before the formula's own step. The same as in crates/core/src/formula/update.rs.
#pragma once
#include "formulas.cuh"

// Returns a column's merged gradient, scaled and clipped. `factor`: the factor of the step, times the factor that clips by the norm of
// the table.
__device__ __forceinline__ float conditioned(const Conditioning& c, float gradient, float factor) {
  return clip(gradient * factor, c.clipvalue);
}

// Returns a column's value after decoupled weight decay.
__device__ __forceinline__ float decayed(const Conditioning& c, float x) {
  return c.decays ? x - x * c.weight_decay * c.learning_rate : x;
}
