// What tests and benchmarks call through ctypes: any table of this build, on whole matrices.
#include <cstdlib>
#include <cstring>

#include "export.h"
#include "kernels.h"

namespace {

using rows::Kernels;
using rows::kPanelRows;
using rows::Type;

const Kernels* table_of(int index) {
  const Kernels* const* tables = rows::all_kernels();
  for (int i = 0; i < index && *tables; ++i) ++tables;
  return *tables;
}

void* aligned(size_t bytes) { return std::aligned_alloc(64, (bytes + 63) / 64 * 64); }

struct Matrix {
  const Kernels* kernels;
  Type type;
  int64_t num_outputs, num_blocks;
  size_t tile_bytes;
  uint8_t* tiles;
};

}  // namespace

// Name of a table, the fastest first; null after the last one.
EDGE_SPEC_EXPORT const char* edge_spec_rows_table_name(int index) {
  const Kernels* table = table_of(index);
  return table ? table->name : nullptr;
}

EDGE_SPEC_EXPORT int edge_spec_rows_table_is_supported(int index) {
  return table_of(index)->is_supported();
}

EDGE_SPEC_EXPORT const char* edge_spec_rows_best_table() { return rows::best_kernels().name; }

EDGE_SPEC_EXPORT int edge_spec_rows_tile_rows(int index) { return table_of(index)->tile_rows; }

EDGE_SPEC_EXPORT int edge_spec_rows_block_values(int type) {
  return rows::block_values(static_cast<Type>(type));
}

EDGE_SPEC_EXPORT size_t edge_spec_rows_block_bytes(int type) {
  return rows::block_bytes(static_cast<Type>(type));
}

// A matrix of `num_outputs` rows of `num_values` in a file's form, packed for a table.
EDGE_SPEC_EXPORT void* edge_spec_rows_pack(int index, int type, const uint8_t* source,
                                      int64_t num_outputs, int64_t num_values) {
  const Kernels* kernels = table_of(index);
  const Type as = static_cast<Type>(type);
  const int64_t num_blocks = num_values / rows::block_values(as), lanes = kernels->tile_rows;
  const size_t row_bytes = static_cast<size_t>(num_blocks) * rows::block_bytes(as);
  const int64_t num_tiles = (num_outputs + lanes - 1) / lanes;
  const size_t tile_bytes = kernels->tile_bytes(as, num_blocks);
  uint8_t* tiles = static_cast<uint8_t*>(aligned(tile_bytes * static_cast<size_t>(num_tiles)));
  if (!tiles) return nullptr;
  for (int64_t i = 0; i < num_tiles; ++i) {
    const int64_t left = num_outputs - i * lanes;
    kernels->pack(as, source + static_cast<size_t>(i * lanes) * row_bytes, row_bytes,
                  static_cast<int>(left < lanes ? left : lanes), num_blocks,
                  tiles + static_cast<size_t>(i) * tile_bytes);
  }
  return new Matrix{kernels, as, num_outputs, num_blocks, tile_bytes, tiles};
}

EDGE_SPEC_EXPORT size_t edge_spec_rows_packed_bytes(const void* handle) {
  const Matrix& matrix = *static_cast<const Matrix*>(handle);
  const int64_t lanes = matrix.kernels->tile_rows;
  return matrix.tile_bytes * static_cast<size_t>((matrix.num_outputs + lanes - 1) / lanes);
}

EDGE_SPEC_EXPORT void edge_spec_rows_free(void* handle) {
  Matrix* matrix = static_cast<Matrix*>(handle);
  std::free(matrix->tiles);
  delete matrix;
}

// `num_rows` rows of float activations times a part of the tiles, `repeats` times over:
// out[row][output] for the outputs of tiles number [first, last). Returns 0, or 1 without memory.
EDGE_SPEC_EXPORT int edge_spec_rows_multiply(const void* handle, const float* activations,
                                        int64_t num_rows, int64_t first, int64_t last,
                                        int repeats, float* out) {
  const Matrix& matrix = *static_cast<const Matrix*>(handle);
  const Kernels& kernels = *matrix.kernels;
  const int64_t num_values = matrix.num_blocks * rows::block_values(matrix.type);
  const int64_t num_panels = (num_rows + kPanelRows - 1) / kPanelRows, lanes = kernels.tile_rows;
  const size_t panel_bytes = kernels.panel_bytes(matrix.type, matrix.num_blocks);
  char* panels = static_cast<char*>(aligned(panel_bytes * static_cast<size_t>(num_panels)));
  if (!panels) return 1;
  for (int64_t row = 0; row < num_rows; ++row)
    kernels.quantize(matrix.type, activations + row * num_values,
                     static_cast<int>(row % kPanelRows), 0, matrix.num_blocks,
                     panels + static_cast<size_t>(row / kPanelRows) * panel_bytes);
  for (int repeat = 0; repeat < repeats; ++repeat) {
    for (int64_t tile = first; tile < last; ++tile) {
      const int64_t left = matrix.num_outputs - tile * lanes;
      for (int64_t panel = 0; panel < num_panels; ++panel) {
        const int64_t rows_left = num_rows - panel * kPanelRows;
        const int width = static_cast<int>(rows_left < kPanelRows ? rows_left : kPanelRows);
        float* to[kPanelRows];
        for (int m = 0; m < width; ++m)
          to[m] = out + (panel * kPanelRows + m) * matrix.num_outputs + tile * lanes;
        kernels.multiply(matrix.type, matrix.tiles + static_cast<size_t>(tile) * matrix.tile_bytes,
                         matrix.num_blocks, panels + static_cast<size_t>(panel) * panel_bytes,
                         width, to, static_cast<int>(left < lanes ? left : lanes));
      }
    }
  }
  std::free(panels);
  return 0;
}
