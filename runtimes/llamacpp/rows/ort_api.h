// What onnxruntime's C interface has for operators of others, as far as ours needs it.
//
// The interface only grows: a structure's members and the functions of a version stay where they
// are in all later ones. kApiVersion is the oldest one that has everything here.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rows {
namespace ort {

constexpr uint32_t kApiVersion = 18;

struct Status;  // null: it went well
struct Value;
struct Shape;
struct KernelInfo;
struct Context;
struct Domain;
struct SessionOptions;

constexpr int kFailed = 1;                       // of the codes of a status
constexpr int kFloat = 1, kUint8 = 2, kInt32 = 6;  // types of a tensor's elements
constexpr int kRequired = 0, kOptional = 1;      // of an operator's inputs and outputs
constexpr int kDefaultMemory = 0;

// The functions, by their places in the table.
class Api {
 public:
  Status* failed(const char* why) const {
    return call<0, Status*>(kFailed, why);
  }
  Status* create_domain(const char* name, Domain** out) const {
    return call<26, Status*>(name, out);
  }
  Status* add_operator(Domain* to, const struct Operator* added) const {
    return call<27, Status*>(to, added);
  }
  Status* add_domain(SessionOptions* to, Domain* added) const {
    return call<28, Status*>(to, added);
  }
  Status* data(const Value* of, void** out) const {
    return call<51, Status*>(const_cast<Value*>(of), out);
  }
  Status* num_sizes(const Shape* of, size_t* out) const { return call<61, Status*>(of, out); }
  Status* sizes(const Shape* of, int64_t* out, size_t count) const {
    return call<62, Status*>(of, out, count);
  }
  Status* element_count(const Shape* of, size_t* out) const { return call<64, Status*>(of, out); }
  Status* shape(const Value* of, Shape** out) const { return call<65, Status*>(of, out); }
  Status* attribute(const KernelInfo* of, const char* name, int64_t* out) const {
    return call<86, Status*>(of, name, out);
  }
  Status* attribute(const KernelInfo* of, const char* name, char* out, size_t* bytes) const {
    return call<87, Status*>(of, name, out, bytes);
  }
  Status* input(const Context* of, size_t index, const Value** out) const {
    return call<90, Status*>(of, index, out);
  }
  Status* output(Context* of, size_t index, const int64_t* sizes, size_t count,
                 Value** out) const {
    return call<91, Status*>(of, index, sizes, count, out);
  }
  void release(Status* status) const { call<93, void>(status); }
  void release(Shape* shape) const { call<99, void>(shape); }
  Status* num_inputs(const KernelInfo* of, size_t* out) const {
    return call<230, Status*>(of, out);
  }
  Status* constant_input(const KernelInfo* of, size_t index, int* is_constant,
                         const Value** out) const {
    return call<249, Status*>(of, index, is_constant, out);
  }
  // Calls work(user, i) for each i below `total`, in the threads of the session.
  Status* in_parallel(const Context* of, void (*work)(void*, size_t), size_t total,
                      void* user) const {
    return call<274, Status*>(of, work, total, size_t{0}, user);
  }

 private:
  template <int place, typename Result, typename... Arguments>
  Result call(Arguments... arguments) const {
    return reinterpret_cast<Result (*)(Arguments...)>(functions_[place])(arguments...);
  }

  void* functions_[275];
};

struct ApiBase {
  const Api* (*api)(uint32_t version);  // null where the library does not have that version
  const char* (*library_version)();
};

// An operator, whose functions onnxruntime calls. Those that may be null are of other kinds.
struct Operator {
  uint32_t version;
  void* (*create)(const Operator*, const Api*, const KernelInfo*);
  const char* (*name)(const Operator*);
  const char* (*provider)(const Operator*);  // null: the CPU
  int (*input_type)(const Operator*, size_t index);
  size_t (*num_inputs)(const Operator*);
  int (*output_type)(const Operator*, size_t index);
  size_t (*num_outputs)(const Operator*);
  void (*compute)(void* kernel, Context*);
  void (*destroy)(void* kernel);
  int (*input_kind)(const Operator*, size_t index);
  int (*output_kind)(const Operator*, size_t index);
  int (*input_memory)(const Operator*, size_t index);
  int (*least_variadic_inputs)(const Operator*);
  int (*variadic_inputs_are_alike)(const Operator*);
  int (*least_variadic_outputs)(const Operator*);
  int (*variadic_outputs_are_alike)(const Operator*);
  Status* (*create_or_fail)(const Operator*, const Api*, const KernelInfo*, void** kernel);
  Status* (*compute_or_fail)(void* kernel, Context*);
  Status* (*infer_shape)(const Operator*, void* context);
  int (*first_version)(const Operator*);
  int (*last_version)(const Operator*);
  size_t (*in_place)(int** inputs, int** outputs);
  void (*release_in_place)(int* inputs, int* outputs);
  size_t (*aliases)(int** inputs, int** outputs);
  void (*release_aliases)(int* inputs, int* outputs);
};

}  // namespace ort
}  // namespace rows
