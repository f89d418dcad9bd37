"""Opens bundles in onnxruntime, on a device in the first form with correct scores."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace

import numpy as np

from edge_spec.core.model import RuntimeOptions
from edge_spec.errors import DeviceError, SessionError, UsageError
from edge_spec.models.bundle import Bundle
from edge_spec.models.devices import CPU
from edge_spec.runtimes.ort import devices as ort_devices
from edge_spec.runtimes.ort import graph_forms
from edge_spec.runtimes.ort.cuda import require_driver
from edge_spec.runtimes.ort.devices import QNN, OrtDevice
from edge_spec.runtimes.ort.graph_forms import GraphForm
from edge_spec.runtimes.ort.growing import GrowingModel
from edge_spec.runtimes.ort.library import import_onnxruntime
from edge_spec.runtimes.ort.model import OrtModel
from edge_spec.runtimes.ort.static import COMPILED, open_static
from edge_spec.runtimes.static import trial
from edge_spec.runtimes.static.onnx_program import FORMAT as STATIC
from edge_spec.runtimes.static.session import StaticModel


def open_bundle(source: Bundle, options: RuntimeOptions) -> OrtModel | GrowingModel | StaticModel:
    """Raises UsageError, BundleError, DeviceError."""
    if source.manifest.format in (STATIC, COMPILED):
        return open_static(source, options)
    device = choose_device(options.providers)
    if device.kind == CPU:
        return _open(source, options)
    _require_known_to_device(source, device)
    with closing(_open(source, replace(options, providers=()), graph_forms.FLOAT32)) as on_cpu:
        expected = trial.scores(on_cpu)
    forms = graph_forms.forms_for(source.config)
    for form in forms[:-1]:
        with suppress(DeviceError, SessionError):  # e.g. float16 overflows
            return _open_right(source, options, form, expected, device.name)
    return _open_right(source, options, forms[-1], expected, device.name)


def choose_device(providers: Sequence[str]) -> OrtDevice:
    """Return the device, with a working driver. Raises UsageError, DeviceError."""
    onnxruntime = import_onnxruntime()
    chosen = ort_devices.choose(onnxruntime, providers)
    require_driver(onnxruntime, chosen.provider)
    return chosen


def _require_known_to_device(source: Bundle, device: OrtDevice) -> None:
    """Raises UsageError for models that only the CPU runs."""
    if device.name == QNN:
        raise UsageError(
            f"{source.path} has passes of any size, which {QNN} does not run",
            remedy="Choose --device cpu, or export the model with --format qnn.",
        )
    config = source.config
    parts = {"an encoder": config.encoder, "short convolutions": config.convolving}
    lacked = [what for what, found in parts.items() if found]
    for what in (*lacked, config.unlike_layers):
        if what is not None:
            raise UsageError(
                f"{source.path} has {what}, which ort computes on the CPU alone",
                remedy="Choose --device cpu.",
            )


def _open(
    bundle: Bundle, options: RuntimeOptions, form: GraphForm | None = None
) -> OrtModel | GrowingModel:
    if bundle.manifest.kv_cache == "growing":
        return GrowingModel(bundle, options)
    return OrtModel(bundle, options, form)


def _open_right(
    bundle: Bundle, options: RuntimeOptions, form: GraphForm, expected: np.ndarray, device: str
) -> OrtModel | GrowingModel:
    """Raises DeviceError, SessionError unless scores are the CPU's."""
    model = _open(bundle, options, form)
    try:
        trial.require_same(trial.scores(model), expected, device)
    except BaseException:
        model.close()
        raise
    return model
