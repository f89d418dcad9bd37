// Memory for packed weights, threads that pack them, and files that have been packed.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace rows {

// Pages that are filled as they are written; huge ones where the system has them.
class Memory {
 public:
  bool reserve(size_t bytes);
  void release();
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// Bytes of a file that are mapped and will not be read again lose their pages, which are no part of
// the process any more; the system keeps them while it has memory for them. Memory of any other
// kind stays as it is, and so does a mapping that may be written to, unless it is known that nothing
// has been: what was written would be lost.
void let_go(const void* data, size_t bytes, bool is_never_written = false);

// Whether this thread is within a load, during which no mapping that it reads goes away.
void watch_sources(bool is_loading);

constexpr size_t kThreadBytes = 1 << 20;  // for less, a thread does not pay

// Calls work(i) for each i below `total`, on several threads, all of which have ended on return.
template <typename Work>
void in_parallel(int64_t total, size_t bytes, const Work& work) {
  std::atomic<int64_t> next{0};
  const auto run = [&] {
    for (int64_t i = next++; i < total; i = next++) work(i);
  };
  const auto wanted = std::min<size_t>(std::thread::hardware_concurrency(), bytes / kThreadBytes);
  std::vector<std::thread> others;
  try {
    others.reserve(wanted);
    while (others.size() + 1 < wanted) others.emplace_back(run);
  } catch (const std::exception&) {
    // Those that did start share the work with this one.
  }
  run();
  for (std::thread& other : others) other.join();
}

}  // namespace rows
