// How weights stand in a tile: kLanes rows of a matrix side by side, in the order of reading.
//
// A group is 32 values of each row: W0 to W7 of four each, in as many pieces of 4 * kLanes bytes
// (byte 4 * lane + i) as a value has bits.
//   4 bits   piece j: W2j in the low nibble, W2j+1 in the high one
//   5 bits   pieces 0 to 4: W0 to W4 in the low five bits; above them bits 0 to 2 of W5, W6, W7 in
//            pieces 0, 2, 4; bits 3, 4 of W5 and W6 and then bit 3 or 4 of W7 in pieces 1, 3
//   6 bits   pieces 0 to 5: W0 to W5 in the low six bits; above them two bits each of W6 (pieces
//            0 to 2) and of W7 (3 to 5), from the lowest
//   8 bits   piece j: Wj
//
//   Q4_K, Q5_K, Q6_K   each block: 8 groups, scales, minima, d, dmin. Integers of a lane stand in
//                      pairs (those of groups 0 and 1 of each lane, then 2 and 3), d and dmin as
//                      kLanes float16.
//   other quantized    each two blocks: their groups, d of each, m of each
//   F16, BF16, F32     kLanes numbers for each value
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace rows {
namespace {

// What a type stores: `bits` of each weight; a minimum beside each scale or none.
struct Format {
  int values, bytes, bits;  // of a block
  bool has_minimum;
};

constexpr Format format_of(Type type) {
  switch (type) {
    case Type::Q4_0: return {32, 18, 4, false};
    case Type::Q4_1: return {32, 20, 4, true};
    case Type::Q5_0: return {32, 22, 5, false};
    case Type::Q5_1: return {32, 24, 5, true};
    case Type::Q8_0: return {32, 34, 8, false};
    case Type::Q4_K: return {256, 144, 4, true};
    case Type::Q5_K: return {256, 176, 5, true};
    case Type::Q6_K: return {256, 210, 6, false};
    case Type::F32: return {1, 4, 32, false};
    case Type::F16:
    case Type::BF16: break;
  }
  return {1, 2, 16, false};
}

// Bytes of one group and of all that belongs to one block (K types) or to two (others).
constexpr int group_bytes(int lanes, int bits) { return 4 * bits * lanes; }
constexpr int unit_bytes(int lanes, Type type) {
  const Format format = format_of(type);
  const int group = group_bytes(lanes, format.bits);
  if (type == Type::Q6_K) return 8 * group + (16 + 4) * lanes;  // d and as much of padding
  if (format.values == 256) return 8 * group + (8 + 8 + 4) * lanes;
  return 2 * group + (format.has_minimum ? 8 : 4) * lanes;
}

inline size_t packed_bytes(int lanes, Type type, int64_t num_blocks) {
  const size_t blocks = static_cast<size_t>(num_blocks);
  size_t bytes;
  switch (format_of(type).values) {
    case 1: bytes = blocks * format_of(type).bytes * lanes; break;
    case 32: bytes = (blocks + 1) / 2 * unit_bytes(lanes, type); break;
    default: bytes = blocks * unit_bytes(lanes, type);
  }
  return (bytes + 63) / 64 * 64;
}

// A block of one row, read from a file's bytes.
struct Block {
  uint8_t values[256];            // unsigned, or of Q8_0 as stored
  uint8_t scales[16], minima[8];  // of K types
  uint16_t d, minimum;            // float16
};

inline void unpack_nibbles(const uint8_t* source, int count, uint8_t* low, uint8_t* high) {
  for (int i = 0; i < count; ++i) {
    low[i] = source[i] & 15;
    high[i] = source[i] >> 4;
  }
}

inline void unpack_32(Type type, const uint8_t* source, Block& block) {
  const Format format = format_of(type);
  std::memcpy(&block.d, source, 2);
  source += 2;
  if (format.has_minimum) {
    std::memcpy(&block.minimum, source, 2);
    source += 2;
  }
  if (format.bits == 8) {
    std::memcpy(block.values, source, 32);
    return;
  }
  uint32_t high_bits = 0;
  if (format.bits == 5) {
    for (int i = 0; i < 4; ++i) high_bits |= static_cast<uint32_t>(source[i]) << 8 * i;
    source += 4;
  }
  unpack_nibbles(source, 16, block.values, block.values + 16);
  if (format.bits == 5)
    for (int i = 0; i < 32; ++i) block.values[i] |= (high_bits >> i & 1) << 4;
}

// Q4_K and Q5_K: d, dmin, 6-bit scales and minima in 12 bytes, bit 4 (Q5_K), nibbles.
inline void unpack_4k_5k(Type type, const uint8_t* source, Block& block) {
  std::memcpy(&block.d, source, 2);
  std::memcpy(&block.minimum, source + 2, 2);
  const uint8_t* packed = source + 4;
  for (int i = 0; i < 4; ++i) {
    block.scales[i] = packed[i] & 63;
    block.minima[i] = packed[4 + i] & 63;
    block.scales[4 + i] = (packed[8 + i] & 15) | packed[i] >> 6 << 4;
    block.minima[4 + i] = packed[8 + i] >> 4 | packed[4 + i] >> 6 << 4;
  }
  const bool has_fifth_bit = type == Type::Q5_K;
  const uint8_t* fifth_bits = source + 16;
  const uint8_t* nibbles = fifth_bits + (has_fifth_bit ? 32 : 0);
  for (int group = 0; group < 8; group += 2) {
    uint8_t* values = block.values + 32 * group;
    unpack_nibbles(nibbles + 16 * group, 32, values, values + 32);
    if (!has_fifth_bit) continue;
    for (int i = 0; i < 32; ++i) {
      values[i] |= (fifth_bits[i] >> group & 1) << 4;
      values[32 + i] |= (fifth_bits[i] >> (group + 1) & 1) << 4;
    }
  }
}

// Q6_K: 128 bytes of low nibbles, 64 of two high bits, 16 signed scales, d.
inline void unpack_6k(const uint8_t* source, Block& block) {
  std::memcpy(block.scales, source + 192, 16);
  std::memcpy(&block.d, source + 208, 2);
  for (int half = 0; half < 2; ++half) {
    uint8_t* values = block.values + 128 * half;
    const uint8_t* high_bits = source + 128 + 32 * half;
    unpack_nibbles(source + 64 * half, 64, values, values + 64);
    for (int quarter = 0; quarter < 4; ++quarter)
      for (int i = 0; i < 32; ++i)
        values[32 * quarter + i] |= (high_bits[i] >> 2 * quarter & 3) << 4;
  }
}

inline void unpack(Type type, const uint8_t* source, Block& block) {
  if (format_of(type).values == 32)
    unpack_32(type, source, block);
  else if (type == Type::Q6_K)
    unpack_6k(source, block);
  else
    unpack_4k_5k(type, source, block);
}

// Writes one group: values [first, first + 32) of each block.
template <int kLanes, int kBits>
void pack_group(const Block* blocks, int first, uint8_t bias, uint8_t* out) {
  constexpr int piece = 4 * kLanes;
  for (int lane = 0; lane < kLanes; ++lane) {
    const uint8_t* values = blocks[lane].values + first;
    uint8_t* to = out + 4 * lane;
    for (int i = 0; i < 4; ++i, ++values, ++to) {
      const auto w = [values](int g) { return static_cast<unsigned>(values[4 * g]); };
      const auto put = [to](int j, unsigned x) { to[piece * j] = static_cast<uint8_t>(x); };
      if constexpr (kBits == 8)
        for (int g = 0; g < 8; ++g) put(g, w(g) + bias);
      if constexpr (kBits == 4)
        for (int j = 0; j < 4; ++j) put(j, w(2 * j) | w(2 * j + 1) << 4);
      if constexpr (kBits == 5) {
        put(0, w(0) | (w(5) & 7) << 5);
        put(1, w(1) | (w(5) >> 3) << 5 | (w(7) >> 3 & 1) << 7);
        put(2, w(2) | (w(6) & 7) << 5);
        put(3, w(3) | (w(6) >> 3) << 5 | (w(7) >> 4) << 7);
        put(4, w(4) | (w(7) & 7) << 5);
      }
      if constexpr (kBits == 6)
        for (int j = 0; j < 6; ++j)
          put(j, w(j) | (w(j < 3 ? 6 : 7) >> 2 * (j % 3) & 3) << 6);
    }
  }
}

template <int kLanes>
void pack_group(int bits, const Block* blocks, int first, uint8_t bias, uint8_t* out) {
  switch (bits) {
    case 4: return pack_group<kLanes, 4>(blocks, first, bias, out);
    case 5: return pack_group<kLanes, 5>(blocks, first, bias, out);
    case 6: return pack_group<kLanes, 6>(blocks, first, bias, out);
    default: return pack_group<kLanes, 8>(blocks, first, bias, out);
  }
}

template <int kLanes>
void pack_k(Type type, const Block* blocks, uint8_t* out) {
  const int bits = format_of(type).bits, size = group_bytes(kLanes, bits);
  for (int group = 0; group < 8; ++group, out += size)
    pack_group<kLanes>(bits, blocks, 32 * group, 0, out);
  const bool has_minimum = format_of(type).has_minimum;
  for (int lane = 0; lane < kLanes; ++lane) {
    const Block& block = blocks[lane];
    const int num_scales = has_minimum ? 8 : 16;
    for (int i = 0; i < num_scales; ++i)
      out[2 * kLanes * (i / 2) + 2 * lane + i % 2] = block.scales[i];
    uint8_t* rest = out + num_scales * kLanes;
    if (has_minimum) {
      for (int i = 0; i < 8; ++i) rest[2 * kLanes * (i / 2) + 2 * lane + i % 2] = block.minima[i];
      rest += 8 * kLanes;
      std::memcpy(rest + 2 * kLanes + 2 * lane, &block.minimum, 2);
    }
    std::memcpy(rest + 2 * lane, &block.d, 2);
  }
}

template <int kLanes>
void pack_numbers(Type type, const uint8_t* source, size_t row_bytes, int num_rows,
                  int64_t num_values, uint8_t* tile) {
  const size_t size = format_of(type).bytes;
  std::memset(tile, 0, packed_bytes(kLanes, type, num_values));
  for (int64_t i = 0; i < num_values; ++i)
    for (int lane = 0; lane < num_rows; ++lane)
      std::memcpy(tile + size * (i * kLanes + lane), source + lane * row_bytes + size * i, size);
}

// Writes a whole tile. `bias` is added to each weight of Q8_0.
template <int kLanes>
void pack_tile(Type type, const uint8_t* source, size_t row_bytes, int num_rows,
               int64_t num_blocks, uint8_t bias, uint8_t* tile) {
  const Format format = format_of(type);
  if (format.values == 1)
    return pack_numbers<kLanes>(type, source, row_bytes, num_rows, num_blocks, tile);
  const int unit = unit_bytes(kLanes, type), group = group_bytes(kLanes, format.bits);
  Block blocks[kLanes] = {};
  if (format.values == 32 && num_blocks % 2) std::memset(tile + num_blocks / 2 * unit, 0, unit);
  for (int64_t b = 0; b < num_blocks; ++b) {
    for (int lane = 0; lane < num_rows; ++lane)
      unpack(type, source + lane * row_bytes + b * format.bytes, blocks[lane]);
    if (format.values == 256) {
      pack_k<kLanes>(type, blocks, tile + b * unit);
      continue;
    }
    uint8_t* two_blocks = tile + b / 2 * unit;
    pack_group<kLanes>(format.bits, blocks, 0, bias, two_blocks + b % 2 * group);
    uint8_t* d = two_blocks + 2 * group + b % 2 * 2 * kLanes;
    for (int lane = 0; lane < kLanes; ++lane) {
      std::memcpy(d + 2 * lane, &blocks[lane].d, 2);
      if (format.has_minimum) std::memcpy(d + (4 * kLanes + 2 * lane), &blocks[lane].minimum, 2);
    }
  }
}

}  // namespace
}  // namespace rows
