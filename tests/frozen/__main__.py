"""Write the files anew: python -m tests.frozen --write [NAME ...]."""

from __future__ import annotations

import argparse

from tests.frozen.answers import FOLDER, FROZEN

parser = argparse.ArgumentParser(prog="python -m tests.frozen", description="Write the files of tests/frozen anew.")
parser.add_argument("--write", action="store_true", required=True)
parser.add_argument("names", nargs="*", metavar="NAME", help="files to write; all by default")
for name in parser.parse_args().names or FROZEN:
    (FOLDER / name).write_text(FROZEN[name](), encoding="utf-8", newline="\n")
