// Copies residual streams while llama.cpp computes a pass: its scheduler asks about each of hundreds
// of tensors whether it is wanted, too often for a callback in Python (taps.py has one all the same,
// of the same rules, for installations without this library).
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "export.h"

namespace {

// As taps.py lays it out. Functions are ggml's own.
struct Tap {
  int64_t num_streams;
  int64_t row_bytes;
  int64_t most_rows;
  const int32_t* layers;  // that the streams enter
  char* rows;             // [num_streams][most_rows][row_bytes]
  int64_t* counts;        // of rows of each stream since the pass began
  const char* (*name)(const void* tensor);
  size_t (*bytes)(const void* tensor);
  void (*get)(const void* tensor, void* to, size_t offset, size_t size);
};

constexpr char kOutput[] = "l_out-";
constexpr size_t kOutputLength = sizeof(kOutput) - 1;

// What graphs call the stream that enters layer 0, and what some make of it before.
constexpr const char* kEmbedded[] = {"embd", "inp_embd", "model.embed_tokens", "model.input_embed"};
constexpr const char* kScaled[] = {"inp_scaled", "inp_embd_scaled"};

template <size_t count>
bool is_among(const char* name, const char* const (&names)[count]) {
  for (const char* each : names) {
    if (!std::strcmp(name, each)) return true;
  }
  return false;
}

// The layer that a tensor of this name enters, -1 where it enters none.
long layer_of(const char* name) {
  if (is_among(name, kEmbedded) || is_among(name, kScaled)) return 0;
  if (std::strncmp(name, kOutput, kOutputLength)) return -1;
  char* end = nullptr;
  const long before = std::strtol(name + kOutputLength, &end, 10);
  return end != name + kOutputLength && !*end && before >= 0 ? before + 1 : -1;
}

int64_t stream_of(const Tap& tap, const char* name) {
  const long layer = layer_of(name);
  for (int64_t at = 0; layer >= 0 && at < tap.num_streams; ++at) {
    if (tap.layers[at] == layer) return at;
  }
  return -1;
}

}  // namespace

// A ggml_backend_sched_eval_callback: whether a tensor is wanted, and then its data.
EDGE_SPEC_EXPORT bool edge_spec_rows_tap(const void* tensor, bool is_asked, void* data) {
  Tap& tap = *static_cast<Tap*>(data);
  if (!tap.num_streams) return !is_asked;
  const char* name = tap.name(tensor);
  const int64_t stream = stream_of(tap, name);
  if (is_asked) return stream >= 0;
  if (stream < 0) return true;
  const size_t size = tap.bytes(tensor);
  const int64_t rows = static_cast<int64_t>(size) / tap.row_bytes;
  int64_t at = tap.counts[stream];
  if (is_among(name, kScaled)) at -= rows;  // in place of the embeddings that it was made of
  const bool fits = at >= 0 && at + rows <= tap.most_rows && rows * tap.row_bytes == int64_t(size);
  if (fits) tap.get(tensor, tap.rows + (stream * tap.most_rows + at) * tap.row_bytes, 0, size);
  tap.counts[stream] = fits ? at + rows : -tap.most_rows;  // not what is expected any more
  return true;
}
