"""OpenVINO: runs static bundles (exporters/onnx/static.py) on its CPU, GPU and NPU.

Imports openvino only when a model is opened or devices are listed.
"""

from edge_spec.runtimes.openvino.runtime import OpenVinoRuntime

__all__ = ["OpenVinoRuntime"]
