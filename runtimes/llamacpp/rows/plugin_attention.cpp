// Attention over all cells of a cache, in place of ggml's FLASH_ATTN_EXT, whose rows would differ
// with the number of rows beside them. It is taken over where its queries come from products of
// packed weights: the rows of all other models are as ggml has them.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "plugin.h"

namespace rows {
namespace {

using ggml::ComputeParams;
using ggml::Tensor;

constexpr int kMostSteps = 16;  // from a product to the queries that are made of it

bool find_cell_type(int ggml_type, CellType* found, int64_t* block) {
  *block = 32;
  switch (ggml_type) {
    case ggml::kTypeF32: *found = CellType::F32; *block = 8; return true;
    case ggml::kTypeF16: *found = CellType::F16; *block = 8; return true;
    case 30: *found = CellType::BF16; *block = 8; return true;
    case 8: *found = CellType::Q8_0; return true;
    case 2: *found = CellType::Q4_0; return true;
    case 3: *found = CellType::Q4_1; return true;
    case 6: *found = CellType::Q5_0; return true;
    case 7: *found = CellType::Q5_1; return true;
    default: return false;
  }
}

// Bytes of a value of these types, or of a block of values.
size_t cell_block_bytes(CellType type) {
  switch (type) {
    case CellType::F32: return 4;
    case CellType::F16:
    case CellType::BF16: return 2;
    case CellType::Q8_0: return 34;
    case CellType::Q4_0: return 18;
    case CellType::Q4_1: return 20;
    case CellType::Q5_0: return 22;
    case CellType::Q5_1: return 24;
  }
  return 0;
}

bool fits(const Tensor* cells) {
  CellType type;
  int64_t block;
  return find_cell_type(cells->type, &type, &block) && cells->ne[0] % block == 0 &&
         cells->ne[0] <= kMaxHeadSize && cells->nb[0] == cell_block_bytes(type);
}

// Whether a tensor was made of a product of ours: rotated, scaled, normed or seen otherwise since.
bool comes_from_ours(const Tensor* tensor) {
  for (int step = 0; tensor != nullptr && step < kMostSteps; step++, tensor = tensor->src[0])
    if (tensor->op == plugin.mul_mat) return tensor->src[0] != nullptr && is_ours(tensor->src[0]);
  return false;
}

struct Options {
  float scale, max_bias, softcap;
  explicit Options(const Tensor* op) { std::memcpy(this, op->op_params, sizeof(*this)); }
};

// The factor of a head's mask (ALiBi).
float slope_of(const Tensor* op, int64_t head) {
  const float max_bias = Options(op).max_bias;
  if (max_bias <= 0) return 1;
  const int64_t heads = op->src[0]->ne[2];
  int64_t power = 1;
  while (2 * power <= heads) power *= 2;
  if (head < power) return std::pow(2.0f, -max_bias / power * (head + 1));
  return std::pow(2.0f, -max_bias / 2 / power * (2 * (head - power) + 1));
}

char* at(const Tensor* tensor, int64_t i1, int64_t i2, int64_t i3) {
  return static_cast<char*>(tensor->data) + i1 * tensor->nb[1] + i2 * tensor->nb[2] +
         i3 * tensor->nb[3];
}

class AttentionTraits final : public ggml::Traits {
 public:
  bool work_size(int num_threads, const Tensor* op, size_t& size) override {
    size = 64 + num_threads * scratch_bytes(op);
    return true;
  }

  // Rows of a KV head are those of its first token for all heads, then those of the next one: rows
  // that see the same cells stand together. Few of them are shared out evenly; many, as panels in
  // turns, since later tokens of a prompt see more cells.
  bool compute_forward(ComputeParams* params, Tensor* op) override {
    const Tensor *query = op->src[0], *keys = op->src[1];
    const int64_t kv_heads = keys->ne[2] * query->ne[3];  // of all streams
    const int64_t together = query->ne[2] / keys->ne[2] * query->ne[1];
    const int64_t panels = (together + kPanelRows - 1) / kPanelRows;
    Attention panel = describe(params, op);
    if (panels * kv_heads >= 4 * params->nth) {
      for (int64_t i = params->ith; i < panels * kv_heads; i += params->nth) {
        const int64_t first = i % panels * kPanelRows;
        attend(op, i / panels, first, std::min(first + kPanelRows, together), &panel);
      }
    } else {
      const int64_t end = together * kv_heads * (params->ith + 1) / params->nth;
      for (int64_t row = together * kv_heads * params->ith / params->nth; row < end;) {
        const int64_t first = row % together, kv_head = row / together;
        const int64_t last = std::min({first + kPanelRows, together, first + end - row});
        attend(op, kv_head, first, last, &panel);
        row += last - first;
      }
    }
    return true;
  }

