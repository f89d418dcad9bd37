// Products and attention for a few rows at once, in one table for each instruction set.
//
// What every table promises: the bits of a row are a function of its inputs. They do not depend on
// how many rows are computed beside it, on threads, on tiles, nor on the instruction set: integer
// sums are exact, and floats are added in one order, with one rounding for a multiply-add.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rows {

// Weights as GGUF files store them.
enum class Type : int { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, F16, BF16, F32 };
constexpr int kNumTypes = 11;
constexpr int kPanelRows = 8;  // activation rows that one call multiplies
constexpr int kMostTileRows = 16;
constexpr int kMaxHeadSize = 512;

// Attention of `num_rows` rows (a query of one head each) to the keys and values of one KV head.
// Any rows may share a call, in any order: none of their bits depends on it. Rows that see the same
// cells make the fastest calls: all heads of a token, then those of the next one. A cell that a row
// does not see (its mask is minus infinity) may hold anything; cells that no row sees cost nothing.
enum class CellType : int { F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1 };
struct Attention {
  int head_size;        // of a key; a multiple of 8, or of 32 where cells are quantized
  int value_size;       // of a value, likewise; both at most kMaxHeadSize
  CellType key_type, value_type;
  const char* keys;     // of cell 0; the next cell is key_stride bytes further on
  const char* values;
  size_t key_stride, value_stride;
  int64_t num_cells;    // at most 2^31
  float scale, softcap;         // softcap 0: none
  int num_rows;                 // 1 to kPanelRows
  const float* queries[kPanelRows];
  const uint16_t* masks[kPanelRows];  // float16 to add, of each cell; null: nothing is masked
  float slopes[kPanelRows];     // of the mask (ALiBi); 1 without
  const float* sinks[kPanelRows];     // a logit that takes part in the sum alone; null: none
  float* out[kPanelRows];       // value_size numbers; zeros for a row that sees nothing
  float* scratch;               // attention_scratch(num_cells) floats, aligned to 64 bytes
};

struct Kernels {
  const char* name;
  int tile_rows;  // rows of a matrix that stand beside each other in a tile
  // Whether this processor has what the table needs.
  bool (*is_supported)();
  // Bytes of a tile of `num_blocks` blocks a row; a multiple of 64.
  size_t (*tile_bytes)(Type, int64_t num_blocks);
  // Writes a tile from `num_rows` <= tile_rows rows of a file; missing rows are zeros.
  void (*pack)(Type, const uint8_t* source, size_t row_bytes, int num_rows, int64_t num_blocks,
               uint8_t* tile);
  // Bytes of a panel: kPanelRows rows of activations in the form that `multiply` takes; of 64.
  size_t (*panel_bytes)(Type, int64_t num_blocks);
  // Writes blocks [first, first + count) of row `row` of a panel; `source`: the row's first value.
  void (*quantize)(Type, const float* source, int row, int64_t first, int64_t count, void* panel);
  // out[m][0..num_outputs) for the panel's first `num_rows` rows; num_outputs <= tile_rows.
  void (*multiply)(Type, const uint8_t* tile, int64_t num_blocks, const void* panel, int num_rows,
                   float* const* out, int num_outputs);
  size_t (*attention_scratch)(int64_t num_cells);
  void (*attend)(const Attention&);
};

// Values and bytes of a block of each type, as files have them.
int block_values(Type);
size_t block_bytes(Type);

// All tables of this build, the fastest first, ended by null; and the first that runs here.
const Kernels* const* all_kernels();
const Kernels& best_kernels();

}  // namespace rows
