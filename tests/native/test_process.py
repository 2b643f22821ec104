"""Contexts across a fork, at the end of the process, and without more threads.

Each case may hang or end its process if it fails, so each runs in a process of its own.
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
import atexit, os, resource, signal, sys, threading, time, warnings
warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)  # the forks are the point
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
    """Run code that finds the model's path in `path`; `before` comes before paceline is imported."""
    script = PRELUDE + before + IMPORTS + f"path = {str(path)!r}\n" + code
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)


# ---- fork


@pytest.mark.parametrize(
    "call",
    [
        "context.decode([1, 2])",
        "context.step([StepRow(seq_id=0, position=3, token_ids=[1])])",
        "context.logits(2)",
        "context.positions(0)",
        "context.remove(0)",
        "context.copy(0, 1)",
        "context.keep(0)",
        "context.clear()",
        "context.save_sequence(0)",
        "context.load_sequence(0, saved)",
        "context.set_threads(1)",
        "context.set_adapters({})",
        "embedder.embed([[1, 2]])",
    ],
)
def test_a_context_made_before_a_fork_raises_in_the_child(tiny_models: TinyModels, call: str) -> None:
    """Its threads are not in the child: every call raises Closed and names the way out; the parent's goes on."""
    code = f"""
model = Model.load(path)
context = Context(model, n_ctx=256, n_seq_max=2, n_threads=2)
embedder = Embedder(model, pooling="mean", n_threads=2)
context.decode([1, 2, 3])
saved = context.save_sequence(0)
assert in_child(lambda: closed(lambda: {call})) == 0
context.decode([4])
print(context.positions(0).last)
"""
    done = run(code, tiny_models("llama"))
    assert (done.returncode, done.stdout.strip()) == (0, "3"), done.stderr


def test_a_child_can_close_the_contexts_it_inherits(tiny_models: TinyModels) -> None:
    """close() in the child waits for no thread, neither llama.cpp's nor the drawing threads."""
    code = """
model = Model.load(path)
context = Context(model, n_ctx=512, n_seq_max=12, n_outputs_max=12, n_threads=2)
context.step(wide_rows(model))
def work():
    context.close()
    model.close()
print(in_child(work))
context.close()
"""
    done = run(code, tiny_models(WIDE))
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr


def test_a_fork_while_another_thread_computes_leaves_a_child_that_can_close_and_exit(tiny_models: TinyModels) -> None:
    """The other thread holds the context's mutex and counts as a call; in the child neither blocks a caller."""
    code = """
model = Model.load(path)
context = Context(model, n_ctx=1024, n_batch=1024, n_threads=2)
context.decode([1] * 1000)  # a fork while a thread imports something would stop the child in Python
over, running = threading.Event(), threading.Event()
def work():
    while not over.is_set():
        context.clear()
        running.set()
        context.decode([1] * 1000)
thread = threading.Thread(target=work)
thread.start()
for _ in range(5):
    running.wait()
    running.clear()
    pid = os.fork()
    if pid == 0:
        signal.alarm(8)  # less than the longest wait for calls at the end of a process
        closed(lambda: context.decode([1]))
        context.close()
        over.set()
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0
over.set()
thread.join()
"""
    done = run(code, tiny_models("llama"))
    assert (done.returncode, done.stderr) == (0, "")


def test_a_child_makes_a_context_of_its_own_from_an_inherited_model(tiny_models: TinyModels) -> None:
    """Models, tokenizers and samplers have no threads: they work after a fork, and a new context computes the same."""
    code = """
model = Model.load(path)
context = Context(model, n_ctx=256, n_threads=2)
context.decode([1, 2, 3])
expected = context.logits(2)
def work():
    with Context(model, n_ctx=256, n_threads=2) as own:
        own.decode([1, 2, 3])
        assert (own.logits(2) == expected).all()
        assert len(list(own.generate(Sampler(SamplingParams(temperature=0), model), [4], 3))) <= 3
print(in_child(work))
"""
    done = run(code, tiny_models("llama"))
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr


# ---- the end of the process


DEEP = LlamaSpec(n_layer=6, n_embd=256, n_head=4, n_head_kv=2, n_ff=1024)

COMPUTING = """
context = Context(Model.load(path), n_ctx=1024, n_batch=1024, n_threads=1)
running = threading.Event()
def work():
    try:
        while True:
            context.clear()
            running.set()
            context.decode([1] * 1000)
    except PacelineError as error:
        os.write(1, type(error).__name__.encode())
thread = threading.Thread(target=work, daemon=True)
thread.start()
running.wait()
"""


def test_a_process_ends_well_while_a_daemon_thread_computes(tiny_models: TinyModels) -> None:
    """Python does not take the thread down in the middle of C++."""
    for _ in range(3):
        done = run(COMPUTING, tiny_models(DEEP))
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout in ("Aborted", "Closed", "")  # nothing where it was taken down between two calls


