"""Models that are static programs, whatever runs them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import Capabilities, RuntimeOptions
from edge_spec.errors import UsageError
from edge_spec.fitting.memory import context_tokens
from edge_spec.models.bundle import Bundle
from edge_spec.runtimes.static.layout import Layout

if TYPE_CHECKING:
    from edge_spec.runtimes.static.session import Program, StaticSession


class StaticModel:
    """A program and its layout; sessions share the program."""

    def __init__(self, program: Program, layout: Layout, config: ModelConfig) -> None:
        self.config = config
        self.capabilities = Capabilities(
            max_rows=layout.max_rows,
            trees=True,
            rollback=True,
            hidden_states=layout.hidden_states,
        )
        self._program: Program | None = program
        self._layout = layout

    def open_session(self) -> StaticSession:
        from edge_spec.runtimes.static.session import StaticSession

        assert self._program is not None, "the model is closed"
        return StaticSession(self._program, self._layout, self.config.context_length)

    def close(self) -> None:
        self._program = None


def config_of(bundle: Bundle, options: RuntimeOptions) -> ModelConfig:
    """Returns the configuration with the context that was asked for. Raises UsageError where the
    cache does not hold it and has to."""
    config, wanted = bundle.config, options.context_length
    if wanted is None or (wanted > config.context_length and options.may_hold_less):
        return config
    if wanted > config.context_length:
        raise UsageError(
            f"the cache of {bundle.path} holds {config.context_length} tokens, not {wanted}",
            remedy=f"Choose a smaller --context, or export the model with --context {wanted}.",
        )
    return replace(config, context_length=wanted)


FLOAT, HALF = 4, 2  # bytes
_PADDING_SLOTS = 64  # at most, beside the context


def session_bytes(
    bundle: Bundle, options: RuntimeOptions, num_tokens: int | None
) -> tuple[int, int]:
    """Returns the bytes of a session's states, the same for any number of tokens since it has all
    of its slots at once, and those of the scores of a prefill."""
    config = bundle.config
    length, _ = context_tokens(config.context_length, options, num_tokens)
    element = FLOAT if bundle.manifest.quantization == "fp32" else HALF
    slots = config.context_length + _PADDING_SLOTS
    states = 2 * config.num_layers * config.kv_size * slots * element
    return states, FLOAT * config.num_heads * _PADDING_SLOTS * (length + _PADDING_SLOTS)
