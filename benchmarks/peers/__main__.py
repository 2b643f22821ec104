"""paceline beside its peers, over HTTP: build the peers, run workloads, write the report.

python -m benchmarks.peers build llama-server [--portable] [--openmp] | llama-cpp-python | xllamacpp
python -m benchmarks.peers list
python -m benchmarks.peers run --workloads steady-8,mixed-8 --rounds 3 [--servers paceline,llama-server,llama-server@tuned]
python -m benchmarks.peers report
python -m benchmarks.peers timeline --workload long-among

--model gemma3-1b (and others) runs on a model with a sliding window or a recurrent state, with workloads for it.

Each step of `run` starts a server, runs one workload once and stops the server; the servers of a round run in a row (A B, then
B A). A step with a record is skipped, so a long run can be cut short and go on later: --seconds ends it before a step that would
begin after that time. Records are kept in a folder by revision; --results names another folder. With --keep-servers servers
run for all rounds of a workload, and each round has prompts of its own.

llama-server is built from paceline's own llama.cpp source, with its flags and compiler (so without OpenMP; --openmp builds with
it). --portable is the build with GGML_NATIVE=OFF, which needs paceline built so as well: --paceline names the
interpreter of that environment. For AVX2 alone PACELINE_CPU_MATMUL=avx2 as well: paceline's products choose at run time.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.model import SIZES
from benchmarks.peers import builds, environment, pictures, report
from benchmarks.peers.results import DEFAULT_FOLDER, Results
from benchmarks.peers.servers import NAMES, NotPossible, Programs
from benchmarks.peers.suite import Step, Suite, line, steps
from benchmarks.peers.workloads import WORKLOADS
from benchmarks.state_models import MODELS, model_file


def main() -> None:
    """Parse the command line and run the command."""
    options = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server of a step ends with it
    options.command(options)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options; `command` is the function to call with them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--paceline", type=Path, default=Path(sys.executable), help="interpreter of paceline's environment"
    )
    common.add_argument("--results", type=Path, help="folder of the records")
    common.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="sets the size of the model")
    common.add_argument("--model", choices=MODELS, help="one with a window or a state, with workloads of its own")
    common.add_argument("--portable", action="store_true", help="llama-server with GGML_NATIVE=OFF")
    common.add_argument("--openmp", action="store_true", help="llama-server with OpenMP")

    build = commands.add_parser("build", parents=[common], help="build or install a peer")
    build.add_argument("peer", choices=("llama-server", *builds.PACKAGES))
    build.add_argument("--jobs", type=int, default=2)
    build.set_defaults(command=build_peer)

    listing = commands.add_parser("list", help="list the workloads")
    listing.set_defaults(command=list_workloads)

    run = commands.add_parser("run", parents=[common], help="run workloads")
    run.add_argument("--workloads", type=names, help="separated by commas; by default all for the kind of model")
    run.add_argument("--servers", type=names, default=["paceline", report.PLAIN, report.TUNED])
    run.add_argument("--rounds", type=int, default=3)
    run.add_argument("--seconds", type=float, help="begin no step after this time")
    run.add_argument(
        "--keep-servers",
        action="store_true",
        help="start the servers once for all rounds of a workload, as a user has them",
    )
    run.add_argument("--llama-server", type=Path, help="a llama-server in place of the one that was built")
    run.set_defaults(command=run_workloads)

    written = commands.add_parser("report", parents=[common], help="write report.md and pictures beside the records")
    written.add_argument("--no-pictures", action="store_true")
    written.set_defaults(command=write_report)

    timeline = commands.add_parser(
        "timeline", parents=[common], help="write the timeline of a workload as a page, from a trace"
    )
    timeline.add_argument("--workload", choices=list(WORKLOADS), default="long-among")
    timeline.set_defaults(command=draw_timeline, llama_server=None)
    return parser.parse_args(arguments)


def names(text: str) -> list[str]:
    """Split a list at its commas, except commas before an option of a strategy (name=value)."""
    return [name for name in re.split(r",(?![a-z_]+=)", text) if name]


def build_peer(options: argparse.Namespace) -> None:
    """Build or install one peer."""
    info = builds.build_info(options.paceline)
    if options.peer == "llama-server":
        print(builds.build_llama_server(info, _variant(options), options.jobs))
    else:
        print(builds.build_package(options.peer, info))


def list_workloads(_: argparse.Namespace) -> None:
    """Print the names and titles."""
    for workload in WORKLOADS.values():
        print(f"{workload.name:<15} {workload.title}")


def run_workloads(options: argparse.Namespace) -> None:
    """Run the steps that are missing."""
    workloads = options.workloads or [
        workload.name for workload in WORKLOADS.values() if workload.is_for_states == (options.model is not None)
    ]
    if unknown := set(workloads) - set(WORKLOADS):
        raise SystemExit(f"no workload {', '.join(sorted(unknown))}: python -m benchmarks.peers list")
    if options.model and (named := [workload for workload in workloads if WORKLOADS[workload].num_adapters]):
        raise SystemExit(f"{', '.join(named)}: {options.model} has no LoRA adapters")
    if others := {name for name in options.servers if name.partition("@")[0] not in NAMES}:
        raise SystemExit(f"no server {', '.join(sorted(others))}: choose from {', '.join(NAMES)}, with @ and a variant")
    builds.compile_bytecode(options.paceline)
    results = Results(_folder(options))
    suite = _suite(options, results)
    start_s = time.monotonic()
    if options.keep_servers:
        run_kept(options, suite, workloads, start_s)
        return
    for step in steps(workloads, options.servers, options.rounds):
        if is_over(options, start_s):
            return
        try:
            record = suite.run(step)
        except NotPossible as reason:
            print(f"{step.workload} round {step.round} {step.server}: left out, {reason}", flush=True)
            continue
        if record is not None:
            print(line(WORKLOADS[step.workload], record), flush=True)


def run_kept(options: argparse.Namespace, suite: Suite, workloads: list[str], start_s: float) -> None:
    """Run the rounds that are missing, on servers that stay for all rounds of a workload."""
    for workload in workloads:
        for record in suite.run_kept(workload, options.servers, options.rounds):
            print(line(WORKLOADS[workload], record), flush=True)
            if is_over(options, start_s):
                return


def is_over(options: argparse.Namespace, start_s: float) -> bool:
    """Return whether no step is to begin any more, after saying so."""
    if options.seconds is None or time.monotonic() - start_s <= options.seconds:
        return False
    print("time is over: the same command goes on")
    return True


def write_report(options: argparse.Namespace) -> None:
    """Write the Markdown and the pictures."""
    folder = _folder(options)
    records = Results(folder).load()
    if not records:
        raise SystemExit(f"no records in {folder}: run workloads first, or name a folder by --results")
    (folder / "report.md").write_text(report.markdown(records))
    print(report.headlines(records))
    print(folder / "report.md")
    if not options.no_pictures:
        for path in pictures.draw_all(records, folder / "pictures"):
            print(path)


def draw_timeline(options: argparse.Namespace) -> None:
    """Run paceline once with a trace and write its timeline as a page."""
    folder = _folder(options) / "timelines"
    trace, picture = folder / f"{options.workload}.jsonl", folder / f"{options.workload}.html"
    suite = _suite(options, Results(folder))
    trace.parent.mkdir(parents=True, exist_ok=True)
    suite.run(Step(options.workload, "paceline", round=time.time_ns()), extra_flags=("--trace", str(trace)))
    command = [options.paceline, "-m", "paceline", "trace", "show", str(trace), "--html", str(picture)]
    subprocess.run(command, check=True)  # noqa: S603
    print(picture)


def _variant(options: argparse.Namespace) -> builds.Variant:
    return builds.Variant(is_native=not options.portable, has_openmp=options.openmp)


def _folder(options: argparse.Namespace) -> Path:
    if options.results is not None:
        return Path(options.results)
    of_model = "" if options.model is None else f"-{options.model}"
    return DEFAULT_FOLDER / f"{environment.revision()}-{options.device}-{_variant(options).name}{of_model}"


def _suite(options: argparse.Namespace, results: Results) -> Suite:
    info = builds.build_info(options.paceline)
    if options.llama_server is None:
        builds.check_instruction_sets(info, _variant(options))
    programs = Programs(
        paceline=options.paceline,
        llama_server=options.llama_server or builds.find_llama_server(info, _variant(options)),
        llama_cpp_python=_interpreter("llama-cpp-python"),
        xllamacpp=_interpreter("xllamacpp"),
    )
    model = None if options.model is None else model_file(options.model)
    return Suite(programs, results, info, SIZES[options.device], model)


def _interpreter(package: str) -> Path | None:
    python = builds.package_interpreter(package)
    return python if python.is_file() else None


if __name__ == "__main__":
    main()
