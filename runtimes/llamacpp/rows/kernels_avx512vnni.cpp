#include "processor.h"
#include "simd_avx512vnni.h"
#include "table.h"

namespace rows {

extern const Kernels avx512vnni_kernels;
const Kernels avx512vnni_kernels = table<Avx512Vnni>("avx512vnni", has_avx512vnni);

}  // namespace rows