 private:
  static size_t scratch_bytes(const Tensor* op) {
    return Workspace::aligned(plugin.kernels->attention_scratch(op->src[1]->ne[1]) * sizeof(float));
  }

  static Attention describe(const ComputeParams* params, const Tensor* op) {
    const Tensor *keys = op->src[1], *values = op->src[2];
    const Options options(op);
    Attention found = {};
    int64_t block;
    found.head_size = static_cast<int>(keys->ne[0]);
    found.value_size = static_cast<int>(values->ne[0]);
    find_cell_type(keys->type, &found.key_type, &block);
    find_cell_type(values->type, &found.value_type, &block);
    found.key_stride = keys->nb[1];
    found.value_stride = values->nb[1];
    found.num_cells = keys->ne[1];
    found.scale = options.scale;
    found.softcap = options.softcap;
    const auto start = (reinterpret_cast<uintptr_t>(params->wdata) + 63) & ~uintptr_t{63};
    found.scratch = reinterpret_cast<float*>(start + params->ith * scratch_bytes(op));
    return found;
  }

  // Rows `first` to `last` of a KV head of a stream.
  static void attend(const Tensor* op, int64_t kv_head_of_all, int64_t first, int64_t last,
                     Attention* panel) {
    const Tensor *query = op->src[0], *keys = op->src[1], *values = op->src[2];
    const int64_t kv_head = kv_head_of_all % keys->ne[2], stream = kv_head_of_all / keys->ne[2];
    const int64_t group = query->ne[2] / keys->ne[2];  // heads that share keys and values
    panel->keys = at(keys, 0, kv_head, stream / (query->ne[3] / keys->ne[3]));
    panel->values = at(values, 0, kv_head, stream / (query->ne[3] / values->ne[3]));
    panel->num_rows = 0;
    for (int64_t row = first; row < last; row++)
      add_row(op, row / group, kv_head * group + row % group, stream, panel);
    plugin.kernels->attend(*panel);
  }

  static void add_row(const Tensor* op, int64_t token, int64_t head, int64_t stream,
                      Attention* panel) {
    const Tensor *mask = op->src[3], *sinks = op->src[4];
    const int row = panel->num_rows++;
    panel->queries[row] = reinterpret_cast<const float*>(at(op->src[0], token, head, stream));
    panel->masks[row] = nullptr;
    if (mask != nullptr)
      panel->masks[row] = reinterpret_cast<const uint16_t*>(
          at(mask, token, head % mask->ne[2], stream % mask->ne[3]));
    panel->slopes[row] = slope_of(op, head);
    panel->sinks[row] =
        sinks == nullptr ? nullptr : static_cast<const float*>(sinks->data) + head;
    panel->out[row] = reinterpret_cast<float*>(at(op, head, token, stream));
  }
};

AttentionTraits traits;

}  // namespace

ggml::Traits* attention() { return &traits; }

bool takes_attention(const Tensor* op) {
  const Tensor *query = op->src[0], *keys = op->src[1], *values = op->src[2];
  const Tensor *mask = op->src[3], *sinks = op->src[4];
  if (!plugin.takes_attention || !comes_from_ours(query)) return false;
  const bool queries_fit = query->type == ggml::kTypeF32 && query->nb[0] == sizeof(float) &&
                           op->type == ggml::kTypeF32 && op->nb[0] == sizeof(float);
  const bool heads_fit = keys->ne[2] == values->ne[2] && query->ne[2] % keys->ne[2] == 0 &&
                         query->ne[3] % keys->ne[3] == 0 && query->ne[3] % values->ne[3] == 0;
  const bool mask_fits = mask == nullptr || (mask->type == ggml::kTypeF16 && mask->nb[0] == 2);
  const bool sinks_fit = sinks == nullptr || (sinks->type == ggml::kTypeF32 && sinks->nb[0] == 4);
  return queries_fit && heads_fit && mask_fits && sinks_fit && fits(keys) && fits(values);
}

}  // namespace rows
