// Products of MatMulNBits nodes with our kernels, as an operator of onnxruntime:
//
//   edge_spec.MatMulRows(A, B, scales, zero_points?, (none), bias?) -> Y
//
// Inputs and the attributes K, N, bits and block_size are MatMulNBits' own; `weights` and `matrix`
// name the model and the matrix, which several sessions may have. All work is done in the threads
// of the session, and a row's bits depend neither on their number nor on the rows beside it.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <mutex>

#include "export.h"
#include "ort_api.h"
#include "ort_weights.h"

namespace rows {
namespace {

using ort::Api;
using ort::Status;

constexpr int64_t kLargestSize = int64_t{1} << 30;  // whose products do not overflow
constexpr size_t kMostSizes = 8;          // of an input
constexpr int64_t kBlockRows = 64;        // activation rows for which a tile stays in the cache
constexpr int64_t kSharedBlocks = 2048;  // of activations to round, from which threads share them
constexpr size_t kPartsPerThread = 4;     // so that none waits long for the slowest
constexpr size_t kBias = 5, kNumInputs = 6;

// Memory of one thread, as large as the largest pass.
class Panels {
 public:
  ~Panels() { std::free(data_); }
  char* reserve(size_t bytes) {
    if (bytes <= bytes_) return data_;
    std::free(data_);
    bytes_ = (bytes + 63) / 64 * 64;
    data_ = static_cast<char*>(std::aligned_alloc(64, bytes_));
    if (data_ == nullptr) bytes_ = 0;
    return data_;
  }

 private:
  char* data_ = nullptr;
  size_t bytes_ = 0;
};

#define RETURN_FAILED(call) \
  if (Status* status = (call)) return status

template <typename T>
Status* data(const Api& api, const ort::Value* of, T** out) {
  void* found;
  RETURN_FAILED(api.data(of, &found));
  *out = static_cast<T*>(found);
  return nullptr;
}

struct Product {
  const TiledMatrix* matrix;
  const float* activations;
  const float* bias;  // null: none
  float* out;
  char* panels;
  size_t panel_bytes;
  int64_t num_rows, num_parts;

  void quantize(int64_t row) const {
    const int64_t blocks = matrix->num_blocks;
    matrix->kernels->quantize(matrix->type, activations + row * blocks * 32,
                              static_cast<int>(row % kPanelRows), 0, blocks,
                              panels + row / kPanelRows * panel_bytes);
  }

  void multiply(int64_t part) const {
    const int64_t first = matrix->num_tiles * part / num_parts;
    const int64_t last = matrix->num_tiles * (part + 1) / num_parts;
    for (int64_t begin = 0; begin < num_rows; begin += kBlockRows) {
      const int64_t end = std::min(num_rows, begin + kBlockRows);
      for (int64_t tile = first; tile < last; tile++)
        for (int64_t row = begin; row < end; row += kPanelRows)
          multiply_tile(tile, row, static_cast<int>(std::min<int64_t>(kPanelRows, end - row)));
    }
  }

 private:
  void multiply_tile(int64_t tile, int64_t row, int count) const {
    const int lanes = matrix->kernels->tile_rows;
    const int64_t first = tile * lanes;
    const int outputs = static_cast<int>(std::min<int64_t>(lanes, matrix->num_outputs - first));
    float* to[kPanelRows];
    for (int m = 0; m < count; m++) to[m] = out + (row + m) * matrix->num_outputs + first;
    matrix->kernels->multiply(matrix->type, matrix->tiles + tile * matrix->tile_bytes,
                              matrix->num_blocks, panels + row / kPanelRows * panel_bytes, count,
                              to, outputs);
    if (bias == nullptr) return;
    for (int m = 0; m < count; m++)
      for (int i = 0; i < outputs; i++) to[m][i] += bias[first + i];
  }
};

class Node {
 public:
  explicit Node(const Api& api) : api_(api) {}

  Status* open(const ort::KernelInfo* info) {
    int64_t bits, block_size;
    RETURN_FAILED(api_.attribute(info, "N", &source_.num_outputs));
    RETURN_FAILED(api_.attribute(info, "K", &source_.num_values));
    RETURN_FAILED(api_.attribute(info, "bits", &bits));
    RETURN_FAILED(api_.attribute(info, "block_size", &block_size));
    RETURN_FAILED(api_.attribute(info, "threads", &num_threads_));
    RETURN_FAILED(api_.num_inputs(info, &num_inputs_));
    std::string weights;
    RETURN_FAILED(text(info, "weights", &weights));
    RETURN_FAILED(text(info, "matrix", &matrix_name_));
    const auto is_size = [](int64_t size) { return 0 < size && size <= kLargestSize; };
    const bool is_known = is_size(source_.num_outputs) && is_size(source_.num_values) &&
                          (bits == 4 || bits == 8) && is_size(block_size) && block_size % 32 == 0 &&
                          source_.num_values % block_size == 0 && is_size(num_threads_);
    if (!is_known) return api_.failed("MatMulRows does not take blocks of these sizes");
    source_.bits = static_cast<int>(bits);
    source_.block_size = static_cast<int>(block_size);
    weights_ = Weights::named(weights);
    const ort::Value* values[kMatrixInputs] = {};
    for (size_t i = 0; i < kMatrixInputs && i + 1 < num_inputs_; i++) {
      int is_constant;
      RETURN_FAILED(api_.constant_input(info, i + 1, &is_constant, &values[i]));
      if (i < 2 && !is_constant) return nullptr;  // of a graph around this one: with the first pass
      if (!is_constant) values[i] = nullptr;
    }
    return pack(values);
  }

