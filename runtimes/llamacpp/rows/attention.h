// Attention of up to 8 rows to the cells of one KV head, with bits that depend on a row alone.
//
// A row's result is a function of its query and of the cells that it sees, in their order: scores
// first, each a dot product in an order that the head's size gives; then the exact maximum; then
// the weights, their sum and the weighted values, added cell after cell in one chain. A cell that a
// row does not see takes no part, not even as a zero: what stands in it may be no number. So it
// makes no difference which rows are computed together, which cells are unseen between those that
// are seen, or how far a cache is filled up.
//
// Cells are visited in blocks, so that they stay in the nearest cache; sums go on from block to
// block in the same chain.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention_kernels.h"
#include "attention_visible.h"

namespace rows {
namespace {

inline constexpr int kBlockCells = 64;
inline constexpr int kPointers = kBlockCells + 16;  // with the next ones, to fetch them early

// Rows whose sums fit in registers at once.
struct Group {
  int first, num_rows, stride;  // rows of the panel, and floats from cell to cell in scores
  float* scores;
  float* queries;  // [element / 16][row][element % 16]
  float* sums;     // [row][kRowFloats]
  float maxima[16], totals[8];
};

template <class S>
class Panel {
 public:
  static constexpr int kGroupRows = S::kLanes == 16 ? 8 : 4;
  static constexpr bool kReadsHalves = !std::is_same_v<S, Portable>;  // in one instruction
  using Halves = std::conditional_t<kReadsHalves, HalfCells<S>, FloatCells<S>>;

  // Rows `rows` of the call, which see the cells that `seen` lists.
  Panel(const Attention& call, const int* rows, int num_rows, const Seen& seen, float* scratch)
      : call_(call), rows_(rows), seen_(seen) {
    const int64_t padded = padded_cells(seen.count);
    float* sums = scratch + kPanelRows * kMaxHeadSize;
    converted_ = sums + kPanelRows * kRowFloats;
    float* scores = converted_ + kBlockCells * kMaxHeadSize;
    for (int first = 0; first < num_rows; first += kGroupRows) {
      Group& group = groups_[num_groups_++];
      group.first = first;
      group.num_rows = std::min(num_rows - first, kGroupRows);
      group.stride = stride_of(group.num_rows);
      group.scores = scores + first * padded;
      group.queries = scratch + first * kMaxHeadSize;
      group.sums = sums + first * kRowFloats;
    }
  }

  static size_t scratch(int64_t num_cells) {
    return kPanelRows * (kMaxHeadSize + kRowFloats + padded_cells(num_cells)) +
           kBlockCells * kMaxHeadSize;
  }

  void attend() {
    for (int g = 0; g < num_groups_; ++g) begin(groups_[g]);
    for (int64_t at = 0; at < seen_.count; at += kBlockCells) {
      const int count = block(at, call_.keys, call_.key_stride, call_.key_type, call_.head_size);
      for (int g = 0; g < num_groups_; ++g) score(groups_[g], at, count);
    }
    for (int g = 0; g < num_groups_; ++g) fold_maxima(groups_[g]);
    for (int64_t at = 0; at < seen_.count; at += kBlockCells) {
      const int count =
          block(at, call_.values, call_.value_stride, call_.value_type, call_.value_size);
      for (int g = 0; g < num_groups_; ++g) add(groups_[g], at, count);
    }
    for (int g = 0; g < num_groups_; ++g) finish(groups_[g]);
  }

 private:
  static int64_t padded_cells(int64_t count) { return (count + kBlockCells) & -kBlockCells; }

  int row_of(const Group& group, int r) const { return rows_[group.first + r]; }

