// What tests call through ctypes: attention with any table of this build.
#include <cstdlib>

#include "export.h"
#include "kernels.h"

// The call as C has it, but for the scratch, of which the call below takes care.
EDGE_SPEC_EXPORT int edge_spec_rows_attend(int index, const rows::Attention* call, int repeats) {
  const rows::Kernels& kernels = *rows::all_kernels()[index];
  const size_t bytes = kernels.attention_scratch(call->num_cells) * sizeof(float);
  rows::Attention complete = *call;
  complete.scratch = static_cast<float*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
  if (!complete.scratch) return 1;
  for (int repeat = 0; repeat < repeats; ++repeat) kernels.attend(complete);
  std::free(complete.scratch);
  return 0;
}
