// What the library shows of itself, by the names of C: to llama.cpp, onnxruntime and ctypes.
#pragma once

#ifdef _WIN32
#define EDGE_SPEC_EXPORT extern "C" __declspec(dllexport)
#else
#define EDGE_SPEC_EXPORT extern "C" __attribute__((visibility("default")))
#endif
