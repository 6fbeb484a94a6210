// The update of an optimizer without a formula: rows and states go to arrays of the framework, and new values come back.
//
// The rows to update, of all launches of a step, are one array of groups of four columns, which is cut into pieces. The columns that fill a
// row's last group belong to it. crates/core/src/contract/general.rs says how a framework uses pieces.
#include "merged.cuh"

// Adds the rows of a launch to `Piece::starts`. One thread. The launches of a step come in order.
template <u32... ROW> __global__ void count_rows(const __grid_constant__ Work<sizeof...(ROW)> w, const Piece piece) {
  begin();
  u64 quads = 0;
  u32 kind = 0;
  if (w.prepared->is_due) ((quads += (u64)Counts(*w.kinds[kind++].lists).keys() * quads_of(ROW)), ...);
  const u64 start = piece.launch ? piece.starts[piece.launch] : 0;
  piece.starts[piece.launch] = start, piece.starts[piece.launch + 1] = start + quads;
}

// Four columns of a record.
template <u32 ROW> struct Columns {
  float4* record;
  u32 quad;
  Chance chance;
  __device__ __forceinline__ float4 row() const { return load_quad<ROW>(record, quad); }
  __device__ __forceinline__ void set_row(const float4& x) const { store_updated<ROW>(record, quad, x, chance); }
  __device__ __forceinline__ float4& state(u32 k) const { return record[states_of(ROW) + k * quads_of(ROW) + quad]; }
};

// Calls `body` with four columns of a merged key of a dim, and returns true. If the dim has fewer, subtracts their number from `quad` and
// returns false. `body`: (four columns of the record, their gradient, factor).
template <u32 SOURCE, u32 ROW, class W, class Body>
__device__ __forceinline__ bool visit_columns(const W& w, const Keys& keys, u64& quad, const Body& body) {
  constexpr u32 QUADS = quads_of(ROW);
  const Counts counts(*keys.lists);
  if (quad >= (u64)counts.keys() * QUADS) {
    quad -= (u64)counts.keys() * QUADS;
    return false;
  }
  const u32 number = (u32)(quad / QUADS), column = (u32)(quad % QUADS);
  const Summed key = summed(w, keys, counts, number);
  float4* record = record_at<SOURCE>(w, key.record, key.value);
  body(Columns<ROW>{record, column, chance_of<SOURCE, ROW>(w, *w.prepared, key.value)}, keys.sums + quad,
      factor_of<SOURCE>(w, key.value));
  return true;
}

// Calls `body` with all columns of a launch that are in the piece, as `visit_columns`, and with their place in the piece.
template <u32 SOURCE, u32... ROW, class W, class Body>
__device__ __forceinline__ void visit_piece(const W& w, const Piece& piece, const Body& body) {
  const int number = *piece.number;
  if (!number || !w.prepared->is_due) return;
  const u64 first = (u64)(number - 1) * piece.quads, start = piece.starts[piece.launch],
            end = min(first + piece.quads, piece.starts[piece.launch + 1]);
  const u64 thread = (u64)blockIdx.x * UPDATE_THREADS + threadIdx.x, stride = (u64)gridDim.x * UPDATE_THREADS;
  for (u64 at = max(first, start) + thread; at < end; at += stride) {
    const auto at_place = [&](const auto& columns, const float4* sum, float factor) { body(columns, sum, factor, at - first); };
    u64 quad = at - start;
    u32 kind = 0;
    (visit_columns<SOURCE, ROW>(w, w.kinds[kind++], quad, at_place) || ...);
  }
}

// Writes the gradients of a launch's part of a piece, after factor and clipping; its rows, after weight decay; and its states.
template <u32 SOURCE, u32... ROW>
__global__ void __launch_bounds__(UPDATE_THREADS) gather_piece(const __grid_constant__ Work<sizeof...(ROW)> w, const Piece piece) {
  begin();
  const Prepared& now = *w.prepared;
  visit_piece<SOURCE, ROW...>(w, piece, [&](const auto& columns, const float4* sum, float clip, u64 place) {
    const float4 merged = scaled(*sum, now.weight), row = columns.row();
    const float factor = now.conditioning.factor * clip;
    float4 gradient, x;
#pragma unroll
    for (u32 c = 0; c < 4; ++c) {
      ((float*)&gradient)[c] = conditioned(now.conditioning, ((const float*)&merged)[c], factor);
      ((float*)&x)[c] = decayed(now.conditioning, ((const float*)&row)[c]);
    }
    ((float4*)piece.arrays[0])[place] = gradient;
    ((float4*)piece.arrays[1])[place] = x;
    for (u32 state = 0; state + 2 < piece.num_arrays; ++state) ((float4*)piece.arrays[2 + state])[place] = columns.state(state);
  });
}

// Writes the new rows and states of a launch's part of a piece to the records.
template <u32 SOURCE, u32... ROW>
__global__ void __launch_bounds__(UPDATE_THREADS) scatter_piece(const __grid_constant__ Work<sizeof...(ROW)> w, const Piece piece) {
  begin();
  visit_piece<SOURCE, ROW...>(w, piece, [&](const auto& columns, const float4*, float, u64 place) {
    columns.set_row(((const float4*)piece.arrays[0])[place]);
    for (u32 state = 0; state + 1 < piece.num_arrays; ++state)
      columns.state(state) = ((const float4*)piece.arrays[1 + state])[place];
  });
}

// Fills the places of a piece beyond the last row: zeros, and the first value of the first state.
extern "C" __global__ void __launch_bounds__(UPDATE_THREADS) fill_piece(const Piece piece, float first_state) {
  begin();
  const int number = *piece.number;
  const u64 first = number ? (u64)(number - 1) * piece.quads : 0, end = number ? piece.starts[piece.launch] : 0;
  const u64 used = end > first ? min(end - first, piece.quads) : 0, stride = (u64)gridDim.x * UPDATE_THREADS;
  for (u64 at = used + (u64)blockIdx.x * UPDATE_THREADS + threadIdx.x; at < piece.quads; at += stride)
    for (u32 array = 0; array < piece.num_arrays; ++array) {
      const float x = array == 2 ? first_state : 0.0f;
      ((float4*)piece.arrays[array])[at] = make_float4(x, x, x, x);
    }
}

// Writes the number of the next piece; 0 after the last one. One thread.
extern "C" __global__ void next_piece(const Piece piece, int* next) {
  begin();
  const int number = *piece.number;
  *next = number && (u64)number * piece.quads < piece.starts[piece.launch] ? number + 1 : 0;
}
