"""The reviewed list of llama-server's tests, `expected.toml`: of each whether paceline passes it, and why not."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

PATH = Path(__file__).with_name("expected.toml")
PASSES, SKIPS, DIFFERS, NEEDS = "passes", "skips", "differs", "needs"
_OUTCOMES = {PASSES: "passed", SKIPS: "skipped", DIFFERS: "failed", NEEDS: "failed"}


@dataclass(frozen=True, slots=True)
class Expectation:
    """The expected outcome of a test. status: passes, skips (by itself), differs (on purpose) or needs (a missing feature).

    reason: a key among the reasons of `differs` and `needs`.
    """

    status: str
    reason: str = ""

    @property
    def outcome(self) -> str:
        """Pytest's word for how the test ends."""
        return _OUTCOMES[self.status]


@dataclass(frozen=True, slots=True)
class Expectations:
    """The whole list. tests: by the id that pytest gives them; reasons: by status and key."""

    tests: Mapping[str, Expectation]
    reasons: Mapping[str, Mapping[str, str]]

    @classmethod
    def read(cls, path: Path = PATH) -> Expectations:
        """Read the list."""
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        reasons = {status: content.pop(status) for status in (DIFFERS, NEEDS)}
        tests = {
            f"{file}::{name}": Expectation(*text.split(": ", 1))
            for file, named in content.items()
            for name, text in named.items()
        }
        return cls(tests, reasons)

    def counts(self) -> Counter[str]:
        """Return the number of tests of each status."""
        return Counter(test.status for test in self.tests.values())

    def contradictions(self, outcomes: Mapping[str, str]) -> list[str]:
        """Return a line for every test that did not end as expected."""
        return [
            f"{test}: {outcome}, and the list has it as {expected.status} {expected.reason}".rstrip()
            for test, outcome in sorted(outcomes.items())
            if outcome != (expected := self.tests.get(test, Expectation(PASSES))).outcome
        ]


def listed(outcomes: Mapping[str, str], known: Expectations) -> str:
    """Return the text of the list for these outcomes: unchanged entries keep their reason, new failures have none yet."""
    lines: list[str] = []
    for status in (DIFFERS, NEEDS):
        lines += [f"[{status}]", *(f"{key} = {_quoted(why)}" for key, why in known.reasons[status].items()), ""]
    for file in sorted({_file(test) for test in outcomes}):
        lines.append(f"[{_quoted(file)}]")
        lines += _lines({test: outcome for test, outcome in outcomes.items() if _file(test) == file}, known)
        lines.append("")
    return "\n".join(lines)


def _lines(outcomes: Mapping[str, str], known: Expectations) -> Iterable[str]:
    for test, outcome in sorted(outcomes.items()):
        expected = known.tests.get(test)
        if expected is None or expected.outcome != outcome:
            expected = Expectation({"passed": PASSES, "skipped": SKIPS}.get(outcome, NEEDS))
        text = f"{expected.status}: {expected.reason}" if expected.reason else expected.status
        yield f"{_quoted(test.partition('::')[2])} = {_quoted(text)}"


def _file(test: str) -> str:
    return test.partition("::")[0]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
