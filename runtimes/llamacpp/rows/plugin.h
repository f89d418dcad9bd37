// The parts of the plugin: what llama.cpp's graphs are computed with in place of ggml's kernels.
#pragma once

#include <cstdint>

#include "export.h"
#include "ggml_abi.h"
#include "kernels.h"

namespace rows {

// A weight in a buffer of ours; `ggml::Tensor::extra` points to it.
struct Weight {
  Type type;
  int64_t num_blocks, num_outputs, num_matrices;
  int64_t num_tiles;  // of a matrix
  size_t tile_bytes, row_bytes;
  size_t num_set;     // bytes of the file that have come so far
  uint8_t* staging;   // where they come in pieces
  bool is_ready;      // packed, wholly
  Weight* next;
  // Outputs that are computed, in rising order, where others are left out and read -infinity.
  const int32_t* kept;
  int64_t num_kept;

  size_t file_bytes() const { return row_bytes * num_outputs * num_matrices; }
  size_t packed_bytes() const { return tile_bytes * num_tiles * num_matrices; }
  int64_t num_packed() const { return kept == nullptr ? num_outputs : num_kept; }  // of a matrix
};

struct Plugin {
  ggml::Functions ggml;
  const Kernels* kernels;
  uint32_t types;  // whose bit is set: those that are taken over
  bool takes_attention;
  int mul_mat, mul_mat_id, flash_attention;  // as this version of ggml numbers operations
  ggml::BufferTypeLayout layout;
  ggml::BufferType* buffer_type;  // null until it is in force
};
extern Plugin plugin;

// The type of a weight in a file, -1 if it is none of ours.
int type_of(int ggml_type);
// Describes a weight, whose memory may yet be missing. False: it does not fit, ggml keeps it.
bool describe(const ggml::Tensor* weight, bool is_experts, Weight* found);
// The weight of a tensor in a buffer of ours, null for all others.
const Weight* packed(const ggml::Tensor*);
bool is_ours(const ggml::Tensor*);

// Our buffer type for a device of ggml's; it lives as long as the process.
ggml::BufferType* make_buffer_type(void* device);

ggml::Traits* products();         // MUL_MAT
ggml::Traits* expert_products();  // MUL_MAT_ID
ggml::Traits* attention();        // FLASH_ATTN_EXT
bool takes_product(const ggml::Tensor* op);
bool takes_expert_product(const ggml::Tensor* op);
bool takes_attention(const ggml::Tensor* op);

// Memory that the threads of an operation share, or, without a barrier, that each has for itself
// (and fills for itself, so that nobody has to wait).
class Workspace {
 public:
  Workspace(const ggml::ComputeParams* params, size_t bytes)
      : params_(params), is_shared_(plugin.ggml.barrier != nullptr) {
    auto start = (reinterpret_cast<uintptr_t>(params->wdata) + 63) & ~static_cast<uintptr_t>(63);
    base_ = reinterpret_cast<char*>(start) + (is_shared_ ? 0 : params->ith * aligned(bytes));
  }
  static size_t aligned(size_t bytes) { return (bytes + 63) & ~static_cast<size_t>(63); }
  static size_t needed(size_t bytes, int num_threads) {
    return 64 + aligned(bytes) * (plugin.ggml.barrier != nullptr ? 1 : num_threads);
  }
  char* base() const { return base_; }
  bool does_all() const { return !is_shared_ || params_->ith == 0; }
  // The part [from, to) of `total` that this thread fills.
  void share(int64_t total, int64_t* from, int64_t* to) const {
    *from = is_shared_ ? total * params_->ith / params_->nth : 0;
    *to = is_shared_ ? total * (params_->ith + 1) / params_->nth : total;
  }
  void wait() const {
    if (is_shared_) plugin.ggml.barrier(params_->threadpool);
  }

 private:
  const ggml::ComputeParams* params_;
  bool is_shared_;
  char* base_;
};

}  // namespace rows