  void begin(Group& group) {
    float* query = group.queries;
    for (int i = 0; i < call_.head_size; i += 16) {
      const int count = std::min(call_.head_size - i, 16);
      for (int r = 0; r < group.num_rows; ++r, query += 16) {
        if (count < 16) std::fill_n(query + count, 16 - count, 0.0f);
        std::memcpy(query, call_.queries[row_of(group, r)] + i, count * sizeof(float));
      }
    }
    std::fill_n(group.sums, group.num_rows * kRowFloats, 0.0f);
    std::fill_n(group.maxima, 16, -HUGE_VALF);
    std::fill_n(group.totals, 8, 0.0f);
  }

  // Points at the next cells, as floats where their own type is not read directly.
  int block(int64_t at, const char* cells, size_t stride, CellType type, int size) {
    const int count = static_cast<int>(std::min<int64_t>(kBlockCells, seen_.count - at));
    const int listed = static_cast<int>(std::min<int64_t>(kPointers, seen_.count - at));
    for (int j = 0; j < listed; ++j) pointers_[j] = cells + seen_.cells[at + j] * stride;
    for (int j = listed; j < kPointers; ++j) pointers_[j] = pointers_[listed - 1];
    is_half_ = type == CellType::F16 && kReadsHalves;
    if (is_half_ || type == CellType::F32) return count;
    for (int j = 0; j < count; ++j) {
      fetch(pointers_ + j, 1, size);
      float* out = converted_ + j * kMaxHeadSize;
      convert_cell<S>(type, pointers_[j], size, out);
      pointers_[j] = reinterpret_cast<const char*>(out);
    }
    // What fills up the last vector is read, too: floats, as cells themselves are shorter.
    for (int j = count; j < kPointers; ++j) pointers_[j] = pointers_[count - 1];
    return count;
  }

  void score(Group& group, int64_t at, int count) {
    float* scores = group.scores + at * group.stride;
    const float scale = call_.softcap == 0 ? call_.scale : call_.scale / call_.softcap;
    if (is_half_)
      score_rows<Halves, kGroupRows>(group, count, scale, scores);
    else
      score_rows<FloatCells<S>, kGroupRows>(group, count, scale, scores);
    const int num_scores = count * group.stride;
    if (call_.softcap != 0)
      for (int i = 0; i < num_scores; i += S::kLanes)
        S::store(scores + i, S::mul(S::all(call_.softcap), tangent<S>(S::load(scores + i))));
    for (int r = 0; r < group.num_rows; ++r)
      if (seen_.is_biased >> row_of(group, r) & 1) add_bias(group, r, at, count, scores + r);
    if (seen_.sets) hide(group, at, count, scores);
    const int rest = num_scores % S::kLanes;
    if (rest) std::fill_n(scores + num_scores, S::kLanes - rest, -HUGE_VALF);
    auto maxima = S::load(group.maxima);
    for (int i = 0; i < num_scores; i += S::kLanes) maxima = S::max(maxima, S::load(scores + i));
    S::store(group.maxima, maxima);
  }

  template <class Cells, int kRows>
  void score_rows(const Group& group, int count, float scale, float* scores) {
    if constexpr (kRows > 0) {
      if (group.num_rows != kRows)
        return score_rows<Cells, kRows - 1>(group, count, scale, scores);
      score_cells<S, Cells, kRows>(pointers_, count, group.queries, call_.head_size, scale, scores);
    }
  }

  // Adds the mask's numbers, times the row's slope.
  void add_bias(const Group& group, int r, int64_t at, int count, float* scores) {
    const int row = row_of(group, r);
    uint16_t halves[kBlockCells] = {};
    float bias[kBlockCells];
    for (int j = 0; j < count; ++j) halves[j] = call_.masks[row][seen_.cells[at + j]];
    for (int j = 0; j < kBlockCells; j += S::kLanes)
      S::store(bias + j, S::mul(S::all(call_.slopes[row]), S::load_half(halves + j)));
    for (int j = 0; j < count; ++j) scores[j * group.stride] += bias[j];
  }

  // Rows of the group that see a cell.
  int set_of(const Group& group, int64_t cell) const {
    return seen_.sets[cell] >> group.first & ((1 << group.num_rows) - 1);
  }

