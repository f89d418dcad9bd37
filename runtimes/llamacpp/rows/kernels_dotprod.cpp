#include "processor.h"
#include "simd_neon.h"
#include "table.h"

namespace rows {

extern const Kernels dotprod_kernels;
const Kernels dotprod_kernels = table<Neon>("dotprod", has_dotprod);

}  // namespace rows
