"""Fourth stage: the engine around the open models."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Protocol

from edge_spec.core.model import HasWays
from edge_spec.core.runtime_protocols import SharesPasses
from edge_spec.core.watchdog import FIRST_S, WatchedModel
from edge_spec.engine.components import EngineComponents, IdleWork, TakesAnswers
from edge_spec.engine.engine import Engine
from edge_spec.engine.prompt_cache import PromptCache
from edge_spec.engine.shared_passes import SharedPasses
from edge_spec.engine.snapshot_file import PREFILL_TOKENS, PromptFiles
from edge_spec.engine.speculation import SpeculationFactory
from edge_spec.loader.open import OpenModels
from edge_spec.loader.place import PlacedModels
from edge_spec.models.options import LoadOptions
from edge_spec.models.pair_history import add_rounds
from edge_spec.models.runtimes import library_build
from edge_spec.placement.idle_process import InTurns, measure_when_idle
from edge_spec.scheduler.batch_invariance import widths_for
from edge_spec.scheduler.profile import load_learnt, save_learnt
from edge_spec.scheduler.row_findings import RoundTimes, rows_key, settle_rows
from edge_spec.text.grammar import GrammarCompiler


class Learner(TakesAnswers, IdleWork, Protocol):
    """Learns from answers while the model is idle."""


# Starts a learner for open models. The factory: of who drafts otherwise. The function: whether
# other idle work is done. Raises an EdgeSpecError where nothing can be learnt of these.
StartLearning = Callable[
    [PlacedModels, OpenModels, SpeculationFactory, Callable[[], bool]], Learner
]


def compose_engine(
    placed: PlacedModels,
    models: OpenModels,
    opened: ExitStack,
    measures: bool,
    learning: StartLearning | None = None,
) -> Engine:
    """opened: closes what is started for the engine where the rest fails. measures: runtimes, while
    the engine is idle. learning: from answers, where that was asked for."""
    target, key = placed.target, models.key
    factory = _speculation_factory(models, placed.options)
    speculation = factory.compose(models.drafters)
    speculation.load_stats(load_learnt(key))
    model, timeout_s = models.target, placed.options.call_timeout_s
    if timeout_s is not None:
        remedy = "Ask again: the text is then read again. Or give a longer --call-timeout."
        model = WatchedModel(model, timeout_s, max(timeout_s, FIRST_S), 0, remedy)
    way = models.target.way if isinstance(models.target, HasWays) else None
    parts = EngineComponents(
        name=target.name,
        runtime=target.runtime.name,
        model=model,
        passes=SharedPasses(model, factory.lossless, factory.load),
        text=target.text,
        batch_invariance=factory.batch_invariance,
        speculation=speculation,
        speculation_factory=factory,
        grammars=GrammarCompiler(
            target.text.tokenizer, target.config.vocab_size, target.text.eos_ids
        ),
        drafter=placed.options.drafter,
        min_rows=factory.lossless.plain_width,
        drafts=models.drafts,
        keep_learnt=partial(save_learnt, key),
        keep_rounds=None if models.pair is None else partial(add_rounds, models.pair),
        identity=placed.source.identity,
        computing=key.digest if way is None else f"{key.digest} {way}",
        round_times=RoundTimes(
            rows_key(key, models.target.config),
            factory.lossless.widths,
        ),
    )
    parts = replace(parts, prompts=PromptCache(_prompt_files(placed, parts)))
    works: list[IdleWork] = []
    runtime = target.runtime.name
    measuring = measure_when_idle(placed.source, placed.options, runtime) if measures else None
    if measuring is not None:
        opened.callback(measuring.close)
        works.append(measuring)
    if learning is not None:
        learner = learning(placed, models, factory, lambda: measuring is None or measuring.is_done)
        opened.callback(learner.close)
        works.append(learner)
        parts = replace(parts, learner=learner)
    if works:
        parts = replace(parts, idle_work=InTurns(works) if len(works) > 1 else works[0])
    return Engine(parts)


def _speculation_factory(models: OpenModels, options: LoadOptions) -> SpeculationFactory:
    key = rows_key(models.key, models.target.config)
    mode = options.lossless_mode
    widths = widths_for(options.most_rows)
    findings = settle_rows(models.target, key, widths, mode)
    lossless = findings.lossless(mode, replays=not options.anticipates)
    return SpeculationFactory(
        models.context,
        models.target.capabilities,
        findings.batch_invariance,
        lossless=lossless,
        overlap=options.drafts_elsewhere,
        draft_overlap=options.overlap,
        begins_overlapped=models.begins_overlapped,
        parallel_rows=options.parallel_rows,
        shares_passes=isinstance(models.target, SharesPasses),
        costs=models.costs,
    )


def _prompt_files(placed: PlacedModels, parts: EngineComponents) -> PromptFiles | None:
    directory = placed.options.prompt_directory
    if directory is None:
        return None
    architecture = {**parts.model.config.to_dict(), "context_length": 0}
    exact = parts.speculation_factory.lossless.is_exact
    build = library_build(parts.runtime)
    made_by = [parts.identity, architecture, parts.computing, build, exact, PREFILL_TOKENS]
    described = json.dumps(made_by, sort_keys=True)
    return PromptFiles(directory, hashlib.sha256(described.encode()).hexdigest())
