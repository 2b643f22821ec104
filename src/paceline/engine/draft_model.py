"""A draft model beside its target: loading, the check for equal tokens, its context, backend and drafter."""

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
    """Draws the likeliest tokens. wants_probabilities: whether to compute their probabilities over the whole vocabulary."""

    def __init__(self, model: Model, context: Context, *, wants_probabilities: bool) -> None:
        self._context, self._wants_probabilities = context, wants_probabilities
        self._greedy = Sampler(SamplingParams(temperature=0), model)
        self._samplers: list[Sampler] = []  # one a row of a pass

    def copy(self, from_seq_id: int, to_seq_id: int, end: int) -> None:
        self._context.copy(from_seq_id, to_seq_id, 0, end)

    def truncate(self, seq_id: int, end: int) -> None:
        self._context.remove(seq_id, end)

    def remove(self, seq_id: int) -> None:
        self._context.remove(seq_id)

    def step(self, rows: Sequence[DraftRow]) -> list[DraftToken | None]:
        while len(self._samplers) < len(rows):
            self._samplers.append(self._greedy.clone())
        if self._wants_probabilities:
            return self._with_probabilities(rows)
        drawn = self._context.plain_step(
            [row.seq_id for row in rows],
            [row.position for row in rows],
            [row.token_ids for row in rows],
            [sampler if row.draws else None for row, sampler in zip(rows, self._samplers, strict=False)],
        )
        return [None if token is None else DraftToken(_token(token), 1.0) for token in drawn]

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
