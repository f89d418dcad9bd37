// Vectors of 256 bits with AVX-VNNI: those of AVX2 but for dot products of bytes.
#pragma once

#include "simd_avx2.h"

namespace rows {
namespace {

struct AvxVnni : Avx2 {
  static constexpr int kByteBias = 128;
  static constexpr bool kChainIsSum = true;

  ROWS_INLINE Scale even(Pairs x) { return _mm256_srai_epi32(_mm256_slli_epi32(x, 16), 16); }
  ROWS_INLINE Scale odd(Pairs x) { return _mm256_srai_epi32(x, 16); }
  ROWS_INLINE Int dot_pairs(Int sum, Pairs x, const int16_t* a) {
    return _mm256_dpwssd_avx_epi32(sum, x, four_bytes(a));
  }
  static constexpr int chain_length(int) { return 8; }
  template <int kStep>
  ROWS_INLINE Chain next(Chain chain, Bytes w, const int8_t* a) {
    return _mm256_dpbusd_avx_epi32(chain, w, four_bytes(a + 4 * kStep));
  }
  template <int kBits, int kStep>
  ROWS_INLINE Chain first(Bytes w, const int8_t* a) {
    return next<kStep>(_mm256_setzero_si256(), w, a);
  }
  ROWS_INLINE Scale one() { return _mm256_set1_epi32(1); }
  ROWS_INLINE Int finish(Int sum, Chain chain, Scale scale) {
    return _mm256_add_epi32(sum, _mm256_mullo_epi32(chain, scale));
  }
};

}  // namespace
}  // namespace rows
