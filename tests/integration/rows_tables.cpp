// Compares all tables of a library of kernels with its portable one, bit for bit.
//
//   rows_tables LIBRARY
//
// Prints "best NAME" and for each table "NAME runs COMPARED DIFFERING" or "NAME lacking". It is a
// program because an emulated processor starts one faster than Python.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

namespace {

constexpr int kNumTypes = 10, kMostRows = 16, kNumOutputs = 21;  // no multiple of any tile
constexpr int kHalf = 8, kBfloat = 9;  // types of plain numbers

struct Library {
  const char* (*table_name)(int);
  int (*table_is_supported)(int);
  const char* (*best_table)();
  int (*tile_rows)(int);
  int (*block_values)(int);
  size_t (*block_bytes)(int);
  void* (*pack)(int, int, const uint8_t*, int64_t, int64_t);
  int (*multiply)(const void*, const float*, int64_t, int64_t, int64_t, int, float*);
  void (*free)(void*);
};

template <class Function>
void find(void* library, const char* name, Function& function) {
  void* found = dlsym(library, name);
  if (!found) {
    std::fprintf(stderr, "the library has no %s\n", name);
    std::exit(1);
  }
  std::memcpy(&function, &found, sizeof found);
}

Library open(const char* path) {
  void* library = dlopen(path, RTLD_NOW);
  if (!library) {
    std::fprintf(stderr, "%s\n", dlerror());
    std::exit(1);
  }
  Library result;
  find(library, "edge_spec_rows_table_name", result.table_name);
  find(library, "edge_spec_rows_table_is_supported", result.table_is_supported);
  find(library, "edge_spec_rows_best_table", result.best_table);
  find(library, "edge_spec_rows_tile_rows", result.tile_rows);
  find(library, "edge_spec_rows_block_values", result.block_values);
  find(library, "edge_spec_rows_block_bytes", result.block_bytes);
  find(library, "edge_spec_rows_pack", result.pack);
  find(library, "edge_spec_rows_multiply", result.multiply);
  find(library, "edge_spec_rows_free", result.free);
  return result;
}

uint16_t moderate_half(std::mt19937& random) {  // up to 2^5
  const uint32_t bits = random();
  return static_cast<uint16_t>((bits & 0x83ff) | (bits >> 16) % 21 << 10);
}

uint16_t moderate_bfloat(std::mt19937& random) {
  const uint32_t bits = random();
  return static_cast<uint16_t>((bits & 0x807f) | (110 + (bits >> 16) % 21) << 7);
}

// Any bytes are weights, but for the float16 among them, of which some are no numbers.
std::vector<uint8_t> weights(int type, size_t num_blocks, size_t block_bytes,
                             std::mt19937& random) {
  std::vector<uint8_t> result(num_blocks * block_bytes);
  for (uint8_t& byte : result) byte = static_cast<uint8_t>(random());
  for (size_t b = 0; b < num_blocks; ++b) {
    uint8_t* block = result.data() + b * block_bytes;
    const uint16_t first = type == kBfloat ? moderate_bfloat(random) : moderate_half(random);
    const uint16_t second = moderate_half(random);
    constexpr int q6_k = 7;
    std::memcpy(block + (type == q6_k ? 208 : 0), &first, 2);
    constexpr bool has_minimum[kNumTypes] = {false, true, false, true, false, true, true};
    if (has_minimum[type]) std::memcpy(block + 2, &second, 2);
  }
  return result;
}

std::vector<float> activations(size_t count, std::mt19937& random) {
  std::vector<float> result(count);
  for (float& value : result)
    value = (static_cast<float>(random() % 65536) - 32768.0f) / static_cast<float>(1 + random() % 9999);
  return result;
}

struct Compared {
  long long all = 0, differing = 0;
};

void compare(const std::vector<float>& found, const std::vector<float>& expected, size_t count,
             Compared& compared) {
  compared.all += static_cast<long long>(count);
  for (size_t i = 0; i < count; ++i)
    compared.differing += std::memcmp(&found[i], &expected[i], sizeof(float)) != 0;
}

// Every type at every width; each row is held to the portable table's, computed alone.
Compared products(const Library& library, int table, int portable) {
  Compared compared;
  std::mt19937 random(42);
  for (int type = 0; type < kNumTypes; ++type) {
    const int values = library.block_values(type);
    const int num_blocks = values == 256 ? 3 : values == 32 ? 17 : 77;
    const int64_t num_values = static_cast<int64_t>(values) * num_blocks;
    const auto file = weights(type, static_cast<size_t>(kNumOutputs * num_blocks),
                              library.block_bytes(type), random);
    const auto rows = activations(static_cast<size_t>(kMostRows * num_values), random);
    std::vector<float> expected(kMostRows * kNumOutputs), found(kMostRows * kNumOutputs);
    const auto multiply = [&](int with, int first, int num_rows, float* out) {
      void* matrix = library.pack(with, type, file.data(), kNumOutputs, num_values);
      const int lanes = library.tile_rows(with);
      library.multiply(matrix, rows.data() + first * num_values, num_rows, 0,
                       (kNumOutputs + lanes - 1) / lanes, 1, out);
      library.free(matrix);
    };
    for (int row = 0; row < kMostRows; ++row)
      multiply(portable, row, 1, expected.data() + row * kNumOutputs);
    for (int width = 1; width <= kMostRows; ++width) {
      multiply(table, 0, width, found.data());
      compare(found, expected, static_cast<size_t>(width * kNumOutputs), compared);
    }
  }
  return compared;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) return 2;
  const Library library = open(arguments[1]);
  std::printf("best %s\n", library.best_table());
  int portable = 0;
  while (std::strcmp(library.table_name(portable), "portable")) ++portable;
  for (int table = 0; const char* name = library.table_name(table); ++table) {
    if (!library.table_is_supported(table)) {
      std::printf("%s lacking\n", name);
      continue;
    }
    const Compared compared = products(library, table, portable);
    std::printf("%s runs %lld %lld\n", name, compared.all, compared.differing);
  }
}
