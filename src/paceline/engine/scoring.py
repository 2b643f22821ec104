"""Scores of choices after a prompt, for `LLM.score` and `LLM.decide`: a request for each choice, with one shared prefix.

The log-probability of a choice is the sum over its tokens. Prompt and choice are encoded as one text, as the model has seen
them in training. The tokens before the first difference are the prefix that all choices share. The engine computes this prefix
once, and the requests start from its cells. The scored tokens begin after it. If the first token of a choice begins with the
end of the prompt, for instance a blank, the end of the prompt is scored with every choice, so that the scores stay comparable.

Runs on the threads and event loops of callers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast, get_args

import numpy as np

from paceline import validation
from paceline.engine.arguments import SCORING_OPTIONS
from paceline.engine.results import AsyncBatch, Batch, Outcome, batch_outcome, softmax
from paceline.errors import DeadlineExceeded, InvalidParams, InvalidType, PacelineError, PromptTooLong
from paceline.params import SamplingParams
from paceline.request import MAX_INTERVAL, RequestOptions
from paceline.scheduling.records import embedding_error
from paceline.streaming import FinishReason
from paceline.streaming.chunk import ChoiceScore, Classification, Completion, LengthNormalization

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.engine.client import EngineClient
    from paceline.runtime import Tokenizer
    from paceline.sequence import Limits, Request


@dataclass(frozen=True, slots=True)
class EncodedChoices:
    """Choices after a prompt as token ids.

    Attributes:
        prompts: Token ids of prompt and choice, for each choice.
        num_shared: Number of tokens at the beginning that all prompts share and that are not scored.
        num_bytes: Bytes of each choice.
    """

    prompts: list[list[int]]
    num_shared: int
    num_bytes: list[int]


def encoded_choices(
    tokenizer: Tokenizer,
    prompt: Any,
    choices: Any,
    options: RequestOptions,
    each: Callable[[Iterable[Any]], Iterable[Any]] = lambda choices: choices,
) -> EncodedChoices:
    """Encode choices after a prompt. Raises `InvalidParams` and `InvalidType`, and the errors of `Tokenizer.encode` and `each`.

    each: iterates over the choices that are encoded; it may raise between two of them.
    """
    if isinstance(choices, (str, bytes)) or not isinstance(choices, Sequence):
        raise InvalidType(f"choices must be a list of texts or of lists of token ids, not {type(choices).__name__}")
    if not choices:
        raise InvalidParams("choices must have at least one choice")
    if any(isinstance(choice, str) is not isinstance(prompt, str) for choice in choices):
        raise InvalidType("prompt and choices must all be texts, or all lists of token ids")
    if isinstance(prompt, str):
        shared, prompts = _encoded_texts(tokenizer, prompt, each(choices), options)
        num_bytes = [len(choice.encode()) for choice in choices]
    else:
        shared = validation.token_ids("prompt", prompt, tokenizer.n_vocab)
        ids = [
            validation.token_ids(f"choices[{index}]", choice, tokenizer.n_vocab)
            for index, choice in enumerate(each(choices))
        ]
        prompts = [shared + choice for choice in ids]
        num_bytes = [len(tokenizer.decode_bytes(choice, special=True)) for choice in ids]
    for index, choice in enumerate(choices):
        if len(choice) == 0:
            raise InvalidParams(f"choices[{index}] is empty, and so has no likelihood; leave it out")
    num_shared = min(_num_common(shared, whole) for whole in prompts)
    if num_shared == 0:
        raise InvalidParams(
            "prompt has no token before the first choice, and the first token of a text has no log-probability; begin the "
            "prompt with a word, or with a token that begins a text"
        )
    return EncodedChoices(prompts, num_shared, num_bytes)


def _encoded_texts(
    tokenizer: Tokenizer, prompt: str, choices: Iterable[str], options: RequestOptions
) -> tuple[list[int], list[list[int]]]:
    """Return the token ids of the prompt, and of the prompt with each choice; without an end-of-text token."""
    begin = [tokenizer.bos] if options.add_special and tokenizer.add_bos and tokenizer.bos is not None else []

    def encode(text: str) -> list[int]:
        return begin + tokenizer.encode(text, add_special=False, parse_special=options.parse_special)

    prompt = validation.text("prompt", prompt)
    return encode(prompt), [
        encode(prompt + validation.text(f"choices[{index}]", choice)) for index, choice in enumerate(choices)
    ]


def _num_common(prompt: Sequence[int], ids: Sequence[int]) -> int:
    """Return the number of tokens of the prompt that a longer sequence begins with; at most all but its last."""
    most = min(len(prompt), len(ids) - 1)
    return next((index for index in range(most) if prompt[index] != ids[index]), most)


def scoring_options(options: Mapping[str, Any]) -> RequestOptions:
    """Return the request options of scoring. Raises `InvalidType` for an option without a meaning there."""
    validation.reject_unknown(options, SCORING_OPTIONS)
    return RequestOptions(**{**options, "interval": MAX_INTERVAL})


class ScoringCall:
    """The requests of a call of `LLM.score`. Leaving the call early cancels them. timeout_s counts from here, for the whole call.

    num_tokens: of the shared prefix and all choices. num_computed: of these the tokens that did not come from the cache, after
    the call.

    Raises the error of the longest prompt, so that nothing is computed of choices that do not fit.
    """

    def __init__(self, engine: EngineClient, encoded: EncodedChoices, options: RequestOptions) -> None:
        self._engine, self._encoded, self._options = engine, encoded, options
        self.num_shared = encoded.num_shared
        self.num_tokens = sum(map(len, encoded.prompts)) - encoded.num_shared * (len(encoded.prompts) - 1)
        self.num_computed = 0
        self._params = SamplingParams(max_tokens=0, prompt_logprobs=1, prompt_logprobs_start=self.num_shared)
        self._began_s = time.monotonic()
        try:
            engine.prepare(max(encoded.prompts, key=len), self._params, options)
        except PromptTooLong as error:
            raise _too_long(error, engine.limits) from error

    def _prepare(self, prompt: list[int]) -> Request:
        options, timeout_s = self._options, self._options.timeout_s
        if timeout_s is not None:
            rest_s = timeout_s - (time.monotonic() - self._began_s)
            if rest_s <= 0:
                raise DeadlineExceeded("the call ran out of time before this choice was computed")
            options = replace(options, timeout_s=rest_s)
        return self._engine.prepare(prompt, self._params, options)

    def result(self) -> list[ChoiceScore]:
        """Return the score of each choice, in order."""
        return self._scores(Batch(self._engine, self._prepare, lambda *_: None).run(self._encoded.prompts))

    async def result_async(self) -> list[ChoiceScore]:
        """Return the score of each choice, without blocking the event loop."""
        return self._scores(await AsyncBatch(self._engine, self._prepare).run(self._encoded.prompts))

    async def result_of_all(self, max_open: int) -> list[ChoiceScore]:
        """Return the scores, computing at most `max_open` choices at once. The first error ends the call and is raised."""

        def check(outcome: Outcome) -> None:
            outcome = _unless_incomplete(outcome)
            if isinstance(outcome, PacelineError):
                raise outcome

        return self._scores(
            await AsyncBatch(self._engine, self._prepare, check, max_open=max_open).run(self._encoded.prompts)
        )

    def _scores(self, outcomes: Sequence[Outcome]) -> list[ChoiceScore]:
        encoded = self._encoded
        whole = batch_outcome([_unless_incomplete(outcome) for outcome in outcomes], "choices")
        self.num_computed = sum(each.usage.prompt_tokens - each.usage.cached_tokens for each in whole)
        return [_score(index, each, encoded.num_shared, encoded.num_bytes[index]) for index, each in enumerate(whole)]


def _too_long(error: PromptTooLong, limits: Limits) -> PromptTooLong:
    """Return the error of a prompt that is too long with its choice: cutting it would change the scores."""
    problem, num_tokens = str(error).partition(";")[0], error.num_tokens or 0
    way_out = f"shorten the prompt or the choice, or {limits.longer_prompts(num_tokens)}"
    return PromptTooLong(f"{problem}; {way_out}", error.num_tokens, error.max_tokens, error.is_counted)


def scoring_call(engine: EngineClient, prompt: Any, choices: Any, options: Mapping[str, Any]) -> ScoringCall:
    """Encode the choices and return the call of `LLM.score`. Raises as `encoded_choices` and `ScoringCall`."""
    engine.check_usable()  # before the tokenizer, which is closed with its engine
    checked = scoring_options(options)
    return ScoringCall(engine, encoded_choices(engine.tokenizer, prompt, choices, checked), checked)


def _unless_incomplete(outcome: Outcome) -> Outcome:
    """Return the error of a request that ended before all of its tokens were scored."""
    if isinstance(outcome, PacelineError) or outcome.finish_reason is FinishReason.LENGTH:
        return outcome
    return embedding_error(outcome.finish_reason)


def _score(index: int, completion: Completion, num_shared: int, num_bytes: int) -> ChoiceScore:
    token_ids = completion.prompt_token_ids[num_shared:]
    scored = completion.prompt_logprobs or ()
    logprobs = tuple(each.own for each in scored)
    is_greedy = all(token == each.token_ids[0] for token, each in zip(token_ids, scored, strict=True))
    return ChoiceScore(index, math.fsum(logprobs), token_ids, logprobs, num_bytes, is_greedy)


def checked_normalization(length_normalization: object) -> LengthNormalization:
    """Return the option `length_normalization`. Raises `InvalidParams` for an unknown value."""
    names = get_args(LengthNormalization)
    return cast(LengthNormalization, validation.choice("length_normalization", length_normalization, names))


def probabilities_of(scores: Sequence[ChoiceScore], by: LengthNormalization) -> tuple[float, ...]:
    """Return the probability of each choice: the softmax of the normalised log-probabilities."""
    (probs,) = softmax(np.array([[score.normalized(by) for score in scores]]))
    return tuple(probs.tolist())


def decision(choices: Sequence[str], scores: Sequence[ChoiceScore], by: LengthNormalization) -> Classification:
    """Return the distribution over choices."""
    probs = probabilities_of(scores, by)
    return Classification(choices[probs.index(max(probs))], probs, tuple(choices))
