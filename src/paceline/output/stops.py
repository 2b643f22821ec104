"""Stop strings, found in the bytes of one sequence while its tokens arrive.

Of all places where a stop string occurs in the bytes, the one that starts earliest counts; of stops that start there
the shortest. That depends neither on the order of the list nor on where tokens begin and end. So a stop that is
complete is not final while a longer one that began before it may still be completed.

At any moment, let `cut` be where the first stop that is or might become complete begins, or else the end of the bytes.
ReleasedTokens are all bytes before `cut`, and all tokens that end by it. A token in which a stop begins thus belongs to the
stop, while its bytes before the stop are text. A stop is UTF-8 and begins with a whole character, so `cut` never
divides one.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import msgspec

from paceline import validation
from paceline.errors import InvalidParams, InvalidType

_ROOT = 0
_NO_CHILD = -1


class ReleasedTokens(msgspec.Struct, frozen=True):
    """Token ids and bytes that no stop can claim any more; either may be empty without the other."""

    token_ids: tuple[int, ...] = ()
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class StopMatch:
    """The stop that ended a sequence.

    `token_ids`: the token in which the stop begins and all that were pushed since; with those released before they are
    all tokens of the sequence.
    """

    stop: str
    token_ids: tuple[int, ...]


class StopFilter:
    """Passes the tokens of one sequence through and holds back what might be the beginning of a stop string.

    `stops` are strings that are not empty; raises `InvalidType` or `InvalidParams` otherwise. Once `match` is set
    nothing more may be pushed.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._automaton = automaton = _shared_automaton(tuple(_encode(stops)))
        self._stops = {stop.encode(): stop for stop in stops}
        self._first_bytes = automaton.first_bytes
        self._node = _ROOT
        self._data = bytearray()  # the bytes that are held back
        self._begin = 0  # where in the sequence they begin
        self._tokens: deque[tuple[int, int]] = deque()  # tokens held back, and where each ends
        self._best: tuple[int, int] | None = None  # begin and end of the earliest stop that is complete
        self._match: StopMatch | None = None

    @classmethod
    def from_state(cls, stops: Sequence[str], state: Iterable[tuple[int, bytes]]) -> StopFilter:
        """Resume where the filter that returned `state` stood."""
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

    def push(self, token_id: int, data: bytes) -> ReleasedTokens:
        """Take the next token and its bytes, and return what can be passed on."""
        if self._match is not None:
            raise RuntimeError("a stop string has matched: no token can follow it")
        if self._node == _ROOT and self._first_bytes.isdisjoint(data):
            self._begin += len(data)
            return ReleasedTokens((token_id,), data)
        self._data += data
        end = self._begin + len(self._data)
        self._tokens.append((token_id, end))
        if self._scan(end - len(data), data):
            return self._settle()
        return self._release(end - self._automaton.depth[self._node])

    def finish(self) -> ReleasedTokens:
        """End the sequence: settle on a stop that is complete, or return everything that was held back."""
        if self._match is not None:
            return ReleasedTokens()
        if self._best is not None:
            return self._settle()
        self._node = _ROOT
        return self._release(self._begin + len(self._data))

    def state(self) -> tuple[tuple[int, bytes], ...]:
        """Return the tokens that are held back, each with those of its bytes that are; only before `match` is set."""
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

    def _settle(self) -> ReleasedTokens:
        assert self._best is not None  # noqa: S101 - called where a best match is known
        begin, end = self._best
        stop = self._stops[bytes(self._data[begin - self._begin : end - self._begin])]
        released = self._release(begin)
        self._match = StopMatch(stop, tuple(token_id for token_id, _ in self._tokens))
        self._tokens.clear()
        self._data.clear()
        return released

    def _release(self, cut: int) -> ReleasedTokens:
        """Everything before `cut`, a place in the sequence."""
        data = bytes(self._data[: cut - self._begin])
        del self._data[: cut - self._begin]
        self._begin = cut
        token_ids = []
        while self._tokens and self._tokens[0][1] <= cut:
            token_ids.append(self._tokens.popleft()[0])
        return ReleasedTokens(tuple(token_ids), data)


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
