"""Opens bundles with a Core AI program."""

from __future__ import annotations

from collections.abc import Sequence

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import Runtime, RuntimeOptions
from edge_spec.errors import BundleError, DeviceError, UsageError
from edge_spec.models.bundle import Bundle
from edge_spec.models.core_ai import FORMAT, PROGRAM, is_mac, require_running
from edge_spec.models.devices import CPU, GPU, NPU, Device, processor
from edge_spec.runtimes.coreai.native import ANE, UNITS, NativeProgram
from edge_spec.runtimes.static.session import Layout, StaticModel, config_of, read_layout

_ON_LINUX = "one core of the processor: Apple's runtime for Linux, to check programs with"
_DESCRIPTIONS = {CPU: "the processor", GPU: "the GPU", ANE: "the Neural Engine"}


class CoreAiModel(StaticModel):
    """Closes its program, too."""

    def __init__(self, program: NativeProgram, layout: Layout, config: ModelConfig) -> None:
        super().__init__(program, layout, config)
        self._native = program

    def close(self) -> None:
        super().close()
        self._native.close()


class CoreAiRuntime(Runtime):
    name = "coreai"
    reads = FORMAT

    def open(self, source: Bundle, options: RuntimeOptions) -> CoreAiModel:
        """Raises UsageError, BundleError, DeviceError, MissingDependencyError."""
        # A draft is given its target's threads; Core AI ignores them.
        options.require_only(self.name, "threads", "providers", "context_length")
        self.require_devices(options.providers)
        if source.manifest.format != FORMAT:
            raise UsageError(
                f"{source.path} is a bundle of format {source.manifest.format}, not {FORMAT}",
                remedy=f"Choose another --runtime, or export the model with --format {FORMAT}.",
            )
        config = config_of(source, options)
        path = source.file(f"{PROGRAM}/metadata.json").parent
        program = NativeProgram(path, _unit(options.providers))
        try:
            layout = read_layout(program.signatures, source.config, str(path))
        except BundleError:
            program.close()
            raise
        return CoreAiModel(program, layout, config)

    def require_devices(self, providers: Sequence[str]) -> None:
        """See `edge_spec.core.model.Runtime`."""
        unit = _unit(providers)
        require_running()
        if unit not in (None, CPU) and not is_mac():
            raise DeviceError(
                f"Core AI has no {unit} on Linux", remedy="Leave --device out, or run it on a Mac."
            )

    def devices(self, options: RuntimeOptions) -> list[Device]:
        require_running()
        if not is_mac():
            here = processor(self.name)
            return [Device(self.name, CPU, CPU, _ON_LINUX, here.total_bytes, here.free_bytes)]
        return [
            Device(self.name, name, NPU if name == ANE else name, description)
            for name, description in _DESCRIPTIONS.items()
        ]


def _unit(providers: Sequence[str]) -> str | None:
    """Return the requested compute unit, None without a request. Raises UsageError."""
    names = [name.lower() for name in providers]
    if len(names) > 1 or not UNITS.keys() >= set(names):
        raise UsageError(
            f"coreai has no device {', '.join(names)}",
            remedy=f"Choose one of {', '.join(UNITS)}, or leave the choice to Core AI.",
        )
    return names[0] if names else None
