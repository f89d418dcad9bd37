// What of ggml's structures the plugin touches, declared again here, and its functions, which are
// looked up in the library that is loaded already: nothing of ggml is compiled or linked in. Each
// of these layouts is checked in a process of its own before the plugin is used.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rows::ggml {

constexpr int kTypeF32 = 0, kTypeF16 = 1;  // ggml_type; those of files never change
constexpr int kSuccess = 0, kAllocationFailed = -2;  // ggml_status

constexpr size_t kObjectBytes = 32;  // of ggml_object, which stands before each tensor

struct BufferType;
struct Buffer;

struct Tensor {
  int type;
  Buffer* buffer;
  int64_t ne[4];  // values in each dimension
  size_t nb[4];   // bytes from one to the next
  int op;
  int32_t op_params[16];
  int32_t flags;
  Tensor* src[10];
  Tensor* view_src;
  size_t view_offs;
  void* data;
  char name[64];
  void* extra;
  char padding[8];
};

struct ComputeParams {
  int ith, nth;
  size_t wsize;
  void* wdata;
  void* threadpool;
  bool use_ref;
};

// An operation that takes the place of ggml's own; virtual functions in the order of its class.
class Traits {
 public:
  virtual ~Traits() = default;
  virtual bool work_size(int num_threads, const Tensor* op, size_t& size) = 0;
  virtual bool compute_forward(ComputeParams* params, Tensor* op) = 0;
};

class ExtraBufferType {
 public:
  virtual ~ExtraBufferType() = default;
  virtual bool supports_op(void* device, const Tensor* op) = 0;
  virtual Traits* get_tensor_traits(const Tensor* op) = 0;
};

struct BufferInterface {
  void (*free_buffer)(Buffer*);
  void* (*get_base)(Buffer*);
  int (*init_tensor)(Buffer*, Tensor*);
  void (*memset_tensor)(Buffer*, Tensor*, uint8_t value, size_t offset, size_t size);
  void (*set_tensor)(Buffer*, Tensor*, const void* data, size_t offset, size_t size);
  void* others[6];  // optional
};

struct Buffer {
  BufferInterface interface;
  BufferType* type;
  void* context;
  size_t size;
  int usage;
};

// Where a buffer type has its functions, its device and its context, by the version of ggml's API.
struct BufferTypeLayout {
  int name, allocate, alignment, allocation_size, device, context;
};
constexpr BufferTypeLayout kLayout2 = {0, 1, 2, 4, 6, 7};
constexpr BufferTypeLayout kLayout3 = {0, 1, 3, 5, 8, 9};
constexpr int kOldestApi = 2, kNewestApi = 3;

struct BufferType {
  void* words[16];
};

// std::vector<BufferType*> as all of its implementations have it.
struct BufferTypes {
  BufferType **begin, **end, **capacity;
};

struct Functions {
  size_t (*tensor_overhead)();
  const char* (*op_name)(int op);
  Buffer* (*buffer_init)(BufferType*, BufferInterface, void* context, size_t size);
  BufferType* (*buffer_type)(Buffer*);
  size_t (*buffer_size)(Buffer*);
  bool (*is_host)(BufferType*);
  const char* (*type_name)(BufferType*);
  size_t (*type_alignment)(BufferType*);
  void* (*type_device)(BufferType*);
  void* (*device_of)(void* registry, size_t index);
  void* (*registry)();
  BufferTypes* (*extra_types)();
  void (*barrier)(void* threadpool);  // null where the library does not export it
};

// Fills in what `library`, a handle of dlopen, and what it needs have. Returns the name of a
// function that is not there, null where all are.
const char* find_functions(void* library, Functions* found);

}  // namespace rows::ggml
