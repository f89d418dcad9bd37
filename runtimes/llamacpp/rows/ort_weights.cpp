#include "ort_weights.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace rows {
namespace {

constexpr size_t kChunkBytes = 32 << 20;  // small matrices share huge pages
// A largest scale below the least float16 of full precision, or above the largest one, would
// lose more than the eleven bits that tiles keep of it.
constexpr float kLeastScale = 6.1035156e-05f, kLargestScale = 65504.0f;
constexpr float kLargestMinimum = 65504.0f / 15;  // a minimum is up to 15 scales

uint16_t half_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);  // not a number
  if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
  if (magnitude < 0x38800000) {  // below the normal numbers: adding 0.5 leaves their digits last
    float shifted;
    std::memcpy(&shifted, &magnitude, 4);
    shifted += 0.5f;
    std::memcpy(&bits, &shifted, 4);
    return static_cast<uint16_t>(sign | (bits - 0x3f000000));
  }
  const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000) >> 13));
}

void put_half(float value, uint8_t* to) {
  const uint16_t half = half_of(value);
  std::memcpy(to, &half, 2);
}

int zero_point(const BlockMatrix& source, int64_t row, int64_t block) {
  const int64_t row_bytes = (source.num_blocks() + 1) / 2;
  const int both = source.zero_points[row * row_bytes + block / 2];
  return block % 2 ? both >> 4 : both & 15;
}

// Writes 32 values of a row as files of GGUF have them: of `to`, a block of this type.
void convert(const BlockMatrix& source, Type type, int64_t row, int64_t first, uint8_t* to) {
  const int64_t block = first / source.block_size, index = row * source.num_blocks() + block;
  const uint8_t* from = source.values + (row * source.num_values + first) * source.bits / 8;
  const float scale = source.scales[index];
  put_half(scale, to);
  to += 2;
  if (type == Type::Q8_0) {
    for (int i = 0; i < 32; i++) to[i] = from[i] ^ 0x80;  // less 128
    return;
  }
  if (type == Type::Q4_1) {
    put_half(-scale * static_cast<float>(zero_point(source, row, block)), to);
    to += 2;
  }
  for (int i = 0; i < 8; i++) {  // values 2i, 2i + 1 and those 16 further on
    to[2 * i] = static_cast<uint8_t>((from[i] & 15) | from[i + 8] << 4);
    to[2 * i + 1] = static_cast<uint8_t>(from[i] >> 4 | (from[i + 8] & 0xf0));
  }
}

const char* refusal(const BlockMatrix& source) {
  float largest = 0;
  const int64_t count = source.num_outputs * source.num_blocks();
  for (int64_t i = 0; i < count; i++) largest = std::max(largest, std::fabs(source.scales[i]));
  const float most = source.zero_points ? kLargestMinimum : kLargestScale;
  if (largest != 0 && (largest < kLeastScale || !(largest <= most)))
    return "scales do not fit float16";
  return nullptr;
}

void pack(const BlockMatrix& source, const TiledMatrix& to, uint8_t* tiles) {
  const int lanes = to.kernels->tile_rows;
  const size_t block = block_bytes(to.type);
  const size_t row_bytes = block * static_cast<size_t>(to.num_blocks);
  in_parallel(to.num_tiles, source.value_bytes(), [&](int64_t tile) {
    thread_local std::vector<uint8_t> rows;
    rows.resize(row_bytes * lanes);
    const int64_t first = tile * lanes;
    const int count = static_cast<int>(std::min<int64_t>(lanes, source.num_outputs - first));
    for (int row = 0; row < count; row++)
      for (int64_t b = 0; b < to.num_blocks; b++)
        convert(source, to.type, first + row, 32 * b, &rows[row * row_bytes + b * block]);
    to.kernels->pack(to.type, rows.data(), row_bytes, count, to.num_blocks,
                     tiles + tile * to.tile_bytes);
  });
}

}  // namespace

std::shared_ptr<Weights> Weights::named(const std::string& name) {
  static std::mutex mutex;
  static std::map<std::string, std::weak_ptr<Weights>> known;
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto each = known.begin(); each != known.end();)
    each = each->second.expired() ? known.erase(each) : std::next(each);
  std::shared_ptr<Weights> found = known[name].lock();
  if (found == nullptr) known[name] = found = std::make_shared<Weights>();
  return found;
}

Weights::~Weights() {
  for (Memory& chunk : chunks_) chunk.release();
}

uint8_t* Weights::reserve(size_t bytes) {
  if (left_ < bytes) {
    Memory chunk;
    const size_t size = std::max(bytes, kChunkBytes);
    if (!chunk.reserve(size)) return nullptr;
    chunks_.push_back(chunk);
    used_ = 0;
    left_ = size;
  }
  uint8_t* found = static_cast<uint8_t*>(chunks_.back().data()) + used_;
  used_ += bytes;
  left_ -= bytes;
  return found;
}

const TiledMatrix* Weights::tiled(const std::string& name, const BlockMatrix& source,
                                  const char** reason) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Kernels& kernels = best_kernels();
  const std::string key = name + kernels.name;
  const auto known = matrices_.find(key);
  if (known != matrices_.end()) return &known->second;
  *reason = refusal(source);
  if (*reason != nullptr) return nullptr;
  TiledMatrix made;
  made.kernels = &kernels;
  made.type = source.bits == 8 ? Type::Q8_0 : source.zero_points ? Type::Q4_1 : Type::Q4_0;
  made.num_outputs = source.num_outputs;
  made.num_blocks = source.num_values / 32;
  made.num_tiles = (source.num_outputs + kernels.tile_rows - 1) / kernels.tile_rows;
  made.tile_bytes = kernels.tile_bytes(made.type, made.num_blocks);
  uint8_t* tiles = reserve(made.tile_bytes * static_cast<size_t>(made.num_tiles));
  if (tiles == nullptr) {
    *reason = "there was not enough memory for the weights";
    return nullptr;
  }
  pack(source, made, tiles);
  made.tiles = tiles;
  // onnxruntime maps weights writable, and never writes to them.
  let_go(source.values, source.value_bytes(), true);
  let_go(source.scales, source.scale_bytes(), true);
  return &matrices_.emplace(key, made).first->second;
}

}  // namespace rows
