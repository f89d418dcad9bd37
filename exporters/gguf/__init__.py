"""Write GGUF files for llama.cpp straight from a checkpoint's tensors."""

from edge_spec.exporters.gguf.export import GgufExporter

__all__ = ["GgufExporter"]
