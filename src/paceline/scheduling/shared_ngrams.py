"""What drafters have in common that learn n-grams of all sequences: the tokens of each, what is to be learned, and the salts.

Sequences learn from each other within a namespace. A salt of each namespace, made with a secret, goes into every hash, and
tables keep 32 bits of it beside the place: no request finds what one of another namespace has left, nor can it make n-grams that
would be found there.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Namespace = tuple[object, ...]

_TOGETHER = 32  # new tokens of a sequence that are learned at once, as a call of NumPy takes as long for one
_MOST_BEHIND = 64  # sequences with more than is learned in a call; of more the oldest is left
_MOST_ENDED = 1024  # that may go on: preempted ones do, and at `end` look like those that do not
_SECRET_BYTES = 16
_SALT_BYTES = 8


class LearnedSequence:
    """The tokens of a sequence, and how many of them are learned. salt: of its namespace; None where nothing is shared."""

    __slots__ = ("_digest", "has_ended", "is_behind", "num_learned", "salt", "tokens")

    def __init__(self, token_ids: Sequence[int], salt: int | None) -> None:
        self.tokens = array("i", token_ids)
        self.salt = salt
        self.num_learned = self._digest = 0
        self.is_behind = self.has_ended = False

    def leave_queue(self) -> None:
        """Be learned no further until there are new tokens. If it has ended, its tokens are freed."""
        self.is_behind = False
        if self.has_ended:
            self._digest = hash(self.tokens[: self.num_learned].tobytes())
            self.tokens = array("i")

    def goes_on(self, token_ids: Sequence[int], salt: int | None) -> bool:
        """Take these tokens as its own, if they begin with those that were learned before it ended; return whether they do."""
        tokens = array("i", token_ids)
        learned = tokens[: self.num_learned]
        is_same = (
            learned == self.tokens[: self.num_learned] if self.is_behind else hash(learned.tobytes()) == self._digest
        )
        if salt != self.salt or not is_same:
            return False
        self.tokens, self.has_ended = tokens, False
        return True


class SharedNgrams(ABC):
    """A drafter that learns from sequences for those that follow; the tables are its heirs'.

    num_context: tokens before a token that are learned with it. at_once: most tokens that a call learns, so that a long prompt
    delays no tick.
    """

    def __init__(self, num_context: int, at_once: int) -> None:
        self._num_context, self._at_once = num_context, at_once
        self._secret = os.urandom(_SECRET_BYTES)
        self._sequences: dict[int, LearnedSequence] = {}
        self._behind: deque[LearnedSequence] = deque()
        self._ended: OrderedDict[int, LearnedSequence] = OrderedDict()  # the oldest first

    def begin(self, key: int, token_ids: Sequence[int]) -> None:
        """Begin with a sequence that shares nothing, and gets no drafts."""
        self._begin(key, token_ids, None)

    def begin_shared(self, key: int, token_ids: Sequence[int], namespace: Namespace | None) -> None:
        """See `SharingDrafter`."""
        self._begin(key, token_ids, None if namespace is None else self._salt(namespace))

    def propose(self, key: int, max_tokens: int) -> list[int]:
        """See `Drafter`."""
        self._learn_some()
        one = self._sequences[key]
        return [] if one.salt is None else self._proposal(one.tokens, one.salt, max_tokens)

    def observe(self, key: int, token_ids: Sequence[int]) -> None:
        """See `Drafter`."""
        one = self._sequences[key]
        one.tokens.extend(token_ids)
        if len(one.tokens) - one.num_learned >= _TOGETHER:
            self._note(one)
        self._learn_some()

    def rollback(self, key: int, num_tokens: int) -> None:  # noqa: B027 - not abstract: there is nothing to do
        """See `Drafter`; proposals leave nothing behind."""

    def end(self, key: int) -> None:
        """See `Drafter`. What is left of it to learn is learned."""
        one = self._sequences.pop(key, None)
        if one is None:
            return
        if one.salt is not None:
            one.has_ended = True
            self._ended[key] = one
            if len(self._ended) > _MOST_ENDED:
                self._ended.popitem(last=False)
        self._note(one)
        self._learn_some()

    @abstractmethod
    def _proposal(self, tokens: array[int], salt: int, max_tokens: int) -> list[int]:
        """Return what may follow the tokens."""

    @abstractmethod
    def _learn(self, tokens: NDArray[np.int32], num_known: int, salt: int) -> None:
        """Learn the tokens behind the first num_known, which were learned before."""

    def _begin(self, key: int, token_ids: Sequence[int], salt: int | None) -> None:
        one = self._ended.pop(key, None)
        if one is None or not one.goes_on(token_ids, salt):
            one = LearnedSequence(token_ids, salt)
        self._sequences[key] = one
        self._note(one)
        self._learn_some()

    def _note(self, one: LearnedSequence) -> None:
        if one.salt is None or one.is_behind:
            return
        one.is_behind = True
        self._behind.append(one)
        if len(self._behind) > _MOST_BEHIND:
            self._behind.popleft().leave_queue()

    def _learn_some(self) -> None:
        """Learn of the sequence that has waited longest."""
        if not self._behind:
            return
        one = self._behind[0]
        assert one.salt is not None  # noqa: S101 - others are never noted
        start, end = one.num_learned, min(len(one.tokens), one.num_learned + self._at_once)
        before = max(0, start - self._num_context)
        if end > start:
            self._learn(np.frombuffer(one.tokens[before:end], np.int32), start - before, one.salt)
            one.num_learned = end
        if end == len(one.tokens):
            self._behind.popleft().leave_queue()

    def _salt(self, namespace: Namespace) -> int:
        digest = blake2b(repr(namespace).encode(), key=self._secret, digest_size=_SALT_BYTES).digest()
        return int.from_bytes(digest, "little")
