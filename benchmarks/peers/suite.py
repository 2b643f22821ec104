"""Steps of the suite: one workload, one round, one server; a step with a record is not repeated."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.model import adapter, qwen2
from benchmarks.peers import environment
from benchmarks.peers.driver import PromptMaker, Run
from benchmarks.peers.figures import Record, figures_by_role, request_times
from benchmarks.peers.results import Results
from benchmarks.peers.servers import Launch, NotPossible, Programs, Running, launch, serving
from benchmarks.peers.workloads import WORKLOADS, Workload

NUM_IMPORTS = 5


@dataclass(frozen=True, slots=True)
class Step:
    """One server is started, runs one workload once, and is stopped."""

    workload: str
    server: str
    round: int


def steps(workloads: Sequence[str], servers: Sequence[str], num_rounds: int) -> Iterator[Step]:
    """Yield the steps: every round of a workload has all servers in a row, every second round in reverse order."""
    for workload in workloads:
        for number in range(1, num_rounds + 1):
            for server in servers if number % 2 else reversed(servers):
                yield Step(workload, server, number)


class Suite:
    """Runs steps and keeps their records."""

    def __init__(
        self, programs: Programs, results: Results, facts: dict[str, Any], size: str, model: Path | None = None
    ) -> None:
        """`size`: of the model and of its adapters; `model`: another one, which has no adapters."""
        self._programs, self._results, self._facts = programs, results, facts
        self._size = size
        self._model = qwen2(size) if model is None else model
        self._prompts = PromptMaker(self._model)

    def run(self, step: Step, extra_flags: tuple[str, ...] = ()) -> Record | None:
        """Run a step; None if its record exists. `extra_flags` go to the server."""
        if self._results.has(step.workload, step.server, step.round):
            return None
        with serving(*self._launch(step, extra_flags)) as server:
            return self._measure(step, server, variation=0)

    def run_kept(self, workload: str, servers: Sequence[str], num_rounds: int) -> Iterator[Record]:
        """Run the missing rounds of a workload on servers that stay for all of them; yield their records.

        Leaves out servers that do not support the workload. Each round has prompts of its own, since the servers have
        cached earlier prompts.
        """
        missing = [
            step
            for step in steps([workload], servers, num_rounds)
            if not self._results.has(workload, step.server, step.round)
        ]
        with contextlib.ExitStack() as stack:
            kept: dict[str, Running] = {}
            for server in dict.fromkeys(step.server for step in missing):
                with contextlib.suppress(NotPossible):
                    kept[server] = stack.enter_context(serving(*self._launch(Step(workload, server, 0))))
            for step in missing:
                if step.server in kept:
                    yield self._measure(step, kept[step.server], variation=step.round)

    def _launch(self, step: Step, extra_flags: tuple[str, ...] = ()) -> tuple[Launch, Path]:
        """Return how to start the server of a step, and its log."""
        workload = WORKLOADS[step.workload]
        adapters = [adapter(self._size, number) for number in range(workload.num_adapters)]
        how = launch(step.server, workload, self._programs, self._model, adapters, extra_flags)
        log = self._results.path(step.workload, step.server, step.round).with_suffix(".log")
        log.parent.mkdir(parents=True, exist_ok=True)
        return how, log

    def _measure(self, step: Step, server: Running, variation: int) -> Record:
        """Run the workload once, and keep the record."""
        workload, how = WORKLOADS[step.workload], server.how
        program = environment.program_id(Path(how.command[0]).resolve())
        facts, at = environment.record(self._facts) | {"program": program}, environment.now()
        begin_cpu_s = server.cpu_s()
        replies = asyncio.run(Run(workload, self._prompts, server, how.dialect, variation).all())
        process = {"load_s": round(server.load_s, 3), "cpu_s": round(server.cpu_s() - begin_cpu_s, 2)}
        if (peak_mib := server.peak_mib()) is not None:
            process["peak_mib"] = peak_mib
        if step.workload == "startup" and step.server.startswith("paceline"):
            process["import_s"] = import_time_s(self._programs.paceline)
        record = Record(
            workload=step.workload,
            server=step.server,
            round=step.round,
            at=at,
            command=tuple(Path(part).name if part.startswith("/") else part for part in how.command),
            environment=facts,
            requests=tuple(request_times(workload, replies)),
            process=process,
        )
        self._results.add(record)
        return record


def import_time_s(interpreter: Path) -> float:
    """Return how long `import paceline` takes, the median of some."""
    code = "import time; start = time.perf_counter(); import paceline; print(time.perf_counter() - start)"
    times = [
        float(subprocess.run([interpreter, "-c", code], check=True, capture_output=True, text=True).stdout)  # noqa: S603
        for _ in range(NUM_IMPORTS)
    ]
    return round(statistics.median(times), 4)


def line(workload: Workload, record: Record) -> str:
    """Return the record in one line, for the terminal."""
    by_role = figures_by_role(workload, record.requests)
    found = by_role["all"]
    headline = record.process.get(workload.headline, by_role[workload.headline_role].get(workload.headline, 0.0))
    problems = {request.problem for request in record.requests if request.problem}
    texts = [
        f"{record.workload} round {record.round} {record.server}:",
        f"{workload.headline_role} {workload.headline} {headline:.3g};",
        f"{found.get('tokens_per_s', 0):.1f} tokens/s, TTFT {found.get('ttft_p50_s', 0):.3f} s,",
        f"longest gap {found.get('longest_gap_s', 0):.3f} s, {found['complete']:.0f} of {len(record.requests)} complete,",
        f"load {record.process['load_s']:.2f} s, {record.process.get('peak_mib', 0):.0f} MiB",
    ]
    if problems:
        texts.append(f"| {min(problems)[:160]}")
    return " ".join(texts)
