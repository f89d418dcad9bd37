"""`ModelPlan`: where one model runs and in which form, judged from headers.

Nothing is converted and no weights are read until a plan is prepared; the conversion is cached.
`edge_spec.scheduler.engine_plan` chooses among plans.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from edge_spec.core.config import ModelConfig
from edge_spec.core.export import ExportOptions, ReadingExporter, ScreeningExporter
from edge_spec.core.model import Model, Progress, Runtime, RuntimeOptions, ScoredTokens
from edge_spec.core.model_info import ModelInfo
from edge_spec.errors import (
    BundleError,
    EdgeSpecError,
    MissingDependencyError,
    ModelFileError,
    UnsupportedModelError,
    UsageError,
    install,
)
from edge_spec.models import runtimes
from edge_spec.models.bundle import Bundle, is_bundle, open_bundle, read_manifest
from edge_spec.models.model_text import text_of_bundle, text_of_info
from edge_spec.models.source import Source
from edge_spec.storage.atomic import atomic_file, make_once, sha256_file
from edge_spec.storage.measurements import known_sha256
from edge_spec.text.chat_format import ChatFormat

_log = logging.getLogger(__name__)
_MANY_ARCHITECTURES = "llamacpp"  # reads all GGUF architectures of its library
_NOTHING = RuntimeOptions()


class Refusal(NamedTuple):
    runtime: str
    error: EdgeSpecError


@dataclass(frozen=True)
class PreparedModel:
    """A model ready to open: header read, weights unread."""

    name: str
    runtime: Runtime
    source: Any  # input of the runtime's `open`
    config: ModelConfig
    make_text: Callable[[], ChatFormat]
    how: RuntimeOptions = _NOTHING
    as_it_is: bool = False  # the very file that was named
    scored_tokens: ScoredTokens | None = None  # for a draft that need not score all

    @cached_property
    def text(self) -> ChatFormat:
        """Tokenizer and chat format, built on first use: a large vocabulary takes a third of a
        second. Raises ModelFileError, and UnsupportedModelError if neither we nor the runtime can
        read the tokenizer."""
        return self.make_text()

    @property
    def loss(self) -> float | None:
        """KL divergence from the original weights in nats a token, about the relative loss of
        perplexity; None if unknown."""
        if isinstance(self.source, Bundle):
            return self.source.manifest.parity.get("kl_divergence")
        return 0.0 if self.as_it_is else None

    def vocabulary(self) -> Mapping[str, int]:
        return self.text.tokenizer.vocabulary()

    def open(self) -> Model:
        how = replace(self.how, scored_tokens=self.scored_tokens)
        return self.runtime.open(self.source, how)


@dataclass(frozen=True)
class ModelPlan:
    """One way to run a model. export: how to convert it. is_only: no other runtime is considered,
    since this one was named or is the format's only one. why: reason of the choice, "" if there was
    none. refusals: of runtimes tried before."""

    source: Source
    name: str  # of the runtime
    how: RuntimeOptions = _NOTHING
    export: ExportOptions = ExportOptions()  # noqa: RUF009
    is_only: bool = False
    why: str = ""
    refusals: tuple[Refusal, ...] = ()

    @cached_property
    def runtime(self) -> Runtime:
        """Load the runtime with its library. Raises MissingDependencyError, UsageError."""
        return runtimes.load_runtime(self.name)

    @cached_property
    def format(self) -> str:
        """Return the format that the runtime opens: an exporter's, "gguf" or "checkpoint"."""
        return runtimes.format_for(self.runtime, self.source.formats)

    @cached_property
    def conversion(self) -> ExportOptions:
        """How to convert the model for the devices. Raises UsageError, DeviceError for devices that
        the runtime lacks."""
        return replace(self.export, compute=self.runtime.compute(self.how.providers))

    @cached_property
    def own(self) -> Path | None:
        """The named path if it is opened unconverted. Raises as `Source.at` does."""
        is_demo = self.source.is_demo
        if is_demo and self.format not in ("checkpoint", "gguf"):
            return None  # known without fetching the demo
        path = self.source.at(self.format)
        if self.format == "checkpoint" or (not is_demo and is_bundle(path)):
            return path
        is_file = self.format == "gguf" and path.is_file()
        return path if is_file and self.export.quantization is None else None

    @cached_property
    def kept(self) -> Path:
        """Where the conversion is kept, existing or not."""
        cached = self.source.cached(self.format, self.conversion)
        # Appended, as names of models may have dots.
        return cached.with_name(f"{cached.name}.gguf") if self.format == "gguf" else cached

    @property
    def is_there(self) -> bool:
        """Return whether no conversion is needed."""
        if self.own is not None:
            return True
        return self.kept.is_file() if self.format == "gguf" else is_bundle(self.kept)

    @property
    def weights(self) -> str | None:
        """Form of the weights, as in profiles; None if a conversion is missing or unreadable."""
        if not self.is_there:
            return None
        if self.runtime.reads == "gguf":
            is_own = self.own is not None
            info = self.source.header if is_own else runtimes.open_model_info(self.kept)
            return joined_types(info.weight_types)
        with suppress(EdgeSpecError):
            return read_manifest(self.own or self.kept).weights
        return None

    def require_devices(self) -> None:
        """Raise UsageError, DeviceError, MissingDependencyError for missing devices, if known
        without a model."""
        if self.how.providers:
            self.runtime.require_devices(self.how.providers)

    def screen(self) -> None:
        """Check headers. Raises UnsupportedModelError, MissingDependencyError if the runtime cannot
        run the model, ModelFileError for damage."""
        if self.runtime.reads == "gguf" and self.own is not None:
            self.runtime.require_runnable(self.source.header)
        elif not self.is_there:
            self.require_convertible()

    def require_convertible(self) -> None:
        """Raise what a conversion would, as far as headers show."""
        exporter, model = runtimes.exporter_for(self.format, self.source.at(self.format))
        reads_itself = isinstance(exporter, ReadingExporter)
        if isinstance(exporter, ScreeningExporter):
            # first, since what a runtime names instead may need it
            exporter.require_exportable(model)
        if not reads_itself:
            model.tokenizer_json()

    def prepare(
        self, progress: Progress, before_conversion: Callable[[Any], None] | None = None
    ) -> PreparedModel:
        """Convert the model if necessary, and open its header; log runtimes that refused it.
        before_conversion: receives a model to convert, and may raise. Raises an EdgeSpecError."""
        if self.refusals:
            _log.warning("%s", self)
        self.require_devices()
        if self.own is None:
            return self._of(self._converted(progress, before_conversion))
        return self._of(self._open(self.own))

    def find(self) -> PreparedModel | None:
        """Prepare for a look only: convert, write and hash nothing. Return None if a conversion is
        missing or damaged."""
        if not self.is_there:
            return None
        try:
            return self._of(self._open(self.own or self.kept, hashed=False), keeps=False)
        except ModelFileError:
            if self.own is not None:
                raise
            return None

    def _open(self, path: Path, hashed: bool = True) -> Bundle | ModelInfo:
        """Open with weights unread. hashed: verify a bundle. Raises ModelFileError for damage,
        UnsupportedModelError, UsageError for another format."""
        if self.format == "checkpoint":
            return runtimes.open_checkpoint(path)
        if self.format != "gguf":
            bundle = open_bundle(path, hashed)
            if bundle.manifest.format != self.format:
                raise UsageError(
                    f"{path} is a bundle of format {bundle.manifest.format}",
                    remedy=f"The chosen runtime and device read {self.format}; choose others with "
                    "--runtime and --device.",
                )
            return bundle
        if is_bundle(path):
            raise UsageError(
                f"{path} is a bundle, not a GGUF file",
                remedy="Choose another --runtime, or give the model that the bundle was made from.",
            )
        info = self.source.header if path == self.own else runtimes.open_model_info(path)
        self.runtime.require_runnable(info)
        return info

    def _converted(
        self, progress: Progress, before_conversion: Callable[[Any], None] | None
    ) -> Bundle | ModelInfo:
        kept = self.kept

        def find() -> Bundle | ModelInfo | None:
            with suppress(BundleError, OSError):
                if self.format != "gguf" or _is_whole(kept):
                    return self._open(kept)
            return None

        def convert() -> None:
            if kept.exists():
                _log.warning("%s is damaged or incomplete: the model is converted again", kept)
            exporter, model = runtimes.exporter_for(self.format, self.source.at(self.format))
            if before_conversion is not None:
                before_conversion(model)
            if kept.is_dir():
                shutil.rmtree(kept, ignore_errors=True)
            exporter.export(model, kept, self.conversion, progress)
            if self.format == "gguf":
                with atomic_file(_digest_file(kept)) as file:
                    file.write_text(sha256_file(kept), encoding="ascii")

        found = make_once(kept, find, convert)
        if found is None:
            raise ModelFileError(
                f"{kept} is damaged as soon as it is written", remedy="Check the disk it is on."
            )
        return found

    def _of(self, found: Bundle | ModelInfo, keeps: bool = True) -> PreparedModel:
        """keeps: cache a slow tokenizer."""
        if isinstance(found, Bundle):
            make_text, is_own = partial(text_of_bundle, found), False
        else:
            make_text = partial(text_of_info, found, self.runtime, keeps)
            is_own = self.own is not None
        name, config = self.source.name, found.config
        return PreparedModel(name, self.runtime, found, config, make_text, self.how, is_own)

    def __str__(self) -> str:
        refused = "; ".join(
            f"{each.runtime} cannot run {self.source.name} ({each.error.shown})"
            for each in self.refusals
        )
        return f"{refused}: {self.name} runs it" if refused else self.name


