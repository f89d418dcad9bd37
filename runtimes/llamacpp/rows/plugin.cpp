// A buffer type for llama.cpp's CPU backend that packs weights into tiles as they are loaded, and
// what finds ggml's functions and puts it first in the list that models are loaded from.
#include "plugin.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string_view>
#include <vector>

#include "plugin_memory.h"

namespace rows {

Plugin plugin;

namespace {

using ggml::Buffer;
using ggml::BufferType;
using ggml::Tensor;

constexpr const char* kName = "EDGE_SPEC_ROWS";
constexpr size_t kAlignment = 64;
constexpr int kMostTypes = 64;  // ggml_type numbers that are counted

// What one load of a model did; each thread loads one at a time.
struct Load {
  int32_t wants_stock;  // whether ggml keeps all weights
  int32_t num_packed, num_failed;
  int64_t packed_bytes;
  int32_t left[kMostTypes];  // tensors of products that ggml keeps, by type
  int32_t num_trimmed;       // matrices that only the wanted outputs were packed of
};
thread_local Load load;

// The tokens that a load's model is to score, in rising order; none: all of them.
struct Wanted {
  const int32_t* tokens;
  int64_t count;
};
thread_local Wanted wanted;

struct Storage {
  Memory memory;
  Weight* weights;
};

Storage* storage_of(Buffer* buffer) { return static_cast<Storage*>(buffer->context); }

void free_buffer(Buffer* buffer) {
  Storage* storage = storage_of(buffer);
  for (Weight* weight = storage->weights; weight != nullptr;) {
    Weight* next = weight->next;
    std::free(weight->staging);
    std::free(const_cast<int32_t*>(weight->kept));
    delete weight;
    weight = next;
  }
  storage->memory.release();
  delete storage;
}

std::string_view name_of(const Tensor* tensor) {
  return {tensor->name, strnlen(tensor->name, sizeof tensor->name)};
}

// Whether its rows score one token each. Embeddings are in a buffer of ours where they are the
// output matrix, too.
bool scores_tokens(const Tensor* tensor) {
  const std::string_view name = name_of(tensor);
  return name == "output.weight" || name == "token_embd.weight";
}

// As `describe`, of what is packed of a weight that is being loaded. `kept` is the caller's own.
bool describe_wanted(const Tensor* tensor, Weight* found) {
  if (!describe(tensor, tensor->ne[2] > 1, found)) return false;
  const bool is_trimmed = wanted.count > 0 && scores_tokens(tensor) && found->num_matrices == 1 &&
                          wanted.tokens[0] >= 0 &&
                          wanted.tokens[wanted.count - 1] < found->num_outputs;
  if (!is_trimmed) return true;
  found->kept = wanted.tokens;
  found->num_kept = wanted.count;
  const int rows = plugin.kernels->tile_rows;
  found->num_tiles = (wanted.count + rows - 1) / rows;
  return true;
}

void* get_base(Buffer* buffer) { return storage_of(buffer)->memory.data(); }

int init_tensor(Buffer* buffer, Tensor* tensor) {
  Weight described;
  tensor->extra = nullptr;
  if (tensor->view_src != nullptr || !describe_wanted(tensor, &described))
    return ggml::kSuccess;  // no operation takes it
  if (described.kept != nullptr) {
    const size_t bytes = described.num_kept * sizeof(int32_t);
    auto* kept = static_cast<int32_t*>(std::malloc(bytes));
    if (kept == nullptr) return ggml::kAllocationFailed;
    std::memcpy(kept, described.kept, bytes);
    described.kept = kept;
  }
  auto* weight = new (std::nothrow) Weight(described);
  if (weight == nullptr) {
    std::free(const_cast<int32_t*>(described.kept));
    return ggml::kAllocationFailed;
  }
  Storage* storage = storage_of(buffer);
  weight->next = storage->weights;
  storage->weights = weight;
  tensor->extra = weight;
  return ggml::kSuccess;
}

// Packs a tile of rows that stand anywhere in the file.
void pack_kept(const Weight& weight, const uint8_t* source, const int32_t* rows, int64_t count,
               uint8_t* target) {
  std::vector<uint8_t> together(count * weight.row_bytes);
  for (int64_t i = 0; i < count; i++)
    std::memcpy(together.data() + i * weight.row_bytes, source + rows[i] * weight.row_bytes,
                weight.row_bytes);
  plugin.kernels->pack(weight.type, together.data(), weight.row_bytes, static_cast<int>(count),
                       weight.num_blocks, target);
}

void pack(Weight* weight, const uint8_t* source, uint8_t* target) {
  const Kernels& kernels = *plugin.kernels;
  const int64_t tiles = weight->num_tiles, total = tiles * weight->num_matrices;
  in_parallel(total, weight->packed_bytes(), [&](int64_t index) {
    const int64_t matrix = index / tiles, first = index % tiles * kernels.tile_rows;
    const int64_t count = std::min<int64_t>(kernels.tile_rows, weight->num_packed() - first);
    uint8_t* tile = target + index * weight->tile_bytes;
    if (weight->kept != nullptr)
      return pack_kept(*weight, source, weight->kept + first, count, tile);
    kernels.pack(weight->type, source + (matrix * weight->num_outputs + first) * weight->row_bytes,
                 weight->row_bytes, static_cast<int>(count), weight->num_blocks, tile);
  });
  weight->is_ready = true;
  load.num_packed++;
  load.num_trimmed += weight->kept != nullptr;
  load.packed_bytes += static_cast<int64_t>(weight->packed_bytes());
}

// Pieces are gathered in order until the weight is whole; with a gap or without memory for them it
// never becomes ready.
void gather(Weight* weight, uint8_t* target, const void* data, size_t offset, size_t size) {
  if (weight->staging == nullptr && offset == 0)
    weight->staging = static_cast<uint8_t*>(std::malloc(weight->file_bytes()));
  if (weight->staging == nullptr || offset != weight->num_set) {
    load.num_failed++;
    return;
  }
  std::memcpy(weight->staging + offset, data, size);
  weight->num_set += size;
  if (weight->num_set < weight->file_bytes()) return;
  pack(weight, weight->staging, target);
  std::free(weight->staging);
  weight->staging = nullptr;
}

void set_tensor(Buffer*, Tensor* tensor, const void* data, size_t offset, size_t size) {
  auto* weight = static_cast<Weight*>(tensor->extra);
  if (weight == nullptr || weight->is_ready || offset + size > weight->file_bytes()) {
    if (weight != nullptr) weight->is_ready = false;  // what is written over is not whole
    load.num_failed++;
  } else if (offset == 0 && size == weight->file_bytes()) {
    pack(weight, static_cast<const uint8_t*>(data), static_cast<uint8_t*>(tensor->data));
    let_go(data, size);
  } else {
    gather(weight, static_cast<uint8_t*>(tensor->data), data, offset, size);
  }
}

const char* type_name(BufferType*) { return kName; }
size_t type_alignment(BufferType*) { return kAlignment; }

Buffer* allocate(BufferType* type, size_t size) {
  auto* storage = new (std::nothrow) Storage{};
  if (storage == nullptr || !storage->memory.reserve(size)) {
    load.num_failed++;
    delete storage;
    return nullptr;
  }
  ggml::BufferInterface interface = {};
  interface.free_buffer = free_buffer;
  interface.get_base = get_base;
  interface.init_tensor = init_tensor;
  interface.set_tensor = set_tensor;
  return plugin.ggml.buffer_init(type, interface, storage, size);
}

size_t allocation_size(BufferType*, const Tensor* tensor) {
  Weight weight;
  if (is_ours(tensor) && packed(tensor) != nullptr) return packed(tensor)->packed_bytes();
  if (describe_wanted(tensor, &weight)) return weight.packed_bytes();
  size_t last = tensor->nb[0];  // of a tensor that no operation takes
  for (int i = 1; i < 4; i++) last = std::max<size_t>(last, tensor->nb[i] * tensor->ne[i]);
  return last;
}

class Rows final : public ggml::ExtraBufferType {
 public:
  bool supports_op(void*, const Tensor* op) override {
    const Tensor* weight = op->src[0];
    if (weight == nullptr || !is_ours(weight)) return false;
    if (plugin.ggml.buffer_size(weight->buffer) == 0) return chooses(op);
    return packed(weight) != nullptr && (takes_product(op) || takes_expert_product(op));
  }

