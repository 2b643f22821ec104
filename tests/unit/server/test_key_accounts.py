"""Limits and usage of API keys, on clocks of the test."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import msgspec
import pytest
from tests import virtual_time

from paceline.server.api_errors import ApiError, ApiException
from paceline.server.application import build_app
from paceline.server.key_accounts import FILE_NAME, KeyAccount, KeyAccounts, key_digest
from paceline.server.request_context import RequestContext
from paceline.server.settings import ApiKey, ServerSettings
from paceline.streaming import FinishReason, Usage

DIGEST, DIGEST_A = key_digest("hidden").hex(), key_digest("a").hex()


class Clock:
    """Both clocks of an account: seconds since 00:00 UTC of a day."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def account_of(clock: Clock, **limits: int) -> KeyAccount:
    return KeyAccount(ApiKey(secret="s", tenant="t", **limits), 1, clock, clock)  # type: ignore[arg-type]


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


def test_prompts_of_a_day_are_reserved_one_by_one() -> None:
    """Requests that were checked before, and still prepared their prompts, get no more than is left."""
    account = account_of(Clock(), tokens_per_day=100)
    for _ in range(3):
        account.check()
    account.reserve(60)
    found = refusal(account, 50)
    assert (found.code, found.retry_after_s) == ("insufficient_quota", 86_400 - 1000)
    assert "40 are left, 50 needed" in found.message
    account.reserve(40)
    assert refusal(account, 1).code == "insufficient_quota"
    assert account.tokens_today == 100


def test_a_prompt_beyond_the_day_needs_all_of_it() -> None:
    """It is accepted if nothing of the day is used."""
    account = account_of(Clock(), tokens_per_day=100)
    account.reserve(150)
    assert refusal(account, 150).code == "insufficient_quota"
    assert account.tokens_today == 150


def test_a_long_reset_has_hours() -> None:
    """As OpenAI writes it."""
    account = account_of(Clock(), tokens_per_minute=1)
    account.charge(61)
    assert headers(account)["reset-tokens"] == "1h1m0s"


def usage_after(reason: FinishReason, usage: Usage) -> tuple[int, int, int]:
    """Return the requests and prompt tokens of an account, and its tokens of the day, after a request of 1000 tokens."""
    account = account_of(Clock())
    request = RequestContext("id", account=account)
    request.reserve(1000)
    request.num_parts = 1
    request.finished.append((reason, usage))
    request.settle()
    return account.usage.requests, account.usage.prompt_tokens, account.tokens_today


def test_a_request_is_charged_for_the_tokens_that_it_computed() -> None:
    """Cached tokens and the prompt of a request that failed in the queue cost nothing; a prompt that was begun counts whole."""
    queued = Usage(prompt_tokens=1000, queue_s=0.05)
    begun = Usage(prompt_tokens=1000, queue_s=0.05, prefill_s=0.1)
    whole = Usage(prompt_tokens=1000, cached_tokens=400, completion_tokens=7, prefill_s=0.1, ttft_s=0.2)
    assert usage_after(FinishReason.DEADLINE, queued) == (1, 0, 0)
    assert usage_after(FinishReason.DEADLINE, begun) == (1, 1000, 1000)
    assert usage_after(FinishReason.LENGTH, whole) == (1, 1000, 607)
    assert usage_after(FinishReason.STOP, Usage(prompt_tokens=1000)) == (1, 1000, 1000)  # an embedding


def test_a_request_that_submitted_nothing_is_not_counted() -> None:
    """It was refused after its prompt had been charged, or before."""
    account = account_of(Clock(), tokens_per_minute=60)
    request = RequestContext("id", account=account)
    request.reserve(50)
    request.settle()
    assert (account.usage.requests, account.tokens_today) == (0, 0)
    assert headers(account)["remaining-tokens"] == "60"


def accounts_of(clock: Clock, folder: Path, *keys: ApiKey) -> KeyAccounts:
    settings = ServerSettings(api_keys=keys, engine_options={"state_folder": folder})
    return KeyAccounts(settings, clock, clock)


def test_the_tokens_of_the_day_outlive_a_restart_and_not_the_day(tmp_path: Path) -> None:
    """They are kept in the state folder, by the key's digest: the file has no key. A damaged file counts as none."""
    clock, key = Clock(), ApiKey(secret="hidden", tokens_per_day=100)
    accounts = accounts_of(clock, tmp_path, key)
    (account,) = accounts
    account.charge(70)
    asyncio.run(accounts.aclose())
    assert "hidden" not in (tmp_path / FILE_NAME).read_text()
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600
    (again,) = accounts_of(clock, tmp_path, ApiKey(secret="hidden", tokens_per_day=200))
    assert again.tokens_today == 70
    clock.now_s += 86_400
    (later,) = accounts_of(clock, tmp_path, key)
    assert later.tokens_today == 0
    for damaged in (
        "{",
        '{"day": "1970-01-02", "tokens": {"zz": "5"}}',
        f'{{"day": "1970-01-02", "tokens": {{"{DIGEST}": -5}}}}',
    ):
        (tmp_path / FILE_NAME).write_text(damaged)
        (fresh,) = accounts_of(clock, tmp_path, key)
        assert fresh.tokens_today == 0


