"""A fake backend that kills its process, or breaks its protocol, on command; made in the worker, by name."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

from paceline.errors import ModelLoadError, RpcServerUnavailable
from paceline.observability.metrics import Instrument
from paceline.params import SamplingParams
from paceline.scheduling.records import RequestRecord
from paceline.sequence import Limits, Row, RowOutput
from paceline.testing.fake_backend import BOS, FakeBackend, FakeSampler, limits_of

POISON = BOS
"""A token that ends the process when it is computed; none is ever drawn."""
HIDDEN_POISON = 2
"""The token that ends the process when a sampler accepts it."""


class FaultyBackend(FakeBackend):
    """poison_signal: the signal of a poisoned pass. once: a file; a pass kills with SIGABRT if it does not exist, and makes it.

    babble: then it does not kill, but sends these bytes, in hexadecimal, to the front. again: number of next workers that are
    killed by their first pass. words: the last words of a kill. hangs: the poison makes its thread wait for ever instead.
    token_s: time of a token of a pass, for at most most_slow passes of a worker; the others take no time.
    """

    def __init__(
        self,
        *,
        poison_signal: int = signal.SIGABRT,
        once: str | None = None,
        babble: str = "",
        again: int = 0,
        words: str = "the poison was computed",
        hangs: bool = False,
        token_s: float = 0.0,
        most_slow: int = 2**31,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._again, self._words, self._hangs = again, words, hangs
        self._token_s, self._most_slow = token_s, most_slow
        self._poison_signal, self._once, self._babble = poison_signal, once, bytes.fromhex(babble)

    def make_samplers(self, params: SamplingParams, prompt: list[int]) -> tuple[FakeSampler, ...]:
        if HIDDEN_POISON in prompt:
            self._end()
        return super().make_samplers(params, prompt)

    def step(self, rows: Many[Row], lora: Any) -> list[RowOutput]:
        if any(POISON in row.token_ids for row in rows):
            self._die()
        if self._token_s and self.num_passes < self._most_slow:
            time.sleep(self._token_s * sum(len(row.token_ids) for row in rows))
        if self._once is not None and self.num_passes > 20 and not Path(self._once).exists():
            Path(self._once).touch()
            if self._babble:
                os.write(int(sys.argv[1]), self._babble)
            else:
                self._die()
        elif self._once is not None and Path(self._once).exists() and self._again > Path(self._once).stat().st_size:
            with Path(self._once).open("a", encoding="utf-8") as deaths:
                deaths.write("x")
            self._die()
        return super().step(rows, lora)

    def embed(self, texts: list[list[int]], pooling: str | None) -> list[Any]:
        if any(POISON in text for text in texts):
            self._die()
        return super().embed(texts, pooling)

    def _die(self) -> None:
        os.write(2, f"{self._words}\n".encode())
        self._end()

    def _end(self) -> None:
        if self._hangs:
            threading.Event().wait()
        signal.raise_signal(self._poison_signal)


class ForgetfulBackend(FaultyBackend):
    """Cannot release anything, which no engine survives."""

    def remove(self, seq_id: int) -> None:
        raise RuntimeError(f"sequence {seq_id} does not go away")


def make_forgetful(options: Mapping[str, Any]) -> tuple[FaultyBackend, Limits]:
    backend = ForgetfulBackend(**options)
    return backend, limits_of(backend, options.get("num_seq_ids", 8))


def make(options: Mapping[str, Any]) -> tuple[FaultyBackend, Limits]:
    """needs: a file without which there is no backend.

    away: one with which its RPC server is away; with "die" in it the worker dies.
    """
    needs, away = options.get("needs"), options.get("away")
    if away is not None and Path(away).exists():
        if Path(away).read_text(encoding="utf-8") == "die":
            signal.raise_signal(signal.SIGABRT)
        raise RpcServerUnavailable("the RPC server 10.0.0.2:50052 refuses connections")
    if needs is not None and not Path(needs).exists():
        raise ModelLoadError(f"there is no {needs}")
    backend = FaultyBackend(**{name: value for name, value in options.items() if name not in ("needs", "away")})
    return backend, limits_of(backend, options.get("num_seq_ids", 8))


def make_shrinking(options: Mapping[str, Any]) -> tuple[FaultyBackend, Limits]:
    """first: a file that the first worker makes; later workers, with less memory, have one slot and half the cells."""
    first = Path(options["first"])
    rest = {name: value for name, value in options.items() if name != "first"}
    if first.exists():
        rest |= {"num_seq_ids": 2, "num_cells": rest["num_cells"] // 2}
    first.touch()
    return make(rest)


def refuse(options: Mapping[str, Any]) -> tuple[FaultyBackend, Limits]:
    raise ModelLoadError(f"there is no model {options['name']!r}")


class Broken(Instrument):
    """Fails at the first request."""

    def request_queued(self, record: RequestRecord) -> None:
        raise RuntimeError(f"request {record.key}")


class Restarted(Instrument):
    """Says that it is not the first."""

    def engine_restarted(self, now_s: float) -> None:
        raise RuntimeError("I am the second")