  void hide(const Group& group, int64_t at, int count, float* scores) const {
    const int all = (1 << group.num_rows) - 1;
    for (int j = 0; j < count; ++j) {
      const int set = set_of(group, at + j);
      if (set == all) continue;
      for (int r = 0; r < group.num_rows; ++r)
        if (!(set >> r & 1)) scores[j * group.stride + r] = -HUGE_VALF;
    }
  }

  void fold_maxima(Group& group) const {
    for (int r = 0; r < group.num_rows; ++r) {
      float largest = -HUGE_VALF;
      for (int i = r; i < S::kLanes; i += group.stride)
        largest = std::max(largest, group.maxima[i]);
      if (const float* sink = call_.sinks[row_of(group, r)]) largest = std::max(largest, *sink);
      group.maxima[r] = largest == -HUGE_VALF ? 0.0f : largest;
    }
    for (int i = group.num_rows; i < group.stride; ++i) group.maxima[i] = 0.0f;
    for (int i = group.stride; i < 16; ++i) group.maxima[i] = group.maxima[i - group.stride];
  }

  void add(Group& group, int64_t at, int count) {
    float* weights = group.scores + at * group.stride;
    const auto maxima = S::load(group.maxima);
    for (int i = 0; i < count * group.stride; i += S::kLanes)
      S::store(weights + i, exponential<S>(S::sub(S::load(weights + i), maxima)));
    const int all = (1 << group.num_rows) - 1;
    for (int j = 0; j < count;) {
      const int set = seen_.sets ? set_of(group, at + j) : all, begin = j;
      if (seen_.sets)
        while (j < count && set_of(group, at + j) == set) ++j;
      else
        j = count;
      if (set == all) {
        add_run<kGroupRows>(group, 0, begin, j - begin, weights);
        continue;
      }
      for (int r = 0; r < group.num_rows; ++r)
        if (set >> r & 1) add_run<1>(group, r, begin, j - begin, weights);
    }
  }

  // Adds a run of cells that rows `first` to `first` + kRows of the group see (fewer: num_rows).
  template <int kRows>
  void add_run(Group& group, int first, int begin, int count, const float* weights) {
    if constexpr (kRows > 1)
      if (group.num_rows != kRows)
        return add_run<kRows - 1>(group, first, begin, count, weights);
    const auto run = is_half_ ? add_cells<S, Halves, kRows> : add_cells<S, FloatCells<S>, kRows>;
    run(pointers_ + begin, count, weights + begin * group.stride + first, group.stride,
        group.sums + first * kRowFloats, call_.value_size, group.totals + first);
  }

  void finish(const Group& group) const {
    for (int r = 0; r < group.num_rows; ++r) {
      const int row = row_of(group, r);
      float total = group.totals[r];
      if (const float* sink = call_.sinks[row]) {
        float weight[16];
        S::store(weight, exponential<S>(S::all(*sink - group.maxima[r])));
        total += weight[0];
      }
      const float inverse = total == 0 ? 0.0f : 1.0f / total;
      const float* sums = group.sums + r * kRowFloats;
      for (int i = 0; i < call_.value_size; ++i) call_.out[row][i] = sums[i] * inverse;
    }
  }

  const Attention& call_;
  const int* rows_;
  int num_groups_ = 0;
  const Seen& seen_;
  Group groups_[kPanelRows / kGroupRows];
  float* converted_;
  bool is_half_ = false;
  const char* pointers_[kPointers];
};

template <class S>
size_t attention_scratch(int64_t num_cells) {
  return Panel<S>::scratch(num_cells) + Visibility::scratch(num_cells);
}

template <class S>
void attend(const Attention& call) {
  Visibility visibility(call, call.scratch + Panel<S>::scratch(call.num_cells));
  int rows[kPanelRows];
  Seen seen;
  while (const int count = visibility.next(rows, &seen))
    Panel<S>(call, rows, count, seen, call.scratch).attend();
}

}  // namespace
}  // namespace rows
