// Vectors in plain C++, and what every instruction set's class of vectors has to offer.
//
// products.h and attention.h are templates over such a class, `S`. Whatever a class does by other
// means, each result below is the same bits in all of them: integers are exact, each float
// operation rounds once, to the nearest, and sums over lanes have one order.
//
//   kLanes             rows of a tile, and floats of a Float; 4, 8 or 16
//   kRowsAtOnce        rows of activations that registers hold beside a tile's weights, at most 8
//   Float, Int         kLanes floats, kLanes 32-bit integers
//   Bytes              four weights of each lane, as unsigned bytes: byte 4 * lane + i
//   Pairs              two 16-bit integers of each lane
//   Scale              an integer factor of each lane, in the form that `finish` wants
//
// Floats (pointers need no alignment, arguments are in the order of the formula):
//   load, store, all   kLanes floats from and to memory; one float in every lane
//   load_half, load_bfloat, load_int8   kLanes numbers, converted exactly
//   add, sub, mul, div, max, min        max is a > b ? a : b, min is a < b ? a : b
//   fma, fnma          a * b + c and c - a * b, rounded once
//   round              to the nearest integer, ties to even; for |x| < 2^22
//   times_power_of_2   x * 2^n; n holds integers in -126 to 127
//   sums               lane j: the sum over lanes of vector j, of kLanes; lane i with half the
//                      lanes further on, then with a quarter and so on
//   sum16, max16       of 16 / kLanes vectors: lane i with i + 8, then i + 4, i + 2, i + 1
//
// Integers of products (p stands at a multiple of the size that is read; a: any address):
//   all_int, to_float  one integer in every lane; conversion, rounded to the nearest
//   minus_shifted<b>   x - (y << b)
//   load_bytes         4 * kLanes bytes
//   bits<right, mask>  x >> right & mask in each byte; no bit of another byte is in the mask
//   merge<right, mask> x | (more >> right & mask) in each byte
//   load_pairs<sign>   2 * kLanes bytes: entries 0 and 1 of each lane, widened with or without sign
//   even, odd          entry 0 or 1 of each lane as a Scale
//   dot_pairs          sum + entry 0 * a[0] + entry 1 * a[1]
// Dot products: Bytes number `step`, of 4 to 8, times values 4 * step .. 4 * step + 3 at a, which
// are -127 to 127. They are added in chains:
//   Chain              sums of up to chain_length(bits) such products of weights below 2^bits
//   first<bits, step>  a chain of one product; weights of 8 bits are as stored
//   next<step>         one product more
//   finish             sum + scale * a whole chain; one() is a scale that leaves it as it is
//   kChainIsSum        a chain is an Int without a limit, and may start with a sum
//   kByteBias          weights of 8 bits are stored as (weight + kByteBias) mod 256 and multiplied
//                      as if nothing had been added, or as unsigned where it is 128, so that the
//                      caller takes kByteBias * the sum of values off
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define ROWS_INLINE static inline __attribute__((always_inline))

// Everything in these headers has internal linkage: a linker that kept one of two equal inline
// functions could hand AVX-512 code to a processor that lacks it.
namespace rows {
namespace {

ROWS_INLINE float half_to_float(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31, mantissa = half & 1023;
  uint32_t bits;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24, exact
    const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
    std::memcpy(&bits, &magnitude, 4);
    bits |= sign;
  } else if (exponent == 31) {
    bits = sign | 0x7f800000u | mantissa << 13 | (mantissa ? 0x400000u : 0);
  } else {
    bits = sign | (exponent + 112) << 23 | mantissa << 13;
  }
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

struct Portable {
  static constexpr int kLanes = 8;
  static constexpr int kRowsAtOnce = 2;
  static constexpr int kByteBias = 0;
  static constexpr bool kChainIsSum = true;
  struct Float { float v[kLanes]; };
  struct Int { int32_t v[kLanes]; };
  struct Bytes { uint8_t v[4 * kLanes]; };
  struct Pairs { int16_t v[2 * kLanes]; };
  using Scale = Int;
  using Chain = Int;

  template <class Function>
  ROWS_INLINE Float each(Function function) {
    Float result;
    for (int i = 0; i < kLanes; ++i) result.v[i] = function(i);
    return result;
  }
  template <class Function>
  ROWS_INLINE Int each_int(Function function) {
    Int result;
    for (int i = 0; i < kLanes; ++i) result.v[i] = function(i);
    return result;
  }

