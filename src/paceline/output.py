"""From drawn tokens to text, stops, log-probabilities and chunks, for one choice: vLLM's output processor.

Pure; knows no KV cache and no scheduling. `Detokenizer`, `StopFilter` and `TextPipe` work on bytes of tokens alone;
`OutputProcessor` puts them together for one choice of a request.

Runs on the engine's thread. Decides whether a token ends the choice before it turns bytes into text, so that text that was
held back leaves with the last chunk on every path.

Stop strings are found in the bytes of a sequence while its tokens arrive.
The stop that starts earliest in the bytes counts; of stops with the same start, the shortest. This depends neither on the order
of the list nor on the borders of tokens. So a complete stop is not final while a longer stop that began before it may still be
completed.

At any moment, let `cut` be the start of the first stop that is or might become complete, or else the end of the bytes.
`Released` are all bytes before `cut`, and all tokens that end by it. A token in which a stop begins thus belongs to the
stop, while its bytes before the stop are text. A stop is UTF-8 and begins with a whole character, so `cut` never
divides a character.
"""

from __future__ import annotations

import codecs
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from weakref import WeakValueDictionary

import msgspec

from paceline import validation
from paceline.errors import InvalidParams, InvalidType, PacelineError
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.streaming.chunk import FinishReason, StreamChunk, TokenLogprobs, TokenText

_ROOT = 0
_NO_CHILD = -1


Released = tuple[tuple[int, ...], bytes]
"""Token ids and bytes that no stop can claim any more; either may be empty without the other."""


@dataclass(frozen=True, slots=True)
class StopMatch:
    """The stop that ended a sequence.

    `token_ids`: the token in which the stop begins and all later tokens; with the tokens released before, these are all tokens of
    the sequence.
    """

    stop: str
    token_ids: tuple[int, ...]


