"""The form of a static graph that Qualcomm's compiler for HTP takes whole.

It has no DequantizeLinear of weights beside float activations: such nodes stay on the CPU, which
would widen all weights in every pass. It has MatMulNBits, which multiplies by integers as they are
stored: 4 and 8 bits with a scale a block of a power of two. An NPU computes in float16, which ends
at 65,504: squares of a residual stream beyond 256 do not fit, so that norms are one operator, too.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from edge_spec.exporters.block_quantize import BlockQuantized
from edge_spec.exporters.onnx.nodes import CONTRIB, Nodes
from edge_spec.exporters.onnx.static import StaticForm
from edge_spec.exporters.onnx.weights import StaticIntegers, channels, output_of
from edge_spec.exporters.static_layout import BLOCK_SIZE


class HtpIntegers(StaticIntegers):
    """Multiplies by 4-bit blocks, and by 8-bit channels as blocks whose scale is repeated."""

    def linear(self, nodes: Nodes, x: str, name: str) -> str:
        return self._multiply(nodes, x, name, self._bits, output_of(name))

    def head(self, nodes: Nodes, hidden: str, name: str, output: str) -> None:
        """HTP multiplies what has three axes, and these rows have two."""
        num_tokens, columns = self._checkpoint.tensors[name].shape
        batch = nodes.weights.add("batch_of_rows", np.array([1, -1, columns]))
        rows = nodes.weights.add("rows_of_scores", np.array([-1, num_tokens]))
        inner = nodes.add("Reshape", [hidden, batch], f"{output}.rows")
        product = self._multiply(nodes, inner, name, 8, f"{output}.batch")
        nodes.add("Reshape", [product, rows], output)

    def _multiply(self, nodes: Nodes, x: str, name: str, bits: int, output: str) -> str:
        make = self._quantized if bits == 4 else self._channel_blocks
        found = cache(lambda: make(name))  # at most once
        add = nodes.weights.add_made
        packed = add(f"{name}.blocks", lambda: found().packed)
        scales = add(f"{name}.block_scales", lambda: found().scales.reshape(-1))
        rows, columns = self._checkpoint.tensors[name].shape
        return nodes.add(
            "MatMulNBits",
            [x, packed, scales],
            output,
            domain=CONTRIB,
            K=columns,
            N=rows,
            bits=bits,
            block_size=BLOCK_SIZE,
        )

    def _channel_blocks(self, name: str) -> BlockQuantized:
        levels, scales = channels(self._checkpoint.float32(name))
        rows, columns = levels.shape
        packed = (levels.view(np.uint8) ^ 0x80).reshape(rows, -1, BLOCK_SIZE)
        of_blocks = np.repeat(scales[:, None], columns // BLOCK_SIZE, axis=1)
        return BlockQuantized(8, BLOCK_SIZE, columns, packed, of_blocks, None)


HTP = StaticForm(HtpIntegers, fuses_norms=True)
