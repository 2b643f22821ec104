"""The JSON Schema Test Suite against the constraints of JSON schemas: is any keyword accepted and not enforced?

python -m tests.unit.constraints.schema_suite FOLDER_OR_SDIST [--drafts draft2020-12 draft7 ...]

The argument is the suite's folder `tests`, or the source distribution of `jsonschema`, which has it as `json/tests`. Each
schema is sorted into

enforced    every valid instance can be written, and no invalid one
narrower    no invalid instance can be written, and some valid one neither (another order of properties, 1.0 for 1)
refused     an error when it is compiled
open        an invalid instance can be written; the exit status is 1 if there is any
"""

from __future__ import annotations

import argparse
import json
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.unit.constraints.byte_table import TABLE

from paceline.constraints import Constraint, ConstraintCompiler
from paceline.errors import PacelineError
from paceline.params import SamplingParams

DRAFTS = ("draft4", "draft6", "draft7", "draft2019-09", "draft2020-12")


def spellings(value: Any) -> set[str]:
    """Return a value as JSON, with and without blanks."""
    return {
        json.dumps(value, ensure_ascii=False),
        json.dumps(value, ensure_ascii=False, separators=(",", ":")),
        json.dumps(value),
    }


def writes(constraint: Constraint, text: str) -> bool:
    """Return whether a text can be generated."""
    try:
        for byte in text.encode():
            if constraint.is_complete:
                return False
            constraint.accept(byte)
    except PacelineError:
        return False
    return constraint.may_end


def sort(compiler: ConstraintCompiler, case: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the kind of a case of the suite, and the values that are open."""
    try:
        constraint = compiler.compile(SamplingParams(json_schema=case["schema"]))
    except PacelineError:
        return "refused", []
    assert constraint is not None
    is_narrower, is_open = False, []
    for test in case["tests"]:
        written = any(writes(constraint.copy(), text) for text in spellings(test["data"]))
        is_narrower = is_narrower or (test["valid"] and not written)
        if written and not test["valid"]:
            is_open.append(str(test["description"]))
    return ("open" if is_open else "narrower" if is_narrower else "enforced"), is_open


def cases(folder: Path, draft: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the required cases of a draft, with the names of their files."""
    for path in sorted((folder / draft).glob("*.json")):
        for case in json.loads(path.read_text(encoding="utf-8")):
            yield path.stem, case


def count(folder: Path, draft: str) -> Counter[str]:
    """Sort the cases of a draft; print the open values."""
    compiler, found = ConstraintCompiler(TABLE), Counter[str]()
    for name, case in cases(folder, draft):
        kind, is_open = sort(compiler, case)
        found[kind] += 1
        if is_open:
            sys.stderr.write(f"{draft} {name}: {case['description']}: {is_open}\n")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--drafts", nargs="+", default=DRAFTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as aside:
        folder = options.source
        if folder.is_file():
            with tarfile.open(folder) as archive:
                archive.extractall(aside, filter="data")
            (folder,) = Path(aside).glob("*/json/tests")
        totals = {draft: count(folder, draft) for draft in options.drafts}
    for draft, found in totals.items():
        kinds = ", ".join(f"{kind} {found[kind]}" for kind in ("enforced", "narrower", "refused", "open"))
        sys.stdout.write(f"{draft:14} {kinds}\n")
    sys.exit(any(found["open"] for found in totals.values()))


if __name__ == "__main__":
    main()