def ways_to_run(
    source: Source,
    runtime: str = "auto",
    how: RuntimeOptions = _NOTHING,
    export: ExportOptions = ExportOptions(),  # noqa: B008
) -> list[ModelPlan]:
    """List plans for the installed runtimes, usual one first, or one plan if a runtime is named or
    the format's only one. Loads none."""
    installed = runtimes.installed_runtimes()
    is_only = runtime != "auto" or source.formats is not None or not installed
    names = [runtime] if is_only else installed
    if names == ["auto"]:
        names = [runtimes.auto_runtime(source.formats)]
    return [ModelPlan(source, name, how, export, is_only) for name in names]


def choose(
    plans: Sequence[ModelPlan], refusals: Sequence[Refusal] = ()
) -> tuple[ModelPlan, list[ModelPlan]]:
    """Return the first plan whose runtime accepts the headers, and the later ones. refusals: from
    before. Raises UnsupportedModelError, MissingDependencyError with the command that may help;
    ModelFileError for damage."""
    found = list(refusals)
    for i, plan in enumerate(plans):
        if plan.is_only:
            return plan, []
        try:
            plan.screen()
        except (UnsupportedModelError, MissingDependencyError) as error:
            found.append(Refusal(plan.name, error))
        else:
            chosen = replace(plan, refusals=tuple(found)) if found else plan
            return chosen, list(plans[i + 1 :])
    raise _refused(plans[0].source, found)


