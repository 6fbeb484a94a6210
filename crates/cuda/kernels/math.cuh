// The functions of crates/core/src/math.rs, with bit-identical results: they use only + - * / and square root, and are compiled without
// contraction.
#pragma once
#include "types.cuh"

template <u32 N> __device__ __forceinline__ double horner(double x, const double (&coefficients)[N]) {
  double sum = 0.0;
#pragma unroll
  for (u32 i = 0; i < N; ++i) sum = sum * x + coefficients[i];
  return sum;
}

// `clip` and `sign` return NaN for NaN. `larger` returns `b` if one of its arguments is NaN.
__device__ __forceinline__ float clip(float x, float limit) {
  const float below = x > limit ? limit : x;
  return below < -limit ? -limit : below;
}
__device__ __forceinline__ float larger(float a, float b) { return a > b ? a : b; }
__device__ __forceinline__ float absolute(float x) { return fabsf(x); }
__device__ __forceinline__ float sign(float x) { return x > 0 ? 1.0f : x < 0 ? -1.0f : x; }

__device__ __forceinline__ double bits_as_double(u64 bits) { return __longlong_as_double((long long)bits); }

__device__ __noinline__ double ln(double x) {
  const double inverse_odds[11] = {
      1.0 / 23, 1.0 / 21, 1.0 / 19, 1.0 / 17, 1.0 / 15, 1.0 / 13, 1.0 / 11, 1.0 / 9, 1.0 / 7, 1.0 / 5, 1.0 / 3};
  const double ln_2_upper = bits_as_double(0x3fe62e4200000000ull), ln_2_lower = 4.7493250390316726e-7;
  const u64 bits = (u64)__double_as_longlong(x);
  const long long exponent_bits = (long long)(bits - 0x3fe6a09e667f3bcdull) >> 52;
  const double m = bits_as_double(bits - ((u64)exponent_bits << 52));
  const double s = (m - 1.0) / (m + 1.0), z = s * s, tail = horner(z, inverse_odds), exponent = (double)exponent_bits;
  const double small = 2.0 * s * z * tail + exponent * ln_2_lower;
  return exponent * ln_2_upper + (2.0 * s + small);
}

__device__ __forceinline__ double central_quantile(double q) {
  const double numerator[8] = {2509.0809287301227, 33430.57558358813, 67265.7709270087, 45921.95393154987, 13731.69376550946,
      1971.5909503065513, 133.14166789178438, 3.3871328727963665};
  const double denominator[8] = {5226.495278852854, 28729.085735721943, 39307.89580009271, 21213.794301586597, 5394.196021424751,
      687.1870074920579, 42.31333070160091, 1.0};
  const double r = 0.180625 - q * q;
  return q * horner(r, numerator) / horner(r, denominator);
}

__device__ __noinline__ double tail_quantile(double p, double q) {
  const double near_numerator[8] = {7.745450142783414e-4, 2.2723844989269184e-2, 2.417807251774506e-1, 1.2704582524523684,
      3.6478483247632045, 5.769497221460691, 4.630337846156546, 1.4234371107496835};
  const double near_denominator[8] = {1.0507500716844169e-9, 5.475938084995345e-4, 1.5198666563616457e-2, 1.4810397642748008e-1,
      6.897673349851e-1, 1.6763848301838038, 2.053191626637759, 1.0};
  const double far_numerator[8] = {2.0103343992922881e-7, 2.7115555687434876e-5, 1.2426609473880784e-3, 2.6532189526576124e-2,
      2.9656057182850487e-1, 1.7848265399172913, 5.463784911164114, 6.657904643501103};
  const double far_denominator[8] = {2.0442631033899398e-15, 1.421511758316446e-7, 1.8463183175100548e-5, 7.868691311456133e-4,
      1.4875361290850615e-2, 1.369298809227358e-1, 5.99832206555888e-1, 1.0};
  const double r = sqrt(-ln(q < 0.0 ? p : 1.0 - p));
  const double magnitude = r <= 5.0 ? horner(r - 1.6, near_numerator) / horner(r - 1.6, near_denominator)
                                    : horner(r - 5.0, far_numerator) / horner(r - 5.0, far_denominator);
  return q < 0.0 ? -magnitude : magnitude;
}

__device__ __forceinline__ double normal_quantile(double p) {
  const double q = p - 0.5;
  return fabs(q) <= 0.425 ? central_quantile(q) : tail_quantile(p, q);
}

// Returns e^x for x in [-200, 200].
__device__ __noinline__ double exp_of(double x) {
  const double inverse_factorials[14] = {1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0,
      1.0 / 40320.0, 1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 1.0 / 2.0, 1.0, 1.0};
  const double ln_2_upper = bits_as_double(0x3fe62e4200000000ull), ln_2_lower = 4.7493250390316726e-7, log2_e = 1.4426950408889634;
  // Adding and then subtracting 1.5 * 2^52 rounds to the nearest integer.
  const double round = 6755399441055744.0, exponent = (x * log2_e + round) - round;
  const double r = (x - exponent * ln_2_upper) - exponent * ln_2_lower;
  return horner(r, inverse_factorials) * bits_as_double((u64)((long long)exponent + 1023) << 52);
}

// Returns `base` raised to a finite `exponent`: 1 for an exponent of 0, otherwise NaN for a negative base.
__device__ __noinline__ float power(float base, float exponent) {
  if (exponent == 0.0f || base == 1.0f) return 1.0f;
  if (!(base >= 0.0f)) return __int_as_float(0x7fc00000);
  const float infinity = __int_as_float(0x7f800000);
  if (base == 0.0f || base == infinity) return (base == 0.0f) == (exponent > 0.0f) ? 0.0f : infinity;
  const double x = (double)exponent * ln((double)base);
  return (float)exp_of(x < -200.0 ? -200.0 : x > 200.0 ? 200.0 : x);
}

// Returns the square root of `x` if `is_root`, otherwise `x` raised to `exponent`.
__device__ __forceinline__ float raise(bool is_root, float x, float exponent) { return is_root ? sqrtf(x) : power(x, exponent); }

// Returns `base` raised to `count`, by repeated squaring in double precision.
__device__ __forceinline__ float power_of_step(float base, u64 count) {
  double result = 1;
  for (double square = base; count; count >>= 1, square *= square)
    if (count & 1) result *= square;
  return (float)result;
}

// Returns the product of 1 - 0.96^i / 2 over i from 1 to `count`, whose factors are 1 from step 1000 on.
__device__ __noinline__ float nadam_product(u64 count) {
  if (count >= 1000) return 9.010186e-7f;
  double product = 1, power = 1;
  for (u64 i = 0; i < count; ++i) {
    power *= 0.96;
    product *= 1.0 - 0.5 * power;
  }
  return (float)product;
}
