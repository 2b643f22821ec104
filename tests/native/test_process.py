"""Contexts across a fork, at the end of the process, and where no more threads can be had.

Each case may hang or end its process where it goes wrong, so each runs in one of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.native.conftest import TinyModels

from paceline.testing.models import LlamaSpec, numbered

pytestmark = pytest.mark.native

# Rows of logits wide enough that a step shares the draws among threads.
WIDE = LlamaSpec(vocabulary=numbered(60000), n_embd=32, n_head=2, n_head_kv=1)

PRELUDE = """
import atexit, os, resource, signal, sys, threading, time
"""

IMPORTS = """
from paceline.errors import Closed, NotEnoughMemory, PacelineError
from paceline.params import SamplingParams
from paceline.runtime import Context, Embedder, MaskSlots, Model, Sampler, StepRow
def in_child(work):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        try:
            work()
        except BaseException as error:
            print(type(error).__name__, error, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]
def closed(call):
    try:
        call()
    except Closed as error:
        assert "fork" in str(error) and "spawn" in str(error), error
        return
    raise AssertionError("no Closed")
def wide_rows(model):
    return [StepRow(seq_id=i, position=0, token_ids=[i + 1], samplers=(Sampler(SamplingParams(seed=i), model),))
            for i in range(12)]
"""


def run(code: str, path: Path, *, before: str = "") -> subprocess.CompletedProcess[str]:
    """Runs code that finds the model's path in `path`; `before` comes before paceline is imported."""
    script = PRELUDE + before + IMPORTS + f"path = {str(path)!r}\n" + code
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)


# ---- threads that cannot be started


def test_threads_that_cannot_be_started_are_an_error(tiny_models: TinyModels) -> None:
    """Where the system has no room for 200 threads, the context is refused and one with a single thread works."""
    code = """
model = Model.load(path)
Context(model, n_ctx=256, n_threads=1).close()
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + 200 * 2**20, resource.RLIM_INFINITY))
try:
    Context(model, n_ctx=256, n_threads=200)
except NotEnoughMemory as error:
    print(error)
context = Context(model, n_ctx=256, n_threads=1)
try:
    context.set_threads(200)
except NotEnoughMemory:
    context.decode([1])
    print(context.n_threads)
"""
    done = run(code, tiny_models("llama"))
    assert done.returncode == 0, done.stderr
    message, n_threads = done.stdout.splitlines()
    assert "200 threads" in message and "n_threads" in message
    assert n_threads == "1"


def test_a_step_draws_with_the_threads_it_can_get(tiny_models: TinyModels) -> None:
    """The pass has been computed when the threads for the draws are made: with fewer of them it is only slower."""
    code = """
model = Model.load(path)
rows = wide_rows(model)
context = Context(model, n_ctx=512, n_seq_max=12, n_outputs_max=12, n_threads=1, n_threads_batch=16)
context.decode([1])
context.clear()
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + 40 * 2**20, resource.RLIM_INFINITY))
print(sum(len(row.draws[0].token_ids) for row in context.step(rows).rows))
"""
    done = run(code, tiny_models(WIDE))
    assert (done.returncode, done.stdout.strip()) == (0, "12"), done.stderr
