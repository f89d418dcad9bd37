"""OpenVINO: runs the bundles that `exporters/onnx` writes on its plugins for CPU and GPU.

Nothing here imports openvino before a model is opened or devices are listed.
"""

from edge_spec.runtimes.openvino.runtime import OpenVinoRuntime

__all__ = ["OpenVinoRuntime"]
