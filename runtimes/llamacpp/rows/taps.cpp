// Copies residual streams, keys and values while llama.cpp computes a pass: its scheduler asks about each of hundreds
// of tensors whether it is wanted, too often for a callback in Python.
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "export.h"

namespace {

// As features.py lays it out. Functions are ggml's own.
struct Tap {
  int64_t num_streams;
  int64_t most_rows;
  const int32_t* layers;     // that the streams enter, or whose keys or values they are
  const int32_t* kinds;      // of each: Kind
  const int64_t* row_bytes;  // of each
  char* const* rows;         // of each, [most_rows][row_bytes]
  int64_t* counts;        // of rows of each stream since the pass began
  const char* (*name)(const void* tensor);
  size_t (*bytes)(const void* tensor);
  void (*get)(const void* tensor, void* to, size_t offset, size_t size);
};

enum Kind { kStream, kKeys, kValues };

// What graphs call, followed by a layer, the stream that leaves it, its keys as they are turned,
// and its values (as Gemma 4's does).
constexpr const char* kOfLayers[] = {"l_out-", "Kcur_pos-", "Vcur_normed-"};

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

// The number that a name ends with after this beginning, -1 where it has another.
long number_after(const char* name, const char* beginning) {
  const size_t length = std::strlen(beginning);
  if (std::strncmp(name, beginning, length)) return -1;
  char* end = nullptr;
  const long number = std::strtol(name + length, &end, 10);
  return end != name + length && !*end && number >= 0 ? number : -1;
}

int64_t stream_of(const Tap& tap, const char* name) {
  long layer = is_among(name, kEmbedded) || is_among(name, kScaled) ? 0 : -1;
  int kind = kStream;
  for (int each = kStream; layer < 0 && each <= kValues; ++each) {
    layer = number_after(name, kOfLayers[each]);
    if (layer >= 0 && each == kStream) ++layer;  // the next one, which it enters
    kind = each;
  }
  for (int64_t at = 0; layer >= 0 && at < tap.num_streams; ++at) {
    if (tap.layers[at] == layer && tap.kinds[at] == kind) return at;
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
  const int64_t row_bytes = tap.row_bytes[stream];
  const int64_t rows = static_cast<int64_t>(size) / row_bytes;
  int64_t at = tap.counts[stream];
  if (is_among(name, kScaled)) at -= rows;  // in place of the embeddings that it was made of
  const bool fits = at >= 0 && at + rows <= tap.most_rows && rows * row_bytes == int64_t(size);
  if (fits) tap.get(tensor, tap.rows[stream] + at * row_bytes, 0, size);
  tap.counts[stream] = fits ? at + rows : -tap.most_rows;  // not what is expected any more
  return true;
}
