// Matrices of MatMulNBits nodes in tiles. Sessions of one model share them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernels.h"
#include "plugin_memory.h"

namespace rows {

// A matrix as onnxruntime has it: rows of blocks of `block_size` integers, with a float scale and
// perhaps a zero point each. Integers and zero points of 4 bits stand two to a byte, low one first.
struct BlockMatrix {
  int64_t num_outputs, num_values;
  int bits, block_size;  // 4 or 8; a multiple of 32
  const uint8_t* values = nullptr;
  const float* scales = nullptr;
  const uint8_t* zero_points = nullptr;  // null: half of all that the bits can say

  int64_t num_blocks() const { return num_values / block_size; }
  size_t value_bytes() const { return static_cast<size_t>(num_outputs * num_values * bits / 8); }
  size_t scale_bytes() const { return static_cast<size_t>(num_outputs * num_blocks()) * 4; }
};

struct TiledMatrix {
  const Kernels* kernels;
  Type type;
  int64_t num_outputs, num_blocks, num_tiles;
  size_t tile_bytes;
  const uint8_t* tiles;
};

// All matrices of one model. What it gives out is there for as long as it is.
class Weights {
 public:
  // Those of this name that a session holds already, or new ones.
  static std::shared_ptr<Weights> named(const std::string& name);
  ~Weights();

  // The matrix of this name, packed by the first who asks. Null with a reason where tiles cannot
  // hold it. The pages of a file that it was mapped from are let go.
  const TiledMatrix* tiled(const std::string& name, const BlockMatrix& source,
                           const char** reason);

 private:
  uint8_t* reserve(size_t bytes);

  std::mutex mutex_;
  std::map<std::string, TiledMatrix> matrices_;
  std::vector<Memory> chunks_;
  size_t used_ = 0, left_ = 0;  // of the last chunk
};

}  // namespace rows
