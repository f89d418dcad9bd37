// Rows of activations as kernels take them, kPanelRows of them together.
//
// Activations are int8 with a float factor for each block, amax / 127, as wide as the weights'
// blocks; beside weights that are plain numbers they stay floats.
#pragma once

#include <cmath>
#include <cstring>

#include "kernels.h"
#include "packing.h"

namespace rows {
namespace {

// One block of a panel: of each row its values, sums that offsets and minima need, and its factor.
struct alignas(64) Panel256 {
  int8_t values[kPanelRows][256];
  int16_t sums_of_16[kPanelRows][16];
  int16_t sums_of_32[kPanelRows][8];
  float scales[kPanelRows];
};
struct alignas(32) Panel32 {
  int8_t values[kPanelRows][32];
  int32_t sums[kPanelRows];
  float scales[kPanelRows];
  float scaled_sums[kPanelRows];
};

inline size_t bytes_of_panel(Type type, int64_t num_blocks) {
  const int values = format_of(type).values;
  const size_t block = values == 1    ? sizeof(float) * kPanelRows
                       : values == 32 ? sizeof(Panel32)
                                      : sizeof(Panel256);
  return (block * static_cast<size_t>(num_blocks) + 63) / 64 * 64;
}

// Rounds kCount values to int8 and returns their factor: NaN, with zeros, if one is not finite.
template <int kCount>
float quantize_block(const float* source, int8_t* values) {
  int32_t largest = 0;  // of the magnitudes' bits, which are ordered as the magnitudes are
  for (int i = 0; i < kCount; ++i) {
    int32_t bits;
    std::memcpy(&bits, source + i, 4);
    bits &= 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  float magnitude;
  std::memcpy(&magnitude, &largest, 4);
  const float inverse = 127.0f / magnitude;
  if (largest >= 0x7f800000 || !(inverse < 3e38f)) {  // not finite, or too small for an inverse
    std::memset(values, 0, kCount);
    return largest >= 0x7f800000 ? std::nanf("") : 0.0f;
  }
  for (int i = 0; i < kCount; ++i) {  // 1.5 * 2^23 has no digits for a fraction: adding it rounds
    const float shifted = source[i] * inverse + 12582912.0f;
    int32_t bits;
    std::memcpy(&bits, &shifted, 4);
    values[i] = static_cast<int8_t>(bits - 0x4b400000);
  }
  return magnitude / 127.0f;
}

inline void quantize_row(Type type, const float* source, int row, int64_t first, int64_t count,
                         void* panel) {
  const int size = format_of(type).values;
  for (int64_t b = first; b < first + count; ++b) {
    const float* from = source + b * size;
    if (size == 1) {
      static_cast<float*>(panel)[b * kPanelRows + row] = *from;
    } else if (size == 32) {
      Panel32& block = static_cast<Panel32*>(panel)[b];
      const float scale = quantize_block<32>(from, block.values[row]);
      int32_t sum = 0;
      for (int i = 0; i < 32; ++i) sum += block.values[row][i];
      block.sums[row] = sum;
      block.scales[row] = scale;
      block.scaled_sums[row] = scale * static_cast<float>(sum);
    } else {
      Panel256& block = static_cast<Panel256*>(panel)[b];
      block.scales[row] = quantize_block<256>(from, block.values[row]);
      for (int group = 0; group < 16; ++group) {
        int32_t sum = 0;
        for (int i = 0; i < 16; ++i) sum += block.values[row][16 * group + i];
        block.sums_of_16[row][group] = static_cast<int16_t>(sum);
      }
      for (int group = 0; group < 8; ++group)
        block.sums_of_32[row][group] = static_cast<int16_t>(block.sums_of_16[row][2 * group] +
                                                            block.sums_of_16[row][2 * group + 1]);
    }
  }
}

}  // namespace
}  // namespace rows
