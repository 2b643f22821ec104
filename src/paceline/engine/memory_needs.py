"""The memory that a model will need, before it is loaded: from its header, or planned by llama.cpp in a process of its own.

The process (`paceline.engine.dry_run`) keeps a crash, its memory and its log to itself.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Unpack

import msgspec

from paceline import validation
from paceline.config import EngineConfig
from paceline.engine.adapters import projector_file
from paceline.engine.arguments import EngineArguments, LLMKeywords, ModelPath, engine_arguments
from paceline.engine.memory_fit import (
    CELL_STEP,
    LEAST_CTX,
    DraftQuestion,
    FittedMemory,
    MemoryChoice,
    MemoryQuestion,
    MemoryReport,
    ProjectorQuestion,
    default_n_ctx,
    greatest,
    has_doubled_seq_ids,
    sized_options,
)
from paceline.errors import EngineError, InvalidType, ModelLoadError, NotEnoughMemory, PacelineError, named_error
from paceline.hub import check_is_path, is_reference
from paceline.keywords import with_keywords
from paceline.runtime import (
    Device,
    MemoryEstimate,
    Model,
    available_memory,
    devices,
    on_empty_machine,
    projector_facts,
    projector_weights,
)
from paceline.runtime.context_options import ContextOptions
from paceline.runtime.gguf_check import files_beside
from paceline.runtime.memory import HOST, CacheShape, Placement, estimate_from_header, mebibytes
from paceline.runtime.model import tensor_placements
from paceline.runtime.model_header import ModelHeader
from paceline.runtime.rpc import rpc_devices
from paceline.speculation.named_drafter import draft_heads_of

_log = logging.getLogger("paceline.engine")


_TIMEOUT_S: Final = 120.0
_CACHE_SHARE: Final = 0.25  # of the free memory: most that the cells of one sequence take if n_ctx is left open
_SMALL_SHARE: Final = 0.5  # of the free memory: a model that surely takes less is loaded without a plan
_UNPLANNED: Final = ("progress", "cancel", "packed_cache")  # options of a load that a plan does not need
_PLACING: Final = ("n_gpu_layers", "tensor_overrides", "cpu_moe", "n_cpu_moe", "n_cpu_ffn", "tensor_split")
_PROJECTOR_BUFFERS: Final = 4 << 30  # an upper bound, except for projectors of images of any size, which are planned
_BYTES_OF_ACTIVATIONS: Final = 256  # for each value of a hidden state, an upper bound


@with_keywords(EngineConfig, ContextOptions, Model.load, lora=(), instruments=())
def estimate_memory(
    model: ModelPath | None = None,
    *,
    dry_run: bool = True,
    offline: bool = False,
    hf_token: str | None = None,
    **options: Unpack[LLMKeywords],
) -> MemoryEstimate:
    """Return the memory that a model will need, without loading it.

        estimate = estimate_memory("model.gguf", n_ctx=32768, num_slots=8)
        print(estimate.total_bytes, estimate.fits)

    Args: model: A path to a GGUF file, or to the first part of a split set; a name such as "hf:user/repo:Q4_K_M" or
        "ollama:llama3.2", or the URL of a GGUF file, of which only the header is requested if it is not on this machine; None
        for the demo model.
        dry_run: Whether llama.cpp plans it, in a process of its own, which knows all buffers and takes up to a second.
            Otherwise weights and cache are computed from the header, in milliseconds.
        offline: Whether a model that is given by name is looked for in the caches alone.
        hf_token: A token of the Hugging Face Hub; None: HF_TOKEN, or the token of `hf auth login`.
        **options: Options of `LLM` that concern memory: num_slots, options of `Model.load` and of the llama.cpp context.

    Returns:
        The bytes that weights, KV cache and buffers take on each device, and the free bytes of each device. For models that do
            not generate, the weights alone.

    Raises:
        InvalidParams: An option is out of its range, unknown or of the wrong type.
        Unsupported: No engine runs models of this kind (encoder-decoders).
        ModelLoadError: The file is not a model that llama.cpp can load.
        ModelNotFound: There is no repository, file or quantisation of that name.
        AccessDenied: The repository is gated or private, and the token may not read it.
        HubUnavailable: The hub cannot be reached, and the caches do not have the model.
        EngineError: The process of the dry run failed.
    """
    validation.boolean("dry_run", dry_run)
    arguments = engine_arguments(options)
    source: dict[str, Any] = {"offline": offline, "hf_token": hf_token}
    with _header_files(model, **source) as paths, _with_draft_files(arguments, **source) as found:
        return _estimate(*_asked(paths, found), dry_run=dry_run)


def estimate_on_machine(model: ModelPath | None, options: Mapping[str, Any], *, dry_run: bool) -> MemoryEstimate:
    """Return the memory that the files of a model will need, as `estimate_memory` does.

    Raises `NotEnoughMemory` if they could not be loaded even on an otherwise empty machine. As in `fit_to_memory`, a model with
    fit=False, or one that cannot be planned, is not refused.
    """
    arguments = engine_arguments(options)
    source: dict[str, Any] = {"offline": True, "hf_token": None}
    with _header_files(model, **source) as paths, _with_draft_files(arguments, **source) as found:
        header, question = _asked(paths, found)
        if arguments.config.fit:
            _fitted(header, dataclasses.replace(question, is_alone=True))
        return _estimate(header, question, dry_run=dry_run)


def _estimate(header: ModelHeader, question: MemoryQuestion, *, dry_run: bool) -> MemoryEstimate:
    if not dry_run or header.keeps_nothing:
        return header_estimate(header, question)
    return plan(dataclasses.replace(question, chooses_slots=False, chooses_layers=False)).wanted


@contextmanager
def _header_files(model: object, *, offline: bool, hf_token: str | None) -> Iterator[ModelPath]:
    """Yield files with the headers of a model: the model's own files, or headers that the hub sends of a model given by name.

    Raises `InvalidType` if the model is no path, and as `model_headers`.
    """
    validation.boolean("offline", offline)
    if hf_token is not None:
        validation.text("hf_token", hf_token)
    if model is None:
        from paceline.demo import demo_model_path

        yield demo_model_path()
    elif isinstance(model, str) and is_reference(model):
        from paceline.hub.remote_header import model_headers

        with model_headers(model, offline=offline, hf_token=hf_token) as found:
            yield found.paths[0]
    else:
        check_is_path(model)
        yield _checked_paths(model)


@contextmanager
def _with_draft_files(arguments: EngineArguments, *, offline: bool, hf_token: str | None) -> Iterator[EngineArguments]:
    """Yield the arguments with the header file of a draft model that is given by name."""
    draft = arguments.draft
    if draft is None or not is_reference(draft.model):
        yield arguments
        return
    with _header_files(draft.model, offline=offline, hf_token=hf_token) as found:
        yield dataclasses.replace(arguments, draft=dataclasses.replace(draft, model=found))


def _checked_paths(model: object) -> ModelPath:
    if isinstance(model, (str, os.PathLike)):
        return validation.path("model", model)
    listed = list(model) if isinstance(model, Sequence) and not isinstance(model, bytes) else []
    if not listed:
        raise InvalidType(f"model must be a path, a name or a list of paths, not {model!r:.80}")
    return [validation.path("model", path) for path in listed]


def memory_report(model: ModelPath, options: Mapping[str, Any]) -> MemoryReport:
    """Return the memory that a model will need, and the choice with which it fits. Raises as `estimate_memory`."""
    header, question = _asked(model, engine_arguments(options))
    if not header.keeps_nothing:
        return plan(question)
    estimate = header_estimate(header, question)
    return MemoryReport(wanted=estimate, fitted=FittedMemory(_wanted(question, 0), estimate))


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryFit:
    """The sizes that are known before a load.

    Attributes:
        choice: The choice that fits, if one was planned; None: the wanted choice.
        is_sure: Whether the wanted choice takes less than half of the free memory, by the header alone.
        sequence_cells: See `MemoryQuestion`.
    """

    choice: MemoryChoice | None = None
    is_sure: bool = False
    sequence_cells: int = 0


def fit_to_memory(model: Model | ModelPath | None, arguments: EngineArguments) -> MemoryFit:
    """Return the choice with which a model fits.

    model: None for the demo model. If the model is loaded already, only the context's size is chosen. Raises `NotEnoughMemory`
    if the model does not fit; other errors are left to the load.
    """
    if model is None or not arguments.config.fit:
        return MemoryFit()
    try:
        header, question = _asked(model.paths if isinstance(model, Model) else model, arguments)
    except PacelineError as error:
        _log_unplanned(error)
        return MemoryFit()
    if isinstance(model, Model):
        return MemoryFit(sequence_cells=question.sequence_cells)
    return dataclasses.replace(_fitted(header, question), sequence_cells=question.sequence_cells)


def _fitted(header: ModelHeader, question: MemoryQuestion) -> MemoryFit:
    """Return the choice. Raises `NotEnoughMemory` if nothing fits; other errors are left to the load."""
    try:
        if _surely_fits(header, question):
            return MemoryFit(is_sure=True)
        report = plan(question)
    except PacelineError as error:
        _log_unplanned(error)
        return MemoryFit()
    if report.fitted is None:
        raise NotEnoughMemory(report.refusal)
    if not question.is_alone:
        _log_choice(report.wanted, report.fitted)
    return MemoryFit(report.fitted.choice)


def _log_unplanned(error: PacelineError) -> None:
    level = logging.WARNING if isinstance(error, EngineError) else logging.DEBUG
    _log.log(level, "the model's memory is not planned: %s", error)


def _asked(model: ModelPath, arguments: EngineArguments) -> tuple[ModelHeader, MemoryQuestion]:
    """Return the header of a model, and the question about its memory. Raises `ModelLoadError`."""
    question = _question(model, arguments)
    header = _header(question)
    if question.n_ctx is None and arguments.config.fit and not header.keeps_nothing:
        cells = _sequence_cells(header, question, arguments.config.fit_cache_bytes)
        question = dataclasses.replace(question, sequence_cells=cells)
    return header, question


def _sequence_cells(header: ModelHeader, question: MemoryQuestion, most_bytes: int | None) -> int:
    """Return the number of cells for a sequence, up to the length that the model was trained for.

    Their cache takes at most `most_bytes`. If that is None, it takes at most a quarter of each device's free memory, and only
    so much that a model which needs no plan with fewer cells needs none with these cells.
    """
    least, trained = default_n_ctx(header.n_ctx_train, question.num_slots), header.n_ctx_train
    if trained <= least:
        return 0
    is_sure = most_bytes is None and _surely_fits(header, question)

    def fits(steps: int) -> bool:
        asked = dataclasses.replace(question, sequence_cells=min(steps * CELL_STEP, trained))
        found = header_estimate(header, asked)
        if most_bytes is not None:
            return found.cache_bytes <= most_bytes
        shares = ((device.cache_bytes, _CACHE_SHARE * (device.free_bytes or 0)) for device in found.devices)
        return all(cache <= share for cache, share in shares) and (not is_sure or _surely_fits(header, asked))

    return min(greatest(least // CELL_STEP, -(-trained // CELL_STEP), fits) * CELL_STEP, trained)


def _question(model: ModelPath, arguments: EngineArguments) -> MemoryQuestion:
    config, options = arguments.config, dict(arguments.context)
    n_ctx = options.pop("n_ctx", None)
    lent = rpc_devices(config.rpc_addresses, config.rpc_timeout_s) if config.rpc_addresses else []
    names = {device.name for device in lent}
    own = [device for device in devices() if device.kind in ("gpu", "igpu") and device.name not in names]
    gpus = (*lent, *own)  # in the order of llama.cpp
    has_gpus, draft, heads = bool(_used(gpus, arguments.model)), arguments.draft, draft_heads_of(config.speculation)
    return MemoryQuestion(
        paths=_named(model),
        model={name: value for name, value in arguments.model.items() if name not in _UNPLANNED},
        context=options,
        n_ctx=n_ctx,
        num_slots=config.num_slots,
        chooses_slots="num_slots" not in arguments.given,
        chooses_layers=not any(name in arguments.model for name in _PLACING) and has_gpus,
        least_ctx=LEAST_CTX if config.fit_ctx is None else config.fit_ctx,
        targets=config.fit_targets,
        drafts=config.speculation is not None,
        heads_path=None if heads is None or heads.model is None else str(Path(heads.model).absolute()),
        draft=None
        if draft is None or isinstance(draft.model, Model)
        else DraftQuestion(
            paths=_named(draft.model), model=dict(draft.load), context=dict(draft.context), n_ctx=draft.n_ctx
        ),
        projector=_projector_question(_named(model), arguments, has_gpus=has_gpus),
        gpus=gpus,
        rpc=config.rpc_addresses,
        rpc_timeout_s=config.rpc_timeout_s,
    )


def _projector_question(
    paths: Sequence[str], arguments: EngineArguments, *, has_gpus: bool
) -> ProjectorQuestion | None:
    """Return the projector to plan; None without a projector, and if the load will refuse it."""
    config = arguments.config
    try:
        path = projector_file([Path(path) for path in paths], config.mmproj)
        if path is None:
            return None
        projector_facts(path)
    except ModelLoadError:
        return None
    return ProjectorQuestion(
        path=str(path.absolute()),
        use_gpu=config.mmproj_offload and has_gpus,
        image_min_tokens=config.image_min_tokens,
        image_max_tokens=config.image_max_tokens,
    )


def plan(question: MemoryQuestion) -> MemoryReport:
    """Let llama.cpp plan the memory in a process of its own.

    Raises the errors of planning, and `EngineError` if the process fails.
    """
    command = [sys.executable, "-P", "-m", "paceline.engine.dry_run"]
    path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter
            command,
            input=json.dumps(dataclasses.asdict(question)),
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
            env={**os.environ, "GGML_NO_BACKTRACE": "1", "PYTHONPATH": path},
        )
    except (OSError, ValueError, TypeError, subprocess.TimeoutExpired) as error:
        raise EngineError(f"the dry run failed: {error}") from error
    reply = done.stdout.strip().rpartition("\n")[2]
    try:
        found = json.loads(reply)
    except ValueError:
        words = done.stderr.strip().rpartition("\n")[2]
        raise EngineError(f"the process of the dry run ended with status {done.returncode}: {words:.200}") from None
    if "error" in found:
        raise named_error(found["error"], found["message"], found["file"])
    return msgspec.convert(found, MemoryReport)


def header_estimate(header: ModelHeader, question: MemoryQuestion) -> MemoryEstimate:
    """Return the weights and the cache of the wanted choice, from the header."""
    shape = None if header.keeps_nothing else _shape(header, question)
    options = question.model
    placement = Placement(
        gpus=_used(question.gpus, options),
        n_gpu_layers=options.get("n_gpu_layers"),
        tensor_split=options.get("tensor_split", ()),
        patterns=tensor_placements(
            options.get("tensor_overrides"),
            **{name: options[name] for name in ("cpu_moe", "n_cpu_moe", "n_cpu_ffn") if name in options},
        ),
        is_mapped=options.get("load_mode", "auto") in ("auto", "mmap"),
        draft_heads=options.get("draft_heads", False),
    )
    found = estimate_from_header(header, shape, placement, num_slots=question.num_slots, free_host=available_memory())
    if question.draft is not None:
        found = found.plus(_draft_estimate(question, question.draft, found.n_ctx))
    if question.projector is not None:
        gpus = _used(question.gpus, options) if question.projector.use_gpu else []
        found = found.plus(projector_weights(question.projector.path, gpus[0].name if gpus else HOST))
    return found


def _draft_estimate(question: MemoryQuestion, draft: DraftQuestion, n_ctx: int) -> MemoryEstimate:
    alone = dataclasses.replace(
        question,
        paths=draft.paths,
        model=draft.model,
        context=draft.context,
        n_ctx=n_ctx if draft.n_ctx is None else draft.n_ctx,
        drafts=False,
        draft=None,
        projector=None,
    )
    return header_estimate(_header(alone), alone)


def _header(question: MemoryQuestion) -> ModelHeader:
    paths = [Path(path) for path in question.paths]
    return ModelHeader(files_beside(paths[0]) if len(paths) == 1 else paths, question.model.get("kv_overrides"))


def _wanted(question: MemoryQuestion, n_ctx_train: int) -> MemoryChoice:
    n_ctx = question.n_ctx
    if n_ctx is None:
        n_ctx = default_n_ctx(n_ctx_train, question.num_slots, question.sequence_cells)
    return MemoryChoice(n_ctx=n_ctx, num_slots=question.num_slots, n_gpu_layers=question.model.get("n_gpu_layers"))


def _shape(header: ModelHeader, question: MemoryQuestion) -> CacheShape:
    n_ctx = _wanted(question, header.n_ctx_train).n_ctx
    memory = header.memory_class
    sizes = sized_options(memory, question.num_slots, n_ctx, question.context, drafts=question.drafts)
    checked = ContextOptions(**sizes).cache_numbers()
    doubled = 2 if has_doubled_seq_ids(memory, question.context) else 1
    num_states = 1 + sizes.get("max_rollback", 0)
    return CacheShape(**{**checked, "n_seq_max": doubled * sizes["n_seq_max"], "num_states": num_states})


def _surely_fits(header: ModelHeader, question: MemoryQuestion) -> bool:
    if header.keeps_nothing:
        return True
    if header.keeps_more or question.heads_path is not None or question.draft is not None:
        return False
    estimate, shape = header_estimate(header, question), _shape(header, question)
    if question.is_alone:
        estimate = on_empty_machine(estimate)
    scores = 4 * header.n_head * shape.n_ubatch * shape.n_ctx
    rows = 4 * header.n_vocab * (2 * (shape.n_seq_max + shape.n_ubatch))
    if question.projector is not None:
        scores += _PROJECTOR_BUFFERS
    needed = estimate.total_bytes + scores + rows + _BYTES_OF_ACTIVATIONS * header.n_embd * shape.n_ubatch
    free = [device.free_bytes for device in estimate.devices]
    return all(free_bytes is None or needed < _SMALL_SHARE * free_bytes for free_bytes in free)


def _used(gpus: Sequence[Device], options: Mapping[str, Any]) -> list[Device]:
    """Return the GPUs that a load with these options uses."""
    found, wanted = list(gpus), options.get("devices")
    if wanted is not None:
        found = [device for device in found if device.name.lower() in {str(name).lower() for name in wanted}]
    return [] if options.get("n_gpu_layers") == 0 else found


def _named(model: ModelPath) -> tuple[str, ...]:
    listed = [model] if isinstance(model, (str, os.PathLike)) else list(model)
    return tuple(str(Path(path).absolute()) for path in listed)


def _log_choice(wanted: MemoryEstimate, fitted: FittedMemory) -> None:
    choice, estimate = fitted.choice, fitted.estimate
    changes = []
    if choice.n_ctx < wanted.n_ctx:
        changes.append(f"the KV cache gets n_ctx={choice.n_ctx} cells instead of {wanted.n_ctx}")
    if choice.num_slots < wanted.num_slots:
        changes.append(f"num_slots={choice.num_slots} instead of {wanted.num_slots}")
    if choice.n_cpu_moe:
        changes.append(f"n_cpu_moe={choice.n_cpu_moe}, the experts of that many layers in host memory")
    if choice.n_gpu_layers is not None:
        changes.append(f"n_gpu_layers={choice.n_gpu_layers}")
    if choice.no_repack:
        changes.append(
            "weights stay mapped from the file instead of being packed for faster products (use_extra_bufts=False)"
        )
    if changes:
        _log.warning("memory is short: %s", "; ".join(changes))
    for device in estimate.devices:
        _log.info(
            "memory of %s: %s of weights, %s of cache, %s of buffers; %s free",
            device.device,
            *(mebibytes(size or 0) for size in (device.weights_bytes, device.cache_bytes, device.compute_bytes)),
            "an unknown amount" if device.free_bytes is None else mebibytes(device.free_bytes),
        )
    if estimate.short_of_cache:
        _log.warning(
            "the weights do not stay in memory beside the KV cache, and are read from the file again and again: %s are "
            "needed; use a smaller quantisation or n_ctx",
            mebibytes(estimate.total_bytes),
        )
