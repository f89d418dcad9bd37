// The two inner loops of attention: scores of cells, and weighted sums of them.
//
// Their loops over rows and vectors are unrolled, so that all sums stand in registers: a key or
// value is read once for all rows. What the numbers of rows and of lanes change is which sums are
// computed at the same time, never the order in which one is added up.
#pragma once

#include "attention_cells.h"

namespace rows {
namespace {

// From row to row of sums; no power of two, with which rows would compete for the same cache lines.
inline constexpr int kRowFloats = kMaxHeadSize + 16;

// Rows stand beside each other in an array of scores, in a power of two.
constexpr int stride_of(int num_rows) {
  return num_rows > 4 ? 8 : num_rows > 2 ? 4 : num_rows;
}

// Dot products of kCells keys with kRows queries: lane i sums elements i, i + 16, i + 32 ..., of
// which vector `part` of 16 / kLanes is computed here. queries: [element / 16][row][element % 16].
template <class S, class Cells, int kRows, int kCells>
ROWS_INLINE void sum_products(const char* const* keys, const float* queries, int head_size,
                              int part, typename S::Float* sums) {
  using Float = typename S::Float;
  constexpr int stride = S::kLanes / kCells;
  Float sum[S::kLanes];
  ROWS_UNROLL for (int i = 0; i < S::kLanes; ++i) sum[i] = S::all(0.0f);
  int at = part * S::kLanes;
  queries += at;
  for (; at + S::kLanes <= head_size; at += 16, queries += 16 * kRows) {
    Float query[kRows];
    ROWS_UNROLL for (int r = 0; r < kRows; ++r) query[r] = S::load(queries + 16 * r);
    ROWS_UNROLL for (int c = 0; c < kCells; ++c) {
      const Float key = Cells::load(keys[c], at);
      ROWS_UNROLL for (int r = 0; r < kRows; ++r)
        sum[c * stride + r] = S::fma(key, query[r], sum[c * stride + r]);
    }
  }
  if constexpr (S::kLanes == 16)
    if (at < head_size)
      ROWS_UNROLL for (int c = 0; c < kCells; ++c) {
        const Float key = Cells::load_rest(keys[c], at);  // its zeros change no score
        ROWS_UNROLL for (int r = 0; r < kRows; ++r)
          sum[c * stride + r] = S::fma(key, S::load(queries + 16 * r), sum[c * stride + r]);
      }
  ROWS_UNROLL for (int i = 0; i < S::kLanes; ++i) sums[i] = sum[i];
}

// Keeps the compiler from holding both halves of sums in registers that suffice for one.
template <class Float>
ROWS_INLINE void leave_registers(Float* sums) {
  asm volatile("" : : "r"(sums) : "memory");
}

// Asks for cells that will be read soon. Two in a row may be far apart, which processors do not
// foresee: all other heads stand between them.
inline constexpr int kCellsAhead = 16;
ROWS_INLINE void fetch(const char* const* cells, int count, int bytes) {
  for (int j = 0; j < count; ++j)
    for (int at = 0; at < bytes; at += 64) __builtin_prefetch(cells[kCellsAhead + j] + at);
}

// Scores [cell][row] of `count` cells: dot products times `scale`. The last vector is filled up.
template <class S, class Cells, int kRows>
void score_cells(const char* const* keys, int count, const float* queries, int head_size,
                 float scale, float* scores) {
  constexpr int lanes = S::kLanes, parts = 16 / lanes, cells = lanes / stride_of(kRows);
  for (int j = 0; j < count; j += cells, scores += lanes) {
    fetch(keys + j, cells, head_size * Cells::kBytes);
    typename S::Float sums[parts][lanes];
    ROWS_UNROLL for (int p = 0; p < parts; ++p) {
      sum_products<S, Cells, kRows, cells>(keys + j, queries, head_size, p, sums[p]);
      if constexpr (parts == 2)
        if (p == 0) leave_registers(sums[0]);
    }
    ROWS_UNROLL for (int i = 0; i < lanes; ++i) {
      if constexpr (parts == 4) {
        sums[0][i] = S::add(sums[0][i], sums[2][i]);
        sums[1][i] = S::add(sums[1][i], sums[3][i]);
      }
      if constexpr (parts > 1) sums[0][i] = S::add(sums[0][i], sums[1][i]);
    }
    S::store(scores, S::mul(S::sums(sums[0]), S::all(scale)));
  }
}

// Whether totals are added up beside the first sums, as further chains: 3 or 4 rows leave registers
// for them. With fewer or more, a loop of its own is faster.
constexpr bool adds_totals_beside(int num_rows) { return num_rows == 3 || num_rows == 4; }

// sums[row][at ...] += weights[cell][row] * value, cell after cell, for kVectors vectors of values.
template <class S, class Cells, int kRows, int kVectors>
ROWS_INLINE void add_vectors(const char* const* values, int count, const float* weights,
                             int stride, float* sums, int at, int value_size, float* totals) {
  using Float = typename S::Float;
  const bool is_first = at == 0, is_rest = at + S::kLanes > value_size;
  Float sum[kRows][kVectors], total[kRows];
  ROWS_UNROLL for (int r = 0; r < kRows; ++r) {
    total[r] = S::all(totals[r]);
    ROWS_UNROLL for (int v = 0; v < kVectors; ++v)
      sum[r][v] = S::load(sums + r * kRowFloats + at + v * S::kLanes);
  }
  for (int j = 0; j < count; ++j, weights += stride) {
    Float value[kVectors];
    if (is_first) fetch(values + j, 1, value_size * Cells::kBytes);
    ROWS_UNROLL for (int v = 0; v < kVectors; ++v) {
      if (S::kLanes == 16 && is_rest)
        value[v] = Cells::load_rest(values[j], at + v * S::kLanes);
      else
        value[v] = Cells::load(values[j], at + v * S::kLanes);
    }
    ROWS_UNROLL for (int r = 0; r < kRows; ++r) {
      const Float weight = S::all(weights[r]);
      if (adds_totals_beside(kRows) && is_first) total[r] = S::add(total[r], weight);
      ROWS_UNROLL for (int v = 0; v < kVectors; ++v)
        sum[r][v] = S::fma(weight, value[v], sum[r][v]);
    }
  }
  ROWS_UNROLL for (int r = 0; r < kRows; ++r) {
    if (adds_totals_beside(kRows)) {
      float lanes[S::kLanes];
      S::store(lanes, total[r]);
      totals[r] = lanes[0];
    }
    ROWS_UNROLL for (int v = 0; v < kVectors; ++v)
      S::store(sums + r * kRowFloats + at + v * S::kLanes, sum[r][v]);
  }
}

// Adds the weights of `count` cells to totals, and their weighted values to sums.
template <class S, class Cells, int kRows>
void add_cells(const char* const* values, int count, const float* weights, int stride, float* sums,
               int value_size, float* totals) {
  constexpr int lanes = S::kLanes;
  constexpr int vectors = kRows > 4 ? 2 : kRows > 2 ? (lanes == 8 ? 2 : 4) : kRows > 1 ? 4 : 8;
  if (!adds_totals_beside(kRows)) {
    float total[kRows];
    for (int r = 0; r < kRows; ++r) total[r] = totals[r];
    for (int j = 0; j < count; ++j)
      for (int r = 0; r < kRows; ++r) total[r] += weights[j * stride + r];
    for (int r = 0; r < kRows; ++r) totals[r] = total[r];
  }
  int at = 0;
  for (; at + vectors * lanes <= value_size; at += vectors * lanes)
    add_vectors<S, Cells, kRows, vectors>(values, count, weights, stride, sums, at, value_size,
                                          totals);
  for (; at < value_size; at += lanes)
    add_vectors<S, Cells, kRows, 1>(values, count, weights, stride, sums, at, value_size, totals);
}

}  // namespace
}  // namespace rows
