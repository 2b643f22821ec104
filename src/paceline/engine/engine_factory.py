"""Makes engines from options: model, draft model, contexts and limits for this machine, timed passes, backend, scheduler."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from paceline.clock import Clock
from paceline.config import EngineConfig
from paceline.cost_model import MeasuredPass
from paceline.engine.adapters import adapter_paths, projector_file, projectors_beside
from paceline.engine.arguments import USUAL_CHUNK, DraftArguments, EngineArguments, ModelPath, check_chunk
from paceline.engine.backend import Backend
from paceline.engine.core import Ask, Engine
from paceline.engine.disk_cache import DiskCache, open_disk_cache
from paceline.engine.llama_backend import LlamaBackend, LlamaDraftBackend
from paceline.engine.media_encoder import MediaEncoder
from paceline.engine.memory_fit import (
    LEAST_CTX,
    MemoryChoice,
    default_n_ctx,
    draft_sized_options,
    has_full_window,
    most_seq_ids,
    num_seq_ids,
    output_shares,
    sized_options,
)
from paceline.engine.memory_needs import MemoryFit, fit_to_memory
from paceline.engine.questions import Resources
from paceline.engine.saved_prefixes import SavedPrefixes, StateFiles
from paceline.errors import (
    Aborted,
    InvalidParams,
    ModelLoadError,
    NotEnoughMemory,
    PacelineError,
    Unsupported,
    named_error,
)
from paceline.observability.metrics import Instruments
from paceline.params import SamplingParams
from paceline.runtime import (
    Adapter,
    Context,
    Device,
    MediaProjector,
    MemoryClass,
    Model,
    Sampler,
    Tokenizer,
    devices,
    memory_in_use,
    rpc,
    total_memory,
)
from paceline.runtime.embedder import longest_text
from paceline.runtime.memory import mebibytes
from paceline.runtime.rpc import LENT_DEVICE
from paceline.runtime.sequence_state import layout_fingerprint
from paceline.runtime.step import StepRow
from paceline.scheduling.scheduler import Scheduler
from paceline.scheduling.strategies import resolve_strategy
from paceline.sequence import Limits
from paceline.speculation.drafter import Drafter, Drafters
from paceline.speculation.drafters.heads import attach_heads
from paceline.speculation.drafters.model_drafter import DraftLimits, DraftRow, ModelDrafter
from paceline.speculation.named_drafter import draft_heads_of, resolve_drafter

_ROWS: Final = (1, 8)  # of decoding passes
_SIZES: Final = (8, 32, 64, 128, 512)  # of pieces of a prompt, timed after them
_START_S: Final = 0.1  # of passes before the engine is ready
_WHOLE_S: Final = 0.5
_NUM_COPIES: Final = 8  # of a prompt's cells, which lie idle beside decoding passes
_NUM_REPEATS: Final = 3  # of a pass beside idle cells and without them; the shortest counts
_LEAST_SLOWDOWN: Final = 0.1  # by idle cells; less may be chance
_LEAST_DECODE_S: Final = 0.001  # of a decoding pass; a shorter pass of a tiny model says nothing, and needs no help


class Calibration:
    """Timed passes of growing size on an empty context: first tokens of several sequences with logits, then pieces of a prompt.

    The first pass warms up and does not count. At last comes a decoding pass beside idle cells: copies of the last prompt's
    cells, which cost a copy each and no pass. `begin` makes the short passes, `step` makes one more pass while the engine is
    idle, and `end` hands over the times before anything else uses the context.
    """

    def __init__(
        self, context: Context, model: Model, num_slots: int, learn: Callable[[Sequence[MeasuredPass], float], None]
    ) -> None:
        """num_slots: most sequences of a pass. learn: called once with the measured passes and `TickCostModel.idle_cell_s`."""
        self._context, self._learn = context, learn
        self._passes = _passes(context, model, num_slots)
        self._measured: list[MeasuredPass] = []
        self._spent_s, self._last_s, self._last_size = 0.0, 0.0, 1
        self._decoding, self._decode_s = self._passes[len(self._passes) - len(_SIZES) - 1], 0.0
        self._has_idle_pass = context.memory_class is MemoryClass.ATTENTION
        self._idle_cell_s = 0.0

    def begin(self) -> None:
        """Warm up, which reads the weights, and time the short passes. Raises the errors of a pass."""
        self._time()
        while self._passes and self._fits(_START_S):
            self._measure()
        if self._fits(_START_S):
            self.step()

    def step(self) -> bool:
        """Time a pass; return False if none is left, or if the next pass would take too long."""
        if self._measured and not self._fits(_WHOLE_S):  # the time of a pass on a cold machine says nothing
            return False
        try:
            if self._passes:
                self._measure()
            else:
                self._measure_idle_cells()
        except Aborted:  # the engine is being closed
            return False
        except Exception as error:  # noqa: BLE001 - without it the cost model learns from ticks
            _log.warning("the passes of a calibration cannot be computed: %r", error)
            return False
        return True

    def end(self) -> None:
        """Hand over the measured passes and drop the others. An error is only logged."""
        self._passes.clear()
        if not self._measured:
            return
        try:
            self._learn(self._measured, self._idle_cell_s)
        except Exception:  # noqa: BLE001 - the cost model learns from ticks
            _log.warning("what the passes of a calibration took cannot be learned", exc_info=True)

    def _fits(self, budget_s: float) -> bool:
        """Return whether the next pass ends within a budget, judging by the last pass."""
        if not self._passes:
            needed_s = self._last_s + 2 * _NUM_REPEATS * self._decode_s
            return self._has_idle_pass and self._spent_s + needed_s <= budget_s
        return self._spent_s + self._last_s * _num_tokens(self._passes[0]) / self._last_size <= budget_s

    def _measure(self) -> None:
        rows = self._passes[0]
        self._time()
        self._spent_s += self._last_s
        if rows is self._decoding:
            self._decode_s = self._last_s
        num_outputs = sum(len(row.samplers) for row in rows)
        self._measured.append(MeasuredPass(self._last_size, self._last_size, self._last_s, num_outputs))

    def _time(self) -> None:
        rows = self._passes.pop(0)
        self._last_s, self._last_size = self._seconds(rows), _num_tokens(rows)

    def _measure_idle_cells(self) -> None:
        self._has_idle_pass = False
        context, num_rows = self._context, len(self._decoding)
        scratch, num_cells = context.n_seq_max - 1, min(_SIZES[-1], context.n_batch, context.max_positions)
        seq_ids = range(num_rows, min(scratch, num_rows + _NUM_COPIES, num_rows + context.n_ctx // (2 * num_cells)))
        if not seq_ids:
            return
        num_idle = len(seq_ids) * num_cells
        start = time.perf_counter()
        try:
            context.step([StepRow(seq_id=seq_ids[0], position=0, token_ids=[0] * num_cells)])
            state = context.save_cells(seq_ids[0], 0, num_cells, scratch_seq_id=scratch)
            for seq_id in seq_ids[1:]:
                context.load_cells(seq_id, state, 0, num_cells, scratch_seq_id=scratch)
            beside_s = min([self._seconds(self._decoding) for _ in range(_NUM_REPEATS)])
        finally:
            for seq_id in seq_ids:
                context.remove(seq_id)
        alone_s = min([self._decode_s, *[self._seconds(self._decoding) for _ in range(_NUM_REPEATS)]])
        if alone_s >= _LEAST_DECODE_S and beside_s - alone_s > _LEAST_SLOWDOWN * alone_s:
            self._idle_cell_s = (beside_s - alone_s) / (num_rows * num_idle)
        self._spent_s += time.perf_counter() - start

    def _seconds(self, rows: list[StepRow]) -> float:
        start = time.perf_counter()
        self._context.step(rows)
        seconds = time.perf_counter() - start
        for row in rows:
            self._context.remove(row.seq_id)
        return seconds


def _num_tokens(rows: list[StepRow]) -> int:
    return sum(len(row.token_ids) for row in rows)


def _passes(context: Context, model: Model, num_slots: int) -> list[list[StepRow]]:
    greedy = Sampler(SamplingParams(temperature=0), model)
    most_rows = min(num_slots, context.n_batch, context.n_outputs_max)
    decoding = [
        [StepRow(seq_id=seq_id, position=0, token_ids=[0], samplers=(greedy.clone(),)) for seq_id in range(num_rows)]
        for num_rows in sorted({min(number, most_rows) for number in _ROWS})
    ]
    sizes = [min(size, context.n_batch, context.max_positions) for size in _SIZES]
    prompts = [[StepRow(seq_id=0, position=0, token_ids=[0] * size)] for size in sizes]
    return [decoding[0], *decoding, *prompts]


_log = logging.getLogger("paceline.engine")

_HOST_SHARE = 8  # an eighth of the machine's memory is for idle prefixes
_FILES_OF_HEADS = {"dflash": "DFlash and DSpark", "eagle3": "EAGLE-3"}  # by their architecture
_DIFFUSION = (
    "it is a diffusion model, which refines a whole text over many passes, and only models that write token after token are "
    "supported; llama.cpp runs it with llama-diffusion-cli"
)
_ITL_TARGET_MS = {"cpu": 250.0, "gpu": 50.0}
# Context options that embedders take over; the others concern a KV cache, which they do not have.
_EMBEDDER_OPTIONS = frozenset(
    (
        "n_threads",
        "n_threads_batch",
        "flash_attn",
        "offload_kqv",
        "op_offload",
        "rope_scaling",
        "rope_freq_base",
        "rope_freq_scale",
        "yarn_ext_factor",
        "yarn_attn_factor",
        "yarn_beta_fast",
        "yarn_beta_slow",
        "yarn_orig_ctx",
    )
)


_MOST_SIZE_DIFFERENCE: Final = 128  # tokens that one vocabulary has in addition, as in llama.cpp
_FIRST_COMPARED: Final = 5  # earlier tokens are control tokens, with names that may differ
_WARM_UP_PASSES: Final = 2


@dataclass(slots=True)
class DraftModel:
    """A loaded draft model; `begin` makes its context and its drafter. owns_model: whether `close` frees the model."""

    model: Model
    owns_model: bool
    arguments: DraftArguments
    context: Context | None = None
    drafter: ModelDrafter | None = None

    @classmethod
    def load(cls, arguments: DraftArguments, target: Model, num_slots: int) -> DraftModel:
        """Load it. Raises as `Model.load`, and `Unsupported` if it cannot draft for the target; errors name it."""
        given = arguments.model
        if isinstance(given, Model):
            if arguments.load:
                raise InvalidParams(
                    f"draft_options[{next(iter(arguments.load))!r}] is an option of loading, and draft_model is loaded already"
                )
            draft = cls(given, owns_model=False, arguments=arguments)
        else:
            try:
                draft = cls(Model.load(given, **arguments.load), owns_model=True, arguments=arguments)
            except PacelineError as error:
                raise _naming(given, error) from error
        try:
            _check_memory(draft.model, num_slots, arguments.context)
            check_same_tokens(target, draft.model)
        except BaseException:
            draft.close()
            raise
        return draft

    def begin(self, target_context: Context, target: Model, num_slots: int) -> None:
        """Make its context and its drafter. Raises `NotEnoughMemory` if not even few cells fit."""
        self.context = self._context(target_context, num_slots)
        self.drafter = self._drafter(self.context, target)

    def _context(self, target: Context, num_slots: int) -> Context:
        """Return its context. Without n_ctx it has as many cells as the target, halved until they fit."""
        asked = self.arguments.n_ctx
        n_ctx = target.n_ctx if asked is None else asked
        while True:
            options = draft_sized_options(
                self.model.memory_class, num_slots, n_ctx, target.n_batch, self.arguments.context
            )
            try:
                return Context(self.model, **options)
            except NotEnoughMemory as error:
                if asked is not None or n_ctx <= LEAST_CTX:
                    raise _naming(self.arguments.model, error) from error
                n_ctx //= 2
                _log.warning("memory is short: the draft model's KV cache gets n_ctx=%d cells", n_ctx)
            except PacelineError as error:
                raise _naming(self.arguments.model, error) from error

    def _drafter(self, context: Context, target: Model) -> ModelDrafter:
        tokenizer, chunk_size = target.tokenizer, self.arguments.chunk_size
        if chunk_size is not None:
            check_chunk(chunk_size, context.n_batch)
        limits = DraftLimits(
            num_cells=context.n_ctx,
            num_seq_ids=context.n_seq_max,
            n_batch=context.n_batch,
            max_positions=min(context.max_positions, self.model.n_ctx_train or context.max_positions),
            n_vocab=self.model.n_vocab,
            target_n_vocab=tokenizer.n_vocab,
            eog_ids=tokenizer.eog_ids,
            p_min=self.arguments.p_min,
            chunk_size=min(USUAL_CHUNK, context.n_batch) if chunk_size is None else chunk_size,
        )
        backend = LlamaDraftBackend(self.model, context, wants_probabilities=self.arguments.p_min > 0)
        _log.info(
            "%s drafts: %d cells, %d sequence ids, %d tokens a sequence",
            self.model.desc,
            limits.num_cells,
            limits.num_seq_ids,
            limits.max_positions,
        )
        for _ in range(_WARM_UP_PASSES):  # the first pass reads the weights, so its time says nothing
            backend.step([DraftRow(0, 0, [0, 0], draws=True)])
            backend.remove(0)
        return ModelDrafter(backend, limits)

    def close(self) -> None:
        """Free the context, and the model unless it belongs to the caller."""
        if self.context is not None:
            self.context.close()
        if self.owns_model:
            self.model.free()


class DraftModelPlace:
    """Takes the place of the draft model among the drafters until it is loaded. Never called."""

    def _never(self, *_arguments: Any) -> Any:
        raise AssertionError("the draft model was not put in its place")

    begin = propose = observe = rollback = end = _never

    def filled(self, drafter: Drafter | Drafters | None, draft_model: Drafter) -> Drafter | Drafters | None:
        """Return the drafters with the draft model in its place."""
        if isinstance(drafter, tuple):
            return tuple(draft_model if each is self else each for each in drafter)
        return draft_model if drafter is self else drafter


def _naming(model: Any, error: PacelineError) -> PacelineError:
    """Return the same error with the name of the draft model."""
    name = model.desc if isinstance(model, Model) else model
    return named_error(type(error).__name__, f"draft model {name}: {error}", getattr(error, "filename", None))


def _check_memory(model: Model, num_slots: int, options: Mapping[str, Any]) -> None:
    """Raise `Unsupported` or `InvalidParams` if wrong drafts could not be taken back, or if the model generates no text."""
    reasons = {
        MemoryClass.RECURRENT: "its state cannot be taken back behind wrong tokens",
        MemoryClass.HYBRID: "the state of its recurrent layers cannot be taken back behind wrong tokens",
        MemoryClass.NONE: "it generates no text",
    }
    reason = reasons.get(model.memory_class)
    if model.has_encoder or not model.has_decoder:
        reason = "it is not a model that writes token after token"
    elif model.native.one_sequence_per_pass and num_slots > 1:
        reason = f"a pass of the architecture {model.native.architecture} has one sequence alone; set num_slots=1"
    if reason is not None:
        raise Unsupported(f"{model.desc} cannot be a draft model: {reason}; use another one, or leave draft_model out")
    if model.memory_class is MemoryClass.SLIDING_WINDOW and options.get("swa_full") is False:
        raise InvalidParams(
            f"draft_options['swa_full']=False does not go with {model.desc}: wrong drafts cannot be cut from a sliding window "
            "that does not keep the whole sequence; leave it out"
        )


def check_same_tokens(target: Model, draft: Model) -> None:
    """Raise `Unsupported` with the first token that differs between target and draft model."""
    difference = _difference(target.tokenizer, draft.tokenizer)
    if difference is not None:
        raise Unsupported(
            f"the draft model {draft.desc} does not have the tokens of {target.desc}: {difference}; a draft model has to be of "
            "the same family, with the same vocabulary"
        )


def _difference(target: Tokenizer, draft: Tokenizer) -> str | None:
    if target.vocab_type != draft.vocab_type:
        return f"its vocabulary is of the type {draft.vocab_type}, not {target.vocab_type}"
    for role in ("bos", "eos"):
        wanted, found = (getattr(tokenizer, f"add_{role}") for tokenizer in (target, draft))
        if wanted != found:
            return f"it {'adds' if found else 'does not add'} {role} to a text, which the other does{' not' * found}"
        ids = [getattr(tokenizer, role) for tokenizer in (target, draft)]
        if wanted and ids[0] != ids[1]:
            return f"its {role} is token {ids[1]}, not {ids[0]}"
    sizes = (target.n_vocab, draft.n_vocab)
    if abs(sizes[0] - sizes[1]) > _MOST_SIZE_DIFFERENCE:
        return f"it has {sizes[1]} tokens, and the other {sizes[0]}"
    for index, (wanted_piece, piece) in enumerate(zip(target.pieces(True), draft.pieces(True), strict=False)):
        if index >= _FIRST_COMPARED and piece != wanted_piece:
            return f"token {index} is {piece!r:.40}, not {wanted_piece!r:.40}"
    return None


@dataclass(slots=True, kw_only=True)
class Parts:
    """The parts of an engine. `build`, or a function of a test, makes the backend and its kin; `assemble` adds the last two.

    Attributes:
        backend: Computes the passes.
        limits: The numbers that follow from model, options and machine.
        model: The model that callers get; None for a backend without a model.
        context: The context for generation; None for a model that cannot generate.
        adapters: The names of the loaded LoRA adapters.
        draft: The draft model, if there is one; it has a drafter if the model can generate.
        encoder: The encoder of images and audio, if there is a projector. Its owner closes it before the calls of `at_end`.
        fingerprint: Identifies the saved prefixes that fit; empty for a model that cannot generate.
        projectors: The projector files beside the model.
        at_end: Functions that free the memory, in order, after the engine's thread has ended.
        scheduler: The scheduler of the backend.
        disk: The disk cache, if there is one; `resources` starts it.
        calibration: Timed passes; None for a model that cannot generate.
    """

    backend: Backend
    limits: Limits
    model: Any = None
    context: Context | None = None
    adapters: tuple[str, ...] = ()
    draft: DraftModel | None = None
    encoder: MediaEncoder | None = None
    fingerprint: bytes = b""
    projectors: Sequence[Path] = ()
    at_end: tuple[Callable[[], None], ...] = ()
    scheduler: Scheduler = field(init=False)
    disk: DiskCache | None = field(init=False, default=None)
    calibration: Calibration | None = field(init=False, default=None)

    def saving(self, engine: Engine) -> tuple[Callable[[], None], ...]:
        """Return what to call before `at_end`, so that prefixes on the device survive."""
        return () if self.disk is None else (engine.save_prefixes,)

    @property
    def projector(self) -> bytes:
        """Identifies the file of the projector; empty without one."""
        return b"" if self.encoder is None else self.encoder.fingerprint

    def resources(
        self,
        state_folder: str | os.PathLike[str] | None,
        ask: Callable[[Ask], Future[Any]],
        next_key: Callable[[], int],
        report: Callable[[], object] = lambda: None,
    ) -> Resources:
        """Return the resources of questions that are answered beside ticks; for the arguments see `Resources`."""
        files = StateFiles(state_folder, self.fingerprint, self.projector, self.limits.host_bytes)
        if self.disk is not None:
            self.disk.start(ask, next_key)
        return Resources(
            backend=self.backend,
            ask=ask,
            next_key=next_key,
            prefixes=SavedPrefixes(files, ask, next_key, self.backend.adapter_fingerprint),
            encoder=self.encoder,
            projectors=self.projectors,
            report=report,
        )


def assemble(
    make: Callable[[EngineArguments], Parts], arguments: EngineArguments, clock: Clock, sink: Instruments
) -> Parts:
    """Make a backend, and put scheduler and drafters together with it.

    make: `build` for a model. Raises as `make`, and `InvalidParams` for an unknown strategy or drafter.
    """
    config = arguments.config
    strategy, place = resolve_strategy(config.strategy), DraftModelPlace()
    drafter = resolve_drafter(config.speculation, place)
    parts = make(arguments)
    try:
        if parts.draft is not None and parts.draft.drafter is not None:
            drafter = place.filled(drafter, parts.draft.drafter)
        attach_heads(drafter, parts.backend)
        fingerprint = layout_fingerprint(parts.fingerprint + parts.projector, _written_ns(parts))
        parts.disk = open_disk_cache(config, parts.limits, parts.backend, fingerprint, _facts(parts), sink.metrics)
    except BaseException:
        for end in (*(() if parts.encoder is None else (parts.encoder.close,)), *parts.at_end):
            end()
        raise
    parts.scheduler = scheduler = Scheduler(parts.limits, strategy, clock, sink, drafter, parts.disk)
    parts.at_end = (scheduler.reset, *parts.at_end)  # the reset frees the prefixes in host memory
    if parts.disk is not None:
        parts.at_end = (parts.disk.close, *parts.at_end)
    if parts.context is not None:
        parts.calibration = Calibration(parts.context, parts.model, parts.limits.num_slots, scheduler.calibrate)
        parts.calibration.begin()
    return parts


def _written_ns(parts: Parts) -> list[int]:
    """Return when the files of a model and of its projector were written, as of their loads.

    Their fingerprints are of samples, which further training may not change.
    """
    of_model: tuple[int, ...] = getattr(parts.model, "written_ns", ())
    return [*of_model, *(() if parts.encoder is None else (parts.encoder.written_ns,))]


def _facts(parts: Parts) -> dict[str, Any]:
    """Return the facts about a model that `paceline cache ls` shows."""
    model = parts.model
    return {"model": getattr(model, "desc", ""), "files": [Path(path).name for path in getattr(model, "paths", ())]}


def build(model: Model | ModelPath | None, arguments: EngineArguments) -> Parts:
    """Load the model and make its backend. Raises as `Model.load` and `Context` do; frees everything if it fails."""
    config = arguments.config
    if config.rpc_addresses:
        rpc.connect(config.rpc_addresses, config.rpc_timeout_s)
    fit = fit_to_memory(model, arguments)
    if fit.choice is not None:
        arguments = _chosen(arguments, fit.choice)
    loaded, owns = _model(model, arguments.model)
    with ExitStack() as undone, ExitStack() as passing:
        if owns:
            undone.callback(loaded.close)
        _max_embedding_tokens(loaded, arguments.config)  # raises before memory is allocated
        swa_full = arguments.context.get("swa_full") is True
        if arguments.config.speculation is not None and (refusal := loaded.native.draft_refusal(swa_full)):
            raise Unsupported(f"speculation does not go with this model: {refusal}; leave speculation out")
        adapters: dict[str, Adapter] = {}
        for name, path in adapter_paths(arguments.lora).items():
            adapters[name] = loaded.load_adapter(path)
            undone.callback(adapters[name].close)
        can_generate = loaded.has_decoder
        if loaded.has_encoder and can_generate:
            raise Unsupported(
                "an encoder-decoder model keeps one text a context, so an engine cannot share it; use Context.generate"
            )
        draft: DraftModel | None = None
        heads = _draft_heads(loaded, arguments)
        if heads is not None and heads is not loaded:
            passing.callback(heads.close)  # the context keeps what it needs
        if arguments.draft is not None:
            draft = DraftModel.load(arguments.draft, loaded, arguments.config.num_slots)
            undone.callback(draft.close)
        context = _context(loaded, heads, arguments, fit) if can_generate else None
        if context is not None:
            undone.callback(context.close)
        limits = _limits(loaded, context, arguments)
        if draft is not None and context is not None:
            draft.begin(context, loaded, limits.num_slots)
        encoder = media_encoder(loaded, arguments, can_generate=can_generate)
        undone.pop_all()
    if context is not None:
        _log_unused_cells(context, limits, arguments.context.get("n_ctx"))
    _log_sizes(loaded, context, limits, arguments)
    options = {name: value for name, value in arguments.context.items() if name in _EMBEDDER_OPTIONS}
    options["max_tokens"] = limits.max_embedding_tokens
    drafting = () if draft is None or draft.context is None else (draft.context,)
    backend = LlamaBackend(loaded, context, adapters, options, drafting)
    shown = (
        loaded if encoder is None else loaded.with_modalities(encoder.modalities)
    )  # the caller's model stays as it was
    of_draft = () if draft is None else (draft.close,)
    freed = (*([loaded.free] if owns else []), *([] if encoder is None else [shown.close]))
    return Parts(
        backend=backend,
        limits=limits,
        model=shown,
        context=context,
        adapters=tuple(adapters),
        draft=draft,
        encoder=encoder,
        fingerprint=b"" if context is None else context.fingerprint,
        projectors=projectors_beside(shown.paths),
        at_end=(backend.close, *of_draft, *freed),
    )


def media_encoder(model: Model, arguments: EngineArguments, *, can_generate: bool) -> MediaEncoder | None:
    """Return the encoder of images, if there is a projector; see `EngineConfig.mmproj`. Raises as `MediaProjector.load`."""
    config = arguments.config
    path = projector_file(model.paths, config.mmproj) if can_generate else None
    if path is None:
        if config.mmproj:
            raise Unsupported("mmproj: this model generates no text, so that a prompt with images would be of no use")
        return None
    context = arguments.context
    try:
        projector = MediaProjector.load(
            path,
            model,
            use_gpu=config.mmproj_offload and uses_gpu(arguments.model, devices()),
            n_threads=context.get("n_threads_batch") or context.get("n_threads"),
            image_min_tokens=config.image_min_tokens,
            image_max_tokens=config.image_max_tokens,
            flash_attn=context.get("flash_attn", "auto"),
        )
    except ModelLoadError as error:
        if config.mmproj is not None or (config.image_min_tokens, config.image_max_tokens) != (None, None):
            raise
        _log.warning("prompts have no images: the projector beside the model is not taken: %s", error)
        return None
    return MediaEncoder(projector, config.media_cache_bytes)


def _chosen(arguments: EngineArguments, choice: MemoryChoice) -> EngineArguments:
    options = dict(arguments.model)
    if choice.n_gpu_layers is not None:
        options["n_gpu_layers"] = choice.n_gpu_layers
    if choice.n_cpu_moe:
        options["n_cpu_moe"] = choice.n_cpu_moe
    if choice.no_repack:
        options["use_extra_bufts"] = False
    config = dataclasses.replace(arguments.config, num_slots=choice.num_slots)
    return dataclasses.replace(arguments, config=config, model=options)


def _model(model: Model | ModelPath | None, options: Mapping[str, Any]) -> tuple[Model, bool]:
    if isinstance(model, Model):
        given = [name for name in options if name != "draft_heads"]
        if given:
            raise InvalidParams(f"{given[0]} is an option of loading, and model is loaded already")
        return model, False
    if model is None:
        from paceline.demo import demo_model_path

        model = demo_model_path()
    return Model.load(model, **options), True


def _draft_heads(model: Model, arguments: EngineArguments) -> Model | None:
    """Return the model with the draft heads: the same model, or the model of their file. Raises as `Model.load`."""
    drafter = draft_heads_of(arguments.config.speculation)
    if drafter is None or drafter.model is None:
        return None if drafter is None else model
    given = arguments.model  # of these, the options that concern the machine, not the layers of a model
    options = {name: given[name] for name in ("devices", "load_mode", "cancel") if name in given}
    if given.get("n_gpu_layers") == 0:
        options["n_gpu_layers"] = 0
    heads = Model.load(drafter.model, draft_heads=True, **options)
    architecture = heads.native.architecture
    expected = drafter.architecture or model.native.architecture
    if architecture != expected and (drafter.architecture or architecture in _FILES_OF_HEADS):
        heads.close()
        files = [f"{name} files go with speculation='{kind}:model=FILE'" for kind, name in _FILES_OF_HEADS.items()]
        raise InvalidParams(
            f"{drafter.model} has the architecture {architecture}, and not {expected}; {', '.join(files)}, heads for the "
            "model itself with mtp"
        )
    return heads


def _context(model: Model, heads: Model | None, arguments: EngineArguments, fit: MemoryFit) -> Context:
    """Return the context for generation, with the n_ctx of the caller or of the fit to memory.

    If the caller set no n_ctx and memory is short, n_ctx is halved until the context fits.
    """
    config, options = arguments.config, dict(arguments.context)
    num_slots, memory = config.num_slots, model.memory_class
    most = most_seq_ids(memory, options) - 1
    if num_slots > most:
        kind = "sliding window model with swa_full" if has_full_window(memory, options) else "recurrent model"
        raise InvalidParams(f"num_slots must be at most {most} for a {kind}, not {num_slots}")
    if model.native.one_sequence_per_pass and num_slots > 1:
        raise InvalidParams(
            f"num_slots must be 1 for a model of the architecture {model.native.architecture}, not {num_slots}: llama.cpp "
            "aborts, or mixes up states, where a pass has several sequences of it"
        )
    asked, drafts = options.pop("n_ctx", None), config.speculation is not None
    chosen = default_n_ctx(model.n_ctx_train, num_slots, fit.sequence_cells)
    chosen = chosen if fit.choice is None else fit.choice.n_ctx
    cells = chosen if asked is None else asked
    while True:
        sized = sized_options(memory, num_slots, cells, options, drafts=drafts)
        try:
            return Context(model, draft_heads=heads, is_checked=not fit.is_sure, **sized)
        except NotEnoughMemory:
            if "max_rollback" not in options and sized.get("max_rollback"):
                options["max_rollback"] = 0
                _log.warning("memory is short: no states of single tokens are kept for speculation (max_rollback=0)")
                continue
            if asked is not None or cells <= LEAST_CTX:
                raise
            cells //= 2
            _log.warning("memory is short: the KV cache gets n_ctx=%d cells", cells)


def uses_gpu(options: Mapping[str, Any], machine: Sequence[Device]) -> bool:
    """Return whether a model that is loaded with these options computes on a GPU of this machine.

    Devices of RPC servers do not count: they may be CPUs, and are used over a network.
    """
    names = {device.name.lower() for device in machine if device.kind in ("gpu", "igpu")}
    names = {name for name in names if not LENT_DEVICE.fullmatch(name)}
    wanted = options.get("devices")
    if wanted is not None:
        names &= {name.lower() for name in wanted}
    return bool(names) and options.get("n_gpu_layers") != 0


def _limits(model: Model, context: Context | None, arguments: EngineArguments) -> Limits:
    """Return the limits. A sequence is no longer than the model was trained for, unless RoPE options stretch it."""
    config, target_ms = arguments.config, arguments.config.itl_target_ms
    if target_ms is None:
        target_ms = _ITL_TARGET_MS["gpu" if uses_gpu(arguments.model, devices()) else "cpu"]
    memory = None if context is None else context.memory_class
    common = Limits(
        num_slots=config.num_slots,
        n_batch=1,
        chunk_size=config.chunk_size,
        max_positions=0,
        num_cells=None,
        max_scored=1,
        can_share_part=memory is MemoryClass.ATTENTION,
        has_state_apart=context is not None and context.has_state_apart,
        boundary_ids=frozenset() if memory in (None, MemoryClass.ATTENTION) else _control_ids(model),
        itl_target_s=target_ms / 1000,
        max_tick_s=config.max_tick_ms / 1000,
        max_embedding_tokens=_max_embedding_tokens(model, config),
        n_vocab=model.n_vocab,
    )
    if context is None:
        return dataclasses.replace(common, cannot_generate=_DIFFUSION if model.is_diffusion else "it embeds texts")
    stretched = {"rope_scaling", "rope_freq_base", "rope_freq_scale", "yarn_orig_ctx"} & arguments.context.keys()
    trained = model.n_ctx_train if model.n_ctx_train > 0 and not stretched else context.max_positions
    host_bytes = total_memory() // _HOST_SHARE if config.host_cache_bytes is None else config.host_cache_bytes
    drafts = config.speculation is not None
    max_scored, max_drafted = output_shares(config.num_slots, context.n_outputs_max, drafts=drafts)
    if drafts and context.n_batch < 2:
        raise InvalidParams(f"n_batch={context.n_batch} leaves speculation no room behind a token; raise n_batch")
    return dataclasses.replace(
        common,
        n_batch=context.n_batch,
        n_ubatch=context.n_ubatch,
        max_positions=min(context.max_positions, trained),
        n_ctx_train=trained,
        num_cells=None if model.memory_class is MemoryClass.RECURRENT else context.n_ctx,
        num_seq_ids=num_seq_ids(model.memory_class, config.num_slots, arguments.context),
        host_bytes=host_bytes if config.cache_prompt else 0,
        max_scored=max_scored,
        max_drafted=max_drafted,
        max_draft=config.max_draft,
        min_draft=config.min_draft,
        # a sliding window still has its cells after a pass only if the pass was one ubatch
        n_verify=min(context.n_batch, context.n_ubatch) if memory is MemoryClass.SLIDING_WINDOW else None,
        max_rollback=context.max_rollback if memory in (MemoryClass.RECURRENT, MemoryClass.HYBRID) else None,
    )


def _control_ids(model: Model) -> frozenset[int]:
    """Return the tokens that have a text only as control tokens."""
    plain, special = model.tokenizer.pieces(False), model.tokenizer.pieces(True)
    return frozenset(index for index, piece in enumerate(special) if piece and not plain[index])


def _log_unused_cells(context: Context, limits: Limits, asked: int | None) -> None:
    """Log that n_ctx is more than one request can use; a warning if it is more than all slots together can use."""
    if asked is None or asked <= limits.max_positions:
        return
    has_table = context.max_positions < context.n_ctx
    reason = "the model's table of positions has no more" if has_table else "the model was trained for no more"
    most = limits.max_positions * limits.num_slots
    if asked > most:
        _log.warning(
            "n_ctx=%d is larger than needed: a request has at most %d tokens (%s), and %s at most n_ctx=%d",
            asked,
            limits.max_positions,
            reason,
            "1 slot uses" if limits.num_slots == 1 else f"{limits.num_slots} slots use",
            most,
        )
    else:
        _log.info(
            "n_ctx=%d is shared by %d slots: a request has at most %d tokens (%s)",
            asked,
            limits.num_slots,
            limits.max_positions,
            reason,
        )


def _log_sizes(model: Model, context: Context | None, limits: Limits, arguments: EngineArguments) -> None:
    _log.info(
        "%s, %s memory: %d slots, %d sequence ids, %d rows of logits, at most %d MiB of host memory for cached prefixes",
        model.desc,
        (model if context is None else context).memory_class,
        limits.num_slots,
        limits.num_seq_ids,
        0 if context is None else context.n_outputs_max,
        limits.host_bytes >> 20,
    )
    if context is None:
        return
    config, is_given = arguments.config, "n_ctx" in arguments.context
    asked = arguments.context.get("n_ctx")
    share = "a quarter of the free memory" if config.fit_cache_bytes is None else mebibytes(config.fit_cache_bytes)
    _log.info(
        "KV cache: %d cells%s shared by %d slots, %d tokens for one request, %s%s",
        limits.num_cells or 0,
        f" (n_ctx={asked}, rounded up to a multiple of 256)" if is_given and asked != context.n_ctx else "",
        limits.num_slots,
        limits.max_positions,
        mebibytes(memory_in_use(context).cache_bytes),
        "" if is_given or not config.fit else f" (beyond 4096 cells a slot at most {share}; n_ctx sets it)",
    )


def _max_embedding_tokens(model: Model, config: EngineConfig) -> int:
    asked, longest = config.max_embedding_tokens, longest_text(model)
    if asked is not None and asked > longest:
        raise InvalidParams(
            f"max_embedding_tokens must be at most {longest}, which the model was trained for, not {asked}"
        )
    return longest if asked is None else asked