def prepare_model(
    source: Source,
    runtime: str,
    progress: Progress,
    how: RuntimeOptions = _NOTHING,
    export: ExportOptions = ExportOptions(),  # noqa: B008
) -> PreparedModel:
    """Prepare the model for the first runtime that runs it, in the usual order. Raises an
    EdgeSpecError."""
    chosen, _ = choose(ways_to_run(source, runtime, how, export))
    return chosen.prepare(progress)


def _refused(source: Source, refusals: Sequence[Refusal]) -> EdgeSpecError:
    if source.path.is_file():
        try:
            _ = source.header
        except EdgeSpecError as error:  # not a runtime's refusal: wrong kind of file
            return error
    for each in refusals:
        if isinstance(each.error, MissingDependencyError):
            return each.error
    first = refusals[0].error
    asked = [each.runtime for each in refusals]
    if source.path.is_file() and _MANY_ARCHITECTURES not in asked:
        return UnsupportedModelError(
            f"{first.message}, which {' and '.join(asked)} cannot run",
            remedy=f"{install(_MANY_ARCHITECTURES)}, which reads many more GGUF files.",
        )
    if len(refusals) == 1:
        return first
    reasons = "; ".join(f"{each.runtime}: {each.error.shown}" for each in refusals)
    return UnsupportedModelError(
        f"nothing that is installed can run {source.name}: {reasons}",
        remedy="Update the libraries, which may know it by now, or use another model.",
    )


def _is_whole(cached: Path) -> bool:
    return known_sha256(cached) == _digest_file(cached).read_text(encoding="ascii")


def _digest_file(cached: Path) -> Path:
    return cached.with_name(f"{cached.name}.sha256")


def joined_types(weight_types: frozenset[str]) -> str:
    """Return the types of a GGUF file's matrices, such as "Q4_K+Q6_K", without norms' F32."""
    return "+".join(sorted(weight_types - {"F32"} or weight_types))
