"""OpenVINO: runs bundles of fixed shapes (exporters/onnx/static.py) on its CPU, GPU and NPU.

Nothing here imports openvino before a model is opened or devices are listed.
"""

from edge_spec.runtimes.openvino.runtime import OpenVinoRuntime

__all__ = ["OpenVinoRuntime"]
