"""python -m tests.repeat: run the tests many times, and list each test that failed at least once.

Every run has another order and other examples. One round in three is a run alone, one is two runs at once, and one is a run
beside a process that computes on every CPU.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from xml.etree import ElementTree as ET

ROUNDS = (("alone", 1, 0), ("two at once", 2, 0), ("beside a load", 1, os.cpu_count() or 1))
"""The name of a round, its runs, and its processes that compute."""


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if no test failed, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m tests.repeat", description=__doc__)
    parser.add_argument("number", type=int, help="how often to run the tests")
    parser.add_argument("--seed", type=int, default=1, help="the seed of the first run; later runs count up")
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="of pytest, after --")
    given = parser.parse_args(argv)
    seeds = list(range(given.seed, given.seed + given.number))
    failures: dict[str, list[int]] = defaultdict(list)
    for name, num_runs, num_loads in cycle(ROUNDS):
        if not seeds:
            break
        running, seeds = seeds[:num_runs], seeds[num_runs:]
        for seed, failed in zip(running, run_at_once(running, num_loads, given.arguments), strict=True):
            print(f"seed {seed}, {name}: {len(failed)} failed", flush=True)
            for test in failed:
                failures[test].append(seed)
    for test, failed_seeds in sorted(failures.items()):
        print(f"{test}: failed with seeds {failed_seeds}")
    return int(bool(failures))


def run_at_once(seeds: Sequence[int], num_loads: int, arguments: Sequence[str]) -> list[list[str]]:
    """Return the failed tests of each seed's run."""
    loads = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_loads)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            reports = [Path(folder) / f"{seed}.xml" for seed in seeds]
            runs = [start(seed, report, arguments) for seed, report in zip(seeds, reports, strict=True)]
            codes = [run.wait() for run in runs]
            return [
                failed_tests(report) if code in (0, 1) else [f"pytest ended with {code}"]
                for code, report in zip(codes, reports, strict=True)
            ]
    finally:
        for load in loads:
            load.kill()
            load.wait()


def start(seed: int, report: Path, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    options = ["-q", f"--randomly-seed={seed}", f"--hypothesis-seed={seed}", f"--junitxml={report}"]
    return subprocess.Popen([sys.executable, "-m", "pytest", *options, *arguments])


def failed_tests(report: Path) -> list[str]:
    cases = ET.parse(report).getroot().iter("testcase")
    return [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]


if __name__ == "__main__":
    sys.exit(main())
