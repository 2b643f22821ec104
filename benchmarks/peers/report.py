"""The report of a folder of records, as Markdown: a table of headlines with targets, then every workload's figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.peers.figures import Record, Spread, Verdict, figures_by_role, ratios, spread, verdict
from benchmarks.peers.workloads import WORKLOADS, Figure, Workload

Records = Mapping[str, Mapping[str, Sequence[Record]]]

PLAIN, TUNED = "llama-server", "llama-server@tuned"
TITLES: Mapping[Figure, str] = {
    "tokens_per_s": "tokens/s",
    "total_s": "time s",
    "ttft_p50_s": "TTFT p50 s",
    "ttft_max_s": "TTFT max s",
    "itl_p50_s": "ITL p50 s",
    "itl_p99_s": "ITL p99 s",
    "longest_gap_s": "longest gap s",
    "complete": "complete",
    "goodput_per_s": "goodput 1/s",
    "load_s": "load s",
    "peak_mib": "peak MiB",
    "import_s": "import s",
    "cpu_s": "CPU s",
}
READING = (
    "Medians over the rounds; a ratio is the median over the rounds of paceline's figure by the other's of the same round, with "
    "the least and the greatest in brackets. llama-server has as many slots as the workload has streams, and else its own "
    "defaults; tuned has flags for each workload; paceline has one configuration for all."
)
DETAILS: tuple[Figure, ...] = (
    "tokens_per_s", "total_s", "ttft_p50_s", "ttft_max_s", "itl_p50_s", "itl_p99_s", "longest_gap_s", "goodput_per_s", "complete",
)  # fmt: skip


def values(records: Sequence[Record], workload: Workload, role: str, figure: Figure) -> dict[int, float]:
    """Return a figure of every round that has it."""
    found = {}
    for record in records:
        by_role = figures_by_role(workload, record.requests)
        if (value := record.process.get(figure, by_role.get(role, {}).get(figure))) is not None:
            found[record.round] = value
    return found


def verdicts(workload: Workload, servers: Mapping[str, Sequence[Record]]) -> list[Verdict]:
    """Return how paceline's records meet the workload's targets."""
    found = []
    for target in workload.targets:
        ours = values(servers.get("paceline", ()), workload, target.role, target.figure)
        beside = servers.get(target.beside or "paceline", ())
        theirs = values(beside, workload, target.of_role or target.role, target.figure)
        if (one := verdict(target, ours, theirs)) is not None:
            found.append(one)
    return found


def markdown(records: Records) -> str:
    """Return the whole report."""
    parts = ["# paceline beside its peers", _environment(records), headlines(records)]
    parts += [_details(WORKLOADS[name], servers) for name, servers in _in_order(records)]
    return "\n\n".join(parts) + "\n"


def headlines(records: Records) -> str:
    """Return the table of headlines."""
    rows = [
        "| workload | figure | paceline | llama-server | tuned | ratio | ratio to tuned | target |",
        "|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for name, servers in _in_order(records):
        workload = WORKLOADS[name]
        figure, role = workload.headline, workload.headline_role
        columns = [values(servers.get(server, ()), workload, role, figure) for server in ("paceline", PLAIN, TUNED)]
        cells = [workload.title, TITLES[figure] + ("" if role == "all" else f" ({role})")]
        cells += [_number(spread(list(column.values())).median) if column else "" for column in columns]
        cells += [_ratio(ratios(columns[0], column)) for column in columns[1:]]
        cells.append("; ".join(_verdict(verdict) for verdict in verdicts(workload, servers)))
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _in_order(records: Records) -> list[tuple[str, Mapping[str, Sequence[Record]]]]:
    return [(name, records[name]) for name in WORKLOADS if name in records]


def _environment(records: Records) -> str:
    every = [record for servers in records.values() for rounds in servers.values() for record in rounds]
    if not every:
        return "No records."
    facts = [record.environment for record in every]
    dates = sorted(record.at[:10] for record in every)
    lines = [
        f"{dates[0]}{'' if dates[0] == dates[-1] else f' to {dates[-1]}'}, revision "
        f"{', '.join(sorted({fact['revision'] for fact in facts}))}, llama.cpp {facts[0]['llama_cpp']}, "
        f"{facts[0]['compiler']}; {facts[0]['cpu']}, {facts[0]['num_cores']} cores"
        + (f", {', '.join(facts[0]['gpus'])}" if facts[0]["gpus"] else "") + ".",
        f"Instruction sets of both builds: {' '.join(facts[0]['cpu_features'])}.",
        READING,
    ]  # fmt: skip
    return "\n\n".join(lines)


def _details(workload: Workload, servers: Mapping[str, Sequence[Record]]) -> str:
    roles = dict.fromkeys(["all", *(request.role for request in workload.requests)])
    if len(roles) == 2:
        del roles["all"]
    rows = [
        f"## {workload.name}: {workload.title}",
        "| server | requests | rounds | "
        + " | ".join(TITLES[figure] for figure in DETAILS)
        + " | load s | peak MiB | CPU s |",
        "|---|---|---:|" + "---:|" * (len(DETAILS) + 3),
    ]
    for server, records in servers.items():
        for role in roles:
            columns = [values(records, workload, role, figure) for figure in (*DETAILS, "load_s", "peak_mib", "cpu_s")]
            cells = [server, role, str(len(records))]
            cells += [_number(spread(list(column.values())).median) if column else "" for column in columns]
            rows.append("| " + " | ".join(cells) + " |")
    commands = [
        f"- {server} ({records[0].environment['program']}): `{' '.join(records[0].command)}`"
        for server, records in servers.items()
    ]
    return "\n".join([rows[0], "", *rows[1:], "", *commands])


def _number(value: float) -> str:
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


def _ratio(found: Spread | None) -> str:
    if found is None:
        return ""
    if found.num_rounds == 1:
        return f"{found.median:.3f}"
    return f"{found.median:.3f} ({found.least:.3f}-{found.most:.3f})"


def _verdict(one: Verdict) -> str:
    target = one.target
    sign = "≥" if target.at_least else "≤"
    what = f"{TITLES[target.figure]}{'' if target.role == 'all' else f' ({target.role})'}"
    if target.is_difference:
        beside = f" more than {target.beside}"
    elif target.beside is not None or target.of_role is not None:
        beside = f" x {target.of_role or target.beside}"
    else:
        beside = ""
    return f"{'met' if one.is_met else '**missed**'}: {what} {sign} {target.bound:.3g}{beside}, is {_number(one.measured.median)}"
