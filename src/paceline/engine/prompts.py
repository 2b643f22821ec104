"""From prompts and texts of callers to token ids that fit, and to requests that an engine can accept.

Any thread except the engine's: tokenising and compiling grammars take time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

import msgspec

from paceline import validation
from paceline.clock import Clock
from paceline.engine.adapters import AdapterRegistry
from paceline.errors import InvalidParams, InvalidType, PacelineError, PromptTooLong, Unsupported
from paceline.keywords import IntArray
from paceline.kv_cache import MAX_DIGEST_PREFIXES, MediaItem, PromptLayout, hash_prefix, pack_tokens
from paceline.media import MAX_ATTACHMENTS, MAX_SECONDS, Attachment, Audio, AudioExtent, MediaExtent, is_attachment
from paceline.output import Vocabulary
from paceline.params import SamplingParams
from paceline.request import RequestOptions, Truncate, cache_scope
from paceline.scheduling.records import MAX_NODES, MOST_DELAY_S, EmbeddingRequest
from paceline.sequence import Limits, Request, prefix_namespace

if TYPE_CHECKING:
    from paceline.runtime import MediaPart, Model, Tokenizer

MAX_BYTES: Final = 1 << 29
"""Most bytes of the files or pixels of a prompt together: half of the size limit of a message to a worker."""

Measure: TypeAlias = "Callable[[MediaExtent], Sequence[MediaPart]]"
WayOut: TypeAlias = Callable[[int], str]


def _raise_n_ctx(_num_tokens: int) -> str:
    return "raise n_ctx"


@dataclass(frozen=True, slots=True)
class ComposedPrompt:
    """Token ids with zeros in the cells of media items, the items, and their attachments in order."""

    ids: list[int]
    media: tuple[MediaItem, ...]
    attachments: tuple[Attachment, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def check_length(self, max_positions: int, before: str = "", way_out: WayOut = _raise_n_ctx) -> None:
        """Raise `PromptTooLong` if a sequence cannot have so many tokens.

        before: the name of a segment that is not measured yet. way_out: returns how a sequence could have a number of tokens.
        """
        num_tokens = len(self.ids)
        if num_tokens > max_positions:
            where = f" before {before}" if before else ""
            raise PromptTooLong(
                f"the prompt ({num_tokens} tokens{where}, {num_tokens - len(self.text_ids)} of them of images and audio) exceeds "
                f"the available context size ({max_positions} tokens); leave some out, {way_out(num_tokens)}, "
                "or set image_max_tokens where it has a meaning",
                num_tokens,
                max_positions,
            )

    @property
    def text_ids(self) -> list[int]:
        """The token ids without the cells of items."""
        ids, begin = [], 0
        for item in self.media:
            ids += self.ids[begin : item.start]
            begin = item.end
        return ids + self.ids[begin:]


class KeyedPrompt(msgspec.Struct, frozen=True, array_like=True):
    """Token ids with the keys of media items in their cells, as in the cache, and these items."""

    ids: list[int]
    media: tuple[MediaItem, ...] = ()


def has_media(prompt: object) -> bool:
    """Return whether this is a prompt of segments with at least one image or audio."""
    return isinstance(prompt, (list, tuple)) and any(map(is_attachment, prompt))


def composed(  # noqa: PLR0913 - names for messages
    segments: Sequence[Any],
    tokenizer: Any,
    options: RequestOptions,
    measure: Measure,
    max_positions: int,
    *,
    place: str = "prompt",
    way_out: WayOut = _raise_n_ctx,
) -> ComposedPrompt:
    """Put segments together.

    place: the prompt's name in messages. way_out: returns how a prompt of a number of tokens would be allowed.

    Raises `InvalidParams` with the name of the segment, the errors of `measure`, and `PromptTooLong`.
    """
    if options.truncate is not None:
        raise InvalidParams("truncate cuts texts, and this prompt has images or audio; leave it out")
    attachments = check_attachments(place, segments)
    ids: list[int] = [tokenizer.bos] if options.add_special and tokenizer.add_bos else []
    media: list[MediaItem] = []
    for index, segment in _joined(place, segments):
        name = f"{place}[{index}]"
        if is_attachment(segment):
            # measuring takes a while, so the prompt is checked before it
            ComposedPrompt(ids, tuple(media), attachments).check_length(max_positions, segment.name or name, way_out)
            try:
                parts = measure(segment.extent)
            except PacelineError as error:
                raise type(error)(f"{segment.name or name}: {error}") from error
            for number, part in enumerate(parts):
                ids += part.tokens
                if not part.tokens:
                    content_hash = segment.content_hash + number.to_bytes(2, "little")
                    media.append(MediaItem(len(ids), part.num_cells, part.num_positions, content_hash, part.is_causal))
                    ids += [0] * part.num_cells
        elif isinstance(segment, str):
            text = validation.text(name, segment)
            at_least = len(ids) + tokenizer.min_tokens(text)
            if at_least > max_positions:
                more = ", leave images or audio out, set image_max_tokens where it has a meaning" if media else ""
                raise PromptTooLong(
                    f"the prompt (at least {at_least} tokens) exceeds the available context size ({max_positions} tokens); "
                    f"shorten {name}{more}, or {way_out(at_least)}",
                    at_least,
                    max_positions,
                    is_counted=False,
                )
            ids += tokenizer.encode(text, add_special=False, parse_special=options.parse_special)
        else:
            ids += validation.token_ids(name, segment, tokenizer.n_vocab)
    if options.add_special and tokenizer.add_eos:
        ids.append(tokenizer.special_tokens["eos"])
    found = ComposedPrompt(ids, tuple(media), attachments)
    found.check_length(max_positions, way_out=way_out)
    return found


def check_attachments(place: str, segments: Sequence[Any], owner: str = "a prompt") -> tuple[Attachment, ...]:
    """Return the images and audio among segments. Raises `InvalidParams` if they are too many, too large or too long together.

    place: the name of the segments. owner: the owner of the segments, in messages.
    """
    attachments = tuple(filter(is_attachment, segments))
    if len(attachments) > MAX_ATTACHMENTS:
        raise InvalidParams(f"{owner} may have {MAX_ATTACHMENTS} images and audio, not {len(attachments)}")
    num_bytes = sum(len(attachment.data) for attachment in attachments)
    if num_bytes > MAX_BYTES:
        raise InvalidParams(
            f"the images and audio of {owner} may have {MAX_BYTES} bytes in all, not {num_bytes}; make them smaller"
        )
    _check_seconds(place, segments, owner)
    return attachments


def _check_seconds(place: str, segments: Sequence[Any], owner: str) -> None:
    seconds = 0.0
    for index, segment in enumerate(segments):
        if isinstance(segment, Audio):
            seconds += segment.seconds
            if seconds > MAX_SECONDS:
                raise InvalidParams(
                    f"{segment.name or f'{place}[{index}]'}: the audio of {owner} may last {MAX_SECONDS} s in all, and with "
                    f"this one it lasts {seconds:.0f} s; leave some out, or send several requests"
                )


def _joined(place: str, segments: Sequence[Any]) -> list[tuple[int, Any]]:
    """Return the segments with their indexes, neighbouring texts as one segment. Raises `InvalidType` for other objects."""
    found: list[tuple[int, Any]] = []
    for index, segment in enumerate(segments):
        is_ids = isinstance(segment, Sequence) and not isinstance(segment, (str, bytes, bytearray))
        if not isinstance(segment, str) and not is_attachment(segment) and not is_ids:
            is_id = isinstance(segment, Integral)
            kind = "a token id of its own; put ids into a list" if is_id else type(segment).__name__
            raise InvalidType(f"{place}[{index}] must be a text, an Image, an Audio or a list of token ids, not {kind}")
        if isinstance(segment, str) and found and isinstance(found[-1][1], str):
            found[-1] = found[-1][0], found[-1][1] + segment
        else:
            found.append((index, segment))
    return found


Segments = Sequence[str | Attachment | Sequence[int]]
"""Texts, lists of token ids and at least one `Image` or `Audio`."""
Prompt = str | Sequence[int] | Segments
Prompts = Sequence[str | IntArray | Sequence[str | Attachment | int | Sequence[int]]]
"""Several prompts of any kind. A single `Sequence` of unions lets type checkers infer lists of lists."""
EmbeddingPrompt = list[int] | ComposedPrompt
"""A part of an embedding request: token ids, or segments with media put together."""
_MAX_SHOWN_LABELS = 8  # in a message


def is_batch(prompts: object) -> bool:
    """Return whether this is a list of prompts, not a single prompt."""
    if isinstance(prompts, str) or not isinstance(prompts, Sequence) or has_media(prompts):
        return False
    return len(prompts) == 0 or not isinstance(prompts[0], Integral)


def prompt_ids(prompt: Prompt, tokenizer: Tokenizer, options: RequestOptions) -> list[int]:
    """Return the token ids of a prompt.

    Raises `InvalidParams` for an empty prompt and for ids outside the vocabulary, and `Unsupported` for images or audio.
    """
    if has_media(prompt):
        raise Unsupported("images and audio are for generate, stream and their like; this takes a text or token ids")
    _check_prompt("prompt", prompt)
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt, add_special=options.add_special, parse_special=options.parse_special)
    else:
        ids = validation.token_ids("prompt", prompt, tokenizer.n_vocab)
    if not ids:
        raise InvalidParams("the prompt has no tokens; give it a word to go on from, or the vocabulary's bos token")
    return ids


def _check_prompt(name: str, prompt: object) -> None:
    """Raise `InvalidType` with a way out if this is neither a text nor a sequence nor an array."""
    is_bytes = isinstance(prompt, (bytes, bytearray, memoryview))
    if (isinstance(prompt, Sequence) and not is_bytes) or hasattr(prompt, "dtype"):
        return
    if is_bytes:
        hint = "; decode it"
    elif isinstance(prompt, Mapping):
        hint = "; pass its text or its token ids"
    else:
        hint = "; make a list of it" if isinstance(prompt, Iterable) else ""
    raise InvalidType(f"{name} must be a text, token ids or a list of these, not {type(prompt).__name__}{hint}")


def fitted(
    ids: list[int], params: SamplingParams, options: RequestOptions, limits: Limits, bos: int | None
) -> list[int]:
    """Return the ids; if they do not fit and options.truncate is set, a part of them that fits.

    A cut prompt leaves room for max_tokens, at most half of the positions; without max_tokens, half of the positions. A bos
    token at the start stays. Raises `PromptTooLong`.
    """
    max_positions = limits.max_positions
    if len(ids) <= max_positions:
        return ids
    if options.truncate is None:
        raise _prompt_too_long(len(ids), limits)
    half = max_positions // 2
    reserved = half if params.max_tokens is None else min(params.max_tokens, half)
    return truncated(ids, max(1, max_positions - reserved), options.truncate, keep=int(ids[0] == bos))


def _prompt_too_long(num_tokens: int, limits: Limits, *, is_counted: bool = True) -> PromptTooLong:
    number = f"{'' if is_counted else 'at least '}{num_tokens}"
    return PromptTooLong(
        f"the prompt ({number} tokens) exceeds the available context size ({limits.max_positions} tokens); shorten it, set "
        f'truncate to "left", "right" or "middle", or {limits.longer_prompts(num_tokens)}',
        num_tokens,
        limits.max_positions,
        is_counted,
    )


def _check_may_fit(texts: Iterable[object], options: RequestOptions, limits: Limits, tokenizer: Tokenizer) -> None:
    """Raise `PromptTooLong` if texts have more bytes than the context has room for. Token ids and None are not counted."""
    if options.truncate is None:
        at_least = sum(tokenizer.min_tokens(text) for text in texts if isinstance(text, str))
        if at_least > limits.max_positions:
            raise _prompt_too_long(at_least, limits, is_counted=False)


def chat_too_long(error: PromptTooLong, limits: Limits, drop: str = "") -> PromptTooLong:
    """Return the error of a chat with a too long prompt: cutting it would cut the system message or the question.

    Args:
        error: The error of the rendered prompt.
        limits: Limits of the engine.
        drop: Another way out, before "shorten the messages".
    """
    problem = str(error).partition(";")[0]
    way_out = f"{drop}shorten the messages, or {limits.longer_prompts(error.num_tokens or 0)}"
    return PromptTooLong(f"{problem}; {way_out}", error.num_tokens, error.max_tokens, error.is_counted)


def truncated(ids: list[int], room: int, side: Truncate, *, keep: int = 0) -> list[int]:
    """Return at most `room` of the ids; the first `keep` of them stay if the room allows it."""
    if len(ids) <= room:
        return ids
    keep = min(keep, room - 1)
    if side == "right":
        return ids[:room]
    if side == "left":
        return ids[:keep] + ids[len(ids) - (room - keep) :]
    head = max(keep, room // 2)
    return ids[:head] + ids[len(ids) - (room - head) :]


def filling_ids(
    prompt: Prompt, params: SamplingParams, options: RequestOptions, limits: Limits, tokenizer: Tokenizer
) -> list[int]:
    """Return the token ids with which a model fills in the text between a prompt and `options.suffix`.

    If they are too many and options.truncate is "left", the prompt loses its beginning; the suffix stays whole. Raises
    `Unsupported` for a vocabulary without tokens for this, `InvalidParams` for echo and for another truncate, and as `fitted`.
    """
    for_prefix, for_suffix, for_middle = tokenizer.fim.required()
    if params.echo:
        raise InvalidParams("echo and suffix exclude each other: the output comes between the prompt and the suffix")
    if options.truncate not in (None, "left"):
        raise InvalidParams(
            f'truncate must be "left" with suffix, not "{options.truncate}": the model reads the end of the prompt and the suffix'
        )
    if has_media(prompt):
        raise InvalidParams("suffix goes with a text or token ids, and this prompt has images or audio")
    bos = [tokenizer.bos] if options.add_special and tokenizer.add_bos and tokenizer.bos is not None else []
    _check_may_fit((prompt, options.suffix), options, limits, tokenizer)
    plain = dataclasses.replace(options, add_special=False, parse_special=False)
    ids = prompt_ids(prompt, tokenizer, plain) if len(prompt) else []
    after = [for_suffix, *tokenizer.encode(options.suffix or "", add_special=False), for_middle]
    if options.truncate is not None:
        room = limits.max_positions - len(bos) - 1 - len(after)
        if room < 1:
            raise PromptTooLong(
                f"the suffix ({len(after)} tokens with its marks) leaves the prompt no place in the available context size "
                f"({limits.max_positions} tokens); shorten it, or {limits.longer_prompts(len(after))}",
                len(after),
                limits.max_positions,
            )
        ids = fitted(ids, params, options, dataclasses.replace(limits, max_positions=room), None)
    return fitted([*bos, for_prefix, *ids, *after], params, options, limits, None)


def digest_sizes(max_prefixes: int, block_tokens: int | None) -> tuple[int, int | None]:
    """Return the checked arguments of `EngineClient.prefix_digest`. Raises `InvalidParams`."""
    max_prefixes = validation.integer("max_prefixes", max_prefixes, 1, MAX_DIGEST_PREFIXES)
    if block_tokens is None:
        return max_prefixes, None
    return max_prefixes, validation.integer("block_tokens", block_tokens, 1, 2**31 - 1)


def activity_numbers(after: int, max_nodes: int | None, delay_s: float) -> tuple[int, int | None, float]:
    """Return the checked arguments of `EngineClient.ask_activity`. Raises `InvalidParams`."""
    after = validation.integer("after", after, 0, 2**53)
    delay_s = validation.number("delay_s", delay_s, 0.0, MOST_DELAY_S)
    return after, None if max_nodes is None else validation.integer("max_nodes", max_nodes, 0, MAX_NODES), delay_s


def prefix_hash(token_ids: Sequence[int], options: RequestOptions) -> str:
    """Return the hash by which `EngineClient.prefix_digest` names a prefix.

    Args:
        token_ids: The first token ids of a prompt.
        options: The request's; adapters, tenant and cache_salt belong to the hash.

    Raises:
        InvalidParams: token_ids are not token ids.
    """
    if isinstance(token_ids, (str, bytes, bytearray)):
        raise InvalidType(f"token_ids must be a sequence of token ids, not {type(token_ids).__name__}")
    ids = [validation.integer(f"token_ids[{index}]", token, 0, 2**31 - 1) for index, token in enumerate(token_ids)]
    return hash_prefix(prefix_namespace(options), pack_tokens(ids))


def refuse_media(extent: MediaExtent, beside: Sequence[Path] = ()) -> NoReturn:
    """Raise `Unsupported`, as there is no projector. beside: projector files beside the model, none of which was loaded."""
    kind = "audio" if isinstance(extent, AudioExtent) else "images"
    if len(beside) > 1:
        raise Unsupported(
            f"this model takes no {kind}: of the {len(beside)} multimodal projectors beside it none was loaded "
            f"({', '.join(path.name for path in beside)}); give one of them as mmproj"
        )
    raise Unsupported(
        f"this model takes no {kind}: it was loaded without a multimodal projector; give its file as mmproj, or put it "
        "beside the model (mmproj-*.gguf)"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequests:
    """Makes an engine's requests for text.

    Attributes:
        shares: Whether the engine caches prefixes.
        adapters: The adapters that requests may use.
        next_key: Returns a new key for a request.
        make_samplers: Returns a sampler for each choice, or none if a worker makes them. Raises the errors of the params.
        measure: Returns the parts of an image or audio of an extent. Raises an error if it cannot be in a prompt.
    """

    tokenizer: Any
    vocabulary: Vocabulary
    limits: Limits
    shares: bool
    adapters: AdapterRegistry
    next_key: Callable[[], int]
    make_samplers: Callable[[SamplingParams, list[int]], tuple[object, ...]]
    clock: Clock
    measure: Measure = refuse_media

    def prepare(self, prompt: Prompt, params: SamplingParams, options: RequestOptions) -> Request:
        """Return a checked request, which is not accepted yet. Raises `RequestError`s."""
        if not self.shares:
            options = dataclasses.replace(options, cache_prompt=False)
        if self.limits.max_positions == 0:
            raise Unsupported(f"this model cannot generate; {self.limits.cannot_generate}")
        options = self.adapters.resolve(options)
        tokenizer = self.tokenizer
        validation.token_ids("preserved_tokens", options.preserved_tokens, tokenizer.n_vocab)
        limits = self.limits
        if options.suffix is not None:
            text_ids = filling_ids(prompt, params, options, limits, tokenizer)
            found, options = ComposedPrompt(text_ids, (), ()), dataclasses.replace(options, suffix=None)
        elif has_media(prompt):
            found = composed(
                prompt, tokenizer, options, self.measure, limits.max_positions, way_out=limits.longer_prompts
            )
            text_ids = found.text_ids
        else:
            _check_may_fit((prompt,), options, limits, tokenizer)
            ids = prompt_ids(prompt, tokenizer, options)
            text_ids = fitted(ids, params, options, limits, tokenizer.bos)
            found = ComposedPrompt(text_ids, (), ())
        with cache_scope(options.tenant, options.cache_salt):
            samplers = self.make_samplers(params, text_ids)
        return Request(
            key=self.next_key(),
            prompt=found.ids,
            media=found.media,
            attachments=found.attachments,
            params=params,
            options=options,
            samplers=samplers,
            submitted_s=self.clock.now(),
            lora=options.lora,
            vocabulary=self.vocabulary,
            echo=tokenizer.decode(text_ids, special=options.special) if params.echo else "",
        )

    def keyed(self, prompt: Prompt | KeyedPrompt, options: RequestOptions) -> KeyedPrompt:
        """Return a prompt with the keys of the cache. Raises as `prepare`."""
        if isinstance(prompt, KeyedPrompt):
            return prompt
        if not has_media(prompt):
            return KeyedPrompt(prompt_ids(prompt, self.tokenizer, options))
        limits = self.limits
        found = composed(
            prompt, self.tokenizer, options, self.measure, limits.max_positions, way_out=limits.longer_prompts
        )
        return KeyedPrompt(PromptLayout(found.media).keyed(found.ids), found.media)


def check_may_be_embedded(name: str, min_tokens: int, options: RequestOptions, longest: int) -> None:
    """Raise `PromptTooLong` if a text of at least `min_tokens` tokens does not fit and may not be cut.

    name: the text's in the error. It is not tokenised.
    """
    if options.truncate is None and min_tokens > longest:
        raise _too_long_to_embed(name, min_tokens, longest, is_counted=False)


def _embedding_ids(index: int, text: Prompt, tokenizer: Tokenizer, options: RequestOptions, longest: int) -> list[int]:
    name, in_error = f"texts[{index}]", f"text {index}"
    _check_prompt(name, text)
    if isinstance(text, str):
        validation.text(name, text)
        check_may_be_embedded(in_error, tokenizer.min_tokens(text), options, longest)
        ids = tokenizer.encode(text, add_special=options.add_special, parse_special=options.parse_special)
    else:
        ids = validation.token_ids(name, text, tokenizer.n_vocab)
    if not ids:
        raise InvalidParams(f"{name} is empty; a text needs at least one token to be embedded")
    if len(ids) > longest and options.truncate is None:
        raise _too_long_to_embed(in_error, len(ids), longest)
    return ids


def is_single_text(texts: object) -> bool:
    """Return whether this is one input to embed, not a list: a str, token ids, or segments with an image or audio."""
    if isinstance(texts, str) or has_media(texts):
        return True
    if isinstance(texts, (list, tuple)):
        return len(texts) > 0 and isinstance(texts[0], Integral)
    return getattr(texts, "ndim", None) == 1 and getattr(getattr(texts, "dtype", None), "kind", None) in ("i", "u")


def embeddable(
    texts: Sequence[Prompt | ComposedPrompt], tokenizer: Any, options: RequestOptions, longest: int, measure: Measure
) -> list[EmbeddingPrompt]:
    """Return the token ids of texts to embed; segments with media are put together.

    Texts are cut to `longest` tokens if options.truncate is set. A bos token at the start and an eos or sep token at the end
    stay, since models pool at them. Raises `InvalidType` if this is no list, `InvalidParams`, `PromptTooLong`, and the errors
    of `measure`.
    """
    _check_list("texts", texts)
    texts = list(texts)
    with_media = [text for text in texts if has_media(text)]
    if len(with_media) > 1:
        segments = [segment for text in with_media for segment in text]  # type: ignore[union-attr]
        check_attachments("texts", segments, "an embedding request")
    found: list[EmbeddingPrompt] = []
    for index, text in enumerate(texts):
        if isinstance(text, ComposedPrompt):
            found.append(text)
        elif has_media(text):
            found.append(_embedding_segments(f"texts[{index}]", text, tokenizer, options, longest, measure))
        else:
            ids = _embedding_ids(index, text, tokenizer, options, longest)
            found.append(
                ids if options.truncate is None else _cut(ids, longest, options.truncate, tokenizer.special_tokens)
            )
    return found


def _embedding_segments(
    name: str, segments: Any, tokenizer: Any, options: RequestOptions, longest: int, measure: Measure
) -> ComposedPrompt:
    """Put an input with media together. Raises as `composed`, and `InvalidParams` if media are at its end."""
    found = composed(
        segments, tokenizer, options, measure, longest, place=name, way_out=lambda _: "raise max_embedding_tokens"
    )
    if found.media and found.media[-1].end == len(found.ids):
        raise InvalidParams(
            f"{found.attachments[-1].name or name}: a prompt must end with a token, as its vector is that of the last one; put a "
            "text behind the last image or audio"
        )
    return found


def embedding_request(
    key: int, prompts: Sequence[EmbeddingPrompt], pooling: str | None, options: RequestOptions
) -> EmbeddingRequest:
    """Return the request of prompts, submitted at time 0. Starts of media items count from the first prompt."""
    texts: list[list[int]] = []
    media: list[MediaItem] = []
    attachments: list[Attachment] = []
    start = 0
    for prompt in prompts:
        if isinstance(prompt, ComposedPrompt):
            media += [msgspec.structs.replace(item, start=start + item.start) for item in prompt.media]
            attachments += prompt.attachments
        texts.append(prompt.ids if isinstance(prompt, ComposedPrompt) else prompt)
        start += len(prompt)
    return EmbeddingRequest(
        key=key,
        texts=texts,
        pooling=pooling,
        options=options,
        submitted_s=0.0,
        media=tuple(media),
        attachments=tuple(attachments),
    )


def _cut(text: list[int], longest: int, side: Truncate, special_tokens: Mapping[str, int]) -> list[int]:
    if len(text) <= longest:
        return text
    head = int(text[0] == special_tokens.get("bos"))
    tail = int(text[-1] in (special_tokens.get("eos"), special_tokens.get("sep")))
    if longest <= head + tail:
        return text[:longest]
    end = len(text) - tail
    return text[:head] + truncated(text[head:end], longest - head - tail, side) + text[end:]


def _too_long_to_embed(name: str, num_tokens: int, longest: int, *, is_counted: bool = True) -> PromptTooLong:
    number = f"{'' if is_counted else 'at least '}{num_tokens}"
    return PromptTooLong(
        f"{name} is too large: it has {number} tokens, which exceeds the available context size ({longest} tokens); "
        'split it, or set truncate to "left", "right" or "middle"',
        num_tokens,
        longest,
        is_counted,
    )


def all_pairs(
    model: Model, query: str, documents: Iterable[str], longest: int, truncate: Truncate | None = None
) -> list[list[int]]:
    """Return query and document as one text of at most `longest` tokens for each document; truncate cuts documents.

    Raises `InvalidType` and `InvalidParams` for wrong texts or lists, `PromptTooLong`, and `Unsupported` for a model without a
    single score of a pair.
    """
    _check_one_score(model)
    validation.text("query", query)
    _check_list("documents", documents)
    return [
        _fitted_pair(model, query, document, f"documents[{index}]", longest, truncate)
        for index, document in enumerate(documents)
    ]


def _check_one_score(model: Model) -> None:
    """Raise `Unsupported` if the model has several classes, unless they are a reranker's yes and no: yes is the score."""
    labels = model.class_labels
    if len(labels) > 1 and labels != ("yes", "no"):
        shown = ", ".join(map(repr, labels[:_MAX_SHOWN_LABELS])) + (" ..." if len(labels) > _MAX_SHOWN_LABELS else "")
        raise Unsupported(
            f"this model has {len(labels)} classes ({shown:.200}) and no score of a text with another one; use classify "
            "(over HTTP /classify), or a reranking model"
        )


