// Puts our buffer type into the list of llama.cpp's CPU backend, and finds what of ggml it needs.
//
// The list is no public interface. A backend without devices that `ggml_backend_load` opens was
// tried (ggml 0.25.3): its `ggml_backend_init` can insert the type just as well, with one graph as
// here, but needs the same list and declares one more internal structure (ggml_backend_reg), and
// ggml compares API versions after it has run. Programs outside read GGML_BACKEND_PATH only where
// their backends are libraries of their own. Nor does it help on Windows, which exports no list.
#ifndef _WIN32
#include <dlfcn.h>
#endif

#include <cstdio>
#include <cstring>
#include <new>

#include "plugin.h"

namespace rows {
namespace {

constexpr int kMostOperations = 200;  // ggml has about a hundred

#ifndef _WIN32
template <typename Function>
bool find(void* library, const char* name, Function** found) {
  *found = reinterpret_cast<Function*>(dlsym(library, name));
  return *found != nullptr;
}

// Which number an operation has, or -1.
int operation(const char* name) {
  for (int op = 0; op < kMostOperations; op++) {
    const char* found = plugin.ggml.op_name(op);
    if (found == nullptr) return -1;
    if (std::strcmp(found, name) == 0) return op;
  }
  return -1;
}

// The registry of ggml's CPU backend begins with the version of its API.
const char* choose_layout() {
  int version;
  std::memcpy(&version, plugin.ggml.registry(), sizeof version);
  if (version < ggml::kOldestApi || version > ggml::kNewestApi) {
    static char reason[80];
    std::snprintf(reason, sizeof reason, "ggml has version %d of its API, known are %d to %d",
                  version, ggml::kOldestApi, ggml::kNewestApi);
    return reason;
  }
  plugin.layout = version == 2 ? ggml::kLayout2 : ggml::kLayout3;
  return nullptr;
}

// ggml's own functions find in our buffer type what was put there.
bool is_understood(ggml::BufferType* type, void* device) {
  using NameFunction = const char* (*)(ggml::BufferType*);
  const auto name = reinterpret_cast<NameFunction>(type->words[plugin.layout.name]);
  return std::strcmp(plugin.ggml.type_name(type), name(type)) == 0 &&
         plugin.ggml.type_alignment(type) == 64 && plugin.ggml.type_device(type) == device &&
         !plugin.ggml.is_host(type);
}

// The front of the list comes first when a weight looks for a place. The old list is left as it is:
// another thread may be reading it.
bool insert_first(ggml::BufferTypes* list, ggml::BufferType* type) {
  const auto count = list->end - list->begin;
  auto** longer = static_cast<ggml::BufferType**>(
      ::operator new((count + 1) * sizeof(ggml::BufferType*), std::nothrow));
  if (longer == nullptr) return false;
  longer[0] = type;
  for (int i = 0; i < count; i++) longer[i + 1] = list->begin[i];
  *list = {longer, longer + count + 1, longer + count + 1};
  return true;
}
#endif

}  // namespace

namespace ggml {

const char* find_functions(void* library, Functions* found) {
#ifdef _WIN32
  (void)library, (void)found;
  return "of a library for Windows";
#else
#define FIND(field, name) \
  if (!find(library, name, &found->field)) return name
  FIND(tensor_overhead, "ggml_tensor_overhead");
  FIND(op_name, "ggml_op_name");
  FIND(buffer_init, "ggml_backend_buffer_init");
  FIND(buffer_type, "ggml_backend_buffer_get_type");
  FIND(buffer_size, "ggml_backend_buffer_get_size");
  FIND(is_host, "ggml_backend_buft_is_host");
  FIND(type_name, "ggml_backend_buft_name");
  FIND(type_alignment, "ggml_backend_buft_get_alignment");
  FIND(type_device, "ggml_backend_buft_get_device");
  FIND(device_of, "ggml_backend_reg_dev_get");
  FIND(registry, "ggml_backend_cpu_reg");
  FIND(extra_types, "_Z39ggml_backend_cpu_get_extra_buffer_typesv");
#undef FIND
  find(library, "ggml_barrier", &found->barrier);
  return nullptr;
#endif
}

}  // namespace ggml
}  // namespace rows

// library: ggml's, as dlopen gave it; types: a bit for each type of weights to take over. Returns
// null, or why nothing was inserted, a text that lives on.
EDGE_SPEC_EXPORT const char* edge_spec_rows_install(void* library, uint32_t types,
                                                    int takes_attention) {
  using rows::plugin;
#ifdef _WIN32
  (void)library, (void)types, (void)takes_attention;
  return "llama.cpp's libraries for Windows do not export what it takes";
#else
  if (plugin.buffer_type != nullptr) return nullptr;
  static char reason[120];
  const char* missing = rows::ggml::find_functions(library, &plugin.ggml);
  if (missing != nullptr) {
    std::snprintf(reason, sizeof reason, "this build of ggml does not export %s", missing);
    return reason;
  }
  if (const char* why = rows::choose_layout()) return why;
  if (plugin.ggml.tensor_overhead() != sizeof(rows::ggml::Tensor) + rows::ggml::kObjectBytes)
    return "ggml's tensors have another layout";
  plugin.kernels = &rows::best_kernels();
  plugin.types = types;
  plugin.takes_attention = takes_attention != 0 && plugin.kernels->attend != nullptr;
  plugin.mul_mat = rows::operation("MUL_MAT");
  plugin.mul_mat_id = rows::operation("MUL_MAT_ID");
  plugin.flash_attention = rows::operation("FLASH_ATTN_EXT");
  if (plugin.mul_mat < 0 || plugin.mul_mat_id < 0 || plugin.flash_attention < 0)
    return "ggml names its operations otherwise";
  void* device = plugin.ggml.device_of(plugin.ggml.registry(), 0);
  rows::ggml::BufferType* type = rows::make_buffer_type(device);
  if (!rows::is_understood(type, device)) return "ggml's buffer types have another layout";
  plugin.buffer_type = type;
  if (rows::insert_first(plugin.ggml.extra_types(), type)) return nullptr;
  plugin.buffer_type = nullptr;
  return "there was not enough memory";
#endif
}

// Null before it is installed.
EDGE_SPEC_EXPORT void* edge_spec_rows_buffer_type() { return rows::plugin.buffer_type; }

// Which operations the installed plugin takes: 1 for products, 2 for attention.
EDGE_SPEC_EXPORT int edge_spec_rows_takes() {
  if (rows::plugin.buffer_type == nullptr) return 0;
  return rows::plugin.takes_attention ? 3 : 1;
}

// Writes where the libraries lie whose functions `edge_spec_rows_install` would take, a line each.
EDGE_SPEC_EXPORT int edge_spec_rows_libraries(void* library, char* text, size_t size) {
#ifdef _WIN32
  (void)library, (void)text, (void)size;
  return 0;
#else
  const char* names[] = {"ggml_backend_cpu_reg", "ggml_backend_buffer_init"};
  size_t used = 0;
  for (const char* name : names) {
    void* function = dlsym(library, name);
    Dl_info info;
    if (function == nullptr || dladdr(function, &info) == 0 || info.dli_fname == nullptr) return 0;
    const size_t length = std::strlen(info.dli_fname);
    if (used + length + 2 > size) return 0;
    std::memcpy(text + used, info.dli_fname, length);
    used += length;
    text[used++] = '\n';
  }
  text[used] = 0;
  return 1;
#endif
}
