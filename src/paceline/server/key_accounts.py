"""Usage and limits of API keys: tokens per minute, requests at once, and a budget of tokens a day. On the event loop.

Computed tokens count: prompt tokens that did not come from the cache, and generated tokens. A prompt is charged whole when it is
submitted, and its cached tokens are returned at the request's end, as is a prompt that was never begun. Generated tokens are
charged as the response is read.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Final

import msgspec

from paceline.observability.metric_table import Sample
from paceline.server.api_errors import ApiError, ApiException
from paceline.server.settings import ApiKey, ServerSettings
from paceline.streaming import Usage

FILE_NAME: Final = "key-usage.json"
"""The file in the state folder that has the tokens of the day."""

KEY_REQUESTS: Final = "paceline_key_requests_total"
KEY_TOKENS: Final = "paceline_key_tokens_total"
KEY_HELP: Final = {
    KEY_REQUESTS: "Requests of an API key that were accepted, with --metrics-per-key.",
    KEY_TOKENS: "Tokens of an API key by kind: prompt (with cached), cached, completion; with --metrics-per-key.",
}

_SAVE_INTERVAL_S: Final = 10.0
_DAY_S: Final = 86_400
_log = logging.getLogger("paceline.server")


class KeyUsage(msgspec.Struct, kw_only=True):
    """Counts of an API key since the server's start; prompt_tokens include cached_tokens."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class _DayFile(msgspec.Struct, kw_only=True):
    """The content of the file. day: in UTC. tokens: computed tokens by the key's digest."""

    day: str
    tokens: dict[str, Annotated[int, msgspec.Meta(ge=0)]]


def key_digest(secret: str) -> bytes:
    """Return the digest by which a key is known."""
    return hashlib.sha256(secret.encode()).digest()


