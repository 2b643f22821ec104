"""A draft model beside its target: loading, the check that their tokens are the same, its context, backend and drafter."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from paceline.engine.arguments import USUAL_CHUNK, DraftArguments, check_chunk
from paceline.engine.memory_fit import LEAST_CTX, draft_sized_options
from paceline.errors import InvalidParams, NotEnoughMemory, PacelineError, Unsupported, named_error
from paceline.params import SamplingParams
from paceline.runtime import Context, MemoryClass, Model, Sampler, Tokenizer
from paceline.runtime.step import StepRow
from paceline.speculation.drafter import Drafter, Drafters
from paceline.speculation.drafters.model_drafter import DraftLimits, DraftRow, DraftToken, ModelDrafter


class LlamaDraftBackend:
    """Draws the likeliest tokens. wants_probabilities: whether those of the tokens are computed, over the whole vocabulary."""

    def __init__(self, model: Model, context: Context, *, wants_probabilities: bool) -> None:
        self._context, self._wants_probabilities = context, wants_probabilities
        self._greedy = Sampler(SamplingParams(temperature=0), model)
        self._samplers: list[Sampler] = []  # one a row of a pass

    def copy(self, from_seq_id: int, to_seq_id: int, end: int) -> None:
        """See `DraftBackend`."""
        self._context.copy(from_seq_id, to_seq_id, 0, end)

    def truncate(self, seq_id: int, end: int) -> None:
        """See `DraftBackend`."""
        self._context.remove(seq_id, end)

    def remove(self, seq_id: int) -> None:
        """See `DraftBackend`."""
        self._context.remove(seq_id)

    def step(self, rows: Sequence[DraftRow]) -> list[DraftToken | None]:
        """See `DraftBackend`. Raises as `Context.step`, and what kept a row from drawing."""
        while len(self._samplers) < len(rows):
            self._samplers.append(self._greedy.clone())
        if self._wants_probabilities:
            return self._with_probabilities(rows)
        drawn = self._context.plain_step(
            [row.seq_id for row in rows],
            [row.position for row in rows],
            [row.token_ids for row in rows],
            [one if row.draws else None for row, one in zip(rows, self._samplers, strict=False)],
        )
        return [None if one is None else DraftToken(_token(one), 1.0) for one in drawn]

    def _with_probabilities(self, rows: Sequence[DraftRow]) -> list[DraftToken | None]:
        found = self._context.step(
            [
                StepRow(
                    seq_id=row.seq_id,
                    position=row.position,
                    token_ids=row.token_ids,
                    samplers=(sampler,) if row.draws else (),
                    num_logprobs=0,
                )
                for row, sampler in zip(rows, self._samplers, strict=False)
            ]
        )
        tokens: list[DraftToken | None] = []
        for result in found.rows:
            if not result.draws:
                tokens.append(None)
                continue
            (draws,) = result.draws
            assert draws.logprobs is not None or draws.error is not None  # noqa: S101 - they were asked for
            token_id = _token(draws.error or draws.token_ids[0])
            tokens.append(DraftToken(token_id, math.exp(float(draws.logprobs.own[0])) if draws.logprobs else 0.0))
        return tokens


def _token(drawn: int | Exception) -> int:
    if isinstance(drawn, Exception):
        raise drawn
    return drawn


_log = logging.getLogger("paceline.engine")

_MOST_SIZE_DIFFERENCE: Final = 128  # tokens that only one of the vocabularies has, as llama.cpp's speculation allows
_FIRST_COMPARED: Final = 5  # tokens before that are control tokens which may be named otherwise
_WARM_UP_PASSES: Final = 2


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A loaded draft model. owns_model: whether `close` frees it."""

    model: Model
    owns_model: bool
    arguments: DraftArguments

    @classmethod
    def load(cls, arguments: DraftArguments, target: Model, num_slots: int) -> DraftModel:
        """Load it. Raises as `Model.load`, and `Unsupported` where it cannot draft for the target; errors name it."""
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
            _check_memory(draft.model, num_slots)
            _check_window(draft.model, arguments.context)
            check_same_tokens(target, draft.model)
        except BaseException:
            draft.close()
            raise
        return draft

    def begin(self, target_context: Context, target: Model, num_slots: int) -> LoadedDraft:
        """Make its context and a drafter on it. Raises `NotEnoughMemory` where not even few cells fit."""
        context = self._context(target_context, num_slots)
        try:
            return LoadedDraft(self, context, self._drafter(context, target))
        except BaseException:
            context.close()
            raise

    def _context(self, target: Context, num_slots: int) -> Context:
        """Return its context: as many cells as the target's where nothing else was asked for, halved until they fit.

        Raises `NotEnoughMemory` where not even few cells fit.
        """
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
        """Return a drafter on its context."""
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
        for _ in range(_WARM_UP_PASSES):  # the first reads the weights: it would say that drafting is dear
            backend.step([DraftRow(0, 0, [0, 0], draws=True)])
            backend.remove(0)
        return ModelDrafter(backend, limits)

    def close(self) -> None:
        """Free the model, unless it belongs to the caller."""
        if self.owns_model:
            self.model.free()


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model with its context and the drafter on it."""

    draft: DraftModel
    context: Context
    drafter: ModelDrafter

    def close(self) -> None:
        """Free the context, and the model unless it belongs to the caller."""
        self.context.close()
        self.draft.close()


class DraftModelPlace:
    """Stands among drafters where the draft model will, which is loaded when all of them are known. Never called."""

    def _never(self, *_arguments: Any) -> Any:
        raise AssertionError("the draft model was not put in its place")

    begin = propose = observe = rollback = end = _never

    def filled(self, drafter: Drafter | Drafters | None, draft_model: Drafter) -> Drafter | Drafters | None:
        """Return the drafter, or drafters, with the draft model in its place."""
        if isinstance(drafter, tuple):
            return tuple(draft_model if one is self else one for one in drafter)
        return draft_model if drafter is self else drafter


def _naming(model: Any, error: PacelineError) -> PacelineError:
    """Return the same error, with the draft model in front."""
    name = model.desc if isinstance(model, Model) else model
    return named_error(type(error).__name__, f"draft model {name}: {error}", getattr(error, "filename", None))


def _check_memory(model: Model, num_slots: int) -> None:
    """Raise `Unsupported` where wrong drafts could not be taken back, or where it generates no text."""
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


def _check_window(model: Model, options: Mapping[str, Any]) -> None:
    """Raise `InvalidParams` where a sliding window was asked for that wrong drafts cannot be cut from."""
    if model.memory_class is MemoryClass.SLIDING_WINDOW and options.get("swa_full") is False:
        raise InvalidParams(
            f"draft_options['swa_full']=False does not go with {model.desc}: wrong drafts cannot be cut from a sliding window "
            "that does not keep the whole sequence; leave it out"
        )


def check_same_tokens(target: Model, draft: Model) -> None:
    """Raise `Unsupported` with the first difference where a token id of one is not the same token in the other."""
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
        wanted, found = (getattr(one, f"add_{role}") for one in (target, draft))
        if wanted != found:
            return f"it {'adds' if found else 'does not add'} {role} to a text, which the other does{' not' * found}"
        ids = [getattr(one, role) for one in (target, draft)]
        if wanted and ids[0] != ids[1]:
            return f"its {role} is token {ids[1]}, not {ids[0]}"
    sizes = (target.n_vocab, draft.n_vocab)
    if abs(sizes[0] - sizes[1]) > _MOST_SIZE_DIFFERENCE:
        return f"it has {sizes[1]} tokens, and the other {sizes[0]}"
    for index, (wanted_piece, piece) in enumerate(zip(target.pieces(True), draft.pieces(True), strict=False)):
        if index >= _FIRST_COMPARED and piece != wanted_piece:
            return f"token {index} is {piece!r:.40}, not {wanted_piece!r:.40}"
    return None
