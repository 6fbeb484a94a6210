// One column's update: the formulas of crates/core/src/optimizer.rs in their order of operations, compiled without contraction.
#pragma once
#include "math.cuh"

// What is done to a column's merged gradient and to its value before the rule's own step.
struct Conditioning {
  float factor, clipvalue, weight_decay, learning_rate;
  u32 decays;
  // `by`: the factor, with what clipping by a table's norm makes of it.
  __device__ __forceinline__ float gradient(float g, float by) const {
    const float scaled = g * by, below = scaled > clipvalue ? clipvalue : scaled;
    return below < -clipvalue ? -clipvalue : below;
  }
  __device__ __forceinline__ float value(float x) const { return decays ? x - x * weight_decay * learning_rate : x; }
};

// Scalars of a rule, made ready for this step of training; each rule says what it has where.
struct Scalars {
  float a, b, c, d, e;
};

// a: the learning rate.
struct Sgd {
  static constexpr u32 STATES = 0;
  static __device__ __forceinline__ float step(const Scalars& s, float x, float*, float g) { return x - g * s.a; }
};

// a: the learning rate; b: momentum.
template <bool NESTEROV> struct Momentum {
  static constexpr u32 STATES = 1;
  static __device__ __forceinline__ float step(const Scalars& s, float x, float* states, float g) {
    states[0] = states[0] * s.b - g * s.a;
    return NESTEROV ? x + (states[0] * s.b - g * s.a) : x + states[0];
  }
};

// a: the learning rate with both bias corrections; b, c: 1 - beta; d: epsilon.
template <bool AMSGRAD> struct Adam {
  static constexpr u32 STATES = 2 + AMSGRAD;
  static __device__ __forceinline__ float step(const Scalars& s, float x, float* states, float g) {
    states[0] += (g - states[0]) * s.b;
    states[1] += (g * g - states[1]) * s.c;
    float variance = states[1];
    if (AMSGRAD) variance = states[2] = states[2] > states[1] ? states[2] : states[1];
    return x - (states[0] * s.a) / (sqrtf(variance) + s.d);
  }
};

// a: the learning rate; d: epsilon.
struct Adagrad {
  static constexpr u32 STATES = 1;
  static __device__ __forceinline__ float step(const Scalars& s, float x, float* states, float g) {
    states[0] += g * g;
    return x - (s.a * g) / sqrtf(states[0] + s.d);
  }
};

// a: the learning rate; b: rho; c: 1 - rho; d: epsilon; e: momentum.
template <bool MOMENTUM, bool CENTERED> struct RmsProp {
  static constexpr u32 STATES = 1 + MOMENTUM + CENTERED;
  static __device__ __forceinline__ float step(const Scalars& s, float x, float* states, float g) {
    const float velocity = s.b * states[0] + s.c * (g * g);
    states[0] = velocity;
    float variance = velocity;
    if (CENTERED) {
      float& average = states[1 + MOMENTUM];
      average = s.b * average + s.c * g;
      variance = velocity - average * average;
    }
    const float increment = (s.a * g) / sqrtf(variance + s.d);
    if (!MOMENTUM) return x - increment;
    states[1] = s.e * states[1] + increment;
    return x - states[1];
  }
};

// a: the learning rate; b: l1; c: twice l2; d: twice the shrinkage; e: the power of the accumulator. SQRT: it is one half.
template <bool SQRT> struct Ftrl {
  static constexpr u32 STATES = 2;
  static __device__ __forceinline__ float raise(const Scalars& s, float x) { return SQRT ? sqrtf(x) : power(x, s.e); }
  static __device__ __forceinline__ float step(const Scalars& s, float x, float* states, float g) {
    const float old_power = raise(s, states[0]);
    states[0] += g * g;
    const float new_power = raise(s, states[0]);
    const float shrunk = g + s.d * x;
    states[1] += shrunk - (new_power - old_power) / s.a * x;
    const float quadratic = new_power / s.a + s.c;
    const float linear = states[1], below = linear > s.b ? s.b : linear;
    return ((below < -s.b ? -s.b : below) - linear) / quadratic;
  }
};

// One accumulator a row: the running sum of the mean of squares of its gradient. The only rule whose columns depend on each
// other. a: the learning rate; d: epsilon. `STATES` of it counts states of a column.
struct RowWiseAdagrad {
  static constexpr u32 STATES = 0;
  static __device__ __forceinline__ float step(const Scalars& s, float x, float divisor, float g) { return x - (s.a * g) / divisor; }
};
