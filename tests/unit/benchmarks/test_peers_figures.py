"""The figures of runs, their ratios and targets, and how records are kept and reported."""

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.peers import builds, report
from benchmarks.peers.__main__ import parse
from benchmarks.peers.figures import Record, RequestTimes, figures, percentile, ratios, spread, verdict
from benchmarks.peers.results import Results
from benchmarks.peers.workloads import WORKLOADS, Target


def request(
    times_s: tuple[float, ...] = (1.0, 1.1, 1.3), *, role: str = "stream", status: str = "complete",
    start_s: float = 0.5, num: int = 3,
) -> RequestTimes:  # fmt: skip
    end_s = times_s[-1] if times_s else start_s
    return RequestTimes(
        role=role, status=status, start_s=start_s, end_s=end_s, times_s=tuple(times_s), num_prompt=4, num_generated=num
    )


def test_percentiles_are_values_that_were_measured() -> None:
    """The smallest that the share does not exceed."""
    values = [4.0, 1.0, 3.0, 2.0]
    assert [percentile(values, share) for share in (0.01, 0.25, 0.5, 0.51, 0.99, 1.0)] == [1, 1, 2, 3, 4, 4]


def test_figures_of_requests() -> None:
    """Throughput counts from the first start to the last end, gaps lie between events of one request."""
    found = figures([request(), request((1.5, 2.5), start_s=1.0, num=7)], max_gap_s=0.3)
    assert found["total_s"] == 2.0
    assert found["tokens_per_s"] == 5.0
    assert found["complete"] == 2
    assert found["goodput_per_s"] == 0.5  # the second has a gap of a second
    assert found["ttft_p50_s"] == found["ttft_max_s"] == 0.5
    assert found["longest_gap_s"] == pytest.approx(1.0)
    assert found["itl_p50_s"] == pytest.approx(0.2)


def test_failed_requests_count_for_nothing_but_themselves() -> None:
    """Their tokens are no throughput; a run with only failures has no other figure."""
    failed = request((), status="failed", num=0)
    assert figures([failed], 0.3) == {"complete": 0}
    assert figures([failed, request()], 0.3)["tokens_per_s"] == pytest.approx(3 / 0.8)
    left = figures([request(status="left"), request()], 0.3)
    assert (left["complete"], left["goodput_per_s"]) == (1, pytest.approx(1 / 0.8))


def test_ratios_compare_the_rounds_that_ran_side_by_side() -> None:
    """Not the medians of both."""
    assert ratios({1: 2.0, 2: 3.0, 4: 10.0}, {1: 1.0, 3: 3.0, 4: 2.0}) == spread([2.0, 5.0])
    assert ratios({1: 2.0}, {1: 0.0}) is None
    assert ratios({1: 2.0}, {2: 1.0}) is None


@pytest.mark.parametrize(
    ("target", "ours", "theirs", "is_met"),
    [
        (Target(figure="tokens_per_s", bound=1.0, at_least=True), [10.0], [9.0], True),
        (Target(figure="tokens_per_s", bound=1.0, at_least=True), [10.0], [11.0], False),
        (Target(figure="ttft_p50_s", bound=0.1, at_least=False), [1.0], [11.0], True),
        (Target(figure="load_s", bound=1.0, at_least=False, is_difference=True), [3.0], [1.5], False),
        (Target(figure="complete", bound=8, at_least=True, beside=None), [8.0, 7.0, 8.0], [], True),
        (Target(figure="ttft_p50_s", bound=1.4, at_least=False, beside=None, of_role="alone"), [3.0], [2.0], False),
    ],
)
def test_targets_are_ratios_differences_or_bounds(
    target: Target, ours: list[float], theirs: list[float], is_met: bool
) -> None:
    """The median decides."""
    found = verdict(target, dict(enumerate(ours)), dict(enumerate(theirs)))
    assert found is not None
    assert found.is_met == is_met


def test_a_target_without_a_measured_figure_has_no_verdict() -> None:
    """For example if the other server did not run, or all of its requests failed."""
    assert verdict(Target(figure="tokens_per_s", bound=1.0, at_least=True), {1: 10.0}, {}) is None


def record(server: str, round_number: int, *requests: RequestTimes, workload: str = "steady-8") -> Record:
    facts = {
        "revision": "abc", "cpu": "CPU", "num_cores": 2, "gpus": [], "llama_cpp": "123", "compiler": "GNU 12",
        "cpu_features": ["AVX2"], "program": "serve 0123",
    }  # fmt: skip
    return Record(
        workload=workload, server=server, round=round_number, at="2030-01-02 03:04", command=("serve",), environment=facts,
        requests=requests, process={"load_s": 1.0},
    )  # fmt: skip


