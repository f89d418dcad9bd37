#include "plugin_memory.h"

#ifndef _WIN32
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <cstdio>
#include <cstdlib>
#include <new>

namespace rows {
namespace {

constexpr size_t kHugePage = 2 << 20;
constexpr size_t kReadAhead = 8192;  // how far kernels fetch beyond the last tile

#ifdef __linux__
struct Mapping {
  uintptr_t begin = 0, end = 0;
  bool is_file = false, is_writable = false;
};
thread_local Mapping last_mapping;
thread_local bool keeps_mapping = false;

// Looks up what is mapped at an address; of no file where nothing is found.
Mapping mapping_at(uintptr_t address) {
  if (keeps_mapping && last_mapping.begin <= address && address < last_mapping.end)
    return last_mapping;
  Mapping found;
  std::FILE* maps = std::fopen("/proc/self/maps", "re");
  if (maps == nullptr) return found;
  char line[512];
  bool is_start = true;  // of a line, which may be longer than ours
  while (std::fgets(line, sizeof line, maps) != nullptr) {
    unsigned long begin, end, inode;
    char permissions[5];
    const bool is_whole =
        is_start && std::sscanf(line, "%lx-%lx %4s %*x %*s %lu", &begin, &end, permissions,
                                &inode) == 4;
    is_start = line[std::char_traits<char>::length(line) - 1] == '\n';
    if (!is_whole || address < begin || address >= end) continue;
    found = {begin, end, inode != 0, permissions[1] == 'w'};
    break;
  }
  std::fclose(maps);
  if (keeps_mapping) last_mapping = found;
  return found;
}
#endif

}  // namespace

bool Memory::reserve(size_t bytes) {
  bytes_ = (bytes + kReadAhead + kHugePage - 1) / kHugePage * kHugePage;
#ifdef _WIN32
  data_ = _aligned_malloc(bytes_, 64);
#else
  data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data_ == MAP_FAILED) data_ = nullptr;
#ifdef MADV_HUGEPAGE
  if (data_ != nullptr) madvise(data_, bytes_, MADV_HUGEPAGE);
#endif
#endif
  return data_ != nullptr;
}

void Memory::release() {
#ifdef _WIN32
  _aligned_free(data_);
#else
  if (data_ != nullptr) munmap(data_, bytes_);
#endif
  data_ = nullptr;
}

void let_go(const void* data, size_t bytes, bool is_never_written) {
#ifdef __linux__
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto start = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (start + page - 1) / page * page, last = (start + bytes) / page * page;
  if (first >= last) return;
  const Mapping mapping = mapping_at(first);
  // Anonymous memory would lose what it holds.
  const bool is_as_read = mapping.is_file && (is_never_written || !mapping.is_writable);
  if (is_as_read && last <= mapping.end)
    madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
#else
  (void)data;
  (void)bytes;
  (void)is_never_written;
#endif
}

void watch_sources(bool is_loading) {
#ifdef __linux__
  keeps_mapping = is_loading;
  last_mapping = {};
#else
  (void)is_loading;
#endif
}

}  // namespace rows
