"""Opens bundles in onnxruntime, on other devices than the CPU in the form that computes right."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from edge_spec.core.model import RuntimeOptions
from edge_spec.errors import DeviceError, SessionError, UsageError
from edge_spec.models.bundle import Bundle
from edge_spec.models.devices import CPU, Device
from edge_spec.runtimes.ort import devices, rows
from edge_spec.runtimes.ort.cuda_driver import require_driver
from edge_spec.runtimes.ort.devices import ProviderChoice
from edge_spec.runtimes.ort.library import import_onnxruntime
from edge_spec.runtimes.ort.model import GrowingModel, OrtModel

if TYPE_CHECKING:
    from edge_spec.core.config import ModelConfig
    from edge_spec.core.heads import BindsBlocks, BindsCaches, MedusaStep, StoredStep
    from edge_spec.models.devices import Memory
    from edge_spec.runtimes.ort.graph_forms import GraphForm
    from edge_spec.runtimes.static.session import StaticModel
    from edge_spec.runtimes.static.trial import TrialScores


STATIC = "onnx-static"  # bundles of graphs whose shapes are fixed
COMPILED = "qnn"  # and of those that were compiled for an NPU


class OrtRuntime:
    name = "ort"
    reads = "onnx"
    also_reads = (STATIC, COMPILED)

    def kernels(self) -> str:
        """See `edge_spec.core.runtime_protocols.HasOwnKernels`."""
        return rows.wanted()

    def open(
        self, source: Bundle, options: RuntimeOptions
    ) -> OrtModel | GrowingModel | StaticModel:
        """Compares, on other devices than the CPU, a few scores with the CPU's first, for which
        it loads the model, too. Raises UsageError, BundleError, DeviceError."""
        options.require_only(self.name, "threads", "providers", "context_length")
        if source.manifest.format == STATIC:
            from edge_spec.runtimes.ort.static import open_static

            return open_static(source, options)
        if source.manifest.format == COMPILED:
            from edge_spec.runtimes.ort.static import open_compiled

            return open_compiled(source, options)
        devices = self._devices(options.providers)
        if all(device.name == CPU for device in devices):
            return _open(source, options)
        _require_known_to_devices(source, self.name)
        from edge_spec.runtimes.ort import graph_forms
        from edge_spec.runtimes.static import trial

        on_cpu = _open(source, replace(options, providers=()), graph_forms.REFERENCE)
        expected = trial.scores(on_cpu)
        on_cpu.close()
        names = ", ".join(device.name for device in devices)
        providers = [device.provider for device in devices]
        forms = graph_forms.forms_for(providers, source.config)
        for form in forms[:-1]:
            with suppress(DeviceError, SessionError):  # such as where float16 overflows
                return _open_right(source, options, form, expected, names)
        return _open_right(source, options, forms[-1], expected, names)

    def require_devices(self, providers: Sequence[str]) -> None:
        """Raises as DeviceScreeningRuntime does."""
        self._devices(providers)

    def devices(self, options: RuntimeOptions) -> list[Device]:
        from edge_spec.runtimes.ort.listing import listed

        return list(listed())

    def memory(
        self, source: Bundle, options: RuntimeOptions, num_tokens: int | None = None
    ) -> Memory:
        from edge_spec.runtimes.ort.memory import bundle_memory, static_memory

        is_static = source.manifest.format in self.also_reads
        return (static_memory if is_static else bundle_memory)(source, options, num_tokens)

    def open_eagle_step(
        self, stored: StoredStep, config: ModelConfig, threads: int | None
    ) -> BindsCaches:
        """Opens it on the CPU; see ComputesHeads."""
        from edge_spec.runtimes.ort.heads import BoundStep, OrtLayers

        return OrtLayers(BoundStep, stored, config, threads)

    def open_medusa_step(self, stored: StoredStep, threads: int | None) -> MedusaStep:
        """Opens it on the CPU; see ComputesHeads."""
        from edge_spec.runtimes.ort.heads import OrtMedusaStep

        return OrtMedusaStep(stored, threads)

    def open_dflash_step(
        self, stored: StoredStep, config: ModelConfig, threads: int | None
    ) -> BindsBlocks:
        """Opens it on the CPU; see ComputesHeads."""
        from edge_spec.runtimes.ort.heads import BoundBlock, OrtLayers

        return OrtLayers(BoundBlock, stored, config, threads)

    def _devices(self, providers: Sequence[str]) -> list[ProviderChoice]:
        """Those of these names, whose driver is there. Raises UsageError, DeviceError."""
        onnxruntime = import_onnxruntime()
        chosen = devices.choose(onnxruntime, providers)
        require_driver(onnxruntime, [choice.provider for choice in chosen])
        return chosen


def _require_known_to_devices(source: Bundle, runtime: str) -> None:
    """Raises UsageError for what no other device than the CPU is given."""
    config = source.config
    parts = {"an encoder": config.encoder, "short convolutions": config.convolving}
    lacked = [what for what, found in parts.items() if found]
    for what in (*lacked, config.unlike_layers):
        if what is not None:
            raise UsageError(
                f"{source.path} has {what}, which {runtime} computes on the CPU alone",
                remedy="Choose --device cpu.",
            )


def _open(
    bundle: Bundle, options: RuntimeOptions, form: GraphForm | None = None
) -> OrtModel | GrowingModel:
    if bundle.manifest.kv_cache == "growing":
        return GrowingModel(bundle, options)
    return OrtModel(bundle, options, form)


def _open_right(
    bundle: Bundle,
    options: RuntimeOptions,
    form: GraphForm | None,
    expected: TrialScores,
    devices: str,
) -> OrtModel | GrowingModel:
    """Raises DeviceError, SessionError where the scores are not those of the CPU."""
    from edge_spec.runtimes.static import trial

    model = _open(bundle, options, form)
    try:
        if not trial.require_same(trial.scores(model), expected, devices):
            model.capabilities = replace(model.capabilities, trees=False)
    except BaseException:
        model.close()
        raise
    return model
