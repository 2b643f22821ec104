"""llama.cpp's log in Python's logging."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from tests.native.conftest import TinyModels

from paceline import LLM
from paceline.errors import ModelLoadError
from paceline.runtime import Context, Model, native_core

pytestmark = pytest.mark.native


def test_lines_arrive_at_their_levels(tiny_models: TinyModels, caplog: pytest.LogCaptureFixture) -> None:
    """llama.cpp's log lines during a load are debug output of the logger paceline.llama, a line a record."""
    with caplog.at_level(logging.DEBUG, logger="paceline.llama"):
        Model.load(tiny_models("llama")).close()
    records = [record for record in caplog.records if record.name == "paceline.llama"]
    assert len(records) > 10
    assert any("general.architecture" in record.getMessage() for record in records if record.levelno == logging.DEBUG)
    assert not any("\n" in record.getMessage() for record in records)


def test_an_error_of_llama_cpp_is_in_the_exception_and_in_the_log(
    tmp_path: Path, tiny_models: TinyModels, caplog: pytest.LogCaptureFixture
) -> None:
    """The reason for a failed load is not lost."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(tiny_models("llama").read_bytes()[:-5000])
    with pytest.raises(ModelLoadError, match="tensor"):
        Model.load(broken)


def test_a_failing_handler_does_not_fail_the_call(tiny_models: TinyModels) -> None:
    """An exception in a log handler is Python's unraisable kind; the model loads."""
    code = f"""
import logging, sys
from paceline.runtime import Model
class Broken(logging.Handler):
    def handle(self, record):
        raise RuntimeError("handler")
logging.getLogger("paceline.llama").addHandler(Broken())
logging.getLogger("paceline.llama").setLevel(logging.DEBUG)
seen = []
sys.unraisablehook = lambda event: seen.append(event.exc_type)
model = Model.load({str(tiny_models("llama"))!r})
assert RuntimeError in seen
print(model.n_layer)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.strip() == "2", done.stderr


@pytest.mark.parametrize(("signal", "outcome"), [("SIGINT", "KeyboardInterrupt()"), ("SIGTERM", "SystemExit(7)")])
def test_a_signal_during_delivery_is_not_lost(tiny_models: TinyModels, signal: str, outcome: str) -> None:
    """Ctrl-C, or an exit by a signal handler, while a log line is handled is raised once the call has returned."""
    code = f"""
import logging, signal, sys
from paceline.runtime import Model
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
lines = []
class Struck(logging.Handler):
    def handle(self, record):
        lines.append(record)
        if len(lines) == 1:
            signal.raise_signal(signal.{signal})
logging.getLogger("paceline.llama").addHandler(Struck())
logging.getLogger("paceline.llama").setLevel(logging.DEBUG)
try:
    model = Model.load({str(tiny_models("llama"))!r})
    model.n_layer
except BaseException as error:
    print(repr(error))
assert len(lines) > 10
print(Model.load({str(tiny_models("llama"))!r}).n_layer)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.split() == [outcome, "2"], done.stderr
    assert done.stderr == ""


def test_an_exit_in_a_thread_during_delivery_ends_that_thread(tiny_models: TinyModels) -> None:
    """SystemExit of a handler is raised in the calling thread, not in the main thread."""
    code = f"""
import logging, sys, threading
from paceline.runtime import Model
class Leaving(logging.Handler):
    def handle(self, record):
        sys.exit()
logging.getLogger("paceline.llama").addHandler(Leaving())
logging.getLogger("paceline.llama").setLevel(logging.DEBUG)
seen = []
def work():
    model = Model.load({str(tiny_models("llama"))!r})
    seen.append(model.n_layer)
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(seen)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_nothing_is_printed_by_itself(tiny_models: TinyModels) -> None:
    """Without a handler neither stdout nor stderr see a line, not even warnings."""
    code = f"""
from paceline.runtime import Context, Model
model = Model.load({str(tiny_models("llama"))!r})
Context(model, n_ctx=4096).decode([1, 2])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_expected_failure_is_no_error_in_the_log(tiny_models: TinyModels, caplog: pytest.LogCaptureFixture) -> None:
    """A full cache is the caller's to handle: it raises and logs nothing above debug."""
    from paceline.errors import NoKvSlot

    with Model.load(tiny_models("llama")) as model, Context(model, n_ctx=256, n_batch=256, n_seq_max=2) as context:
        context.decode([1] * 256)
        caplog.clear()
        with pytest.raises(NoKvSlot):
            context.decode([1], seq_ids=1)
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_normal_start_logs_no_warning(isolation: str, caplog: pytest.LogCaptureFixture) -> None:
    """With a context that is longer than the model was trained for, which all slots share; the model is named by its size."""
    with caplog.at_level(logging.DEBUG, logger="paceline"), LLM(num_slots=8, n_ctx=8192, isolation=isolation) as llm:
        llm.generate("Hello", max_tokens=2)
        assert llm.model.desc == "llama 3.9M Q8_0"
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    overflow = [record for record in caplog.records if "possible training context overflow" in record.getMessage()]
    assert all(record.levelno == logging.DEBUG for record in overflow)


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("load: control-looking token: 212 '</s>' was not control-type; its type will be overridden", logging.DEBUG),
        ("load: GENERATION QUALITY WILL BE DEGRADED!", logging.WARNING),
    ],
)
def test_corrections_of_llama_cpp_are_debug_output(line: str, level: int, caplog: pytest.LogCaptureFixture) -> None:
    """Other warnings stay warnings."""
    with caplog.at_level(logging.DEBUG, logger="paceline.llama"):
        native_core._log_line(3, line)
    assert [(record.getMessage(), record.levelno) for record in caplog.records] == [(line, level)]