def test_a_restart_charges_no_tokens_of_the_day_before(tmp_path: Path) -> None:
    """The key was idle since midnight when the file was written."""
    clock, key = Clock(), ApiKey(secret="a", tokens_per_day=100)
    accounts = accounts_of(clock, tmp_path, key)
    (account,) = accounts
    account.charge(100)
    clock.now_s = 86_400.0
    asyncio.run(accounts.aclose())
    (again,) = accounts_of(clock, tmp_path, key)
    assert again.tokens_today == 0
    again.check()


def test_a_key_that_is_removed_and_added_again_has_its_tokens_of_the_day(tmp_path: Path) -> None:
    """After a reload and after a restart. Its requests in flight are the same, and its batches keep its account."""
    clock, key, other = Clock(), ApiKey(secret="a"), ApiKey(secret="b")
    accounts = accounts_of(clock, tmp_path, key, other)
    account = next(iter(accounts))
    account.charge(70)
    accounts.apply([other])
    assert account not in tuple(accounts) and accounts.of(key_digest("a")) is account
    asyncio.run(accounts.aclose())
    restarted = accounts_of(clock, tmp_path, other)
    asyncio.run(restarted.aclose())
    restarted.apply([other, key])
    assert [account.tokens_today for account in restarted] == [0, 70]
    accounts.apply([key, other])
    assert next(iter(accounts)) is account


def test_a_batch_of_a_removed_key_has_an_account_of_its_tenant(tmp_path: Path) -> None:
    """After a restart that of another key of the tenant; none if the tenant has no key any more."""
    keys = ApiKey(secret="a", tenant="x"), ApiKey(secret="b", tenant="x"), ApiKey(secret="c", tenant="y")
    accounts = accounts_of(Clock(), tmp_path, *keys)
    first, _, _ = accounts
    accounts.apply(keys[1:])
    assert accounts.of_batch(key_digest("a"), "x") is first
    restarted = accounts_of(Clock(), tmp_path, *keys[1:])
    second, third = restarted
    assert restarted.of_batch(key_digest("a"), "x") is second
    assert restarted.of_batch(key_digest("c"), "y") is third
    assert restarted.of_batch(key_digest("d"), "z") is None


@pytest.mark.parametrize(("tenant", "names"), [("library", ["mine"]), ("", ["mine", "other"])])
def test_a_key_of_a_tenant_sees_its_own_usage_alone(tenant: str, names: list[str]) -> None:
    """Also on a server with a single tenant, whose keys are operators' keys; a key without a tenant sees all keys."""
    keys = ApiKey(secret="a", tenant=tenant, name="mine"), ApiKey(secret="b", tenant=tenant, name="other")
    app = build_app(ServerSettings(api_keys=keys))

    async def found() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.get("/v1/usage", headers={"x-api-key": "a"})

    assert [entry["key"] for entry in asyncio.run(found()).json()["data"]] == names


def test_a_clock_that_is_set_back_begins_no_day() -> None:
    """Over midnight and again: the tokens of the day stay. A clock that was wrong by days does begin one."""
    clock = Clock()
    clock.now_s = 86_400.0 + 1
    account = account_of(clock, tokens_per_day=100)
    account.charge(100)
    clock.now_s -= 2
    assert account.tokens_of_day() == 100
    clock.now_s += 2
    assert account.tokens_of_day() == 100
    clock.now_s += 10 * 86_400
    account.charge(100)
    clock.now_s -= 10 * 86_400
    assert account.tokens_of_day() == 0


def test_the_file_is_written_while_a_request_is_in_flight_and_after_it(tmp_path: Path) -> None:
    """Ten seconds after each count at the latest, with no further request."""

    async def stored() -> list[int]:
        clock = asyncio.get_running_loop().time
        settings = ServerSettings(api_keys=(ApiKey(secret="a"),), engine_options={"state_folder": tmp_path})
        accounts = KeyAccounts(settings, clock, clock)
        (account,) = accounts
        account.num_in_flight = 1
        accounts.save_soon()
        found = []
        for num_in_flight in (1, 1, 0):
            account.charge(5)
            account.num_in_flight = num_in_flight
            await asyncio.sleep(10.5)
            await writing(accounts)
            found.append(msgspec.json.decode((tmp_path / FILE_NAME).read_bytes())["tokens"][DIGEST_A])
        assert accounts._timer is None
        return found

    async def writing(accounts: KeyAccounts) -> None:
        if accounts._writing is not None:
            await accounts._writing

    assert virtual_time.run(stored()) == [5, 10, 15]


def test_a_reload_keeps_the_counts_and_changes_the_limits(tmp_path: Path) -> None:
    """Of a key that stays. A removed key is in no list, and a key without a name has its number."""
    clock = Clock()
    accounts = accounts_of(clock, tmp_path, ApiKey(secret="a", tokens_per_minute=60), ApiKey(secret="b"))
    kept, dropped = accounts
    kept.reserve(50)
    accounts.apply([ApiKey(secret="a", tokens_per_minute=600, name="first"), ApiKey(secret="c", tokens_per_day=5)])
    names = [account.name for account in accounts]
    assert names == ["first", "key-3"]
    assert accounts.of(key_digest("a")) is kept
    assert dropped.name == "key-2"
    assert headers(kept)["remaining-tokens"] == "10"
    assert headers(kept)["limit-tokens"] == "600"
    accounts.apply([ApiKey(secret="a")])
    assert kept.name == "key-1"