  ggml::Traits* get_tensor_traits(const Tensor* op) override {
    if (op->op == plugin.mul_mat) return is_ours(op->src[0]) ? products() : nullptr;
    if (op->op == plugin.mul_mat_id) return is_ours(op->src[0]) ? expert_products() : nullptr;
    if (op->op == plugin.flash_attention && takes_attention(op)) return attention();
    return nullptr;
  }

 private:
  // llama.cpp asks for products of every tensor whose name may be that of a matrix, but adds, scales
  // or reshapes some that are float32, and ends the process where it finds these in tiles. Those
  // that conversions leave in float32 it multiplies alone.
  static bool is_only_multiplied(const Tensor* weight) {
    if (weight->type != ggml::kTypeF32) return true;
    const std::string_view name = name_of(weight);
    return is_matrix(weight) && (name.find(".ffn_gate_inp") != name.npos ||
                                 name.find("per_layer_model_proj") != name.npos);
  }

  // It asks so for scales of matrices, too.
  static bool is_matrix(const Tensor* weight) {
    constexpr std::string_view end = ".weight";
    const std::string_view name = name_of(weight);
    return name.size() > end.size() && name.substr(name.size() - end.size()) == end;
  }

  // Whether a model that is being loaded gives us this weight: it asks with an empty buffer.
  static bool chooses(const Tensor* op) {
    if (load.wants_stock) return false;
    if (is_only_multiplied(op->src[0]) && (takes_product(op) || takes_expert_product(op)))
      return true;
    const bool is_product = (op->op == plugin.mul_mat || op->op == plugin.mul_mat_id) &&
                            is_matrix(op->src[0]);
    const int type = op->src[0]->type;
    if (is_product && 0 <= type && type < kMostTypes) load.left[type]++;
    return false;
  }
};

}  // namespace

int type_of(int ggml_type) {
  switch (ggml_type) {
    case 0: return static_cast<int>(Type::F32);
    case 1: return static_cast<int>(Type::F16);
    case 2: return static_cast<int>(Type::Q4_0);
    case 3: return static_cast<int>(Type::Q4_1);
    case 6: return static_cast<int>(Type::Q5_0);
    case 7: return static_cast<int>(Type::Q5_1);
    case 8: return static_cast<int>(Type::Q8_0);
    case 12: return static_cast<int>(Type::Q4_K);
    case 13: return static_cast<int>(Type::Q5_K);
    case 14: return static_cast<int>(Type::Q6_K);
    case 30: return static_cast<int>(Type::BF16);
    default: return -1;
  }
}

bool describe(const Tensor* tensor, bool is_experts, Weight* found) {
  const int type = type_of(tensor->type);
  if (type < 0 || (plugin.types >> type & 1) == 0) return false;
  *found = Weight();
  found->type = static_cast<Type>(type);
  const int values = block_values(found->type);
  const size_t bytes = block_bytes(found->type);
  found->num_blocks = tensor->ne[0] / values;
  found->num_outputs = tensor->ne[1];
  found->num_matrices = tensor->ne[2];
  found->row_bytes = found->num_blocks * bytes;
  found->tile_bytes = plugin.kernels->tile_bytes(found->type, found->num_blocks);
  const int rows = plugin.kernels->tile_rows;
  found->num_tiles = (found->num_outputs + rows - 1) / rows;
  // A type of one value a block may have blocks of several here, which only whole rows fill.
  return tensor->ne[0] > 0 && tensor->ne[0] % values == 0 && tensor->nb[1] == found->row_bytes &&
         tensor->nb[2] == found->row_bytes * tensor->ne[1] && tensor->ne[3] == 1 &&
         (is_experts || tensor->ne[2] == 1) && tensor->ne[1] > 0;
}

bool is_ours(const Tensor* tensor) {
  return tensor->buffer != nullptr && plugin.ggml.buffer_type(tensor->buffer) == plugin.buffer_type;
}

const Weight* packed(const Tensor* tensor) {
  return tensor->view_src == nullptr ? static_cast<const Weight*>(tensor->extra) : nullptr;
}

BufferType* make_buffer_type(void* device) {
  auto* type = new BufferType{};
  const ggml::BufferTypeLayout& at = plugin.layout;
  type->words[at.name] = reinterpret_cast<void*>(type_name);
  type->words[at.allocate] = reinterpret_cast<void*>(allocate);
  type->words[at.alignment] = reinterpret_cast<void*>(type_alignment);
  type->words[at.allocation_size] = reinterpret_cast<void*>(allocation_size);
  type->words[at.device] = device;
  type->words[at.context] = static_cast<ggml::ExtraBufferType*>(new Rows);
  return type;
}

}  // namespace rows

// tokens: in rising order, and without any twice, those whose scores a model is loaded for, which
// stay the caller's until the load has ended; none for all.
EDGE_SPEC_EXPORT void edge_spec_rows_begin_load(int wants_stock, const int32_t* tokens,
                                                int64_t num_tokens) {
  rows::load = {};
  rows::load.wants_stock = wants_stock;
  rows::wanted = {tokens, num_tokens};
  rows::watch_sources(true);
}

// What this thread's load did since; the next one, begun by nobody, packs again.
EDGE_SPEC_EXPORT void edge_spec_rows_end_load(rows::Load* found) {
  *found = rows::load;
  rows::load = {};
  rows::wanted = {};
  rows::watch_sources(false);
}
