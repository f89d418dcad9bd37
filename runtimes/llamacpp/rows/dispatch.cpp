// Which tables there are, and which of them this processor can run.
#include <cstdlib>
#include <cstring>

#include "packing.h"
#include "processor.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

// build.py finds in a library the digest of the sources that it was compiled from.
extern "C" __attribute__((visibility("default"))) const char edge_spec_rows_mark[];
extern "C" const char edge_spec_rows_mark[] = ROWS_MARK;

// It defines ROWS_TABLES by what it compiles, the fastest first: TABLE(avx2)TABLE(portable)
namespace rows {

#define TABLE(name) extern const Kernels name##_kernels;
ROWS_TABLES
#undef TABLE

#if defined(__x86_64__)
bool has_avx2() {
  unsigned a, b, c, d;
  const bool has_f16c = __get_cpuid(1, &a, &b, &c, &d) && c >> 29 & 1;
  return has_f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

bool has_avxvnni() {
  unsigned a, b, c, d;
  return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 4 & 1;
}

bool has_avx512vnni() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}
#elif defined(__aarch64__)
bool has_dotprod() {
#if defined(__APPLE__)
  return true;  // in every processor of Macs
#elif defined(__linux__)
  return getauxval(AT_HWCAP) >> 20 & 1;  // HWCAP_ASIMDDP
#else
  return false;
#endif
}
#endif

int block_values(Type type) { return format_of(type).values; }
size_t block_bytes(Type type) { return static_cast<size_t>(format_of(type).bytes); }

const Kernels* const* all_kernels() {
#define TABLE(name) &name##_kernels,
  static const Kernels* const tables[] = {ROWS_TABLES nullptr};
#undef TABLE
  return tables;
}

const Kernels& best_kernels() {
  const char* wanted = std::getenv("EDGE_SPEC_ROWS_KERNELS");
  const Kernels* best = nullptr;
  for (const Kernels* const* table = all_kernels(); *table; ++table) {
    if (!(*table)->is_supported()) continue;
    if (wanted && !std::strcmp(wanted, (*table)->name)) return **table;
    if (!best) best = *table;
  }
  return *best;
}

}  // namespace rows
