"""Check that a wheel has the web page, that it loads nothing from elsewhere, and that it is small.

python tools/check_web_page.py dist/*.whl
"""

from __future__ import annotations

import gzip
import re
import sys
import zipfile

FOLDER = "paceline/webui/"
MOST_FIRST_BYTES = 300 * 1024  # compressed, of the page and the files that it names: the first view
MOST_BYTES = 1024 * 1024  # compressed, with libraries that are loaded when they are needed
NOT_LOADED = ("trace.html",)  # of `paceline trace show --html`
INLINE = re.compile(r"<script(?![^>]*\bsrc=)[^>]*>|<style|\son[a-z]+=|\sstyle=", re.IGNORECASE)
NAMED = re.compile(r"(?:src|href)=\"\./([^\"]+)\"")
ELSEWHERE = re.compile(r"(?:src|href)=[\"']?(?:https?:)?//", re.IGNORECASE)


def problems(files: dict[str, bytes]) -> list[str]:
    """Return the errors in the files of a page, by their names in it."""
    if "index.html" not in files:
        return ["it has no index.html: the page was not built, see PACELINE_WEBUI"]
    found = []
    page = files["index.html"].decode()
    if INLINE.search(page):
        found.append("index.html has inline scripts or styles, which the policy of the page does not allow")
    if ELSEWHERE.search(page):
        found.append("index.html loads something from elsewhere")
    if not any(name.startswith("assets/") and name.endswith(".js") for name in files):
        found.append("it has no script under assets/")
    first = {name: files[name] for name in ["index.html", *NAMED.findall(page)] if name in files}
    for part, which, most in (("its first view", first, MOST_FIRST_BYTES), ("it", files, MOST_BYTES)):
        if (size := compressed_bytes(which)) > most:
            found.append(f"{part} has {size:,} bytes compressed, more than {most:,}")
    if "trace.html" not in files:
        found.append("it has no trace.html, the viewer of traces")
    return found


def compressed_bytes(files: dict[str, bytes]) -> int:
    """Return the number of bytes that a browser loads, each file compressed."""
    return sum(len(gzip.compress(data, 9)) for name, data in files.items() if name not in NOT_LOADED)


def main() -> int:
    """Check the wheels that are given."""
    status = 0
    for path in sys.argv[1:]:
        with zipfile.ZipFile(path) as wheel:
            names = [name for name in wheel.namelist() if name.startswith(FOLDER) and not name.endswith("/")]
            files = {name.removeprefix(FOLDER): wheel.read(name) for name in names}
        found = problems(files)
        for problem in found:
            print(f"{path}: the web page: {problem}", file=sys.stderr)
        if not found:
            print(f"{path}: the web page has {compressed_bytes(files):,} bytes compressed, in {len(files)} files")
        status = status or bool(found)
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
