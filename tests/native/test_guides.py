"""The Python of the docs is run: block after block of a page, in one namespace, on the demo model."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.native.architecture_files import documented_classes, known_architectures

DOCS = Path(__file__).parents[2] / "docs"
PAGES = (
    "guide/batches.md",
    "guide/chat.md",
    "guide/continuous_batching.md",
    "guide/embeddings.md",
    "guide/from_llama_cpp_python.md",
    "guide/disk_cache.md",
    "guide/from_ollama.md",
    "guide/from_vllm.md",
    "guide/isolation.md",
    "guide/kv_cache_offload.md",
    "guide/logging.md",
    "guide/lora.md",
    "guide/memory.md",
    "guide/metrics_and_traces.md",
    "guide/prefix_caching.md",
    "guide/quantize.md",
    "guide/sampling.md",
    "guide/scores.md",
    "guide/several_models.md",
    "guide/speculation.md",
    "guide/strategies.md",
    "guide/streaming.md",
    "guide/structured_output.md",
    "guide/web_application.md",
    "guide/testing.md",
    "guide/writing_a_strategy.md",
    "guide/writing_an_instrument.md",
    "reference/chat.md",
    "reference/errors.md",
    "reference/requests.md",
    "reference/runtime.md",
    "index.md",
    "quickstart.md",
)
AGAINST_A_HUB = {"guide/models_by_name.md"}  # by tests/hub
WITH_A_PROJECTOR = {"guide/audio.md", "guide/media.md"}  # by tests/native/test_audio.py and test_images.py
OF_A_CALLER = {"reference/cluster.md"}  # an outline; benchmarks/cluster does what it shows, in tests/property
OF_OTHER_PROGRAMS = {"guide/clients.md"}  # their packages are not installed for tests
OVER_RPC = {"guide/rpc.md"}  # by tests/native/test_rpc.py
AGAINST_A_SERVER = {"guide/anthropic.md", "guide/ollama.md", "guide/openai.md", "guide/responses.md"}  # by tests/server

pytestmark = pytest.mark.native


@pytest.fixture
def _own_logging() -> Iterator[None]:
    """A page may set levels and handlers: they are set back."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    names = [name for name in root.manager.loggerDict if name.partition(".")[0] == "paceline"]
    levels = {name: logging.getLogger(name).level for name in ["paceline", *names]}
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in [logger for logger in root.manager.loggerDict if logger.partition(".")[0] == "paceline"]:
        logging.getLogger(name).setLevel(levels.get(name, logging.NOTSET))


@pytest.mark.usefixtures("_own_logging")
@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_page_runs(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The snippets of a page work."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    names: dict[str, object] = {"__name__": "page"}
    exec("import paceline", names)
    for number, block in enumerate(blocks):
        exec(compile(block, f"{page}, block {number}", "exec", dont_inherit=True), names)
    for value in names.values():
        close = getattr(value, "close", None)
        if type(value).__name__ == "LLM" and close is not None:
            close()
    capsys.readouterr()


def test_every_page_is_run() -> None:
    """A page with Python in it is in the lists above."""
    pages = {page.relative_to(DOCS).as_posix(): page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md")}
    assert {name for name, text in pages.items() if "```python\n" in text} == {
        *PAGES,
        *AGAINST_A_SERVER,
        *OF_A_CALLER,
        *AGAINST_A_HUB,
        *WITH_A_PROJECTOR,
        *OF_OTHER_PROGRAMS,
        *OVER_RPC,
    }


def test_the_page_has_every_architecture_in_one_class() -> None:
    """docs/models.md names each architecture that the pinned source knows once."""
    documented = [name for names in documented_classes().values() for name in names]
    assert sorted(documented) == sorted(known_architectures())
