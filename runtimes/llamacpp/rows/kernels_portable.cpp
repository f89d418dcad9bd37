#include "simd_portable.h"
#include "table.h"

namespace rows {

extern const Kernels portable_kernels;
const Kernels portable_kernels = table<Portable>("portable", [] { return true; });

}  // namespace rows