def test_the_end_of_calls_ends_a_pass_and_refuses_the_next(tiny_models: TinyModels) -> None:
    """Whichever the thread is in, it comes back with an error, and no call is left when the end has waited for it."""
    code = """
from paceline.runtime.native_core import end_calls
end_calls(60)
thread.join()
"""
    done = run(COMPUTING + code, tiny_models(DEEP))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout in ("Aborted", "Closed")


def test_the_end_of_calls_ends_a_load(tiny_models: TinyModels) -> None:
    """A large file must not hold the process up: the load is cancelled, whatever its progress callback says."""
    code = """
from paceline.runtime.native_core import end_calls
context = Context(Model.load(path), n_ctx=256, n_threads=1)
running, ending = threading.Event(), threading.Event()
def progress(share):
    running.set()
    ending.wait()
    return True
def load():
    try:
        print(Model.load(path, progress=progress))
    except PacelineError as error:
        print(type(error).__name__)
def watch():
    try:
        while True:
            context.positions(0)
    except Closed:
        ending.set()
threads = [threading.Thread(target=work, daemon=True) for work in (load, watch)]
for thread in threads:
    thread.start()
running.wait()
end_calls(60)
for thread in threads:
    thread.join()
"""
    done = run(code, tiny_models("llama"))
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "Aborted", "")


def test_calls_after_the_end_began_are_refused(tiny_models: TinyModels) -> None:
    """Code that runs at exit later than paceline's own end gets Closed and can still close its objects."""
    before = """
def late():
    try:
        context.decode([1])
    except Closed as error:
        print(error)
    context.close()
atexit.register(late)
"""
    code = """
model = Model.load(path)
context = Context(model, n_ctx=256, n_threads=1)
"""
    done = run(code, tiny_models("llama"), before=before)
    assert (done.returncode, done.stderr) == (0, "")
    assert "process is ending" in done.stdout


def test_a_call_that_outlives_the_wait_does_not_end_the_process_badly(tiny_models: TinyModels) -> None:
    """It comes back to an interpreter that is being taken down, and stays in its call."""
    code = """
from paceline.runtime.native_core import end_calls
class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(1.5)  # the call below comes back meanwhile
sys.modules["slow"] = Slow()  # goes when Python takes its modules down
model = Model.load(path)
context = Context(model, n_ctx=256, n_threads=1)
row = StepRow(seq_id=0, position=0, token_ids=[1], samplers=(Sampler(SamplingParams(), model),), mask_slots=(0,))
masks = MaskSlots(1, model.n_vocab)
threading.Thread(target=lambda: context.step([row], masks=masks, mask_timeout_s=0.8), daemon=True).start()
time.sleep(0.2)
atexit.register(end_calls, 0.0)  # runs first and waits for nothing
"""
    done = run(code, tiny_models("llama"))
    assert (done.returncode, done.stderr) == (0, "")


# ---- a KV cache that is not used yet


@pytest.mark.skipif(sys.platform != "linux", reason="other systems give no pages back so that they read as zeros")
def test_a_kv_cache_takes_memory_as_its_cells_are_used(tiny_models: TinyModels) -> None:
    """Neither its zeros nor clearing it are written: 512 MiB of cells are made in little memory, and read as zeros again."""
    code = """
from paceline.runtime import memory_in_use

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

model = Model.load(path)
before = resident()
context = Context(model, n_ctx=65536, n_threads=1, type_k="f32", type_v="f32")
made = resident() - before
context.decode([1, 2, 3])
expected = context.logits(2).tobytes()
for _ in range(4):
    context.decode(list(range(200)) * 5)
used = resident() - before - made
context.native.clear(True)
cleared = resident() - before
context.decode([1, 2, 3])
print(memory_in_use(context).cache_bytes >> 20, made >> 20, used >> 20, cleared >> 20, context.logits(2).tobytes() == expected)
"""
    done = run(code, tiny_models(LlamaSpec(n_embd=256, n_layer=8, n_ctx_train=65536)))
    assert done.returncode == 0, done.stderr
    cache, made, used, cleared, is_same = done.stdout.split()
    assert is_same == "True" and int(cache) >= 512
    assert int(made) < 64 and 24 < int(used) < 256
    assert int(cleared) < int(made) + int(used) // 2


# ---- threads that cannot be started


def test_threads_that_cannot_be_started_are_an_error(tiny_models: TinyModels) -> None:
    """If the system has no room for 200 threads, the context is refused and a context with a single thread works."""
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
resource.setrlimit(resource.RLIMIT_AS, (used + 80 * 2**20, resource.RLIM_INFINITY))
print(sum(len(row.draws[0].token_ids) for row in context.step(rows).rows))
"""
    done = run(code, tiny_models(WIDE))
    assert (done.returncode, done.stdout.strip()) == (0, "12"), done.stderr
