// The table of functions of one class of vectors.
#pragma once

#include "attention.h"
#include "products.h"

namespace rows {
namespace {

template <class S>
size_t tile_bytes(Type type, int64_t num_blocks) {
  return packed_bytes(S::kLanes, type, num_blocks);
}

template <class S>
void pack(Type type, const uint8_t* source, size_t row_bytes, int num_rows, int64_t num_blocks,
          uint8_t* tile) {
  pack_tile<S::kLanes>(type, source, row_bytes, num_rows, num_blocks, S::kByteBias, tile);
}

template <class S>
constexpr Kernels table(const char* name, bool (*is_supported)()) {
  return {name,       S::kLanes,      is_supported,   tile_bytes<S>, pack<S>,
          bytes_of_panel, quantize_row, multiply<S>, attention_scratch<S>, attend<S>};
}

}  // namespace
}  // namespace rows
