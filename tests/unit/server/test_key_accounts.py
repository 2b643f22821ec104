"""Limits and usage of API keys, on clocks of the test."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.server.api_errors import ApiError, ApiException
from paceline.server.key_accounts import FILE_NAME, KeyAccount, KeyAccounts, key_digest
from paceline.server.settings import ApiKey, ServerSettings


class Clock:
    """Both clocks of an account: seconds since 00:00 UTC of a day."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def account_of(clock: Clock, **limits: int) -> KeyAccount:
    return KeyAccount(ApiKey(secret="s", tenant="t", **limits), key_digest("s"), clock, clock)  # type: ignore[arg-type]


def refusal(account: KeyAccount, num_tokens: int | None = None) -> ApiError:
    with pytest.raises(ApiException) as caught:
        account.check() if num_tokens is None else account.reserve(num_tokens)
    return caught.value.api_error


def headers(account: KeyAccount) -> dict[str, str]:
    return {name.decode().removeprefix("x-ratelimit-"): value.decode() for name, value in account.headers()}


def test_tokens_of_a_minute_come_back_second_by_second() -> None:
    """The error and the headers say when enough of them are there; a refused prompt costs nothing."""
    clock = Clock()
    account = account_of(clock, tokens_per_minute=60)
    account.check()
    account.reserve(50)
    found = refusal(account, 20)
    assert (found.status, found.code, found.retry_after_s) == (429, "rate_limit_exceeded", 10)
    assert headers(account) == {"limit-tokens": "60", "remaining-tokens": "10", "reset-tokens": "50s"}
    clock.now_s += 10
    account.reserve(20)
    assert refusal(account).retry_after_s == 1
    clock.now_s += 1000
    assert headers(account)["remaining-tokens"] == "60"  # and no more than that


def test_a_prompt_beyond_the_minute_needs_all_of_it_and_is_paid_off_afterwards() -> None:
    """Otherwise it could never run. Generated tokens are charged, and cached ones are returned, in the same way."""
    clock = Clock()
    account = account_of(clock, tokens_per_minute=60)
    account.reserve(100)
    assert refusal(account).retry_after_s == 41
    account.charge(20)
    assert refusal(account).retry_after_s == 61
    account.charge(-90)
    assert headers(account)["remaining-tokens"] == "30"
    assert refusal(account, 100).retry_after_s == 30


def test_requests_at_once_are_limited() -> None:
    """The next one is accepted when one of them has ended."""
    account = account_of(Clock(), max_requests=2)
    account.num_in_flight = 2
    assert refusal(account).code == "too_many_requests"
    assert headers(account) == {"limit-requests": "2", "remaining-requests": "0", "reset-requests": "1s"}
    account.num_in_flight = 1
    account.check()


def test_the_budget_of_a_day_ends_at_midnight() -> None:
    """Retry-After is the time until then."""
    clock = Clock()
    account = account_of(clock, tokens_per_day=100)
    account.charge(100)
    found = refusal(account)
    assert (found.code, found.retry_after_s) == ("insufficient_quota", 86_400 - 1000)
    clock.now_s = 86_400.0
    account.check()
    assert account.tokens_today == 0


def accounts_of(clock: Clock, folder: Path, *keys: ApiKey) -> KeyAccounts:
    settings = ServerSettings(api_keys=keys, engine_options={"state_folder": folder})
    return KeyAccounts(settings, clock, clock)


def test_the_tokens_of_the_day_outlive_a_restart_and_not_the_day(tmp_path: Path) -> None:
    """They are kept in the state folder, by the key's digest: the file has no key. A damaged file counts as none."""
    clock, key = Clock(), ApiKey(secret="hidden", tokens_per_day=100)
    accounts = accounts_of(clock, tmp_path, key)
    (account,) = accounts
    account.charge(70)
    accounts.save()
    assert "hidden" not in (tmp_path / FILE_NAME).read_text()
    (again,) = accounts_of(clock, tmp_path, ApiKey(secret="hidden", tokens_per_day=200))
    assert again.tokens_today == 70
    clock.now_s += 86_400
    (later,) = accounts_of(clock, tmp_path, key)
    assert later.tokens_today == 0
    (tmp_path / FILE_NAME).write_text("{")
    (fresh,) = accounts_of(clock, tmp_path, key)
    assert fresh.tokens_today == 0


def test_a_reload_keeps_the_counts_and_changes_the_limits(tmp_path: Path) -> None:
    """Of a key that stays; a removed key is forgotten."""
    clock = Clock()
    accounts = accounts_of(clock, tmp_path, ApiKey(secret="a", tokens_per_minute=60), ApiKey(secret="b"))
    kept, dropped = accounts
    kept.reserve(50)
    accounts.apply([ApiKey(secret="a", tokens_per_minute=600, name="first"), ApiKey(secret="c", tokens_per_day=5)])
    names = [account.name for account in accounts]
    assert names == ["first", key_digest("c").hex()[:12]]
    assert accounts.of(key_digest("a")) is kept
    assert accounts.of(key_digest("b")) is None and dropped.name not in names
    assert headers(kept)["remaining-tokens"] == "10"
    assert headers(kept)["limit-tokens"] == "600"