  ROWS_INLINE Float load(const float* p) { return each([&](int i) { return p[i]; }); }
  ROWS_INLINE void store(float* p, Float x) { std::memcpy(p, x.v, sizeof x.v); }
  ROWS_INLINE Float all(float x) { return each([&](int) { return x; }); }
  ROWS_INLINE Float load_half(const uint16_t* p) {
    return each([&](int i) { return half_to_float(p[i]); });
  }
  ROWS_INLINE Float load_bfloat(const uint16_t* p) {
    return each([&](int i) {
      const uint32_t bits = static_cast<uint32_t>(p[i]) << 16;
      float value;
      std::memcpy(&value, &bits, 4);
      return value;
    });
  }
  ROWS_INLINE Float load_int8(const int8_t* p) {
    return each([&](int i) { return static_cast<float>(p[i]); });
  }
  ROWS_INLINE Float add(Float a, Float b) { return each([&](int i) { return a.v[i] + b.v[i]; }); }
  ROWS_INLINE Float sub(Float a, Float b) { return each([&](int i) { return a.v[i] - b.v[i]; }); }
  ROWS_INLINE Float mul(Float a, Float b) { return each([&](int i) { return a.v[i] * b.v[i]; }); }
  ROWS_INLINE Float div(Float a, Float b) { return each([&](int i) { return a.v[i] / b.v[i]; }); }
  ROWS_INLINE Float max(Float a, Float b) {
    return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
  }
  ROWS_INLINE Float min(Float a, Float b) {
    return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
  }
  ROWS_INLINE Float fma(Float a, Float b, Float c) {
    return each([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); });
  }
  ROWS_INLINE Float fnma(Float a, Float b, Float c) {
    return each([&](int i) { return std::fma(-a.v[i], b.v[i], c.v[i]); });
  }
  ROWS_INLINE Float round(Float x) {
    // Above 2^23 a float has no digits for a fraction, so that adding rounds.
    return each([&](int i) { return x.v[i] + 12582912.0f - 12582912.0f; });
  }
  ROWS_INLINE Float times_power_of_2(Float x, Float n) {
    return each([&](int i) {
      const int32_t bits = (static_cast<int32_t>(n.v[i]) + 127) * (1 << 23);
      float factor;
      std::memcpy(&factor, &bits, 4);
      return x.v[i] * factor;
    });
  }
  template <class Function>
  ROWS_INLINE float fold16(const Float (&x)[16 / kLanes], Function function) {
    float values[16];
    std::memcpy(values, x, sizeof values);
    for (int half = 8; half; half /= 2)
      for (int i = 0; i < half; ++i) values[i] = function(values[i], values[i + half]);
    return values[0];
  }
  ROWS_INLINE float sum16(const Float (&x)[16 / kLanes]) {
    return fold16(x, [](float a, float b) { return a + b; });
  }
  ROWS_INLINE Float sums(const Float (&x)[kLanes]) {
    Float folded[kLanes];
    std::memcpy(folded, x, sizeof folded);
    for (int half = kLanes / 2; half; half /= 2)
      for (int j = 0; j < kLanes; ++j)
        for (int i = 0; i < half; ++i) folded[j].v[i] += folded[j].v[i + half];
    return each([&](int i) { return folded[i].v[0]; });
  }
  ROWS_INLINE float max16(const Float (&x)[16 / kLanes]) {
    return fold16(x, [](float a, float b) { return a > b ? a : b; });
  }

  ROWS_INLINE Int all_int(int32_t x) { return each_int([&](int) { return x; }); }
  ROWS_INLINE Float to_float(Int x) {
    return each([&](int i) { return static_cast<float>(x.v[i]); });
  }
  template <int kShift>
  ROWS_INLINE Int minus_shifted(Int x, Int y) {
    return each_int([&](int i) { return x.v[i] - y.v[i] * (1 << kShift); });
  }
  ROWS_INLINE Bytes load_bytes(const uint8_t* p) {
    Bytes result;
    std::memcpy(result.v, p, sizeof result.v);
    return result;
  }
  template <class Function>
  ROWS_INLINE Bytes each_byte(Function function) {
    Bytes result;
    for (int i = 0; i < 4 * kLanes; ++i) result.v[i] = static_cast<uint8_t>(function(i));
    return result;
  }
  template <int kRight, int kMask>
  ROWS_INLINE Bytes bits(Bytes x) {
    return each_byte([&](int i) { return x.v[i] >> kRight & kMask; });
  }
  template <int kRight, int kMask>
  ROWS_INLINE Bytes merge(Bytes x, Bytes more) {
    return each_byte([&](int i) { return x.v[i] | (more.v[i] >> kRight & kMask); });
  }
  template <bool kSigned>
  ROWS_INLINE Pairs load_pairs(const uint8_t* p) {
    Pairs result;
    for (int i = 0; i < 2 * kLanes; ++i)
      result.v[i] = kSigned ? static_cast<int16_t>(static_cast<int8_t>(p[i])) : p[i];
    return result;
  }
  ROWS_INLINE Scale even(Pairs x) {
    return each_int([&](int i) { return static_cast<int32_t>(x.v[2 * i]); });
  }
  ROWS_INLINE Scale odd(Pairs x) {
    return each_int([&](int i) { return static_cast<int32_t>(x.v[2 * i + 1]); });
  }
  ROWS_INLINE Int dot_pairs(Int sum, Pairs x, const int16_t* a) {
    return each_int([&](int i) { return sum.v[i] + x.v[2 * i] * a[0] + x.v[2 * i + 1] * a[1]; });
  }
  static constexpr int chain_length(int) { return 8; }
  template <int kStep>
  ROWS_INLINE Chain next(Chain chain, Bytes w, const int8_t* a) {
    return each_int([&](int i) {
      int32_t sum = chain.v[i];
      for (int j = 0; j < 4; ++j)
        sum += static_cast<int32_t>(static_cast<int8_t>(w.v[4 * i + j])) * a[4 * kStep + j];
      return sum;
    });
  }
  template <int kBits, int kStep>
  ROWS_INLINE Chain first(Bytes w, const int8_t* a) {
    return next<kStep>(all_int(0), w, a);
  }
  ROWS_INLINE Scale one() { return all_int(1); }
  ROWS_INLINE Int finish(Int sum, Chain chain, Scale scale) {
    return each_int([&](int i) { return sum.v[i] + chain.v[i] * scale.v[i]; });
  }
};

}  // namespace
}  // namespace rows