class StopFilter:
    """Passes the tokens of one sequence through and holds back a possible beginning of a stop string.

    `stops` are strings that are not empty; raises `InvalidType` or `InvalidParams` otherwise. Once `match` is set
    nothing more may be pushed.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._automaton = automaton = _shared_automaton(tuple(_encode(stops)))
        self._stops = {stop.encode(): stop for stop in stops}
        self._first_bytes = automaton.first_bytes
        self._node = _ROOT
        self._data = bytearray()  # the bytes that are held back
        self._begin = 0  # their place in the sequence
        self._tokens: deque[tuple[int, int]] = deque()  # tokens held back, and the end of each
        self._best: tuple[int, int] | None = None  # begin and end of the earliest stop that is complete
        self._match: StopMatch | None = None

    @classmethod
    def from_state(cls, stops: Sequence[str], state: Iterable[tuple[int, bytes]]) -> StopFilter:
        """Resume from a state that another filter returned."""
        stop_filter = cls(stops)
        for token_id, data in state:
            stop_filter.push(token_id, data)
        return stop_filter

    @property
    def match(self) -> StopMatch | None:
        """The stop that was found, as soon as no other can take its place."""
        return self._match

    @property
    def is_holding(self) -> bool:
        """Whether tokens or bytes are held back."""
        return bool(self._tokens or self._data)

    def push(self, token_id: int, data: bytes) -> Released:
        """Take the next token and its bytes, and return the tokens and bytes that can be passed on."""
        if self._match is not None:
            raise RuntimeError("a stop string has matched: no token can follow it")
        if self._node == _ROOT and self._first_bytes.isdisjoint(data):
            self._begin += len(data)
            return (token_id,), data
        self._data += data
        end = self._begin + len(self._data)
        self._tokens.append((token_id, end))
        if self._scan(end - len(data), data):
            return self._settle()
        return self._release(end - self._automaton.depth[self._node])

    def finish(self) -> Released:
        """End the sequence: settle on a stop that is complete, or return everything that was held back."""
        if self._match is not None:
            return (), b""
        if self._best is not None:
            return self._settle()
        self._node = _ROOT
        return self._release(self._begin + len(self._data))

    def state(self) -> tuple[tuple[int, bytes], ...]:
        """Return the tokens that are held back, each with its bytes that are held back; only before `match` is set."""
        result, begin = [], self._begin
        for token_id, end in self._tokens:
            result.append((token_id, bytes(self._data[begin - self._begin : end - self._begin])))
            begin = end
        return tuple(result)

    def _scan(self, begin: int, data: bytes) -> bool:
        """Feed the automaton; return whether a stop is found that no earlier one can replace."""
        automaton = self._automaton
        for position, byte in enumerate(data, begin + 1):
            self._node = node = automaton.step(self._node, byte)
            length = automaton.stop_length[node]
            if length and (self._best is None or position - length < self._best[0]):
                self._best = (position - length, position)
            if self._best is not None and position - automaton.depth[node] >= self._best[0]:
                return True
        return False

    def _settle(self) -> Released:
        assert self._best is not None  # noqa: S101 - called if a best match is known
        begin, end = self._best
        stop = self._stops[bytes(self._data[begin - self._begin : end - self._begin])]
        released = self._release(begin)
        self._match = StopMatch(stop, tuple(token_id for token_id, _ in self._tokens))
        self._tokens.clear()
        self._data.clear()
        return released

    def _release(self, cut: int) -> Released:
        """Everything before `cut`, a place in the sequence."""
        data = bytes(self._data[: cut - self._begin])
        del self._data[: cut - self._begin]
        self._begin = cut
        token_ids = []
        while self._tokens and self._tokens[0][1] <= cut:
            token_ids.append(self._tokens.popleft()[0])
        return tuple(token_ids), data


class _Automaton:
    """Aho and Corasick's: after any bytes, its node stands for their longest end that begins a stop.

    By node: `depth` is how long that is, `stop_length` how long the longest stop is that ends here (0: none does). A node's
    first child is the node after it, so that most nodes take 14 bytes and no object.
    """

    def __init__(self, stops: Sequence[bytes]) -> None:
        self.first_bytes = frozenset(stop[0] for stop in stops)
        self._first_byte = array("h", [_NO_CHILD])  # by node, of its first child
        self._others: dict[int, int] = {}  # further children, by node * 256 + byte
        self._fallback = array("i", [_ROOT])
        self.depth = array("i", [0])
        self.stop_length = array("i", [0])
        parents = array("i", [_ROOT])
        last_bytes = bytearray(1)
        for stop in stops:
            node = _ROOT
            for byte in stop:
                node = self._child(node, byte) or self._add(node, byte, parents, last_bytes)
            self.stop_length[node] = len(stop)
        for node in sorted(
            range(1, len(self.depth)), key=self.depth.__getitem__
        ):  # fallbacks are found by shallower nodes'
            parent = parents[node]
            fallback = _ROOT if parent == _ROOT else self.step(self._fallback[parent], last_bytes[node])
            self._fallback[node] = fallback
            self.stop_length[node] = self.stop_length[node] or self.stop_length[fallback]

    def step(self, node: int, byte: int) -> int:
        """Return the node after one more byte."""
        while True:
            following = self._child(node, byte)
            if following or node == _ROOT:
                return following
            node = self._fallback[node]

    def _child(self, node: int, byte: int) -> int:
        """Return the node's child by a byte; the root, which is no child, if there is none."""
        return node + 1 if self._first_byte[node] == byte else self._others.get(node * 256 + byte, _ROOT)

    def _add(self, parent: int, byte: int, parents: array[int], last_bytes: bytearray) -> int:
        node = len(self.depth)
        if node == parent + 1:
            self._first_byte[parent] = byte
        else:
            self._others[parent * 256 + byte] = node
        self._first_byte.append(_NO_CHILD)
        self._fallback.append(_ROOT)
        self.depth.append(self.depth[parent] + 1)
        self.stop_length.append(0)
        parents.append(parent)
        last_bytes.append(byte)
        return node


_automata: WeakValueDictionary[tuple[bytes, ...], _Automaton] = WeakValueDictionary()


