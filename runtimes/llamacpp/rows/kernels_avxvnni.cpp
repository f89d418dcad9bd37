#include "processor.h"
#include "simd_avxvnni.h"
#include "table.h"

namespace rows {

extern const Kernels avxvnni_kernels;
const Kernels avxvnni_kernels = table<AvxVnni>("avxvnni", has_avxvnni);

}  // namespace rows
