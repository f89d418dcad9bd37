// Products of packed weights and activations, in place of ggml's MUL_MAT and MUL_MAT_ID.
#include <algorithm>
#include <cmath>
#include <limits>

#include "plugin.h"

namespace rows {
namespace {

using ggml::ComputeParams;
using ggml::Tensor;

constexpr int64_t kBlockRows = 64;  // activation rows for which a tile stays in the cache

char* row_at(const Tensor* of, int64_t row) {
  const int64_t i1 = row % of->ne[1], i2 = row / of->ne[1] % of->ne[2];
  const int64_t i3 = row / (of->ne[1] * of->ne[2]);
  return static_cast<char*>(of->data) + i1 * of->nb[1] + i2 * of->nb[2] + i3 * of->nb[3];
}

int64_t num_rows(const Tensor* of) { return of->ne[1] * of->ne[2] * of->ne[3]; }

bool is_host(const Tensor* tensor) {
  return tensor->buffer == nullptr ||
         plugin.ggml.is_host(plugin.ggml.buffer_type(tensor->buffer));
}

bool has_float_rows(const Tensor* tensor) {
  return tensor->type == ggml::kTypeF32 && tensor->nb[0] == sizeof(float);
}

void fill_with_nan(float* values, int64_t count) {
  std::fill(values, values + count, std::numeric_limits<float>::quiet_NaN());
}

// A weight that is not whole gives no numbers: nothing can be taken for a result.
bool without_weight(const ComputeParams* params, const Tensor* op) {
  if (params->ith == 0)
    for (int64_t row = 0; row < num_rows(op); row++)
      fill_with_nan(reinterpret_cast<float*>(row_at(op, row)), op->ne[0]);
  return true;
}

// Of a tile of outputs that stand anywhere in the rows.
void multiply_kept(const Weight& weight, const uint8_t* tile, int64_t first, const char* panel,
                   int count, float* const* rows) {
  const Kernels& kernels = *plugin.kernels;
  const auto outputs = std::min<int64_t>(kernels.tile_rows, weight.num_kept - first);
  float together[kPanelRows][kMostTileRows];
  float* out[kPanelRows];
  for (int i = 0; i < count; i++) out[i] = together[i];
  kernels.multiply(weight.type, tile, weight.num_blocks, panel, count, out,
                   static_cast<int>(outputs));
  for (int i = 0; i < count; i++)
    for (int64_t at = 0; at < outputs; at++) rows[i][weight.kept[first + at]] = together[i][at];
}

void multiply_tile(const Weight& weight, const uint8_t* tile, int64_t tile_index,
                   const char* panel, int count, float* const* rows) {
  const Kernels& kernels = *plugin.kernels;
  const int64_t first = tile_index * kernels.tile_rows;
  if (weight.kept != nullptr) return multiply_kept(weight, tile, first, panel, count, rows);
  float* out[kPanelRows];
  for (int i = 0; i < count; i++) out[i] = rows[i] + first;
  const auto outputs = std::min<int64_t>(kernels.tile_rows, weight.num_outputs - first);
  kernels.multiply(weight.type, tile, weight.num_blocks, panel, count, out,
                   static_cast<int>(outputs));
}

size_t panel_bytes(const Weight& weight) {
  return plugin.kernels->panel_bytes(weight.type, weight.num_blocks);
}

// What both operations have in common.
class PackedProducts : public ggml::Traits {
 public:
  bool work_size(int num_threads, const Tensor* op, size_t& size) final {
    const Weight* weight = packed(op->src[0]);
    size = weight == nullptr ? 0 : Workspace::needed(bytes(*weight, op), num_threads);
    return true;
  }

  bool compute_forward(ComputeParams* params, Tensor* op) final {
    const Weight* weight = packed(op->src[0]);
    if (weight == nullptr || !weight->is_ready) return without_weight(params, op);
    compute(params, Workspace(params, bytes(*weight, op)), *weight, op);
    return true;
  }

 private:
  // Of the workspace.
  virtual size_t bytes(const Weight&, const Tensor* op) const = 0;
  virtual void compute(const ComputeParams*, const Workspace&, const Weight&,
                       const Tensor* op) const = 0;
};

class Products final : public PackedProducts {
  void compute(const ComputeParams* params, const Workspace& space, const Weight& weight,
               const Tensor* op) const override {
    quantize(space, weight, op->src[1]);
    space.wait();
    multiply(params, space, weight, op);
  }

  size_t bytes(const Weight& weight, const Tensor* op) const override {
    return (num_rows(op->src[1]) + kPanelRows - 1) / kPanelRows * panel_bytes(weight);
  }

