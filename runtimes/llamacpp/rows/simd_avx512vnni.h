// Vectors of 512 bits with AVX-512 F, BW, VL, DQ and VNNI. simd_portable.h says what each does.
#pragma once

#include <immintrin.h>

#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own undefined vectors
#endif

#include "simd_portable.h"

namespace rows {
namespace {

struct Avx512Vnni {
  static constexpr int kLanes = 16;
  static constexpr int kRowsAtOnce = 8;
  static constexpr int kByteBias = 128;
  static constexpr bool kChainIsSum = true;
  using Float = __m512;
  using Int = __m512i;
  using Bytes = __m512i;
  using Pairs = __m512i;
  using Scale = __m512i;
  using Chain = __m512i;

  ROWS_INLINE Float load(const float* p) { return _mm512_loadu_ps(p); }
  ROWS_INLINE void store(float* p, Float x) { _mm512_storeu_ps(p, x); }
  ROWS_INLINE Float all(float x) { return _mm512_set1_ps(x); }
  ROWS_INLINE Float load_half(const uint16_t* p) {
    // The form with a mask of ones is the same instruction; the other one makes GCC 12 warn.
    return _mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  ROWS_INLINE Float load_bfloat(const uint16_t* p) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
  }
  ROWS_INLINE Float load_int8(const int8_t* p) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x));
  }
  ROWS_INLINE Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
  ROWS_INLINE Float sub(Float a, Float b) { return _mm512_sub_ps(a, b); }
  ROWS_INLINE Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
  ROWS_INLINE Float div(Float a, Float b) { return _mm512_div_ps(a, b); }
  ROWS_INLINE Float max(Float a, Float b) { return _mm512_max_ps(a, b); }
  ROWS_INLINE Float min(Float a, Float b) { return _mm512_min_ps(a, b); }
  ROWS_INLINE Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  ROWS_INLINE Float fnma(Float a, Float b, Float c) { return _mm512_fnmadd_ps(a, b, c); }
  ROWS_INLINE Float round(Float x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  ROWS_INLINE Float times_power_of_2(Float x, Float n) { return _mm512_scalef_ps(x, n); }
  ROWS_INLINE Float sums(const Float (&x)[16]) {
    Float quarters[4];  // each of four vectors, with four sums left of each
    for (int i = 0; i < 4; ++i) {
      const Float a = add_halves(x[i], x[i + 4]), b = add_halves(x[i + 8], x[i + 12]);
      quarters[i] = add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
    }
    const Float a = add_pairs(quarters[0], quarters[1]), b = add_pairs(quarters[2], quarters[3]);
    return add(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xDD));
  }
  ROWS_INLINE Float add_halves(Float a, Float b) {  // lane i with i + 8: of a, then of b
    return add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
  }
  ROWS_INLINE Float add_pairs(Float a, Float b) {  // in each four lanes: i with i + 2
    return add(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xEE));
  }
  ROWS_INLINE float sum16(const Float (&x)[1]) {
    const __m256 y = _mm256_add_ps(_mm512_castps512_ps256(x[0]), _mm512_extractf32x8_ps(x[0], 1));
    __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    z = _mm_add_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_add_ss(z, _mm_movehdup_ps(z)));
  }
  ROWS_INLINE float max16(const Float (&x)[1]) {
    const __m256 y = _mm256_max_ps(_mm512_castps512_ps256(x[0]), _mm512_extractf32x8_ps(x[0], 1));
    __m128 z = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    z = _mm_max_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_max_ss(z, _mm_movehdup_ps(z)));
  }

  ROWS_INLINE Int all_int(int32_t x) { return _mm512_set1_epi32(x); }
  ROWS_INLINE Float to_float(Int x) { return _mm512_cvtepi32_ps(x); }
  template <int kShift>
  ROWS_INLINE Int minus_shifted(Int x, Int y) {
    return _mm512_sub_epi32(x, _mm512_slli_epi32(y, kShift));
  }
  ROWS_INLINE Bytes load_bytes(const uint8_t* p) { return _mm512_load_si512(p); }
  template <int kRight, int kMask>
  ROWS_INLINE Bytes bits(Bytes x) {
    if constexpr (kRight > 0) x = _mm512_srli_epi16(x, kRight);
    return _mm512_and_si512(x, _mm512_set1_epi8(kMask));
  }
  template <int kRight, int kMask>
  ROWS_INLINE Bytes merge(Bytes x, Bytes more) {
    more = _mm512_srli_epi16(more, kRight);
    return _mm512_ternarylogic_epi32(x, more, _mm512_set1_epi8(kMask), 0xF8);  // x | more & mask
  }
  template <bool kSigned>
  ROWS_INLINE Pairs load_pairs(const uint8_t* p) {
    const __m256i x = _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
    return kSigned ? _mm512_cvtepi8_epi16(x) : _mm512_cvtepu8_epi16(x);
  }
  ROWS_INLINE Scale even(Pairs x) { return _mm512_srai_epi32(_mm512_slli_epi32(x, 16), 16); }
  ROWS_INLINE Scale odd(Pairs x) { return _mm512_srai_epi32(x, 16); }
  ROWS_INLINE __m512i four_bytes(const void* p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return _mm512_set1_epi32(x);
  }
  ROWS_INLINE Int dot_pairs(Int sum, Pairs x, const int16_t* a) {
    return _mm512_dpwssd_epi32(sum, x, four_bytes(a));
  }
  static constexpr int chain_length(int) { return 8; }
  template <int kStep>
  ROWS_INLINE Chain next(Chain chain, Bytes w, const int8_t* a) {
    return _mm512_dpbusd_epi32(chain, w, four_bytes(a + 4 * kStep));
  }
  template <int kBits, int kStep>
  ROWS_INLINE Chain first(Bytes w, const int8_t* a) {
    return next<kStep>(_mm512_setzero_si512(), w, a);
  }
  ROWS_INLINE Scale one() { return _mm512_set1_epi32(1); }
  ROWS_INLINE Int finish(Int sum, Chain chain, Scale scale) {
    return _mm512_add_epi32(sum, _mm512_mullo_epi32(chain, scale));
  }
};

}  // namespace
}  // namespace rows
