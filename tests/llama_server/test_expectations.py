"""The list of llama-server's tests is whole, and a sample of them ends as it says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.llama_server.expectations import DIFFERS, NEEDS, PASSES, Expectation, Expectations, listed
from tests.llama_server.launcher import serve_arguments
from tests.llama_server.suite import Suite

SAMPLE = (
    "test_basic.py::test_server_models",
    "test_basic.py::test_server_props",
    "test_completion.py::test_completion_stream_vs_non_stream",
    "test_completion.py::test_n_probs",
    "test_embedding.py::test_embedding_usage_multiple",
    "test_lora.py::test_lora[0.0-(little|girl|three|years|old)+]",
    "test_metrics.py::test_metrics_predicted_total_matches_requests",
    "test_rerank.py::test_rerank",
    "test_security.py::test_correct_api_key",
    "test_stream.py::test_stream_resume_and_stop_with_slashed_model_name",
    "test_tokenize.py::test_tokenize_detokenize",
)
"""One of most kinds of requests, and of most stand-ins."""


@pytest.fixture(scope="module")
def suite(llama_cpp_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    """Return the tests of the source that the core was built from."""
    if not (llama_cpp_source / "tools" / "server" / "tests").is_dir():
        pytest.skip("this tree of llama.cpp has no tests of its server")
    return Suite(tmp_path_factory.mktemp("llama-server") / "suite", llama_cpp_source)


@pytest.mark.native
def test_every_test_is_in_the_list(suite: Suite) -> None:
    """And no other one."""
    assert sorted(Expectations.read().tests) == sorted(suite.collect())


def test_every_reason_is_given_and_used() -> None:
    """Failures have a reason of their status, passes have none."""
    expectations = Expectations.read()
    used = {(test.status, test.reason) for test in expectations.tests.values() if test.status in (DIFFERS, NEEDS)}
    assert used == {(status, key) for status, reasons in expectations.reasons.items() for key in reasons}
    assert not any(test.reason for test in expectations.tests.values() if test.status == PASSES)


@pytest.mark.native
@pytest.mark.full
def test_a_sample_ends_as_the_list_has_it(suite: Suite) -> None:
    """`python -m tests.llama_server` runs all of them."""
    outcomes = suite.run(SAMPLE, jobs=2)
    assert not Expectations.read().contradictions(outcomes), suite.lines()


def test_a_test_that_ends_otherwise_is_a_contradiction() -> None:
    """In either direction, and if it is not in the list."""
    expectations = Expectations({"a": Expectation(PASSES), "b": Expectation(NEEDS, "x"), "c": Expectation(PASSES)}, {})
    found = expectations.contradictions({"a": "failed", "b": "passed", "c": "passed", "d": "skipped"})
    assert [line.partition(":")[0] for line in found] == ["a", "b", "d"]


def test_an_updated_list_keeps_reasons(tmp_path: Path) -> None:
    """Of remaining failures; new failures have to be given a reason."""
    reasons = {DIFFERS: {"why": "because"}, NEEDS: {}}
    known = Expectations({"f.py::a": Expectation(DIFFERS, "why"), "f.py::b": Expectation(PASSES)}, reasons)
    path = tmp_path / "list.toml"
    path.write_text(listed({"f.py::a": "failed", "f.py::b": "failed", 'g.py::c["\n]': "passed"}, known))
    assert Expectations.read(path) == Expectations(
        {"f.py::a": Expectation(DIFFERS, "why"), "f.py::b": Expectation(NEEDS), 'g.py::c["\n]': Expectation(PASSES)},
        reasons,
    )


def test_a_repository_becomes_a_stand_in_and_other_flags_stay() -> None:
    """With llama-server's defaults if paceline's differ."""
    models = {"some/model/": "a.gguf", "some/model/folder/file": "b.gguf"}
    cors = ["--cors-origins", "*", "--cors-credentials"]
    assert serve_arguments(["--port", "1", "--hf-repo", "some/model", "--offline", "--metrics"], models) == [
        *("--port", "1", "--metrics", "--model", "a.gguf"),
        *cors,
        "--prefill-assistant",
    ]
    named = serve_arguments(["--hf-repo", "some/model", "--hf-file", "folder/file"], models)
    assert named == ["--model", "b.gguf", *cors, "--no-metrics", "--prefill-assistant"]
    assert serve_arguments(["--cors-origins", "a"], models)[:3] == ["--cors-origins", "a", "--no-metrics"]
