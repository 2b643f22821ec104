"""Storage of records: a file for each round of a workload against a server, in a folder by revision and device."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

from benchmarks.peers.environment import ROOT
from benchmarks.peers.figures import Record

DEFAULT_FOLDER = ROOT / "out" / "peers"
_FILE = re.compile(r"(?P<server>.+)-round(?P<round>\d+)\.json")


class Results:
    """The records of one folder: `<workload>/<server>-round<N>.json`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, workload: str, server: str, round_number: int) -> Path:
        """Return the file of a record, there or not."""
        return self.folder / workload / f"{server}-round{round_number}.json"

    def add(self, record: Record) -> Path:
        """Keep a record."""
        path = self.path(record.workload, record.server, record.round)
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".part")  # a record that is there is whole
        aside.write_text(json.dumps(record.to_json()) + "\n")
        aside.replace(path)
        return path

    def has(self, workload: str, server: str, round_number: int) -> bool:
        """Return whether the record is there: the step need not run again."""
        return self.path(workload, server, round_number).is_file()

    def load(self) -> dict[str, dict[str, list[Record]]]:
        """Return all records by workload and server, in the order of their rounds."""
        found: dict[str, dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
        for path in sorted(self.folder.glob("*/*.json")):
            if _FILE.fullmatch(path.name):
                record = Record.from_json(json.loads(path.read_text()))
                found[record.workload][record.server].append(record)
        for servers in found.values():
            for records in servers.values():
                records.sort(key=lambda record: record.round)
        return found