def _fitted_pair(
    model: Model, query: str, document: str, name: str, longest: int, truncate: Truncate | None
) -> list[int]:
    validation.text(name, document)
    tokenizer, with_query = model.tokenizer, f"{name} with the query"
    at_least = sum(map(tokenizer.min_tokens, _pair_texts(model, query, document)))
    if truncate is None and at_least > longest:
        raise _too_long_to_embed(with_query, at_least, longest, is_counted=False)
    pair = _pair_ids(model, query, document)
    if len(pair) <= longest:
        return pair
    if truncate is None:
        raise _too_long_to_embed(with_query, len(pair), longest)
    ids = tokenizer.encode(document, add_special=False)
    while len(pair) > longest:
        room = len(ids) - (len(pair) - longest)
        if room < 1:
            raise _too_long_to_embed(f"the query, with nothing of {name},", len(pair) - len(ids), longest)
        ids = truncated(ids, room, truncate)
        # Tokens at the seam may differ from those before the cut, so the length is checked again.
        pair = _pair_ids(model, query, tokenizer.decode(ids))
    return pair


def _pair_texts(model: Model, query: str, document: str) -> tuple[str, ...]:
    """Return the text of a pair by the model's "rerank" template, or query and document if there is no template."""
    template = model.chat_template("rerank")
    if template is None:
        return query, document
    parts = template.split("{query}")
    return (query.join(part.replace("{document}", document) for part in parts),)