def test_records_come_back_in_the_order_of_their_rounds(tmp_path: Path) -> None:
    """The same as the kept figures; a step with a record is known."""
    results = Results(tmp_path)
    for number in (2, 10, 1):
        results.add(record("llama-server@tuned", number, request()))
    assert not results.has("steady-8", "llama-server@tuned", 3)
    assert results.has("steady-8", "llama-server@tuned", 10)
    (found,) = results.load()["steady-8"].values()
    assert found == [record("llama-server@tuned", number, request()) for number in (1, 2, 10)]
    assert json.loads(results.path("steady-8", "llama-server@tuned", 1).read_text())["round"] == 1


def test_the_report_has_medians_ratios_and_targets() -> None:
    """A loss is shown as one."""
    ours = [record("paceline", number, request(num=2 + number)) for number in (1, 2, 3)]
    theirs = [record("llama-server", number, request(num=8)) for number in (1, 2, 3)]
    text = report.markdown({"steady-8": {"paceline": ours, "llama-server": theirs}})
    title = WORKLOADS["steady-8"].title
    assert (
        f"| {title} | tokens/s | 5 | 10 |  | 0.500 (0.375-0.625) |  | **missed**: tokens/s ≥ 1 x llama-server, is 0.5 |"
        in text
    )
    assert "| paceline | stream | 3 | 5 |" in text
    assert "2030-01-02, revision abc" in text


INFO: dict[str, Any] = {
    "flags": ["GGML_NATIVE=ON", "GGML_OPENMP=OFF", "CMAKE_C_FLAGS=-a -b"], "build_type": "Release", "compiler": "GNU 12.2.0",
    "llama_cpp_source": "/source", "llama_cpp_commit": "123", "target": "Linux x86_64",
}  # fmt: skip


def test_llama_server_has_the_flags_of_paceline_and_what_the_variant_changes() -> None:
    """Source, build type and compiler flags equal the core's."""
    flags = builds.cmake_flags(INFO, builds.Variant(is_native=False))
    assert "-DGGML_NATIVE=OFF" in flags
    assert "-DGGML_OPENMP=OFF" in flags
    assert "-DCMAKE_C_FLAGS=-a -b" in flags
    assert "-DLLAMA_CPP_TREE=/source" in flags
    assert "-DGGML_OPENMP=ON" in builds.cmake_flags(INFO, builds.Variant(has_openmp=True))


def test_a_build_is_found_again_only_with_the_same_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another compiler, flag or variant is another build."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = builds.llama_server_path(INFO, builds.Variant())
    path.parent.mkdir(parents=True)
    path.touch()
    assert builds.find_llama_server(INFO, builds.Variant()) == path
    for other in (INFO | {"compiler": "Clang 18"}, INFO | {"flags": []}, INFO | {"llama_cpp_commit": "4"}):
        assert builds.find_llama_server(other, builds.Variant()) is None
    assert builds.find_llama_server(INFO, builds.Variant(has_openmp=True)) is None


def test_portable_and_native_builds_share_no_folder() -> None:
    """CMake would keep the instruction sets of the folder's first configuration: none, if it was native."""
    folders = [
        builds.build_folder(INFO, builds.Variant(is_native=is_native, has_openmp=has_openmp))
        for is_native in (True, False)
        for has_openmp in (True, False)
    ]
    assert folders[0] == folders[1] != folders[2] == folders[3]


def test_a_native_core_is_not_compared_with_a_portable_server() -> None:
    """Nor the other way round."""
    portable = INFO | {"flags": ["GGML_NATIVE=OFF"]}
    builds.check_instruction_sets(INFO, builds.Variant())
    builds.check_instruction_sets(portable, builds.Variant(is_native=False, has_openmp=True))
    with pytest.raises(SystemExit, match="native build: run this without --portable"):
        builds.check_instruction_sets(INFO, builds.Variant(is_native=False))
    with pytest.raises(SystemExit, match="portable build: run this with --portable"):
        builds.check_instruction_sets(portable, builds.Variant())


def test_a_report_of_no_records_says_so(tmp_path: Path) -> None:
    """The folder of a revision is there only when something ran."""
    options = parse(["report", "--results", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match="no records in"):
        options.command(options)


def test_pictures_are_drawn_of_what_there_is(tmp_path: Path) -> None:
    """Throughput over streams, the distributions of every workload, and the trade-off if servers are compared."""
    pytest.importorskip("matplotlib")
    from benchmarks.peers import pictures

    records = {
        name: {
            "paceline": [record("paceline", 1, request(), workload=name)],
            "llama-server": [record("llama-server", 1, request((), status="failed", num=0), workload=name)],
        }
        for name in ("steady-1", "steady-8")
    }
    files = {path.name for path in pictures.draw_all(records, tmp_path)}
    assert files == {"throughput-steady.svg"} | {
        f"{kind}-steady-{width}.svg" for kind in ("latency", "trade") for width in (1, 8)
    }
    assert all((tmp_path / name).read_text().startswith("<?xml") for name in files)
