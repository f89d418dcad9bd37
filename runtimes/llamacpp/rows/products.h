// A tile of weights times up to kPanelRows rows of activations, for each type of weights.
//
// Within a block sums are integers; blocks are added one after the other, each with one
// multiply-add. simd_portable.h describes the class of vectors `S`.
#pragma once

#include <utility>

#include "packing.h"
#include "panels.h"
#include "simd_portable.h"

namespace rows {
namespace {

constexpr int kPrefetchBytes = 8192;  // how far ahead of its use memory is asked for

template <int kBytes>
ROWS_INLINE void prefetch(const uint8_t* p) {
  for (int i = 0; i < kBytes; i += 64) __builtin_prefetch(p + kPrefetchBytes + i);
}

// W`g` of the group at p, as packing.h describes it: unsigned, but of 8 bits as stored.
template <class S, int kBits, int g>
ROWS_INLINE typename S::Bytes weights(const uint8_t* p) {
  const auto piece = [p](int j) { return S::load_bytes(p + 4 * S::kLanes * j); };
  if constexpr (kBits == 8) return piece(g);
  if constexpr (kBits == 4) return S::template bits<g % 2 * 4, 15>(piece(g / 2));
  if constexpr (g < kBits) return S::template bits<0, (1 << kBits) - 1>(piece(g));
  if constexpr (kBits == 5 && g < 7)
    return S::template merge<2, 24>(S::template bits<5, 7>(piece(2 * g - 10)), piece(2 * g - 9));
  if constexpr (kBits == 5)
    return S::template merge<3, 16>(
        S::template merge<4, 8>(S::template bits<5, 7>(piece(4)), piece(1)), piece(3));
  constexpr int from = 3 * (g - 6);
  return S::template merge<2, 48>(
      S::template merge<4, 12>(S::template bits<6, 3>(piece(from)), piece(from + 1)),
      piece(from + 2));
}

// One step of add_products: W`g`, number `step` of `count`, with all rows.
template <class S, int kBits, int kStride, bool kScaled, int g, int step, int count, int kRows>
ROWS_INLINE void add_product(typename S::Int (&sums)[kRows], typename S::Chain (&chains)[kRows],
                             const uint8_t* p, const int8_t* a, typename S::Scale scale) {
  constexpr int length = S::chain_length(kBits);
  constexpr int piece = 4 * S::kLanes;
  if constexpr (g < kBits) prefetch<piece>(p + piece * g);  // a few at a time: many would stall
  const auto w = weights<S, kBits, g>(p);
  for (int m = 0; m < kRows; ++m) {
    const int8_t* values = a + kStride * m;
    if constexpr (S::kChainIsSum && !kScaled)
      sums[m] = S::template next<step>(sums[m], w, values);
    else if constexpr (step % length == 0)
      chains[m] = S::template first<kBits, step>(w, values);
    else
      chains[m] = S::template next<step>(chains[m], w, values);
  }
  if constexpr ((!S::kChainIsSum || kScaled) && (step % length == length - 1 || step + 1 == count))
    for (int m = 0; m < kRows; ++m) sums[m] = S::finish(sums[m], chains[m], scale);
}

// Adds to each row's sum the dot product of weights from W`first` on of the group at p with the
// values at a; those of the next row stand kStride bytes further on.
template <class S, int kBits, int kStride, bool kScaled, int first, int kRows, int... steps>
ROWS_INLINE void add_products(typename S::Int (&sums)[kRows], const uint8_t* p, const int8_t* a,
                              typename S::Scale scale, std::integer_sequence<int, steps...>) {
  typename S::Chain chains[kRows];
  (add_product<S, kBits, kStride, kScaled, first + steps, steps, sizeof...(steps)>(sums, chains, p,
                                                                                   a, scale),
   ...);
}
template <int count>
constexpr std::make_integer_sequence<int, count> steps;

// Where a kernel writes: kLanes floats for each row, or the first `count` of them.
template <class S, int kRows>
ROWS_INLINE void write(const typename S::Float (&sums)[kRows], float* const* out, int count) {
  for (int m = 0; m < kRows; ++m) {
    if (count == S::kLanes) {
      S::store(out[m], sums[m]);
    } else {
      float values[S::kLanes];
      S::store(values, sums[m]);
      std::memcpy(out[m], values, sizeof(float) * static_cast<size_t>(count));
    }
  }
}

// Q4_K and Q5_K: d * scale * w - dmin * minimum; a scale and a minimum for each group.
template <class S, int kBits, int kRows>
void multiply_4k_5k(const uint8_t* tile, int64_t num_blocks, const void* panel, int row,
                    float* const* out, int num_outputs) {
  constexpr int lanes = S::kLanes, group = group_bytes(lanes, kBits);
  constexpr int minima = 8 * group + 8 * lanes, d_at = minima + 8 * lanes;
  typename S::Float sums[kRows];
  for (int m = 0; m < kRows; ++m) sums[m] = S::all(0.0f);
  const Panel256* a = static_cast<const Panel256*>(panel);
  for (int64_t b = 0; b < num_blocks; ++b, ++a, tile += d_at + 4 * lanes) {
    typename S::Int products[kRows], offsets[kRows];
    for (int m = 0; m < kRows; ++m) products[m] = offsets[m] = S::all_int(0);
    prefetch<20 * lanes>(tile + 8 * group);
#pragma GCC unroll 1
    for (int p = 0; p < 4; ++p) {
      const auto scales = S::template load_pairs<false>(tile + 8 * group + 2 * lanes * p);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const uint8_t* weights = tile + group * (2 * p + half);
        add_products<S, kBits, 256, true, 0>(products, weights,
                                             a->values[row] + 64 * p + 32 * half,
                                             half ? S::odd(scales) : S::even(scales), steps<8>);
      }
    }
    for (int p = 0; p < 4; ++p) {
      const auto pair = S::template load_pairs<false>(tile + minima + 2 * lanes * p);
      for (int m = 0; m < kRows; ++m)
        offsets[m] = S::dot_pairs(offsets[m], pair, a->sums_of_32[row + m] + 2 * p);
    }
    const auto d = S::load_half(reinterpret_cast<const uint16_t*>(tile + d_at));
    const auto dmin = S::load_half(reinterpret_cast<const uint16_t*>(tile + d_at + 2 * lanes));
    for (int m = 0; m < kRows; ++m) {
      const auto factor = S::all(a->scales[row + m]);
      sums[m] = S::fma(S::to_float(products[m]), S::mul(d, factor), sums[m]);
      sums[m] = S::fnma(S::to_float(offsets[m]), S::mul(dmin, factor), sums[m]);
    }
  }
  write<S, kRows>(sums, out, num_outputs);
}

// Q6_K: d * scale * (w - 32); a signed scale for each half of a group.
template <class S, int kRows>
void multiply_6k(const uint8_t* tile, int64_t num_blocks, const void* panel, int row,
                 float* const* out, int num_outputs) {
  constexpr int lanes = S::kLanes, group = group_bytes(lanes, 6);
  constexpr int d_at = 8 * group + 16 * lanes;
  typename S::Float sums[kRows];
  for (int m = 0; m < kRows; ++m) sums[m] = S::all(0.0f);
  const Panel256* a = static_cast<const Panel256*>(panel);
  for (int64_t b = 0; b < num_blocks; ++b, ++a, tile += d_at + 4 * lanes) {
    typename S::Int products[kRows], offsets[kRows];
    for (int m = 0; m < kRows; ++m) products[m] = offsets[m] = S::all_int(0);
    prefetch<20 * lanes>(tile + 8 * group);
#pragma GCC unroll 1
    for (int p = 0; p < 8; ++p) {
      const uint8_t* weights = tile + group * p;
      const auto scales = S::template load_pairs<true>(tile + 8 * group + 2 * lanes * p);
      const int8_t* values = a->values[row] + 32 * p;
      add_products<S, 6, 256, true, 0>(products, weights, values, S::even(scales), steps<4>);
      add_products<S, 6, 256, true, 4>(products, weights, values + 16, S::odd(scales), steps<4>);
    }
    for (int p = 0; p < 8; ++p) {
      const auto pair = S::template load_pairs<true>(tile + 8 * group + 2 * lanes * p);
      for (int m = 0; m < kRows; ++m)
        offsets[m] = S::dot_pairs(offsets[m], pair, a->sums_of_16[row + m] + 2 * p);
    }
    const auto d = S::load_half(reinterpret_cast<const uint16_t*>(tile + d_at));
    for (int m = 0; m < kRows; ++m) {
      const auto product = S::template minus_shifted<5>(products[m], offsets[m]);
      sums[m] = S::fma(S::to_float(product), S::mul(d, S::all(a->scales[row + m])), sums[m]);
    }
  }
  write<S, kRows>(sums, out, num_outputs);
}

// Q4_0, Q5_0: d * (w - 2^(bits - 1)); Q4_1, Q5_1: d * w + m; Q8_0: d * w.
template <class S, int kBits, bool kMinimum, int kRows>
void multiply_32(const uint8_t* tile, int64_t num_blocks, const void* panel, int row,
                 float* const* out, int num_outputs) {
  constexpr int lanes = S::kLanes, group = group_bytes(lanes, kBits);
  constexpr int unit = 2 * group + (kMinimum ? 8 : 4) * lanes;
  constexpr int bias = kMinimum ? 0 : kBits == 8 ? S::kByteBias : 1 << (kBits - 1);
  typename S::Float sums[kRows];
  for (int m = 0; m < kRows; ++m) sums[m] = S::all(0.0f);
  const Panel32* a = static_cast<const Panel32*>(panel);
  for (int64_t b = 0; b < num_blocks; ++b, ++a) {
    const uint8_t* both = tile + b / 2 * unit;
    const uint8_t* weights = both + b % 2 * group;
    const uint8_t* d_at = both + 2 * group + b % 2 * 2 * lanes;
    if (b % 2 == 0) prefetch<unit - 2 * group>(both + 2 * group);
    typename S::Int products[kRows];
    for (int m = 0; m < kRows; ++m) products[m] = S::all_int(-bias * a->sums[row + m]);
    add_products<S, kBits, 32, false, 0>(products, weights, a->values[row], S::one(), steps<8>);
    const auto d = S::load_half(reinterpret_cast<const uint16_t*>(d_at));
    for (int m = 0; m < kRows; ++m)
      sums[m] = S::fma(S::to_float(products[m]), S::mul(d, S::all(a->scales[row + m])), sums[m]);
    if constexpr (kMinimum) {
      const auto minimum = S::load_half(reinterpret_cast<const uint16_t*>(d_at + 4 * lanes));
      for (int m = 0; m < kRows; ++m)
        sums[m] = S::fma(minimum, S::all(a->scaled_sums[row + m]), sums[m]);
    }
  }
  write<S, kRows>(sums, out, num_outputs);
}

// kLanes weights of F16, BF16 or F32.
template <class S, Type type>
ROWS_INLINE typename S::Float load_numbers(const uint8_t* p) {
  if constexpr (type == Type::F32) return S::load(reinterpret_cast<const float*>(p));
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(p);
  if constexpr (type == Type::F16) return S::load_half(halves);
  return S::load_bfloat(halves);
}

// F16, BF16 and F32: products of floats, in two chains (even and odd values) that are added at the
// end. Registers hold the chains of half as many rows as of other types.
template <class S, Type type, int kRows>
void multiply_numbers(const uint8_t* tile, int64_t num_values, const void* panel, int row,
                      float* const* out, int num_outputs) {
  if constexpr (2 * kRows > S::kRowsAtOnce && kRows > 1) {
    constexpr int half = kRows / 2, rest = kRows - half;
    multiply_numbers<S, type, half>(tile, num_values, panel, row, out, num_outputs);
    multiply_numbers<S, type, rest>(tile, num_values, panel, row + half, out + half, num_outputs);
    return;
  }
  constexpr int size = format_of(type).bytes * S::kLanes;
  typename S::Float sums[2][kRows];
  for (int m = 0; m < kRows; ++m) sums[0][m] = sums[1][m] = S::all(0.0f);
  const float* a = static_cast<const float*>(panel);
  int64_t i = 0;
  for (; i + 2 <= num_values; i += 2, a += 2 * kPanelRows, tile += 2 * size) {
    prefetch<2 * size>(tile);
    const auto even = load_numbers<S, type>(tile), odd = load_numbers<S, type>(tile + size);
    for (int m = 0; m < kRows; ++m) {
      sums[0][m] = S::fma(even, S::all(a[row + m]), sums[0][m]);
      sums[1][m] = S::fma(odd, S::all(a[kPanelRows + row + m]), sums[1][m]);
    }
  }
  for (int m = 0; m < kRows; ++m) {
    if (i < num_values)
      sums[0][m] = S::fma(load_numbers<S, type>(tile), S::all(a[row + m]), sums[0][m]);
    sums[0][m] = S::add(sums[0][m], sums[1][m]);
  }
  write<S, kRows>(sums[0], out, num_outputs);
}

template <class S, int kRows>
void multiply_rows(Type type, const uint8_t* tile, int64_t num_blocks, const void* panel, int row,
                   float* const* out, int num_outputs) {
  switch (type) {
#define ROWS_CASE(name, ...) \
  case Type::name: return __VA_ARGS__(tile, num_blocks, panel, row, out, num_outputs)
    ROWS_CASE(Q4_0, multiply_32<S, 4, false, kRows>);
    ROWS_CASE(Q4_1, multiply_32<S, 4, true, kRows>);
    ROWS_CASE(Q5_0, multiply_32<S, 5, false, kRows>);
    ROWS_CASE(Q5_1, multiply_32<S, 5, true, kRows>);
    ROWS_CASE(Q8_0, multiply_32<S, 8, false, kRows>);
    ROWS_CASE(Q4_K, multiply_4k_5k<S, 4, kRows>);
    ROWS_CASE(Q5_K, multiply_4k_5k<S, 5, kRows>);
    ROWS_CASE(Q6_K, multiply_6k<S, kRows>);
    ROWS_CASE(F16, multiply_numbers<S, Type::F16, kRows>);
    ROWS_CASE(BF16, multiply_numbers<S, Type::BF16, kRows>);
    ROWS_CASE(F32, multiply_numbers<S, Type::F32, kRows>);
#undef ROWS_CASE
  }
}

// Rows [row, row + num_rows) of a panel, with a kernel of exactly that width.
template <class S, int kRows = S::kRowsAtOnce>
void multiply_part(Type type, const uint8_t* tile, int64_t num_blocks, const void* panel, int row,
                   int num_rows, float* const* out, int num_outputs) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows)
      return multiply_part<S, kRows - 1>(type, tile, num_blocks, panel, row, num_rows, out,
                                         num_outputs);
  }
  multiply_rows<S, kRows>(type, tile, num_blocks, panel, row, out, num_outputs);
}

template <class S>
void multiply(Type type, const uint8_t* tile, int64_t num_blocks, const void* panel, int num_rows,
              float* const* out, int num_outputs) {
  for (int row = 0; row < num_rows; row += S::kRowsAtOnce) {
    const int count = num_rows - row < S::kRowsAtOnce ? num_rows - row : S::kRowsAtOnce;
    multiply_part<S>(type, tile, num_blocks, panel, row, count, out + row, num_outputs);
  }
}

}  // namespace
}  // namespace rows
