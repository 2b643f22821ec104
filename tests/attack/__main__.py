"""python -m tests.attack: attack servers that are started for it, and compare with the figures of earlier servers."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tests.attack.harness import Result, find_attacks, run_attack


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if every attack was held, 1 if not."""
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description=__doc__)
    parser.add_argument("names", nargs="*", help="modules, or attacks as MODULE.NAME (default: all)")
    parser.add_argument("--sample", action="store_true", help="only the quick attacks that the tests run")
    parser.add_argument("--list", action="store_true", help="list the attacks and run none")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results into a file")
    given = parser.parse_args(argv)
    attacks = find_attacks()
    known = {*attacks, *(name.partition(".")[0] for name in attacks)}
    if unknown := [name for name in given.names if name not in known]:
        parser.error(f"no such attack: {', '.join(unknown)}; --list shows all")
    if given.names:
        attacks = {
            name: attack
            for name, attack in attacks.items()
            if name in given.names or name.partition(".")[0] in given.names
        }
    if given.sample:
        attacks = {name: attack for name, attack in attacks.items() if attack.sample}
    if given.list:
        for name, attack in attacks.items():
            sys.stdout.write(f"{name}: {attack.claim}\n")
        return 0
    results = []
    for name, attack in attacks.items():
        sys.stderr.write(f"{name} ...\n")
        results.append(run_attack(name, attack))
    if given.json:
        given.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n", encoding="utf-8")
    Console().print(_table(results))
    return 0 if all(result.held for result in results) else 1


def _table(results: Sequence[Result]) -> Table:
    table = Table("attack", "before", "now", "held", show_lines=True)
    for result in results:
        table.add_row(
            f"{result.name}\n[dim]{escape(result.claim)}[/]",
            escape(result.before),
            escape(result.now),
            "[green]yes[/]" if result.held else "[red]no[/]",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
