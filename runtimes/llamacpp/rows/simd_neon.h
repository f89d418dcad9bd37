// Vectors of 128 bits with NEON and its dot products. simd_portable.h says what each function does.
//
// Weights of up to 7 bits are signed bytes as well as unsigned ones, so that the signed dot product
// does for all of them.
#pragma once

#include <arm_neon.h>

#include "simd_portable.h"

namespace rows {
namespace {

struct Neon {
  static constexpr int kLanes = 4;
  static constexpr int kByteBias = 0;
  static constexpr bool kChainIsSum = true;
  static constexpr int kRowsAtOnce = 8;
  using Float = float32x4_t;
  using Int = int32x4_t;
  using Bytes = uint8x16_t;
  using Pairs = int16x8_t;
  using Scale = int32x4_t;
  using Chain = int32x4_t;

  ROWS_INLINE Float load(const float* p) { return vld1q_f32(p); }
  ROWS_INLINE void store(float* p, Float x) { vst1q_f32(p, x); }
  ROWS_INLINE Float all(float x) { return vdupq_n_f32(x); }
  ROWS_INLINE Float load_half(const uint16_t* p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
  }
  ROWS_INLINE Float load_bfloat(const uint16_t* p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
  }
  ROWS_INLINE Float load_int8(const int8_t* p) {
    uint32_t four;
    std::memcpy(&four, p, 4);
    const int16x8_t widened = vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(four)));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(widened)));
  }
  ROWS_INLINE Float add(Float a, Float b) { return vaddq_f32(a, b); }
  ROWS_INLINE Float sub(Float a, Float b) { return vsubq_f32(a, b); }
  ROWS_INLINE Float mul(Float a, Float b) { return vmulq_f32(a, b); }
  ROWS_INLINE Float div(Float a, Float b) { return vdivq_f32(a, b); }
  // vmaxq_f32 takes what is not a number from either side, and has an order of zeros.
  ROWS_INLINE Float max(Float a, Float b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
  ROWS_INLINE Float min(Float a, Float b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
  ROWS_INLINE Float fma(Float a, Float b, Float c) { return vfmaq_f32(c, a, b); }
  ROWS_INLINE Float fnma(Float a, Float b, Float c) { return vfmsq_f32(c, a, b); }
  ROWS_INLINE Float round(Float x) { return vrndnq_f32(x); }
  ROWS_INLINE Float times_power_of_2(Float x, Float n) {
    const int32x4_t biased = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
    return vmulq_f32(x, vreinterpretq_f32_s32(vshlq_n_s32(biased, 23)));
  }
  ROWS_INLINE Float sums(const Float (&x)[4]) {
    return vpaddq_f32(add_halves(x[0], x[1]), add_halves(x[2], x[3]));
  }
  ROWS_INLINE Float add_halves(Float a, Float b) {  // lane i with i + 2: of a, then of b
    return vaddq_f32(vcombine_f32(vget_low_f32(a), vget_low_f32(b)),
                     vcombine_f32(vget_high_f32(a), vget_high_f32(b)));
  }
  // Of four sums or maxima: 0 with 2 and 1 with 3, then both.
  ROWS_INLINE float sum16(const Float (&x)[4]) {
    const float32x4_t y = vaddq_f32(vaddq_f32(x[0], x[2]), vaddq_f32(x[1], x[3]));
    const float32x2_t z = vadd_f32(vget_low_f32(y), vget_high_f32(y));
    return vget_lane_f32(z, 0) + vget_lane_f32(z, 1);
  }
  ROWS_INLINE float max16(const Float (&x)[4]) {
    const float32x4_t y = max(max(x[0], x[2]), max(x[1], x[3]));
    const float32x4_t z = max(y, vextq_f32(y, y, 2));
    return vgetq_lane_f32(max(z, vdupq_laneq_f32(z, 1)), 0);
  }

  ROWS_INLINE Int all_int(int32_t x) { return vdupq_n_s32(x); }
  ROWS_INLINE Float to_float(Int x) { return vcvtq_f32_s32(x); }
  template <int kShift>
  ROWS_INLINE Int minus_shifted(Int x, Int y) {
    return vsubq_s32(x, vshlq_n_s32(y, kShift));
  }
  ROWS_INLINE Bytes load_bytes(const uint8_t* p) { return vld1q_u8(p); }
  template <int kRight, int kMask>
  ROWS_INLINE Bytes bits(Bytes x) {
    if constexpr (kRight > 0) x = vshrq_n_u8(x, kRight);
    return kMask == 255 >> kRight ? x : vandq_u8(x, vdupq_n_u8(kMask));
  }
  template <int kRight, int kMask>
  ROWS_INLINE Bytes merge(Bytes x, Bytes more) {
    return vorrq_u8(x, bits<kRight, kMask>(more));
  }
  template <bool kSigned>
  ROWS_INLINE Pairs load_pairs(const uint8_t* p) {
    const uint8x8_t x = vld1_u8(p);
    return kSigned ? vmovl_s8(vreinterpret_s8_u8(x)) : vreinterpretq_s16_u16(vmovl_u8(x));
  }
  ROWS_INLINE Scale even(Pairs x) {
    return vshrq_n_s32(vshlq_n_s32(vreinterpretq_s32_s16(x), 16), 16);
  }
  ROWS_INLINE Scale odd(Pairs x) { return vshrq_n_s32(vreinterpretq_s32_s16(x), 16); }
  ROWS_INLINE Int dot_pairs(Int sum, Pairs x, const int16_t* a) {
    int32_t two;
    std::memcpy(&two, a, 4);
    const int16x8_t factors = vreinterpretq_s16_s32(vdupq_n_s32(two));
    const int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(factors));
    return vaddq_s32(sum, vpaddq_s32(low, vmull_high_s16(x, factors)));
  }
  static constexpr int chain_length(int) { return 8; }
  template <int kStep>
  ROWS_INLINE Chain next(Chain chain, Bytes w, const int8_t* a) {
    const int8x16_t values = vld1q_s8(a + kStep / 4 * 16);  // of four steps
    return vdotq_laneq_s32(chain, vreinterpretq_s8_u8(w), values, kStep % 4);
  }
  template <int kBits, int kStep>
  ROWS_INLINE Chain first(Bytes w, const int8_t* a) {
    return next<kStep>(all_int(0), w, a);
  }
  ROWS_INLINE Scale one() { return all_int(1); }
  ROWS_INLINE Int finish(Int sum, Chain chain, Scale scale) {
    return vmlaq_s32(sum, chain, scale);
  }
};

}  // namespace
}  // namespace rows
