"""Usage and limits of API keys: tokens per minute, requests at once, and a budget of tokens a day. On the event loop.

Computed tokens count: prompt tokens that did not come from the cache, and generated tokens. A prompt is charged whole when it is
submitted, and its cached tokens are returned at the request's end; generated tokens are charged as the response is read.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

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
    tokens: dict[str, int]


def key_digest(secret: str) -> bytes:
    """Return the digest by which a key is known."""
    return hashlib.sha256(secret.encode()).digest()


class KeyAccount:
    """One API key: its counts, and what its limits leave.

    Attributes:
        key: The key with its limits; a reload replaces it.
        name: The key's name, else the beginning of its digest.
        usage: The counts since the server's start.
        tokens_today: Computed tokens of the day.
        num_in_flight: Requests in progress.
    """

    def __init__(self, key: ApiKey, digest: bytes, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._clock, self._wall = clock, wall
        self.name = key.name or digest.hex()[:12]
        self.usage = KeyUsage()
        self.tokens_today = self.num_in_flight = 0
        self._day = self._today()
        self._filled_s = clock()
        self._balance = float(key.tokens_per_minute or 0)
        self.key = key

    def _today(self) -> int:
        return int(self._wall() // _DAY_S)

    def apply(self, key: ApiKey) -> None:
        """Take over new limits. Tokens that the old limit left stay, up to the new limit."""
        self._fill()
        if self.key.tokens_per_minute is None:
            self._balance = float(key.tokens_per_minute or 0)
        self.key, self.name = key, key.name or self.name
        self._fill()

    def _fill(self) -> None:
        """Add the tokens of the time that has passed, and begin a new day."""
        now_s, today = self._clock(), self._today()
        if self.key.tokens_per_minute is not None:
            filled = self._balance + (now_s - self._filled_s) * self.key.tokens_per_minute / 60
            self._balance = min(filled, float(self.key.tokens_per_minute))
        self._filled_s = now_s
        if today != self._day:
            self._day, self.tokens_today = today, 0

    def check(self) -> None:
        """Raise `ApiException` (429) if a limit allows no request now."""
        self._fill()
        key = self.key
        if key.max_requests is not None and self.num_in_flight >= key.max_requests:
            text = f"{self.num_in_flight} requests of this API key are in flight, which is its limit; try again later"
            raise ApiException(ApiError(429, "rate_limit_error", "too_many_requests", text, retry_after_s=1))
        if key.tokens_per_day is not None and self.tokens_today >= key.tokens_per_day:
            wait_s = _DAY_S - int(self._wall() % _DAY_S)
            text = f"the API key has used its {key.tokens_per_day} tokens of the day; the next day begins at 00:00 UTC"
            raise ApiException(ApiError(429, "rate_limit_error", "insufficient_quota", text, retry_after_s=wait_s))
        if key.tokens_per_minute is not None and self._balance < 1:
            raise self._exceeded(1)

    def reserve(self, num_tokens: int) -> None:
        """Charge the prompt tokens of a request. Raises `ApiException` (429), and charges nothing, if too few are left.

        A prompt with more tokens than the limit of a minute needs all of them: it is accepted, and the next request waits longer.
        """
        self._fill()
        per_minute = self.key.tokens_per_minute
        if per_minute is not None and (needed := min(num_tokens, per_minute)) > self._balance + 1e-6:
            raise self._exceeded(needed)
        self.charge(num_tokens)

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
        """Count the usages of a request that has ended."""
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
    reset = f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
    for name, value in (("limit", limit), ("remaining", remaining), ("reset", reset)):
        yield f"x-ratelimit-{name}-{kind}".encode(), str(value).encode()


class KeyAccounts:
    """The accounts of a server's keys. They outlive a reload of the keys, and the tokens of the day a restart.

    The tokens of the day are kept in a file of the engine's state folder, if it has one. A file that cannot be read counts as
    none. What was used in the last ten seconds before a crash is lost.
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
        self._accounts: dict[bytes, KeyAccount] = {}
        self._saved_s = -math.inf
        self.apply(settings.api_keys)
        for digest, tokens in self._read().items():
            if account := self._accounts.get(bytes.fromhex(digest)):
                account.tokens_today = tokens

    def apply(self, keys: Iterable[ApiKey]) -> None:
        """Take over the keys; the accounts of removed keys are dropped."""
        before, self._accounts = self._accounts, {}
        for key in keys:
            digest = key_digest(key.secret)
            account = before.get(digest)
            if account is None:
                account = KeyAccount(key, digest, self._clock, self._wall)
            else:
                account.apply(key)
            self._accounts[digest] = account

    def of(self, digest: bytes) -> KeyAccount | None:
        """Return the account of a key."""
        return self._accounts.get(digest)

    def __iter__(self) -> Iterator[KeyAccount]:
        return iter(tuple(self._accounts.values()))

    def samples(self) -> Iterator[Sample]:
        """Yield the metrics of each key. Any thread."""
        for account in self:
            label, usage = ("key", account.name), account.usage
            yield Sample(KEY_REQUESTS, "counter", (label,), usage.requests)
            for kind in ("prompt", "cached", "completion"):
                yield Sample(KEY_TOKENS, "counter", (label, ("kind", kind)), getattr(usage, f"{kind}_tokens"))

    def _date(self) -> str:
        return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=self._wall())).date().isoformat()

    def _read(self) -> Mapping[str, int]:
        if self._path is None or not self._path.exists():
            return {}
        try:
            found = msgspec.json.decode(self._path.read_bytes(), type=_DayFile)
            return found.tokens if found.day == self._date() else {}
        except (OSError, ValueError) as error:
            _log.error("the tokens of the day of the API keys start at 0, as %s cannot be read: %s", self._path, error)
            return {}

    def save_soon(self) -> None:
        """Write the file in a thread, at most every ten seconds."""
        if self._path is not None and self._clock() - self._saved_s >= _SAVE_INTERVAL_S:
            self._saved_s = self._clock()
            asyncio.get_running_loop().run_in_executor(None, self.save)

    def save(self) -> None:
        """Write the tokens of the day. Any thread; an error is logged."""
        if self._path is None or not self._accounts:
            return
        tokens = {digest.hex(): account.tokens_today for digest, account in tuple(self._accounts.items())}
        partial = self._path.with_suffix(".partial")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(msgspec.json.encode(_DayFile(day=self._date(), tokens=tokens)))
            partial.replace(self._path)
        except OSError as error:
            _log.error("the tokens of the day of the API keys could not be written: %s", error)
