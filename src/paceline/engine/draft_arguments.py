"""The options of a draft model: `draft_model` and `draft_options`, sorted by what they configure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from paceline import validation
from paceline.errors import InvalidParams, InvalidType
from paceline.hub import check_is_path, is_reference, parse_reference
from paceline.speculation.named_drafter import DRAFT_MODEL, drafter_parts

DRAFT_NAMES: Final = frozenset({"draft_model", "draft_options"})
_OWN: Final = frozenset({"p_min", "chunk_size"})
_LEAST_CHUNK, _MOST_CHUNK, USUAL_CHUNK = 16, 4096, 256
_LEAST_SIZES: Final = {"n_ctx": 2, "n_batch": 2}  # what was proposed last, and a token behind it
# Context options that the draft model has as the target has them, where it has none of its own.
_INHERITED: Final = ("n_threads", "n_threads_batch", "flash_attn", "op_offload")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftArguments:
    """What is given of a draft model.

    model: a path, a name, or a `Model`. load, context: options of both. n_ctx: cells; None: as many as the target has.
    p_min: a token that the draft model finds less likely is not proposed. chunk_size: most tokens that a tick catches up with;
    None: `USUAL_CHUNK`, or as many as a batch has.
    """

    model: Any
    load: Mapping[str, Any]
    context: Mapping[str, Any]
    n_ctx: int | None
    p_min: float
    chunk_size: int | None


def draft_arguments(
    options: Mapping[str, Any], model_names: frozenset[str], context_names: frozenset[str]
) -> DraftArguments | None:
    """Return the arguments of the draft model; None without one.

    model_names, context_names: options of loading and of a context. Raises `InvalidParams` and `InvalidType`.
    """
    model, given = options.get("draft_model"), options.get("draft_options")
    _check_named(model, options.get("speculation"))
    if model is None:
        if given:
            raise InvalidParams("draft_options are given, and no draft_model; name one, or leave them out")
        return None
    _check_source(model)
    found = _checked_mapping({} if given is None else given, model_names | context_names | _OWN)
    own = {name: found.pop(name) for name in _OWN if name in found}
    inherited = {name: options[name] for name in _INHERITED if options.get(name) is not None}
    context = {**inherited, **{name: value for name, value in found.items() if name in context_names}}
    _check_sizes(context, own.get("chunk_size"))
    n_ctx = context.pop("n_ctx", None)
    return DraftArguments(
        model=model,
        load={name: value for name, value in found.items() if name in model_names},
        context=context,
        n_ctx=n_ctx,
        p_min=validation.number("draft_options['p_min']", own.get("p_min", 0.0), 0, 1),
        chunk_size=own.get("chunk_size"),
    )


def _check_sizes(context: Mapping[str, Any], chunk_size: Any) -> None:
    """Raise what is wrong with sizes of a draft model's context, and its chunks."""
    for name, least in _LEAST_SIZES.items():
        if context.get(name) is not None:
            validation.integer(f"draft_options[{name!r}]", context[name], least, 2**31 - 256)
    if context.get("max_rollback"):
        raise InvalidParams(
            f"draft_options['max_rollback']={context['max_rollback']!r:.20} has no use: it is for recurrent states, which draft "
            "models cannot have; leave it out"
        )
    if chunk_size is not None:
        validation.integer("draft_options['chunk_size']", chunk_size, _LEAST_CHUNK, _MOST_CHUNK)
        check_chunk(chunk_size, context.get("n_batch"))


def check_chunk(chunk_size: int, n_batch: int | None) -> None:
    """Raise `InvalidParams` where a batch of a draft model has less than a chunk. n_batch: None while it is not known."""
    if n_batch is not None and chunk_size > n_batch:
        raise InvalidParams(
            f"draft_options['chunk_size']={chunk_size} is more than a batch of the draft model has, n_batch={n_batch}; lower it, "
            "or raise draft_options['n_batch']"
        )


def with_draft(speculation: Any, options: Mapping[str, Any]) -> Any:
    """Return the option `speculation`, which a draft model alone sets."""
    return DRAFT_MODEL if speculation is None and options.get("draft_model") is not None else speculation


def _check_named(model: object, speculation: Any) -> None:
    """Raise where one of draft_model and speculation names a draft model, and the other does not."""
    parts = [] if speculation is None else drafter_parts(speculation)
    is_named = any(one == DRAFT_MODEL or (isinstance(one, Mapping) and one.get("name") == DRAFT_MODEL) for one in parts)
    if is_named and model is None:
        raise InvalidParams(f"speculation names {DRAFT_MODEL!r}, and there is none; give draft_model=PATH")
    if model is not None and parts and not is_named:
        raise InvalidParams(
            f"draft_model is given, and speculation={speculation!r:.80} does not use it; add {DRAFT_MODEL!r} to speculation, "
            "or leave speculation out"
        )


def _check_source(model: object) -> None:
    try:
        if is_reference(model):
            parse_reference(str(model))
        elif not isinstance(model, (str, os.PathLike)) and type(model).__name__ != "Model":
            raise InvalidType(f"must be a path, a name or a Model, not {model!r:.80}")
        elif isinstance(model, str):
            check_is_path(model)
    except InvalidParams as error:
        raise type(error)(f"draft_model: {error}") from error


def _checked_mapping(given: object, known: frozenset[str]) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise InvalidType(f"draft_options must be a mapping such as {{'n_gpu_layers': 0}}, not {given!r:.80}")
    try:
        validation.reject_unknown(given, known, "Model.load, ContextOptions, p_min and chunk_size")
    except InvalidType as error:
        raise InvalidType(f"draft_options: {error}") from None
    return validation.given(given)
