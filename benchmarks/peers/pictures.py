"""Pictures of a folder of records, by matplotlib (the extra `bench`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.figures import Record, spread
from benchmarks.peers.report import Records, values
from benchmarks.peers.workloads import WORKLOADS, Figure

COLOURS = ("#1b6ca8", "#d1495b", "#edae49", "#66a182", "#8d96a3", "#6a4c93", "#3d3d3d", "#b56576")


def draw_all(records: Records, folder: Path) -> list[Path]:
    """Draw every picture that the records suffice for, and return their files."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise SystemExit("matplotlib is not installed: pip install 'paceline[bench]'") from None
    mpl.use("svg")
    mpl.rcParams.update({"axes.grid": True, "grid.alpha": 0.3, "font.size": 9, "svg.hashsalt": "paceline"})
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, figure in _pictures(records):
        figure.tight_layout()
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        files.append(folder / f"{name}.svg")
    return files


def _pictures(records: Records) -> Iterator[tuple[str, Any]]:
    for kind in ("steady", "mixed"):
        if sum(name.startswith(f"{kind}-") for name in records) > 1:
            yield f"throughput-{kind}", _throughput(records, kind)
    for name, servers in records.items():
        yield f"latency-{name}", _distributions(name, servers)
        if len(servers) > 1:
            yield f"trade-{name}", _trade(name, servers)


def _axes(num: int = 1, title: str = "") -> tuple[Any, Any]:
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(5.5 * num, 3.8))
    canvas.suptitle(title)
    return canvas, canvas.subplots(1, num)


def _colours(records: Records) -> dict[str, str]:
    names = sorted(
        {server for servers in records.values() for server in servers}, key=lambda name: (name != "paceline", name)
    )
    return {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}


def _throughput(records: Records, kind: str) -> Any:
    """Tokens a second over the number of streams; bars are the extremes of the rounds."""
    canvas, axes = _axes(title=f"throughput, {'equal' if kind == 'steady' else 'mixed'} lengths")
    for server, colour in _colours(records).items():
        points = []
        for name, servers in records.items():
            workload = WORKLOADS[name]
            if name.startswith(f"{kind}-") and (
                found := values(servers.get(server, ()), workload, "all", "tokens_per_s")
            ):
                points.append((workload.width or 0, spread(list(found.values()))))
        points.sort(key=lambda point: point[0])
        if points:
            medians = [point.median for _, point in points]
            bars = [
                [point.median - point.least for _, point in points],
                [point.most - point.median for _, point in points],
            ]
            axes.errorbar(
                [width for width, _ in points], medians, yerr=bars, label=server, color=colour, marker="o", capsize=2
            )
    axes.set(xlabel="streams", ylabel="tokens/s", xscale="log", ylim=(0, None))
    axes.set_xticks([1, 2, 4, 8, 16, 32], labels=["1", "2", "4", "8", "16", "32"])
    axes.legend()
    return canvas


def _distributions(name: str, servers: dict[str, Sequence[Record]] | Any) -> Any:
    """Empirical distributions of TTFT and of the gaps between tokens."""
    canvas, (first, gaps) = _axes(2, WORKLOADS[name].title)
    for server, colour in _colours({name: servers}).items():
        requests = [request for record in servers[server] for request in record.requests]
        _distribution(first, [request.ttft_s for request in requests if request.ttft_s is not None], server, colour)
        _distribution(gaps, [gap for request in requests for gap in request.gaps_s], server, colour)
    first.set(xlabel="TTFT, s", ylabel="share of requests", xscale="log")
    gaps.set(xlabel="gap between tokens, s", ylabel="share of gaps", xscale="log")
    for axes in (first, gaps):
        axes.xaxis.set_major_formatter("{x:g}")
    first.legend()
    return canvas


def _distribution(axes: Any, found: Sequence[float], label: str, colour: str) -> None:
    ordered = sorted(max(value, 1e-4) for value in found)
    shares = [(place + 1) / len(ordered) for place in range(len(ordered))]
    axes.step(ordered, shares, where="post", label=label, color=colour)


def _trade(name: str, servers: dict[str, Sequence[Record]] | Any) -> Any:
    """Throughput over the longest gap, a point for each server: up and left is better."""
    canvas, axes = _axes(title=f"throughput over longest gap: {WORKLOADS[name].title}")
    workload = WORKLOADS[name]
    role = workload.headline_role if workload.headline == "longest_gap_s" else "all"
    for server, colour in _colours({name: servers}).items():
        wanted: tuple[tuple[str, Figure], ...] = ((role, "longest_gap_s"), ("all", "tokens_per_s"))
        points = [values(servers[server], workload, of, figure) for of, figure in wanted]
        if all(points):
            gap, speed = (spread(list(point.values())).median for point in points)
            axes.plot([gap], [speed], "o", color=colour)
            axes.annotate(server, (gap, speed), xytext=(5, 3), textcoords="offset points", fontsize=8)
    axes.margins(x=0.3)
    axes.set(xlabel="longest gap, s", ylabel="tokens/s", xscale="log", ylim=(0, 1.15 * axes.get_ylim()[1]))
    _plain_numbers(axes)
    return canvas


def _plain_numbers(axes: Any) -> None:
    """Write 0.4 instead of 4 times a power of ten on a logarithmic axis."""
    for which in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        which("{x:g}")