def _shared_automaton(stops: tuple[bytes, ...]) -> _Automaton:
    """One for all who look for the same stops at the same time; it never changes once it is made."""
    automaton = _automata.get(stops)
    if automaton is None:
        automaton = _automata[stops] = _Automaton(stops)
    return automaton


def _encode(stops: Sequence[str]) -> list[bytes]:
    if isinstance(stops, (str, bytes)) or not isinstance(stops, Sequence):
        raise InvalidType(f"stop must be a list of strings, not {stops!r:.80}")
    for index, stop in enumerate(stops):
        if validation.text(f"stop[{index}]", stop) == "":
            raise InvalidParams(f"stop[{index}] must not be empty; leave it out")
    return [stop.encode() for stop in stops]


_MAX_SHOWN = 8  # combinations of preserved tokens whose tables are kept
_new_decoder = codecs.getincrementaldecoder("utf-8")


class TokenTexts(dict[int, str | None]):
    """The texts of tokens by id, None for parts of characters.

    Each is made when it is first needed: of a large vocabulary most never are, and all of them take 10 MB. Any thread.
    """

    __slots__ = ("_pieces",)

    def __init__(self, pieces: Sequence[bytes]) -> None:
        super().__init__()
        self._pieces = pieces

    def __missing__(self, token_id: int) -> str | None:
        try:
            text = self._pieces[token_id].decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text


class _Tokens(dict[int, TokenText]):
    """The tokens with their texts by id, made and kept when they are first needed. Any thread."""

    __slots__ = ("_pieces",)

    def __init__(self, pieces: Sequence[bytes]) -> None:
        super().__init__()
        self._pieces = pieces

    def __missing__(self, token_id: int) -> TokenText:
        piece = self._pieces[token_id]
        token = self[token_id] = TokenText(token_id, piece.decode("utf-8", "replace"), tuple(piece))
        return token