  Status* compute(ort::Context* context) {
    if (matrix_.load(std::memory_order_acquire) == nullptr) {
      const ort::Value* values[kMatrixInputs] = {};
      for (size_t i = 0; i < kMatrixInputs && i + 1 < num_inputs_; i++)
        RETURN_FAILED(api_.input(context, i + 1, &values[i]));
      RETURN_FAILED(pack(values));
    }
    Product product;
    product.matrix = matrix_.load(std::memory_order_relaxed);
    RETURN_FAILED(bind(context, &product));
    if (product.num_rows == 0) return nullptr;
    const TiledMatrix& matrix = *product.matrix;
    product.panel_bytes = matrix.kernels->panel_bytes(matrix.type, matrix.num_blocks);
    const int64_t num_panels = (product.num_rows + kPanelRows - 1) / kPanelRows;
    thread_local Panels panels;
    product.panels = panels.reserve(static_cast<size_t>(num_panels) * product.panel_bytes);
    if (product.panels == nullptr) return api_.failed("MatMulRows has no memory for activations");
    const auto quantize = [](void* of, size_t row) {
      static_cast<const Product*>(of)->quantize(static_cast<int64_t>(row));
    };
    const auto multiply = [](void* of, size_t part) {
      static_cast<const Product*>(of)->multiply(static_cast<int64_t>(part));
    };
    const size_t num_rows = static_cast<size_t>(product.num_rows);
    if (num_rows > 1 && product.num_rows * matrix.num_blocks >= kSharedBlocks) {
      RETURN_FAILED(api_.in_parallel(context, quantize, num_rows, &product));
    } else {
      for (size_t row = 0; row < num_rows; row++) quantize(&product, row);
    }
    product.num_parts = std::min<int64_t>(matrix.num_tiles, num_threads_ * kPartsPerThread);
    return api_.in_parallel(context, multiply, static_cast<size_t>(product.num_parts), &product);
  }

 private:
  static constexpr size_t kMatrixInputs = 3;  // B, scales, zero points

  Status* text(const ort::KernelInfo* info, const char* name, std::string* out) const {
    size_t bytes = 0;
    RETURN_FAILED(api_.attribute(info, name, nullptr, &bytes));
    out->resize(bytes);
    return api_.attribute(info, name, out->data(), &bytes);
  }

  // Checks the sizes of what onnxruntime gives, which it knows nothing about.
  Status* pack(const ort::Value* const* values) {
    BlockMatrix source = source_;
    const int64_t blocks = source.num_blocks();
    const bool has_zero_points = values[2] != nullptr;
    if (has_zero_points && source.bits == 8)
      return api_.failed("MatMulRows takes no zero points of 8 bits");
    RETURN_FAILED(checked(values[0], static_cast<int64_t>(source.value_bytes()), &source.values));
    RETURN_FAILED(checked(values[1], source.num_outputs * blocks, &source.scales));
    if (has_zero_points)
      RETURN_FAILED(
          checked(values[2], source.num_outputs * ((blocks + 1) / 2), &source.zero_points));
    const char* reason = nullptr;
    const TiledMatrix* found = weights_->tiled(matrix_name_, source, &reason);
    if (found == nullptr) return api_.failed(reason);
    if (found->num_outputs != source.num_outputs || found->num_blocks != source.num_values / 32)
      return api_.failed("MatMulRows was given two matrices of one name");
    matrix_.store(found, std::memory_order_release);
    return nullptr;
  }

  template <typename T>
  Status* checked(const ort::Value* of, int64_t count, const T** out) const {
    size_t found;
    RETURN_FAILED(num_elements(of, &found));
    if (found != static_cast<size_t>(count))
      return api_.failed("MatMulRows was given a matrix of other sizes than it was told");
    return data(api_, of, out);
  }

