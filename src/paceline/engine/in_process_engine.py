"""An engine in this process, and the choice between it and an engine with a worker: `open_engine`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

from paceline import validation
from paceline.clock import MonotonicClock
from paceline.engine.adapters import AdapterRegistry, adapter_paths
from paceline.engine.arguments import EngineArguments, ModelPath, engine_arguments, refuse_rpc, sampling_defaults
from paceline.engine.backend import Executor, prepare_embedding
from paceline.engine.client import EngineClient, close_trace, fitted_config, open_trace
from paceline.engine.core import Engine
from paceline.engine.engine_factory import Parts, assemble, build
from paceline.engine.engine_thread import Runner
from paceline.engine.inbox import Inbox
from paceline.engine.media_encoder import EncodingInbox
from paceline.engine.output_router import OutputRouter
from paceline.engine.prompts import Measure, refuse_media
from paceline.engine.questions import Question
from paceline.errors import InvalidType
from paceline.hub import check_is_path, is_reference, local_model, parse_reference
from paceline.observability.heartbeat import Pulse
from paceline.observability.metric_table import MetricsSnapshot
from paceline.observability.metrics import Instruments, Metrics, resolve_instruments
from paceline.runtime import Model, trim_heap
from paceline.scheduling.records import EmbeddingRequest

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class InProcessEngine(EngineClient):
    """A model, its contexts and the thread that computes on them. Options as `LLM` takes them."""

    def __init__(self, model: Model | ModelPath | None, options: Mapping[str, Any]) -> None:
        arguments = engine_arguments(options)
        refuse_rpc(arguments.config)
        self._begin(arguments, partial(build, model))

    def _begin(self, arguments: EngineArguments, make: Callable[[EngineArguments], Parts]) -> None:
        """Make the parts of the engine, and start its thread. make: see `assemble`."""
        config = arguments.config
        self.metrics = Metrics(config.num_slots)
        given = resolve_instruments(arguments.instruments)
        self._clock = MonotonicClock()
        trace = open_trace(config, self._clock.now())
        at_end = () if trace is None else (partial(close_trace, trace),)
        try:
            self.instruments = Instruments(given if trace is None else (*given, trace), own=self.metrics)
            parts = assemble(make, arguments, self._clock, self.instruments)
        except BaseException:
            for end in at_end:
                end()
            raise
        self.model, self.limits, self._backend, encoder = parts.model, parts.limits, parts.backend, parts.encoder
        self.config = config = fitted_config(config, parts.limits)
        self.metrics.set_num_slots(config.num_slots)
        self.tokenizer = parts.model.tokenizer
        self.sampling_defaults = sampling_defaults(parts.model.metadata)
        measure: Measure = partial(refuse_media, beside=parts.projectors)
        bounds = config.num_slots + config.max_queue, config.max_queue_tokens
        if encoder is None:
            self._inbox = Inbox(*bounds)
        else:
            self._inbox = inbox = EncodingInbox(*bounds, encoder, self._clock)
            measure, at_end = encoder.measure, (inbox.close_encoder, *at_end)
        self._router = OutputRouter(self._inbox)
        self._take_requests(
            AdapterRegistry(parts.adapters, adapter_paths(arguments.lora)),
            self._backend.vocabulary,
            self._backend.make_samplers,
            measure,
        )
        self._resources = parts.resources(config.state_folder, self._router.ask, self._inbox.next_key)
        engine = Engine(self._inbox, parts.scheduler, Executor(self._backend, self._clock), parts.calibration)
        pulse, at_end = Pulse(self._clock), (*at_end, *parts.saving(engine), *parts.at_end, trim_heap)
        self._thread = Runner(engine, self._inbox, self._router, pulse, self._backend.abort, at_end)
        # Nothing that the thread holds refers to this object, so that losing it ends the thread.
        self._thread.end_when_lost(self)

    def _checked_pooling(self, request: EmbeddingRequest) -> str | None:
        return prepare_embedding(self._backend, request)

    def _ask(self, question: Question[R, *Ts], args: tuple[*Ts], delay_s: float = 0.0) -> Future[R]:
        """Have the engine's thread answer, or answer here a question that takes no tick."""
        self._thread.check_process()
        if question.place == "tick":
            return self._router.ask(question.command(self._inbox.next_key(), args, self._clock.now() + delay_s))
        answered: Future[R] = Future()
        try:
            answered.set_result(question.answer(self._resources, *args))
        except Exception as error:  # noqa: BLE001 - raised by `result`
            answered.set_exception(error)
        return answered

    def stats(self) -> MetricsSnapshot:
        """Return all metrics."""
        return self.metrics.snapshot()

    def reported_stats(self, max_age_s: float) -> MetricsSnapshot:  # noqa: ARG002
        """Return all metrics, which are of this moment."""
        return self.metrics.snapshot()


def check_options(model: Any, options: Mapping[str, Any]) -> None:
    """Raise the errors of the model and the options that are known before anything is loaded."""
    _check_model(model)
    config = engine_arguments(options).config
    if config.isolation == "process":
        from paceline.engine.worker.worker_process import worker_setup

        worker_setup(model, options)
    else:
        refuse_rpc(config)


def _check_model(model: object) -> None:
    """Raise `InvalidType` if this cannot be a model."""
    if model is None or isinstance(model, (Model, str, os.PathLike)):
        return
    if isinstance(model, (list, tuple)) and model and all(isinstance(part, (str, os.PathLike)) for part in model):
        return  # the parts of a split file
    raise InvalidType(
        "model must be the path of a GGUF file, a name such as 'hf:user/repo:Q4_K_M', a Model, a list of a split file's parts, "
        f"or None for the demo model, not {model!r:.80}"
    )


def local_files(
    model: Model | ModelPath | None, options: Mapping[str, Any], *, offline: bool, hf_token: str | None
) -> Model | ModelPath | None:
    """Return the path of a model that is given by name, downloaded if necessary; any other model unchanged."""
    check_source(model, offline=offline, hf_token=hf_token)
    if not is_reference(model):
        check_is_path(model)
        return validation.path("model", model) if isinstance(model, (str, os.PathLike)) else model
    return local_model(str(model), offline=offline, hf_token=hf_token, cancel=options.get("cancel")).path


def local_options(options: Mapping[str, Any], *, offline: bool, hf_token: str | None) -> dict[str, Any]:
    """Return the options with the paths of a draft model and a projector that are given by name, downloaded if necessary."""
    found = dict(options)
    for name in ("draft_model", "mmproj"):
        given = options.get(name)
        if given is None or isinstance(given, (Model, bool)):
            continue
        files = local_files(given, options, offline=offline, hf_token=hf_token)
        found[name] = Path(files).absolute() if isinstance(files, (str, os.PathLike)) else files
    return found


def check_source(model: Any, *, offline: bool, hf_token: str | None) -> None:
    """Raise the errors of a model's name and of the options of its download."""
    validation.boolean("offline", offline, default=False)
    if hf_token is not None:
        validation.text("hf_token", hf_token)
    if is_reference(model):
        parse_reference(model)


def open_engine(model: Model | ModelPath | None, options: Mapping[str, Any]) -> EngineClient:
    """Return an engine, in this process or with a worker by `isolation`. Raises the errors of options and loading."""
    if engine_arguments(options).config.isolation == "process":
        from paceline.engine.worker.worker_engine import WorkerEngine

        return WorkerEngine(model, options)
    return InProcessEngine(model, options)
