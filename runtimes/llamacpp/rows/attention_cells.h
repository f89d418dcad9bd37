// What attention reads, and the functions of softmax: cells of a cache as floats, exp and tanh.
//
// Everything here is a template over a class of vectors `S` (simd_portable.h says what one offers),
// and does the same float operations in the same order with each of them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "simd_portable.h"

#if defined(__clang__)
#define ROWS_UNROLL _Pragma("unroll")
#else
#define ROWS_UNROLL _Pragma("GCC unroll 16")
#endif

namespace rows {
namespace {

// Cells that need no conversion beforehand. load_rest reads the last 8 numbers of a cell whose size
// is no multiple of 16 where vectors hold 16: what stands behind it may be no number at all.
template <class S>
struct HalfCells {
  static constexpr int kBytes = 2;
  ROWS_INLINE typename S::Float load(const char* cell, int first) {
    return S::load_half(reinterpret_cast<const uint16_t*>(cell) + first);
  }
  ROWS_INLINE typename S::Float load_rest(const char* cell, int first) {
    uint16_t padded[16] = {};
    std::memcpy(padded, cell + 2 * first, 16);
    return S::load_half(padded);
  }
};

template <class S>
struct FloatCells {
  static constexpr int kBytes = 4;
  ROWS_INLINE typename S::Float load(const char* cell, int first) {
    return S::load(reinterpret_cast<const float*>(cell) + first);
  }
  ROWS_INLINE typename S::Float load_rest(const char* cell, int first) {
    float padded[16] = {};
    std::memcpy(padded, cell + 4 * first, 32);
    return S::load(padded);
  }
};

inline constexpr int kBlockValues = 32;  // of quantized cells

// Values of a quantized block before its scale, read from its bytes behind the scale.
template <CellType kType>
ROWS_INLINE void unpack(const uint8_t* bytes, int8_t (&values)[kBlockValues]) {
  if constexpr (kType == CellType::Q8_0) {
    std::memcpy(values, bytes, kBlockValues);
    return;
  }
  constexpr bool five_bits = kType == CellType::Q5_0 || kType == CellType::Q5_1;
  constexpr bool has_minimum = kType == CellType::Q4_1 || kType == CellType::Q5_1;
  constexpr int middle = has_minimum ? 0 : five_bits ? 16 : 8;
  uint32_t fifth = 0;
  if constexpr (five_bits) {
    std::memcpy(&fifth, bytes, 4);
    bytes += 4;
  }
  for (int i = 0; i < 16; ++i) {
    const int low = static_cast<int>(fifth >> i & 1) << 4;
    const int high = static_cast<int>(fifth >> (i + 16) & 1) << 4;
    values[i] = static_cast<int8_t>((bytes[i] & 15) + low - middle);
    values[i + 16] = static_cast<int8_t>((bytes[i] >> 4) + high - middle);
  }
}

template <class S, CellType kType>
void convert_blocks(const uint8_t* cell, int size, float* out) {
  constexpr bool has_minimum = kType == CellType::Q4_1 || kType == CellType::Q5_1;
  constexpr bool five_bits = kType == CellType::Q5_0 || kType == CellType::Q5_1;
  constexpr int header = has_minimum ? 4 : 2;
  constexpr int bytes = header + (kType == CellType::Q8_0 ? 32 : five_bits ? 20 : 16);
  for (int i = 0; i < size; i += kBlockValues, cell += bytes) {
    uint16_t halves[2];
    std::memcpy(halves, cell, header);
    const auto scale = S::all(half_to_float(halves[0]));
    int8_t values[kBlockValues];
    unpack<kType>(cell + header, values);
    for (int j = 0; j < kBlockValues; j += S::kLanes) {
      auto x = S::load_int8(values + j);
      if constexpr (has_minimum)
        x = S::fma(scale, x, S::all(half_to_float(halves[1])));
      else
        x = S::mul(scale, x);
      S::store(out + i + j, x);
    }
  }
}

// Writes the `size` numbers of a cell that is neither float16 nor float32.
template <class S>
void convert_cell(CellType type, const char* cell, int size, float* out) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(cell);
  switch (type) {
    case CellType::Q8_0: return convert_blocks<S, CellType::Q8_0>(bytes, size, out);
    case CellType::Q4_0: return convert_blocks<S, CellType::Q4_0>(bytes, size, out);
    case CellType::Q4_1: return convert_blocks<S, CellType::Q4_1>(bytes, size, out);
    case CellType::Q5_0: return convert_blocks<S, CellType::Q5_0>(bytes, size, out);
    case CellType::Q5_1: return convert_blocks<S, CellType::Q5_1>(bytes, size, out);
    case CellType::BF16:
      for (int i = 0; i < size; ++i) {
        uint16_t half;
        std::memcpy(&half, bytes + 2 * i, 2);
        const uint32_t bits = static_cast<uint32_t>(half) << 16;
        std::memcpy(out + i, &bits, 4);
      }
      return;
    case CellType::F16:
      for (int i = 0; i < size; i += 8) {
        uint16_t halves[16] = {};
        float values[16];
        std::memcpy(halves, bytes + 2 * i, 16);
        for (int j = 0; j < 8; j += S::kLanes) S::store(values + j, S::load_half(halves + j));
        std::memcpy(out + i, values, 32);
      }
      return;
    case CellType::F32: return;
  }
}

// x = n ln 2 + r with an integer n and |r| <= ln 2 / 2: returns e^r - 1. x: at least `lowest`, or
// not a number, which then is the result (n is a number still: not every class converts others).
template <class S>
ROWS_INLINE typename S::Float reduced_exponential(typename S::Float x, float lowest,
                                                  typename S::Float* n) {
  *n = S::round(S::mul(S::max(x, S::all(lowest)), S::all(1.44269504f)));
  // ln 2 in two parts, of which the first has 15 bits: its product with n is exact.
  auto r = S::fnma(*n, S::all(0.693145752f), x);
  r = S::fnma(*n, S::all(1.428606765e-6f), r);
  // (e^r - 1 - r) / r^2, fitted for the smallest relative error of e^r: 4e-9.
  auto p = S::all(1.381453942e-3f);
  p = S::fma(p, r, S::all(8.368745446e-3f));
  p = S::fma(p, r, S::all(4.166838899e-2f));
  p = S::fma(p, r, S::all(1.666652113e-1f));
  p = S::fma(p, r, S::all(4.999999404e-1f));
  return S::fma(S::mul(r, r), p, r);
}

// e^x for x <= 0, and e^-87 for all that is smaller: beside the largest weight, which is 1, that
// is nothing, and no result is subnormal.
template <class S>
ROWS_INLINE typename S::Float exponential(typename S::Float x) {
  typename S::Float n;
  x = S::max(S::all(-87.0f), x);  // in this order what is not a number stays
  const auto rest = reduced_exponential<S>(x, -87.0f, &n);
  return S::times_power_of_2(S::add(rest, S::all(1.0f)), n);
}

// (e^2x - 1) / (e^2x + 1), with e^2x - 1 computed without cancellation.
template <class S>
ROWS_INLINE typename S::Float tangent(typename S::Float x) {
  typename S::Float n;
  x = S::max(S::all(-10.0f), S::min(S::all(10.0f), x));
  const auto rest = reduced_exponential<S>(S::add(x, x), -20.0f, &n);
  const auto power = S::times_power_of_2(S::all(1.0f), n);
  const auto minus_1 = S::fma(power, rest, S::sub(power, S::all(1.0f)));
  return S::div(minus_1, S::add(minus_1, S::all(2.0f)));
}

}  // namespace
}  // namespace rows
