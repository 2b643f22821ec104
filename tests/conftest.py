"""Parts that several test modules share."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from paceline.runtime import Model

# How long an example takes says something about the machine, and nothing about what it is an example of; hangs are for
# the timeout of each test.
settings.register_profile("paceline", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("paceline")

# Started in the background by some shells, a process and its children ignore Ctrl-C, which tests are about.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest.register_assert_rewrite("tests.unit.kv_cache.prefix_rig")  # before a test imports it

os.environ.setdefault("PACELINE_NO_DISK_CACHE", "1")  # servers of tests write no prefixes into the user's cache folder

_BEGIN_S = pytest.StashKey[float]()  # when the first test started
_PATH = pytest.StashKey[Path]()  # the file of the test before
_EXIT_S = 120  # for the threads that tests have left


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--budget", type=float, metavar="S", help="skip tests that by their time limit may end after S seconds"
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    budget_s, now_s = item.config.getoption("--budget"), time.monotonic()
    mark = item.get_closest_marker("timeout")
    limit_s = float(mark.args[0] if mark else item.config.getini("timeout"))
    if budget_s is not None and now_s + limit_s > item.config.stash.setdefault(_BEGIN_S, now_s) + budget_s:
        pytest.skip("it might end after the seconds of --budget")
    if item.path != item.config.stash.get(_PATH, None):
        # Modules, tests and servers of before stay. Left out, they do not slow the garbage collections down that the tests of
        # this file ask for: with all of them, each would take half a second.
        item.config.stash[_PATH] = item.path
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    """See that the process ends: a thread that hangs would keep it, so its stack is printed then, and the run fails."""
    faulthandler.dump_traceback_later(_EXIT_S, exit=True)


@pytest.fixture(scope="session")
def llama_cpp_source() -> Path:
    """The llama.cpp source tree that the native core was built from."""
    named = os.environ.get("PACELINE_LLAMA_CPP_SOURCE")
    if not named:
        from paceline import _native

        named = getattr(_native, "build_info", dict)().get("llama_cpp_source")
    path = Path(named) if named else None
    if path is None or not path.is_dir():
        pytest.fail(f"no llama.cpp source tree at {named}: set PACELINE_LLAMA_CPP_SOURCE to one")
    return path


@pytest.fixture(scope="session")
def vocabulary(llama_cpp_source: Path) -> Model:
    """A model of 32,000 tokens without weights (SentencePiece, byte tokens), for tests that only look at tokens."""
    return Model.load(llama_cpp_source / "models" / "ggml-vocab-llama-spm.gguf", vocab_only=True)
