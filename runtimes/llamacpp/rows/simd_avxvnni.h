// Vectors of 256 bits with AVX-VNNI: those of AVX2 but for dot products of bytes.
#pragma once

#include "simd_avx2.h"

namespace rows {
namespace {

struct AvxVnni : Avx2 {
  static constexpr int kByteBias = 128;
  static constexpr bool kHasDot4 = true;

  ROWS_INLINE Scale even(Pairs x) { return _mm256_srai_epi32(_mm256_slli_epi32(x, 16), 16); }
  ROWS_INLINE Scale odd(Pairs x) { return _mm256_srai_epi32(x, 16); }
  ROWS_INLINE Int dot_pairs(Int sum, Pairs x, const int16_t* a) {
    return _mm256_dpwssd_avx_epi32(sum, x, four_bytes(a));
  }
  ROWS_INLINE Int dot4(Int sum, Bytes w, const int8_t* a) {
    return _mm256_dpbusd_avx_epi32(sum, w, four_bytes(a));
  }
  ROWS_INLINE Int times(Int x, Scale scale) { return _mm256_mullo_epi32(x, scale); }
  ROWS_INLINE Int add_int(Int a, Int b) { return _mm256_add_epi32(a, b); }
};

}  // namespace
}  // namespace rows
