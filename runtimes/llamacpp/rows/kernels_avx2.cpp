#include "processor.h"
#include "simd_avx2.h"
#include "table.h"

namespace rows {

extern const Kernels avx2_kernels;
const Kernels avx2_kernels = table<Avx2>("avx2", has_avx2);

}  // namespace rows
