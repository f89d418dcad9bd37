// What llama.cpp logs on its way to Python, where a callback waits for the interpreter.
#include <atomic>

#include "export.h"

namespace {

constexpr int kContinued = 5;  // ggml_log_level: the level of what came before
std::atomic<int> least_level{0};
thread_local bool is_heard = true;

}  // namespace

// Lines of this level and of higher ones go on from now on.
EDGE_SPEC_EXPORT void edge_spec_rows_log_from(int level) { least_level = level; }

// A ggml_log_callback. next: another one, for those that go on.
EDGE_SPEC_EXPORT void edge_spec_rows_log(int level, const char* text, void* next) {
  if (level != kContinued) is_heard = level >= least_level;
  using Callback = void (*)(int, const char*, void*);
  if (is_heard) reinterpret_cast<Callback>(next)(level, text, nullptr);
}
