// What the processor can do. Asked in code that is compiled for every processor.
#pragma once

namespace rows {

bool has_avx2();         // AVX2, FMA and F16C
bool has_avxvnni();      // AVX-VNNI beside them
bool has_avx512vnni();   // AVX-512 F, BW, VL, DQ and VNNI beside them
bool has_dotprod();      // NEON's dot products of bytes

}  // namespace rows
