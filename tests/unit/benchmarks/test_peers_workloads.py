"""The tables of the workloads: whole, fixed, and within the servers' limits."""

from pathlib import Path

import pytest
from benchmarks.peers.__main__ import parse
from benchmarks.peers.driver import WARM_UP_TOKENS
from benchmarks.peers.servers import NotPossible, Programs, launch, llama_server_flags
from benchmarks.peers.suite import steps
from benchmarks.peers.workloads import PACELINE, WORKLOADS, PlannedRequest, Segment, Workload, mixed


def length(workload: Workload, number: int) -> int:
    """Return the number of a request's tokens at its end, with the request that it continues."""
    request = workload.requests[number]
    earlier = 0 if request.continues is None else length(workload, request.continues)
    return earlier + sum(segment.length for segment in request.segments) + request.max_tokens


def flag(flags: tuple[str, ...], name: str) -> int:
    """The last value of a flag."""
    return int(flags[len(flags) - 1 - flags[::-1].index(name) + 1])


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=lambda workload: workload.name)
def test_requests_wait_for_earlier_requests_only(workload: Workload) -> None:
    """So no workload waits forever."""
    for number, request in enumerate(workload.requests):
        assert all(other < number for other in request.after)
        assert request.continues is None or request.continues in request.after


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=lambda workload: workload.name)
def test_every_request_fits_into_the_tuned_cells_and_into_those_of_paceline(workload: Workload) -> None:
    """A part of a cache that is split holds any of the requests; the workload with too little memory is the exception."""
    longest = max(length(workload, number) for number in range(len(workload.requests)))
    ours, tuned = (*PACELINE, *workload.limits), llama_server_flags(workload, "tuned")
    assert max(longest, WARM_UP_TOKENS + 4) <= flag(ours, "-c")
    share = flag(tuned, "-c") // (flag(tuned, "-np") if "--no-kv-unified" in tuned else 1)
    assert longest <= share
    roles = {request.role for request in workload.requests}
    assert {target.role for target in workload.targets} | {workload.headline_role} <= roles | {"all"}


def test_lengths_are_the_same_on_every_machine() -> None:
    """Drawn once with a fixed seed."""
    shapes = [(request.segments[0].length, request.max_tokens) for request in mixed(8).requests]
    assert shapes[:4] == FIRST_SHAPES
    assert (len(shapes), sum(prompt for prompt, _ in shapes), sum(output for _, output in shapes)) == SUMS


FIRST_SHAPES = [(185, 66), (153, 50), (161, 33), (159, 93)]
SUMS = (32, 4169, 2098)


def test_servers_get_the_limits_of_the_case_and_variants_their_flags() -> None:
    """llama-server has the slots in any case, its tuning only as a variant; paceline has one configuration."""
    case = Workload(
        name="case", title="", requests=(PlannedRequest(role="r", segments=(Segment(1, 4),), max_tokens=2),),
        tuned=("--kv-unified",), headline="tokens_per_s", slots=3, limits=("-c", "99"),
    )  # fmt: skip
    assert llama_server_flags(case, "") == ("-np", "3", "-c", "99")
    assert llama_server_flags(case, "tuned") == ("-np", "3", "-c", "99", "--kv-unified")
    assert llama_server_flags(case, "bare") == ("-c", "99")
    with pytest.raises(ValueError, match="choose tuned or bare"):
        llama_server_flags(case, "best")


def test_a_strategy_is_a_variant_of_paceline(tmp_path: Path) -> None:
    """Behind the @; adapters are loaded without applying."""
    programs = Programs(paceline=tmp_path / "python")
    command = launch(
        "paceline@balanced", WORKLOADS["little-kv"], programs, tmp_path / "m.gguf", [tmp_path / "a"]
    ).command
    assert command[command.index("--strategy") + 1] == "balanced"
    assert command[command.index("--lora") + 1] == str(tmp_path / "a")
    assert "--lora-init-without-apply" in command
    assert flag(command, "-c") == 1280
    with pytest.raises(SystemExit, match="build llama-server"):
        launch("llama-server", WORKLOADS["little-kv"], programs, tmp_path / "m.gguf", [])


def test_commas_of_a_strategy_do_not_end_a_server() -> None:
    """Its options are name=value."""
    servers = "paceline@paced:efficiency=0,prefill_share=0.1,llama-server,llama-server@tuned"
    assert parse(["run", "--servers", servers]).servers == [
        "paceline@paced:efficiency=0,prefill_share=0.1", "llama-server", "llama-server@tuned",
    ]  # fmt: skip
    assert parse(["run", "--workloads", "steady-1,mixed-8"]).workloads == ["steady-1", "mixed-8"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workloads", "steady-1,stead"], "no workload stead:"),
        (["--servers", "paceline,pacelin"], "no server pacelin:"),
    ],
)
def test_unknown_names_end_a_run_before_its_first_step(arguments: list[str], message: str) -> None:
    """A long run does not end at a name that was mistyped."""
    options = parse(["run", *arguments])
    with pytest.raises(SystemExit, match=message):
        options.command(options)


@pytest.mark.parametrize("name", ["llama-cpp-python", "xllamacpp"])
def test_servers_without_adapters_do_not_run_workloads_that_have_them(name: str, tmp_path: Path) -> None:
    """Without the adapters they would be measured at less work."""
    programs = Programs(paceline=tmp_path / "python", llama_cpp_python=tmp_path / "a", xllamacpp=tmp_path / "b")
    with pytest.raises(NotPossible, match="no LoRA"):
        launch(name, WORKLOADS["two-loras"], programs, tmp_path / "m.gguf", [tmp_path / "a"])
    assert "m.gguf" in " ".join(launch(name, WORKLOADS["little-kv"], programs, tmp_path / "m.gguf", []).command)


def test_llama_cpp_python_has_the_cells_of_the_case(tmp_path: Path) -> None:
    """No more than the workload allows, and 4,096 if it sets no limit or a larger limit."""
    programs = Programs(paceline=tmp_path / "python", llama_cpp_python=tmp_path / "a")
    for workload, n_ctx in (("little-kv", 1280), ("steady-8", 4096), ("overload", 4096)):
        command = launch("llama-cpp-python", WORKLOADS[workload], programs, tmp_path / "m.gguf", []).command
        assert flag(command, "--n_ctx") == n_ctx


def test_rounds_have_all_servers_side_by_side_and_change_their_order() -> None:
    """A B, B A, for each workload."""
    found = [(step.workload, step.round, step.server) for step in steps(["x", "y"], ["A", "B"], 2)]
    assert found == [(w, r, s) for w in "xy" for r, s in ((1, "A"), (1, "B"), (2, "B"), (2, "A"))]
