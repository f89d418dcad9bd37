"""Messages that onnxruntime-gpu, the linkers and CUDA write, and what a user is told of them.

The Linux ones without a driver were seen with onnxruntime-gpu 1.31.1; the others are from reports
of onnxruntime's users and its sources: they were not seen here.
"""

from __future__ import annotations

import pytest

from edge_spec.errors import DeviceError, DeviceMemoryError
from edge_spec.runtimes.ort.cuda import find_cause, start_error

# What onnxruntime adds to each library that does not load.
GENERAL = (
    "[W:onnxruntime:Default, onnxruntime_pybind_state.cc:1295] Failed to create "
    "CUDAExecutionProvider. Require cuDNN 9.* and CUDA 13.*. Please install all dependencies as "
    "mentioned in the GPU requirements page (https://onnxruntime.ai/docs), make sure they're in "
    "the PATH, and that your GPU is supported."
)
LINUX = (
    "[E:onnxruntime:Default, provider_bridge_ort.cc:2458 operator()] provider_bridge_ort.cc:2043 "
    "onnxruntime::Provider& onnxruntime::ProviderLibrary::Get() [ONNXRuntimeError] : 1 : FAIL : "
    "Failed to load library /site/onnxruntime/capi/libonnxruntime_providers_cuda.so with error: "
    "{}: cannot open shared object file: No such file or directory\n\n" + GENERAL
)
WINDOWS = (
    '[ONNXRuntimeError] : 1 : FAIL : Error loading "C:\\site\\onnxruntime_providers_cuda.dll" '
    'which depends on "{}" which is missing. (Error 126: "The specified module")\n' + GENERAL
)
CALL = (
    "/onnxruntime_src/onnxruntime/core/providers/cuda/cuda_call.cc:122 std::conditional_t<THRW, "
    "void, onnxruntime::common::Status> onnxruntime::CudaCall(ERRTYPE, const char*) [with ERRTYPE "
    "= cudaError; bool THRW = true] CUDA failure {} ; GPU=-1 ; hostname=c43 ; file=/onnxruntime_src"
    "/cuda_execution_provider.cc ; line=336 ; expr=cudaSetDevice(info_.device_id); "
)


@pytest.mark.parametrize(
    ("text", "cause", "words", "remedy"),
    [
        (
            LINUX.format("libcublasLt.so.13"),
            "CUDA's or cuDNN's libraries are missing",
            "libcublasLt.so.13: cannot open shared object file: No such file or directory",
            ".[gpu]",
        ),
        (
            LINUX.format("libcudnn.so.9"),
            "libraries are missing",
            "libcudnn.so.9",
            ".[gpu]",
        ),
        (
            WINDOWS.format("cublasLt64_13.dll"),
            "CUDA's or cuDNN's libraries",
            "cublasLt64_13",
            "edge-spec",
        ),
        (GENERAL, "CUDA's or cuDNN's libraries", "Require cuDNN 9.* and CUDA 13.*", "edge-spec"),
        (
            CALL.format("209: no kernel image is available for execution on the device"),
            "no kernels for the device",
            "CUDA failure 209: no kernel image is available for execution on the device",
            "llamacpp",
        ),
        (
            "CUDNN failure 1002: CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH ; GPU=0 ; hostname=c4",
            "another version",
            "CUDNN failure 1002: CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH",
            ".[gpu]",
        ),
    ],
)
def test_each_failure_has_its_cause_its_words_and_a_remedy(
    text: str, cause: str, words: str, remedy: str
) -> None:
    found = find_cause(text)
    assert found is not None
    assert cause in found.message
    assert words in found.message
    assert "onnxruntime_src" not in found.message
    assert remedy in found.remedy
    error = start_error("cuda:1", text)
    assert type(error) is DeviceError
    assert error.message.startswith("onnxruntime cannot start cuda:1: ")
    assert "\n" not in str(error)


def test_too_little_memory_is_an_error_of_its_own() -> None:
    for text in (
        CALL.format("2: out of memory"),
        "BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer of size 9",
    ):
        assert isinstance(start_error("cuda", text), DeviceMemoryError)