  static void quantize(const Workspace& space, const Weight& weight, const Tensor* from) {
    const int64_t blocks = weight.num_blocks;
    const size_t stride = panel_bytes(weight);
    int64_t first, last;
    space.share(num_rows(from) * blocks, &first, &last);
    while (first < last) {
      const int64_t row = first / blocks, block = first % blocks;
      const int64_t count = std::min(blocks - block, last - first);
      plugin.kernels->quantize(weight.type, reinterpret_cast<const float*>(row_at(from, row)),
                               static_cast<int>(row % kPanelRows), block, count,
                               space.base() + row / kPanelRows * stride);
      first += count;
    }
  }

  // Gives what no tile computes its value, between the outputs of this thread's tiles and before
  // those of the next one's.
  static void leave_out(const Weight& weight, const Tensor* op, int64_t first, int64_t last) {
    const int64_t rows = plugin.kernels->tile_rows;
    const int64_t from = first == 0 ? 0 : weight.kept[first * rows];
    const int64_t to = last == weight.num_tiles ? weight.num_outputs : weight.kept[last * rows];
    for (int64_t row = 0; row < num_rows(op); row++) {
      auto* values = reinterpret_cast<float*>(row_at(op, row));
      std::fill(values + from, values + to, -std::numeric_limits<float>::infinity());
    }
  }

  static void multiply(const ComputeParams* params, const Workspace& space, const Weight& weight,
                       const Tensor* op) {
    const int64_t total = num_rows(op), tiles = weight.num_tiles;
    const int64_t first = tiles * params->ith / params->nth;
    const int64_t last = tiles * (params->ith + 1) / params->nth;
    const auto* data = static_cast<const uint8_t*>(op->src[0]->data);
    const size_t stride = panel_bytes(weight);
    if (weight.kept != nullptr) leave_out(weight, op, first, last);
    for (int64_t begin = 0; begin < total; begin += kBlockRows) {
      const int64_t end = std::min(total, begin + kBlockRows);
      for (int64_t tile = first; tile < last; tile++)
        for (int64_t row = begin; row < end; row += kPanelRows) {
          const int count = static_cast<int>(std::min<int64_t>(kPanelRows, end - row));
          float* out[kPanelRows];
          for (int i = 0; i < count; i++) out[i] = reinterpret_cast<float*>(row_at(op, row + i));
          multiply_tile(weight, data + tile * weight.tile_bytes, tile,
                        space.base() + row / kPanelRows * stride, count, out);
        }
    }
  }
};

// Which rows each expert has; in memory of an operation, before its panels.
struct Groups {
  int32_t* pairs;        // (token, place among its experts) as one number, sorted by experts
  int32_t* experts;      // those that have rows
  int32_t* first_pair;   // of each of them, in `pairs`; one more ends the last
  int32_t* first_panel;  // likewise
  int32_t* next;         // of all experts, while sorting
  int32_t* count;        // of `experts`

  Groups(char* base, int64_t num_pairs, int64_t num_experts)
      : pairs(reinterpret_cast<int32_t*>(base)),
        experts(pairs + num_pairs),
        first_pair(experts + num_experts),
        first_panel(first_pair + num_experts + 1),
        next(first_panel + num_experts + 1),
        count(next + num_experts) {}
  static size_t bytes(int64_t num_pairs, int64_t num_experts) {
    return Workspace::aligned((num_pairs + 4 * num_experts + 3) * sizeof(int32_t));
  }
};

class ExpertProducts final : public PackedProducts {
  void compute(const ComputeParams* params, const Workspace& space, const Weight& weight,
               const Tensor* op) const override {
    Groups groups(space.base(), num_pairs(op), weight.num_matrices);
    if (space.does_all()) group(weight, op, groups);
    space.wait();
    char* panels = space.base() + Groups::bytes(num_pairs(op), weight.num_matrices);
    quantize(space, weight, op, groups, panels);
    space.wait();
    multiply(params, weight, op, groups, panels);
  }

  static int64_t num_pairs(const Tensor* op) { return op->src[2]->ne[0] * op->src[2]->ne[1]; }

  size_t bytes(const Weight& weight, const Tensor* op) const override {
    const int64_t pairs = num_pairs(op);
    const int64_t most_panels = std::min(pairs, pairs / kPanelRows + weight.num_matrices);
    return Groups::bytes(pairs, weight.num_matrices) + most_panels * panel_bytes(weight);
  }

  static int32_t expert_at(const Tensor* ids, int64_t pair) {
    const int64_t place = pair % ids->ne[0], token = pair / ids->ne[0];
    const char* at = static_cast<char*>(ids->data) + place * ids->nb[0] + token * ids->nb[1];
    return *reinterpret_cast<const int32_t*>(at);
  }

