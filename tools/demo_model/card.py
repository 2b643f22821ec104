"""Puts the measured table into the model card, between its two marks."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from demo_model.measure import Row, table

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def fill(card: str, rows: list[Row]) -> str:
    """Return the card with a fresh table."""
    before, _, rest = card.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table(rows)}\n\n{END}{after}"


def main() -> None:
    """Read the figures and rewrite the card."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("figures", type=Path)
    parser.add_argument("card", type=Path)
    a = parser.parse_args()
    rows = [Row(**row) for row in json.loads(a.figures.read_text(encoding="utf-8"))]
    a.card.write_text(fill(a.card.read_text(encoding="utf-8"), rows), encoding="utf-8")


if __name__ == "__main__":
    main()
