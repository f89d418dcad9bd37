// Which cells the rows of a call see: found from their masks, once for all of them.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace rows {
namespace {

// Cells that at least one of some rows sees.
struct Seen {
  const int32_t* cells;
  const uint8_t* sets;  // bit r: row r of the call sees the cell; null: each row sees each cell
  int64_t count;
  int is_biased;  // bit r: the mask of row r holds other numbers than 0 and minus infinity
};

// Hands out rows that are to be computed together: all of them if they see about the same cells,
// else (rows of several conversations) those that see exactly the same. No bits depend on it.
class Visibility {
 public:
  Visibility(const Attention& call, float* scratch) : num_rows_(call.num_rows) {
    const int64_t padded = (call.num_cells + 63) / 64 * 64;
    cells_ = reinterpret_cast<int32_t*>(scratch);
    own_cells_ = cells_ + padded;
    sets_ = reinterpret_cast<uint8_t*>(own_cells_ + padded);
    by_cell_ = sets_ + padded;
    mark(call, padded);
    list(padded);
    compare();
  }

  static size_t scratch(int64_t num_cells) { return 5 * ((num_cells + 63) / 64 * 64) / 2; }

  // Rows of the next panel, and what they see; 0 after the last one.
  int next(int* rows, Seen* seen) {
    if (!left_) return 0;
    *seen = {cells_, is_uniform_ ? nullptr : sets_, count_, is_biased_};
    int taken = left_;
    if (is_split_) {
      int first = 0;
      while (!(left_ >> first & 1)) ++first;
      taken = left_ & ~differs_[first];
      int64_t own = 0;
      for (int64_t j = 0; j < count_; ++j) {
        own_cells_[own] = cells_[j];
        own += sets_[j] >> first & 1;
      }
      *seen = {own_cells_, nullptr, own, is_biased_};
    }
    left_ &= ~taken;
    int count = 0;
    for (int r = 0; r < num_rows_; ++r)
      if (taken >> r & 1) rows[count++] = r;
    return count;
  }

 private:
  // by_cell_[cell]: the rows that see it.
  void mark(const Attention& call, int64_t padded) {
    std::memset(by_cell_, 0, padded);
    left_ = (1 << num_rows_) - 1;
    for (int r = 0; r < num_rows_; ++r) {
      int same = 0;  // rows that have this mask
      for (int other = 0; other < num_rows_; ++other)
        if (call.masks[other] == call.masks[r]) same |= 1 << other;
      if (same & ((1 << r) - 1)) continue;
      if (call.masks[r] ? mark_mask(call.masks[r], call.num_cells, same, by_cell_)
                        : mark_all(call.num_cells, same, by_cell_))
        is_biased_ |= same;
    }
  }

  static bool mark_all(int64_t num_cells, int set, uint8_t* __restrict sets) {
    for (int64_t i = 0; i < num_cells; ++i) sets[i] = static_cast<uint8_t>(sets[i] | set);
    return false;
  }

  // Whether the mask holds numbers to add.
  static bool mark_mask(const uint16_t* __restrict mask, int64_t num_cells, int set,
                        uint8_t* __restrict sets) {
    constexpr uint16_t minus_infinity = 0xFC00;
    uint16_t others = 0;
    for (int64_t i = 0; i < num_cells; ++i) {
      const uint16_t visible = mask[i] == minus_infinity ? 0 : 0xFFFF;
      others = static_cast<uint16_t>(others | (mask[i] & visible));
      sets[i] = static_cast<uint8_t>(sets[i] | (visible & set));
    }
    return others != 0;
  }

  // Cells that anybody sees, without gaps.
  void list(int64_t padded) {
    for (int64_t i = 0; i < padded; i += 8) {
      uint64_t eight;
      std::memcpy(&eight, by_cell_ + i, 8);
      if (!eight) continue;
      for (int k = 0; k < 8; ++k) {
        cells_[count_] = static_cast<int32_t>(i + k);
        sets_[count_] = by_cell_[i + k];
        count_ += by_cell_[i + k] != 0;
      }
    }
  }

  // How much rows differ, and which of them.
  void compare() {
    const int all = left_;
    int64_t runs = 0, pairs = 0;
    for (int64_t j = 0; j < count_; ++runs) {
      const int set = sets_[j];
      const uint64_t pattern = set * 0x0101010101010101ull;
      const int64_t begin = j;
      for (uint64_t eight; j + 8 <= count_; j += 8) {
        std::memcpy(&eight, sets_ + j, 8);
        if (eight != pattern) break;
      }
      while (j < count_ && sets_[j] == set) ++j;
      for (int r = 0; r < num_rows_; ++r) {
        differs_[r] |= set >> r & 1 ? all & ~set : set;
        pairs += (set >> r & 1) * (j - begin);
      }
    }
    is_uniform_ = pairs == count_ * num_rows_;
    is_split_ = 4 * pairs < 3 * count_ * num_rows_ || (runs > 16 && 4 * runs > count_);
  }

  int num_rows_, left_ = 0, is_biased_ = 0;
  bool is_uniform_ = true, is_split_ = false;
  int64_t count_ = 0;
  int differs_[kPanelRows] = {};
  int32_t *cells_, *own_cells_;
  uint8_t *sets_, *by_cell_;
};

}  // namespace
}  // namespace rows
