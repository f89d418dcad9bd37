// Vectors of 256 bits with AVX2, FMA and F16C. simd_portable.h says what each function does.
#pragma once

#include <immintrin.h>

#include "simd_portable.h"

namespace rows {
namespace {

struct Avx2 {
  static constexpr int kLanes = 8;
  static constexpr int kRowsAtOnce = 4;
  static constexpr int kByteBias = 0;
  static constexpr bool kChainIsSum = false;
  using Float = __m256;
  using Int = __m256i;
  using Bytes = __m256i;
  using Pairs = __m256i;
  using Scale = __m256i;  // the factor twice, as 16-bit integers
  using Chain = __m256i;  // sums of 16 bits

  ROWS_INLINE Float load(const float* p) { return _mm256_loadu_ps(p); }
  ROWS_INLINE void store(float* p, Float x) { _mm256_storeu_ps(p, x); }
  ROWS_INLINE Float all(float x) { return _mm256_set1_ps(x); }
  ROWS_INLINE Float load_half(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  ROWS_INLINE Float load_bfloat(const uint16_t* p) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
  }
  ROWS_INLINE Float load_int8(const int8_t* p) {
    const __m128i x = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x));
  }
  ROWS_INLINE Float add(Float a, Float b) { return _mm256_add_ps(a, b); }
  ROWS_INLINE Float sub(Float a, Float b) { return _mm256_sub_ps(a, b); }
  ROWS_INLINE Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
  ROWS_INLINE Float div(Float a, Float b) { return _mm256_div_ps(a, b); }
  ROWS_INLINE Float max(Float a, Float b) { return _mm256_max_ps(a, b); }
  ROWS_INLINE Float min(Float a, Float b) { return _mm256_min_ps(a, b); }
  ROWS_INLINE Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  ROWS_INLINE Float fnma(Float a, Float b, Float c) { return _mm256_fnmadd_ps(a, b, c); }
  ROWS_INLINE Float round(Float x) {
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  ROWS_INLINE Float times_power_of_2(Float x, Float n) {
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)));
  }
  ROWS_INLINE Float sums(const Float (&x)[8]) {
    Float halves[4];  // each of two vectors, with four sums left of each
    for (int i = 0; i < 4; ++i)
      halves[i] = add(_mm256_permute2f128_ps(x[i], x[i + 4], 0x20),
                      _mm256_permute2f128_ps(x[i], x[i + 4], 0x31));
    const Float a = add_pairs(halves[0], halves[1]), b = add_pairs(halves[2], halves[3]);
    return add(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xDD));
  }
  ROWS_INLINE Float add_pairs(Float a, Float b) {  // in each four lanes: i with i + 2
    return add(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xEE));
  }
  ROWS_INLINE float sum16(const Float (&x)[2]) {
    const __m256 y = _mm256_add_ps(x[0], x[1]);
    __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    z = _mm_add_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_add_ss(z, _mm_movehdup_ps(z)));
  }
  ROWS_INLINE float max16(const Float (&x)[2]) {
    const __m256 y = _mm256_max_ps(x[0], x[1]);
    __m128 z = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    z = _mm_max_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_max_ss(z, _mm_movehdup_ps(z)));
  }

  ROWS_INLINE Int all_int(int32_t x) { return _mm256_set1_epi32(x); }
  ROWS_INLINE Float to_float(Int x) { return _mm256_cvtepi32_ps(x); }
  template <int kShift>
  ROWS_INLINE Int minus_shifted(Int x, Int y) {
    return _mm256_sub_epi32(x, _mm256_slli_epi32(y, kShift));
  }
  ROWS_INLINE Bytes load_bytes(const uint8_t* p) {
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
  }
  template <int kRight, int kMask>
  ROWS_INLINE Bytes bits(Bytes x) {
    if constexpr (kRight > 0) x = _mm256_srli_epi16(x, kRight);
    return _mm256_and_si256(x, _mm256_set1_epi8(kMask));
  }
  template <int kRight, int kMask>
  ROWS_INLINE Bytes merge(Bytes x, Bytes more) {
    return _mm256_or_si256(x, bits<kRight, kMask>(more));
  }
  template <bool kSigned>
  ROWS_INLINE Pairs load_pairs(const uint8_t* p) {
    const __m128i x = _mm_load_si128(reinterpret_cast<const __m128i*>(p));
    return kSigned ? _mm256_cvtepi8_epi16(x) : _mm256_cvtepu8_epi16(x);
  }
  ROWS_INLINE Scale even(Pairs x) {
    return _mm256_shuffle_epi8(
        x, _mm256_setr_epi8(0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13,  //
                            0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13));
  }
  ROWS_INLINE Scale odd(Pairs x) {
    return _mm256_shuffle_epi8(
        x, _mm256_setr_epi8(2, 3, 2, 3, 6, 7, 6, 7, 10, 11, 10, 11, 14, 15, 14, 15,  //
                            2, 3, 2, 3, 6, 7, 6, 7, 10, 11, 10, 11, 14, 15, 14, 15));
  }
  ROWS_INLINE __m256i four_bytes(const void* p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return _mm256_set1_epi32(x);
  }
  ROWS_INLINE Int dot_pairs(Int sum, Pairs x, const int16_t* a) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(x, four_bytes(a)));
  }
  // Otherwise GCC computes all products of a chain first, keeps them in memory, and adds a tree.
  ROWS_INLINE __m256i in_this_order(__m256i x) {
    asm volatile("" : "+x"(x));
    return x;
  }
  // As long as none can overflow: each step adds up to 2 * (2^bits - 1) * 127.
  static constexpr int chain_length(int bits) {
    return bits == 4 ? 8 : bits == 5 ? 4 : bits == 6 ? 2 : 1;
  }
  template <int kBits, int kStep>
  ROWS_INLINE Chain first(Bytes w, const int8_t* a) {
    __m256i values = four_bytes(a + 4 * kStep);
    if constexpr (kBits == 8) {  // |w| * (a with w's sign): maddubs wants a factor without a sign
      values = _mm256_sign_epi8(values, w);
      w = _mm256_abs_epi8(w);
    }
    return _mm256_maddubs_epi16(w, values);
  }
  template <int kStep>
  ROWS_INLINE Chain next(Chain chain, Bytes w, const int8_t* a) {
    const __m256i product = _mm256_maddubs_epi16(w, four_bytes(a + 4 * kStep));
    return in_this_order(_mm256_add_epi16(chain, product));
  }
  ROWS_INLINE Scale one() { return _mm256_set1_epi16(1); }
  ROWS_INLINE Int finish(Int sum, Chain chain, Scale scale) {
    return in_this_order(_mm256_add_epi32(sum, _mm256_madd_epi16(chain, scale)));
  }
};

}  // namespace
}  // namespace rows