def _pair_ids(model: Model, query: str, document: str) -> list[int]:
    """Tokenise a pair by the "rerank" template, or as bos, query, eos, sep, document, eos, if the model uses these tokens."""
    tokenizer = model.tokenizer
    texts = _pair_texts(model, query, document)
    if len(texts) == 1:
        return tokenizer.encode(texts[0], add_special=False, parse_special=True)
    ids = {name: tokenizer.special_tokens.get(name) for name in ("bos", "eos", "sep")}
    end = ids["sep"] if ids["eos"] is None else ids["eos"]
    wanted: list[list[int | None]] = [
        [ids["bos"]] if tokenizer.add_bos else [],
        [*tokenizer.encode(query, add_special=False)],
        [end] if tokenizer.add_eos else [],
        [ids["sep"]] if tokenizer.add_sep else [],
        [*tokenizer.encode(document, add_special=False)],
        [end] if tokenizer.add_eos else [],
    ]
    return [token for part in wanted for token in part if token is not None]


def _check_list(name: str, values: object) -> None:
    """Raise `InvalidType` if this is no list of texts. A single str is none, although it is iterable."""
    if isinstance(values, (str, bytes, bytearray, memoryview)) or not isinstance(values, Iterable):
        kind = type(values).__name__
        raise InvalidType(f"{name} must be a list of texts, not {kind}; make a list of a single one, and decode bytes")
