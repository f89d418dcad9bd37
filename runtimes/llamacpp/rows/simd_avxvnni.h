// Vectors of 256 bits with AVX-VNNI: those of AVX2 but for dot products of bytes.
#pragma once

#include "simd_avx2.h"

namespace rows {
namespace {

struct AvxVnni : Avx2 {
  static constexpr int kByteBias = 128;

  ROWS_INLINE Scale even(Pairs x) { return _mm256_srai_epi32(_mm256_slli_epi32(x, 16), 16); }
  ROWS_INLINE Scale odd(Pairs x) { return _mm256_srai_epi32(x, 16); }
  ROWS_INLINE Int dot_pairs(Int sum, Pairs x, const int16_t* a) {
    return _mm256_dpwssd_avx_epi32(sum, x, four_bytes(a));
  }
  template <int kBits>
  ROWS_INLINE Int dot(Int sum, const Bytes (&w)[8], const int8_t* a) {
    for (int g = 0; g < 8; ++g) sum = _mm256_dpbusd_avx_epi32(sum, w[g], four_bytes(a + 4 * g));
    return sum;
  }
  template <int kBits, int kCount>
  ROWS_INLINE Int dot_scaled(Int sum, const Bytes* w, const int8_t* a, Scale scale) {
    Int product = _mm256_setzero_si256();
    for (int g = 0; g < kCount; ++g)
      product = _mm256_dpbusd_avx_epi32(product, w[g], four_bytes(a + 4 * g));
    return _mm256_add_epi32(sum, _mm256_mullo_epi32(product, scale));
  }
  ROWS_INLINE Int dot_bytes(Int sum, const uint8_t* p, const int8_t* a) {
    for (int g = 0; g < 8; ++g)
      sum = _mm256_dpbusd_avx_epi32(sum, load_bytes(p + 32 * g), four_bytes(a + 4 * g));
    return sum;
  }
};

}  // namespace
}  // namespace rows
