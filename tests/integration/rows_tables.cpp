// Compares all tables of a library of kernels with its portable one, bit for bit.
//
//   rows_tables LIBRARY
//
// Prints "best NAME" and for each table "NAME lacking", or "NAME runs" and how many numbers were
// compared and differed, of products and of attention. It is a program because an emulated
// processor starts one faster than Python.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "kernels.h"

namespace {

constexpr int kNumTypes = 11, kMostRows = 16, kNumOutputs = 21;  // no multiple of any tile
constexpr int kBfloat = 9, kFloat = 10;  // types of plain numbers

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
  int (*attend)(int, const rows::Attention*, int);
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
  find(library, "edge_spec_rows_attend", result.attend);
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
    if (type == kFloat) block += 2;  // its sign and exponent are those of a bfloat16
    const uint16_t first = type >= kBfloat ? moderate_bfloat(random) : moderate_half(random);
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

// A cache of cells that are `bytes` long. Each block is some float16 and any bytes; or, without any
// float16, a float or bfloat16, whose upper bytes are last.
std::vector<uint8_t> cells(size_t count, size_t bytes, size_t block_bytes, size_t num_halves,
                           std::mt19937& random) {
  std::vector<uint8_t> result(count * bytes);
  for (uint8_t& byte : result) byte = static_cast<uint8_t>(random());
  for (size_t at = 0; at + block_bytes <= result.size(); at += block_bytes) {
    for (size_t i = 0; i < num_halves; ++i) {
      const uint16_t half = moderate_half(random) % 0x2800 | (random() & 0x8000);  // up to 2^-5
      std::memcpy(result.data() + at + 2 * i, &half, 2);
    }
    const uint16_t upper = moderate_bfloat(random) - (7 << 7);  // up to 2^-3
    if (!num_halves) std::memcpy(result.data() + at + block_bytes - 2, &upper, 2);
  }
  return result;
}

struct Cache {
  rows::CellType type;
  size_t block_values, block_bytes, num_halves;  // halves: at the start of each block
};
constexpr Cache kCaches[] = {
    {rows::CellType::F16, 1, 2, 1},    {rows::CellType::BF16, 1, 2, 0},
    {rows::CellType::F32, 1, 4, 0},    {rows::CellType::Q8_0, 32, 34, 1},
    {rows::CellType::Q4_0, 32, 18, 1}, {rows::CellType::Q4_1, 32, 20, 2},
    {rows::CellType::Q5_0, 32, 22, 1}, {rows::CellType::Q5_1, 32, 24, 2},
};

// Every type of cells at every width; each row is held to the portable table's, computed alone.
Compared attention(const Library& library, int table, int portable) {
  Compared compared;
  std::mt19937 random(43);
  for (const Cache& cache : kCaches) {
    for (const int num_cells : {1, 70, 200}) {
      const bool is_plain = num_cells == 70;
      const int size = cache.block_values == 32 || is_plain ? 96 : 72;
      const size_t bytes = size / cache.block_values * cache.block_bytes;
      const size_t count = static_cast<size_t>(num_cells);
      const auto keys = cells(count, bytes, cache.block_bytes, cache.num_halves, random);
      const auto values = cells(count, bytes, cache.block_bytes, cache.num_halves, random);
      const auto queries = activations(static_cast<size_t>(rows::kPanelRows * size), random);
      std::vector<uint16_t> masks(rows::kPanelRows * count);
      for (size_t i = 0; i < masks.size(); ++i)  // hidden, of a bias, or plainly seen
        masks[i] = i % count == 0 ? 0 : random() % 3 == 0 ? 0xfc00 : random() % 3 == 0 ? 0xb800 : 0;
      const float sink = 0.5f;
      const auto attend = [&](int with, int first, int num_rows, float* out) {
        rows::Attention call = {};
        call.head_size = call.value_size = size;
        call.key_type = call.value_type = cache.type;
        call.keys = reinterpret_cast<const char*>(keys.data());
        call.values = reinterpret_cast<const char*>(values.data());
        call.key_stride = call.value_stride = bytes;
        call.num_cells = num_cells;
        call.scale = 0.125f;
        call.softcap = is_plain ? 0.0f : 20.0f;
        call.num_rows = num_rows;
        for (int m = 0; m < num_rows; ++m) {
          call.queries[m] = queries.data() + (first + m) * size;
          call.masks[m] = is_plain ? nullptr : masks.data() + static_cast<size_t>(first + m) * count;
          call.slopes[m] = 1.0f + static_cast<float>(first + m) / 4.0f;
          call.sinks[m] = is_plain ? nullptr : &sink;
          call.out[m] = out + m * size;
        }
        library.attend(with, &call, 1);
      };
      std::vector<float> expected(queries.size()), found(queries.size());
      for (int row = 0; row < rows::kPanelRows; ++row)
        attend(portable, row, 1, expected.data() + row * size);
      for (int width = 1; width <= rows::kPanelRows; ++width) {
        attend(table, 0, width, found.data());
        compare(found, expected, static_cast<size_t>(width * size), compared);
      }
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
    const Compared first = products(library, table, portable);
    const Compared second = attention(library, table, portable);
    std::printf("%s runs %lld %lld %lld %lld\n", name, first.all, first.differing, second.all,
                second.differing);
  }
}