  static float* out_at(const Tensor* op, int64_t pair) {
    const int64_t place = pair % op->src[2]->ne[0], token = pair / op->src[2]->ne[0];
    char* at = static_cast<char*>(op->data) + place * op->nb[1] + token * op->nb[2];
    return reinterpret_cast<float*>(at);
  }

  static void group(const Weight& weight, const Tensor* op, const Groups& groups) {
    const int64_t pairs = num_pairs(op);
    const auto experts = static_cast<int32_t>(weight.num_matrices);
    std::fill(groups.next, groups.next + experts, 0);
    const auto is_one = [&](int32_t expert) { return 0 <= expert && expert < experts; };
    for (int64_t pair = 0; pair < pairs; pair++) {
      const int32_t expert = expert_at(op->src[2], pair);
      if (is_one(expert)) groups.next[expert]++;
      else fill_with_nan(out_at(op, pair), op->ne[0]);
    }
    int32_t active = 0, first_pair = 0, first_panel = 0;
    for (int32_t expert = 0; expert < experts; expert++) {
      const int32_t count = groups.next[expert];
      groups.next[expert] = first_pair;
      if (count == 0) continue;
      groups.experts[active] = expert;
      groups.first_pair[active] = first_pair;
      groups.first_panel[active++] = first_panel;
      first_pair += count;
      first_panel += (count + kPanelRows - 1) / kPanelRows;
    }
    groups.first_pair[active] = first_pair;
    groups.first_panel[active] = first_panel;
    *groups.count = active;
    for (int64_t pair = 0; pair < pairs; pair++) {
      const int32_t expert = expert_at(op->src[2], pair);
      if (is_one(expert)) groups.pairs[groups.next[expert]++] = static_cast<int32_t>(pair);
    }
  }

  static void quantize(const Workspace& space, const Weight& weight, const Tensor* op,
                       const Groups& groups, char* panels) {
    const Tensor *from = op->src[1], *ids = op->src[2];
    int64_t first, last;
    space.share(groups.first_pair[*groups.count], &first, &last);
    int32_t active = 0;
    for (int64_t index = first; index < last; index++) {
      while (index >= groups.first_pair[active + 1]) active++;
      const int64_t within = index - groups.first_pair[active], pair = groups.pairs[index];
      const int64_t panel = groups.first_panel[active] + within / kPanelRows;
      const int64_t place = pair % ids->ne[0] % from->ne[1], token = pair / ids->ne[0];
      const char* at = static_cast<char*>(from->data) + place * from->nb[1] + token * from->nb[2];
      plugin.kernels->quantize(weight.type, reinterpret_cast<const float*>(at),
                               static_cast<int>(within % kPanelRows), 0, weight.num_blocks,
                               panels + panel * panel_bytes(weight));
    }
  }

  static void multiply(const ComputeParams* params, const Weight& weight, const Tensor* op,
                       const Groups& groups, const char* panels) {
    const auto* data = static_cast<const uint8_t*>(op->src[0]->data);
    const int64_t tiles = weight.num_tiles;
    const int64_t first = tiles * params->ith / params->nth;
    const int64_t last = tiles * (params->ith + 1) / params->nth;
    for (int32_t active = 0; active < *groups.count; active++) {
      const uint8_t* matrix = data + groups.experts[active] * tiles * weight.tile_bytes;
      for (int64_t tile = first; tile < last; tile++) {
        const char* panel = panels + groups.first_panel[active] * panel_bytes(weight);
        const int32_t end = groups.first_pair[active + 1];
        for (int32_t at = groups.first_pair[active]; at < end; at += kPanelRows) {
          const int count = std::min(kPanelRows, end - at);
          float* out[kPanelRows];
          for (int i = 0; i < count; i++) out[i] = out_at(op, groups.pairs[at + i]);
          multiply_tile(weight, matrix + tile * weight.tile_bytes, tile, panel, count, out);
          panel += panel_bytes(weight);
        }
      }
    }
  }
};

Products products_traits;
ExpertProducts expert_traits;

}  // namespace

ggml::Traits* products() { return &products_traits; }
ggml::Traits* expert_products() { return &expert_traits; }

bool takes_product(const Tensor* op) {
  Weight weight;
  return op->op == plugin.mul_mat && describe(op->src[0], false, &weight) &&
         has_float_rows(op->src[1]) && has_float_rows(op) && is_host(op->src[1]);
}

bool takes_expert_product(const Tensor* op) {
  Weight weight;
  return op->op == plugin.mul_mat_id && describe(op->src[0], true, &weight) &&
         has_float_rows(op->src[1]) && has_float_rows(op) && is_host(op->src[1]) &&
         op->src[1]->ne[3] == 1;
}

}  // namespace rows
