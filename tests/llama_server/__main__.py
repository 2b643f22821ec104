"""python -m tests.llama_server: run llama-server's own tests against `paceline serve` and compare with `expected.toml`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.llama_server.expectations import PATH, Expectations, listed
from tests.llama_server.suite import Suite

from paceline import _native


def main() -> int:
    """Return 0 if every test ended as listed."""
    parser = argparse.ArgumentParser(prog="python -m tests.llama_server", description=__doc__)
    parser.add_argument("tests", nargs="*", help="texts of which a test's id has one; without any, all tests")
    parser.add_argument("--jobs", type=int, default=2, help="tests that run at once (default: 2)")
    parser.add_argument("--keep", type=Path, help="a new folder for the logs and the models, which then stays")
    parser.add_argument("--update", action="store_true", help="write the outcomes into the list; reasons are by hand")
    given = parser.parse_args()
    source = Path(os.environ.get("PACELINE_LLAMA_CPP_SOURCE") or _native.build_info()["llama_cpp_source"])
    with tempfile.TemporaryDirectory() as folder:
        suite = Suite(given.keep or Path(folder), source)
        collected = suite.collect()
        wanted = [test for test in collected if not given.tests or any(text in test for text in given.tests)]
        outcomes = suite.run(wanted, jobs=given.jobs)
    expectations = Expectations.read()
    if given.update:
        known = {test: item.outcome for test, item in expectations.tests.items() if test in collected}
        PATH.write_text(listed({**known, **outcomes}, expectations), encoding="utf-8")
        expectations = Expectations.read()
    contradictions = expectations.contradictions(outcomes)
    for line in contradictions:
        sys.stdout.write(line + "\n")
    counted = ", ".join(f"{number} {outcome}" for outcome, number in sorted(Counter(outcomes.values()).items()))
    sys.stdout.write(f"{len(outcomes)} tests: {counted}; {len(contradictions)} not as the list has them\n")
    return 1 if contradictions else 0


if __name__ == "__main__":
    sys.exit(main())