  Status* num_elements(const ort::Value* of, size_t* out) const {
    ort::Shape* shape;
    RETURN_FAILED(api_.shape(of, &shape));
    Status* status = api_.element_count(shape, out);
    api_.release(shape);
    return status;
  }

  Status* bind(ort::Context* context, Product* product) const {
    const ort::Value *given, *bias = nullptr;
    RETURN_FAILED(api_.input(context, 0, &given));
    if (num_inputs_ > kBias) RETURN_FAILED(api_.input(context, kBias, &bias));
    ort::Shape* shape;
    RETURN_FAILED(api_.shape(given, &shape));
    size_t count = 0;
    int64_t sizes[kMostSizes];
    Status* status = api_.num_sizes(shape, &count);
    if (status == nullptr && 0 < count && count <= kMostSizes)
      status = api_.sizes(shape, sizes, count);
    api_.release(shape);
    if (status != nullptr) return status;
    if (count == 0 || count > kMostSizes || sizes[count - 1] != source_.num_values)
      return api_.failed("MatMulRows was given rows of another size");
    product->num_rows = 1;
    for (size_t i = 0; i + 1 < count; i++) product->num_rows *= sizes[i];
    sizes[count - 1] = source_.num_outputs;
    ort::Value* out;
    RETURN_FAILED(api_.output(context, 0, sizes, count, &out));
    RETURN_FAILED(data(api_, given, &product->activations));
    RETURN_FAILED(data(api_, out, &product->out));
    product->bias = nullptr;
    if (bias == nullptr) return nullptr;
    return checked(bias, source_.num_outputs, &product->bias);
  }

  const Api& api_;
  BlockMatrix source_;  // without data
  int64_t num_threads_ = 0;
  size_t num_inputs_ = 0;
  std::string matrix_name_;
  std::shared_ptr<Weights> weights_;
  std::atomic<const TiledMatrix*> matrix_{nullptr};
};

Status* create(const ort::Operator*, const Api* api, const ort::KernelInfo* info, void** kernel) {
  try {
    auto node = std::make_unique<Node>(*api);
    RETURN_FAILED(node->open(info));
    *kernel = node.release();
    return nullptr;
  } catch (const std::exception& error) {
    return api->failed(error.what());
  }
}

const Api* registered = nullptr;

Status* compute(void* kernel, ort::Context* context) {
  try {
    return static_cast<Node*>(kernel)->compute(context);
  } catch (const std::exception& error) {
    return registered->failed(error.what());
  }
}

int input_type(const ort::Operator*, size_t index) {
  constexpr int types[kNumInputs] = {ort::kFloat, ort::kUint8, ort::kFloat,
                                     ort::kUint8, ort::kInt32, ort::kFloat};
  return types[index];
}

ort::Operator made() {
  ort::Operator op{};
  op.version = ort::kApiVersion;
  op.name = [](const ort::Operator*) { return "MatMulRows"; };
  op.provider = [](const ort::Operator*) -> const char* { return nullptr; };
  op.input_type = input_type;
  op.num_inputs = [](const ort::Operator*) { return kNumInputs; };
  op.output_type = [](const ort::Operator*, size_t) { return ort::kFloat; };
  op.num_outputs = [](const ort::Operator*) { return size_t{1}; };
  op.destroy = [](void* kernel) { delete static_cast<Node*>(kernel); };
  op.input_kind = [](const ort::Operator*, size_t index) {
    return index > 2 ? ort::kOptional : ort::kRequired;
  };
  op.output_kind = [](const ort::Operator*, size_t) { return ort::kRequired; };
  op.input_memory = [](const ort::Operator*, size_t) { return ort::kDefaultMemory; };
  const auto one = [](const ort::Operator*) { return 1; };
  op.least_variadic_inputs = op.variadic_inputs_are_alike = one;
  op.least_variadic_outputs = op.variadic_outputs_are_alike = one;
  op.create_or_fail = create;
  op.compute_or_fail = compute;
  op.first_version = one;
  op.last_version = one;
  return op;
}

}  // namespace
}  // namespace rows

// What SessionOptions.register_custom_ops_library looks for.
EDGE_SPEC_EXPORT rows::ort::Status* RegisterCustomOps(rows::ort::SessionOptions* options,
                                                      const rows::ort::ApiBase* base) {
  using namespace rows;
  static const ort::Operator op = made();
  static std::mutex mutex;
  static ort::Domain* domain = nullptr;
  const ort::Api* api = base->api(ort::kApiVersion);
  if (api == nullptr) return base->api(1)->failed("onnxruntime is too old for MatMulRows");
  const std::lock_guard<std::mutex> lock(mutex);
  registered = api;
  if (domain == nullptr) {
    RETURN_FAILED(api->create_domain("edge_spec", &domain));
    RETURN_FAILED(api->add_operator(domain, &op));
  }
  return api->add_domain(options, domain);
}