@dataclass(frozen=True)
class Vocabulary:
    """The bytes of a model's tokens, without and with the text of control tokens, and its end-of-generation tokens.

    names_tokens: whether log-probabilities get the texts of their tokens. A worker leaves that to the front, which has one text
    for all entries of a token.
    """

    pieces: Sequence[bytes]
    pieces_special: Sequence[bytes]
    eog_ids: frozenset[int]
    names_tokens: bool = True
    _shown: dict[tuple[int, ...], tuple[Sequence[bytes], TokenTexts]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def _texts(self) -> TokenTexts:
        return TokenTexts(self.pieces)

    @cached_property
    def _texts_special(self) -> TokenTexts:
        return TokenTexts(self.pieces_special)

    @cached_property
    def _tokens(self) -> _Tokens:
        return _Tokens(self.pieces_special)

    def with_texts(self, token_id: int, logprobs: TokenLogprobs) -> TokenLogprobs:
        """Return the log-probabilities at the position of this token with the texts of all their tokens."""
        if not self.names_tokens:
            return logprobs
        tokens, top = self._tokens, logprobs.token_ids
        return TokenLogprobs(
            logprobs.own, top, logprobs.values, tokens[token_id], tuple([tokens[token] for token in top])
        )

    def shown(self, options: RequestOptions) -> tuple[Sequence[bytes], TokenTexts]:
        """Return the bytes and the texts of all tokens, as the options of a request want control tokens shown."""
        if options.special:
            return self.pieces_special, self._texts_special
        if not options.preserved_tokens:
            return self.pieces, self._texts
        found = self._shown.get(options.preserved_tokens)
        if found is None:
            pieces = list(self.pieces)
            for token_id in options.preserved_tokens:
                pieces[token_id] = self.pieces_special[token_id]
            found = pieces, TokenTexts(pieces)
            if len(self._shown) >= _MAX_SHOWN:
                self._shown.clear()
            self._shown[options.preserved_tokens] = found
        return found


class Detokenizer:
    """Decodes the bytes of one sequence, split anywhere.

    Every piece is well-formed text. The joined pieces equal `bytes.decode("utf-8", "replace")` of all bytes: one U+FFFD for each
    maximal invalid subpart. At most three bytes are held back, the beginning of a character.
    """

    def __init__(self) -> None:
        self._decoder = _new_decoder("replace")

    @classmethod
    def from_state(cls, state: bytes) -> Detokenizer:
        """Resume from a state that another detokenizer returned."""
        detokenizer = cls()
        detokenizer._decoder.setstate((state, 0))
        return detokenizer

    def push(self, data: bytes) -> str:
        """Return the text that is complete with these bytes; may be empty."""
        return self._decoder.decode(data)

    def finish(self) -> str:
        """Return the bytes held back: nothing, or one replacement character; the detokenizer is as new afterwards."""
        return self._decoder.decode(b"", final=True)

    def state(self) -> bytes:
        """Return the bytes that are held back."""
        return self._decoder.getstate()[0]


PipeState = tuple[tuple[tuple[int, bytes], ...], bytes]


class TextPiece(msgspec.Struct, frozen=True):
    """The ids and well-formed text that a step adds to a sequence. Either may be empty without the other."""

    token_ids: tuple[int, ...]
    text: str


class TextPipe:
    """Turns the tokens of one sequence into text and ends it at a stop string.

    `pieces`: the bytes of every token, by id (`Tokenizer.pieces`). The results of `push` and, at the end, `finish` join to the
    ids and the text before the stop, or to the whole sequence if there is no stop.
    """

    def __init__(self, pieces: Sequence[bytes], stops: Sequence[str] = ()) -> None:
        self._pieces = pieces
        self._filter = StopFilter(stops)
        self._detokenizer = Detokenizer()

    @classmethod
    def from_state(cls, pieces: Sequence[bytes], stops: Sequence[str], state: PipeState) -> TextPipe:
        """Resume from a state that another pipe returned."""
        pipe = cls(pieces)
        pipe._filter = StopFilter.from_state(stops, state[0])
        pipe._detokenizer = Detokenizer.from_state(state[1])
        return pipe

    def go_on_from(self, earlier: TextPipe) -> None:
        """Take over the bytes held back by another pipe without stops; this pipe has to be new."""
        self._detokenizer = earlier._detokenizer

    @property
    def match(self) -> StopMatch | None:
        """The stop that was found; nothing may be pushed any more, and `finish` still has to be called."""
        return self._filter.match

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held back: the next token's text depends on nothing before it."""
        return not (self._filter.is_holding or self._detokenizer.state())

    def push(self, token_id: int) -> TextPiece:
        """Take the next token and return the output that can be shown now."""
        return TextPiece(*self.released_by(token_id))

    def released_by(self, token_id: int) -> tuple[tuple[int, ...], str]:
        """Take the next token and return the ids and the text that can be shown now."""
        token_ids, data = self._filter.push(token_id, self._pieces[token_id])
        return token_ids, self._detokenizer.push(data)

    def finish(self) -> TextPiece:
        """End the sequence, for any reason: return the output held back that belongs to no stop."""
        token_ids, data = self._filter.finish()
        return TextPiece(token_ids, self._detokenizer.push(data) + self._detokenizer.finish())

    def state(self) -> PipeState:
        """Return the output held back, for `from_state`: tokens that may belong to a stop, bytes of an unfinished character."""
        return self._filter.state(), self._detokenizer.state()


_NO_LIMIT = 2**63


class RepetitionDetector:
    """Finds the moment from which a choice only repeats itself: its last tokens are one n-gram, at least four times in a row.

    The last `num_tokens` tokens also occur `p` tokens earlier, with `p` at most a third of them. Token ids are compared as bytes,
    since `bytearray.find` takes a microsecond for hundreds of tokens, and only at every eighth token. A
    smaller `num_tokens` than 3 counts as 3.
    """

    __slots__ = ("_ids", "_most_bytes", "_num_bytes", "_num_taken")

    def __init__(self, num_tokens: int) -> None:
        num_tokens = max(3, num_tokens)
        self._num_bytes = _ID_BYTES * num_tokens
        self._most_bytes = self._num_bytes + _ID_BYTES * (num_tokens // 3)
        self._ids = bytearray()
        self._num_taken = 0

    def is_repeating(self, token_id: int) -> bool:
        """Take the next token; return whether the choice repeats itself."""
        ids = self._ids
        ids += token_id.to_bytes(_ID_BYTES, "little")
        self._num_taken += 1
        if self._num_taken % _CHECK_EVERY or len(ids) <= self._num_bytes:
            return False
        del ids[: -self._most_bytes]
        tail, last = bytes(ids[-self._num_bytes :]), len(ids) - self._num_bytes
        at = ids.find(tail, 0, -_ID_BYTES)
        while at >= 0 and (last - at) % _ID_BYTES:  # between two tokens
            at = ids.find(tail, at + 1, -_ID_BYTES)
        return at >= 0


_ID_BYTES = 4
_CHECK_EVERY = 8


class OutputProcessor:
    """Takes drawn tokens one by one; `chunk` returns the output since the last chunk. interval: tokens that a chunk needs."""

    __slots__ = (
        "_armed", "_choice", "_ends", "_has_stops", "_held", "_ids", "_is_plain", "_logprobs", "_max_tokens",
        "_min_tokens", "_num_emitted", "_pipe", "_repetition", "_stop_ids", "_stopping_pipe", "_texts",
        "_texts_by_id", "_vocabulary", "interval", "num_generated", "prompt_logprobs", "stop", "stop_token_ids",
    )  # fmt: skip

    def __init__(
        self, params: SamplingParams, vocabulary: Vocabulary, choice: int, options: RequestOptions, echo: str
    ) -> None:
        self._choice = choice
        self._vocabulary = vocabulary
        self.interval = options.interval
        # Without stop strings a token that is text by itself needs no pipe, as long as the pipe holds nothing back.
        pieces, self._texts_by_id = vocabulary.shown(options)
        self._has_stops = bool(params.stop)
        self._is_plain = not self._has_stops
        self._ends = frozenset() if params.ignore_eos else vocabulary.eog_ids
        self._stop_ids = frozenset(params.stop_token_ids)
        self._min_tokens = params.min_tokens
        self._max_tokens = _NO_LIMIT if params.max_tokens is None else params.max_tokens
        self._repetition = RepetitionDetector(params.max_repetition) if params.max_repetition else None
        self._armed = self._min_tokens == 0
        self._stopping_pipe = TextPipe(pieces, params.stop)  # made here, since many stops take time
        self._pipe = self._stopping_pipe if self._armed else TextPipe(pieces)
        self._ids: list[int] = []
        self._texts: list[str] = [echo] if echo else []
        self._logprobs: list[TokenLogprobs] = []
        self._held: deque[TokenLogprobs] = deque()
        self._num_emitted = 0
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.num_generated = 0
        self.stop: str | int | None = None
        self.stop_token_ids: tuple[int, ...] = ()

    def take(self, token_id: int, logprobs: TokenLogprobs | None) -> FinishReason | None:
        """Take the next token; return the finish reason if it is the last token."""
        self.num_generated += 1
        if token_id in self._ends or token_id in self._stop_ids:
            self.stop, self.stop_token_ids = token_id, (token_id,)
            return FinishReason.STOP
        if not self._armed and self.num_generated > self._min_tokens:  # no earlier token can be part of a stop string
            self._stopping_pipe.go_on_from(self._pipe)
            self._pipe = self._stopping_pipe
            self._armed = True
        if self._is_plain and (text := self._texts_by_id[token_id]) is not None:
            self._ids.append(token_id)
            self._texts.append(text)
            if logprobs is not None:
                self._logprobs.append(self._vocabulary.with_texts(token_id, logprobs))
        elif self._push(token_id, logprobs):
            return FinishReason.STOP
        is_loop = self._repetition is not None and self._repetition.is_repeating(token_id)
        if is_loop and self.num_generated >= self._min_tokens:
            return FinishReason.REPETITION
        return FinishReason.LENGTH if self.num_generated >= self._max_tokens else None

    def _push(self, token_id: int, logprobs: TokenLogprobs | None) -> bool:
        """Take the next token by way of the text pipe; return whether a stop string is complete."""
        pipe = self._pipe
        if logprobs is not None:
            self._held.append(self._vocabulary.with_texts(token_id, logprobs))
        self._add(*pipe.released_by(token_id))
        self._is_plain = not self._has_stops and pipe.is_empty
        return pipe.match is not None

    def add_prompt_logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Take the log-probabilities of prompt tokens."""
        self.prompt_logprobs += map(self._vocabulary.with_texts, token_ids, logprobs)

    def with_token_texts(self, chunk: StreamChunk, scored_ids: Sequence[int]) -> StreamChunk:
        """Return a chunk of a worker with the texts of the tokens of its log-probabilities. All chunks share these texts.

        scored_ids: the prompt's tokens, beginning with the first token that has a log-probability in the chunk.
        """
        add = self._vocabulary.with_texts
        return msgspec.structs.replace(
            chunk,
            logprobs=tuple(map(add, chunk.token_ids, chunk.logprobs)),
            prompt_logprobs=tuple(map(add, scored_ids, chunk.prompt_logprobs)),
        )

    def finish(self) -> bool:
        """Flush the output held back, for any end of the choice; return whether a stop string is complete."""
        rest = self._pipe.finish()
        self._add(rest.token_ids, rest.text)
        match = self._pipe.match
        if match is None:
            return False
        # An end-of-generation token within a stop belongs to the stop.
        self.stop, self.stop_token_ids = match.stop, match.token_ids + self.stop_token_ids
        return True

    def resume(self, token_ids: Sequence[int], num_told: int | None, untold: Sequence[TokenLogprobs]) -> None:
        """Resume after tokens that another processor took; call it before anything else. See `GenerationState`."""
        for token_id in token_ids[:num_told] if num_told is not None else ():
            self.take(token_id, None)
        num_held = 0
        if num_told is not None:
            self._num_emitted = len(self._ids)
            self._ids, self._texts = [], []
            num_held = num_told - self._num_emitted
        held_ids = token_ids[num_told - num_held : num_told] if num_told is not None else ()
        self._held.extend(map(self._vocabulary.with_texts, held_ids, untold[:num_held]))
        for index, token_id in enumerate(token_ids[num_told or 0 :], num_held):
            self.take(token_id, untold[index] if index < len(untold) else None)

    def latest_logprobs(self, count: int) -> tuple[TokenLogprobs, ...]:
        """Return the logprobs of the last tokens that are in no chunk yet, at most `count`."""
        held = list(self._held)[-count:] if count else []
        rest = count - len(held)
        return (*(self._logprobs[-rest:] if rest else ()), *held)

    def chunk(self) -> StreamChunk | None:
        """Return the output since the last chunk; None if there is none, or fewer tokens than the interval."""
        if len(self._ids) < self.interval and not (self.interval == 1 and (self._texts or self.prompt_logprobs)):
            return None
        ids, text = tuple(self._ids), "".join(self._texts)
        chunk = StreamChunk(
            index=self._num_emitted,
            token_ids=ids,
            text=text,
            logprobs=tuple(self._logprobs),
            choice=self._choice,
            prompt_logprobs=tuple(self.prompt_logprobs),
        )
        self._num_emitted += len(ids)
        self._ids, self._texts, self._logprobs, self.prompt_logprobs = [], [], [], []
        return chunk

    def last_chunk(self, reason: FinishReason, error: PacelineError | None) -> StreamChunk:
        """Return the chunk that ends the choice, with all that is left; call `finish` before."""
        return StreamChunk(
            index=self._num_emitted,
            token_ids=tuple(self._ids),
            text="".join(self._texts),
            logprobs=tuple(self._logprobs),
            choice=self._choice,
            prompt_logprobs=tuple(self.prompt_logprobs),
            finish_reason=reason,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            error=error,
        )

    def _add(self, token_ids: tuple[int, ...], text: str) -> None:
        if token_ids:
            self._ids += token_ids
            if self._held:
                self._logprobs += [self._held.popleft() for _ in token_ids]
        if text:
            self._texts.append(text)