class KeyAccount:
    """One API key: its counts, and what its limits leave.

    Attributes:
        key: The key with its limits; a reload replaces it.
        usage: The counts since the server's start.
        tokens_today: Computed tokens of the day.
        num_in_flight: Requests in progress.
    """

    def __init__(self, key: ApiKey, number: int, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._clock, self._wall = clock, wall
        self._number = number
        self.usage = KeyUsage()
        self.tokens_today = self.num_in_flight = 0
        self._day = self._today()
        self._filled_s = clock()
        self._balance = float(key.tokens_per_minute or 0)
        self.key = key

    @property
    def name(self) -> str:
        """The key's name, else its number."""
        return self.key.shown_name(self._number)

    def _today(self) -> int:
        return int(self._wall() // _DAY_S)

    def apply(self, key: ApiKey) -> None:
        """Take over new limits. Tokens that the old limit left stay, up to the new limit."""
        self._fill()
        if self.key.tokens_per_minute is None:
            self._balance = float(key.tokens_per_minute or 0)
        self.key = key
        self._fill()

    def tokens_of_day(self) -> int:
        """Return the computed tokens of the present day."""
        self._fill()
        return self.tokens_today

    def _fill(self) -> None:
        """Add the tokens of the time that has passed, and begin a new day."""
        now_s, today = self._clock(), self._today()
        if self.key.tokens_per_minute is not None:
            filled = self._balance + (now_s - self._filled_s) * self.key.tokens_per_minute / 60
            self._balance = min(filled, float(self.key.tokens_per_minute))
        self._filled_s = now_s
        if today > self._day or today < self._day - 1:  # a clock that is set back over midnight begins no day
            self._day, self.tokens_today = today, 0

    def check(self) -> None:
        """Raise `ApiException` (429) if a limit allows no request now."""
        self._fill()
        key = self.key
        if key.max_requests is not None and self.num_in_flight >= key.max_requests:
            text = f"{self.num_in_flight} requests of this API key are in flight, which is its limit; try again later"
            raise ApiException(ApiError(429, "rate_limit_error", "too_many_requests", text, retry_after_s=1))
        self._check_day(1)
        if key.tokens_per_minute is not None and self._balance < 1:
            raise self._exceeded(1)

    def reserve(self, num_tokens: int) -> None:
        """Charge the prompt tokens of a request. Raises `ApiException` (429), and charges nothing, if too few are left.

        A prompt with more tokens than a limit needs all of them: it is accepted, and the next request waits longer.
        """
        self._fill()
        self._check_day(num_tokens)
        per_minute = self.key.tokens_per_minute
        if per_minute is not None and (needed := min(num_tokens, per_minute)) > self._balance + 1e-6:
            raise self._exceeded(needed)
        self.charge(num_tokens)

    def _check_day(self, num_tokens: int) -> None:
        per_day = self.key.tokens_per_day
        if per_day is not None and (needed := min(num_tokens, per_day)) > per_day - self.tokens_today:
            wait_s = _DAY_S - int(self._wall() % _DAY_S)
            text = (
                f"the budget of this API key is {per_day} tokens a day, and {max(0, per_day - self.tokens_today)} are left, "
                f"{needed} needed; the next day begins at 00:00 UTC"
            )
            raise ApiException(ApiError(429, "rate_limit_error", "insufficient_quota", text, retry_after_s=wait_s))

    def _exceeded(self, needed: int) -> ApiException:
        per_minute = self.key.tokens_per_minute or 1
        wait_s = max(1, math.ceil((needed - self._balance) * 60 / per_minute))
        text = (
            f"the limit of this API key is {per_minute} tokens per minute, and {max(0, int(self._balance))} are left, "
            f"{needed} needed; try again in {wait_s} s"
        )
        return ApiException(ApiError(429, "rate_limit_error", "rate_limit_exceeded", text, retry_after_s=wait_s))

    def charge(self, num_tokens: int) -> None:
        """Charge computed tokens; a negative number returns some."""
        self._fill()
        self._balance -= num_tokens
        self.tokens_today = max(0, self.tokens_today + num_tokens)

    def count(self, usages: Iterable[Usage]) -> None:
        """Count a request that has ended, and its usages."""
        self.usage.requests += 1
        for usage in usages:
            self.usage.prompt_tokens += usage.prompt_tokens
            self.usage.cached_tokens += usage.cached_tokens
            self.usage.completion_tokens += usage.completion_tokens

    def headers(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield OpenAI's headers about the limits: limit, remaining and reset of requests and tokens."""
        self._fill()
        key = self.key
        if key.max_requests is not None:
            remaining = max(0, key.max_requests - self.num_in_flight)
            yield from _headers("requests", key.max_requests, remaining, 0 if remaining else 1)
        if key.tokens_per_minute is not None:
            reset_s = (key.tokens_per_minute - self._balance) * 60 / key.tokens_per_minute
            yield from _headers("tokens", key.tokens_per_minute, max(0, int(self._balance)), reset_s)

    def members(self) -> dict[str, object]:
        """Return the entry of /v1/usage."""
        self._fill()
        key = self.key
        return {
            "object": "usage",
            "key": self.name,
            "tenant": key.tenant,
            **msgspec.structs.asdict(self.usage),
            "requests_in_flight": self.num_in_flight,
            "tokens_today": self.tokens_today,
            "limits": {
                "max_requests": key.max_requests,
                "tokens_per_minute": key.tokens_per_minute,
                "tokens_per_day": key.tokens_per_day,
                "weight": key.weight,
            },
        }


def _headers(kind: str, limit: int, remaining: int, reset_s: float) -> Iterator[tuple[bytes, bytes]]:
    minutes, seconds = divmod(math.ceil(reset_s), 60)
    hours, minutes = divmod(minutes, 60)
    reset = f"{hours}h" * (hours > 0) + f"{minutes}m" * (hours + minutes > 0) + f"{seconds}s"
    for name, value in (("limit", limit), ("remaining", remaining), ("reset", reset)):
        yield f"x-ratelimit-{name}-{kind}".encode(), str(value).encode()


class KeyAccounts:
    """The accounts of a server's keys. They outlive a reload of the keys, and the tokens of the day a restart.

    A removed key keeps its account: for its batches, and for the case that it is added again. Iterating yields the accounts of
    the present keys.

    The tokens of the day are kept in a file of the engine's state folder, if it has one. A file that cannot be read counts as
    none. It is written every ten seconds while there are requests, and once more after them.
    """

    def __init__(
        self,
        settings: ServerSettings,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        folder = settings.engine_options.get("state_folder")
        self._path = None if folder is None else Path(folder) / FILE_NAME
        self._clock, self._wall = clock, wall
        self._accounts: dict[bytes, KeyAccount] = {}  # by digest, also of removed keys
        self._present: tuple[KeyAccount, ...] = ()
        self._stored = self._read()  # by digest, of keys without an account
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Future[None] | None = None
        self._is_changed = False  # since the last record that was written
        self.apply(settings.api_keys)

    def apply(self, keys: Iterable[ApiKey]) -> None:
        """Take over the keys."""
        present = []
        for key in keys:
            digest = key_digest(key.secret)
            account = self._accounts.get(digest)
            if account is None:
                account = self._accounts[digest] = KeyAccount(key, len(self._accounts) + 1, self._clock, self._wall)
                if self._stored.day == self._date():
                    account.tokens_today = self._stored.tokens.pop(digest.hex(), 0)
            else:
                account.apply(key)
            present.append(account)
        self._present = tuple(present)

    def of(self, digest: bytes) -> KeyAccount | None:
        """Return the account of a key that is or was the server's."""
        return self._accounts.get(digest)

    def of_batch(self, digest: bytes, tenant: str) -> KeyAccount | None:
        """Return the account of a batch's key; if the key was removed before a restart, that of its tenant's first key."""
        return self.of(digest) or next((account for account in self if account.key.tenant == tenant), None)

    def __iter__(self) -> Iterator[KeyAccount]:
        return iter(self._present)

    def samples(self) -> Iterator[Sample]:
        """Yield the metrics of each key. Any thread."""
        for account in self:
            label, usage = ("key", account.name), account.usage
            yield Sample(KEY_REQUESTS, "counter", (label,), usage.requests)
            for kind in ("prompt", "cached", "completion"):
                yield Sample(KEY_TOKENS, "counter", (label, ("kind", kind)), getattr(usage, f"{kind}_tokens"))

    def _date(self) -> str:
        return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=self._wall())).date().isoformat()

    def _read(self) -> _DayFile:
        if self._path is not None and self._path.exists():
            try:
                return msgspec.json.decode(self._path.read_bytes(), type=_DayFile)
            except (OSError, ValueError) as error:
                _log.error("the tokens of the day of the API keys start at 0: %s cannot be read: %s", self._path, error)
        return _DayFile(day="", tokens={})

    def save_soon(self) -> None:
        """Write the file in a thread within ten seconds, and again while requests are in flight."""
        self._is_changed = True
        if self._path is not None and self._timer is None and self._writing is None:
            self._timer = asyncio.get_running_loop().call_later(_SAVE_INTERVAL_S, self._save)

    def _save(self) -> None:
        self._timer, self._is_changed = None, False
        self._writing = asyncio.get_running_loop().run_in_executor(None, self._write, self._record())
        self._writing.add_done_callback(self._end_writing)

    def _end_writing(self, _: object) -> None:
        self._writing = None
        if self._is_changed or any(account.num_in_flight for account in self._accounts.values()):
            self.save_soon()

    async def aclose(self) -> None:
        """Write the file, after the last request."""
        if self._writing is not None:
            await self._writing
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.to_thread(self._write, self._record())

    def _record(self) -> _DayFile:
        day = self._date()
        tokens = dict(self._stored.tokens) if self._stored.day == day else {}
        for digest, account in self._accounts.items():
            if number := account.tokens_of_day():
                tokens[digest.hex()] = number
        return _DayFile(day=day, tokens=tokens)

    def _write(self, record: _DayFile) -> None:
        """Replace the file. Any thread; an error is logged."""
        if self._path is None or not self._accounts:
            return
        partial = self._path.with_suffix(f".{os.getpid()}.partial")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(partial, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.write(msgspec.json.encode(record))
            partial.replace(self._path)
        except OSError as error:
            _log.error("the tokens of the day of the API keys could not be written: %s", error)
