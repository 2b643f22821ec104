"""Compare ways to choose a replica, on simulated replicas.

python -m benchmarks.cluster [--replicas 4,16,64] [--traces shared,chats,agents] [--policies power_of_two,ours] [--load 0.6]

Each replica is the real scheduler and KV cache on a fake backend: 20 ms a pass and 1 ms a token, 8 slots, 16,384 cells.
Arrivals are drawn from a seed, so that the same command prints the same table. Load: requests a second and replica. Other
policies than ours see exact numbers of open requests at once; ours sees reports, twice a second and 0.1 s old.

prompt tokens computed    relative to power_of_two, if it is among the policies
imbalance                 the busy time of the busiest replica, relative to the mean
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from random import Random

from benchmarks.cluster.policies import POLICIES
from benchmarks.cluster.simulation import Outcome, Setting, Simulation
from benchmarks.cluster.traces import TRACES, Dialogue, Shape, read_trace


def main() -> None:
    """Print a table for each number of replicas and trace."""
    options = parser().parse_args()
    for num_replicas in map(int, options.replicas.split(",")):
        for name in options.traces.split(","):
            shape = Shape(options.load * num_replicas, options.requests * num_replicas, options.seed)
            trace = TRACES[name](shape) if name in TRACES else read_trace(Path(name))
            print(f"\n{name}, {num_replicas} replicas, {sum(len(record.turns) for record in trace)} requests")
            print(f"{'':16}computed  hit rate  TTFT p50     p99  imbalance  digest bytes")
            compare(options, num_replicas, trace)


def compare(options: argparse.Namespace, num_replicas: int, trace: list[Dialogue]) -> None:
    """Run every policy on a trace."""
    outcomes: dict[str, Outcome] = {}
    for name in options.policies.split(","):
        start_s = time.perf_counter()
        setting = Setting(num_replicas, report_s=options.report_s, delay_s=options.delay_s, lost_share=options.lost)
        outcomes[name] = Simulation(trace, POLICIES[name](Random(options.seed)), setting).run()
        print(row(name, outcomes[name], outcomes.get("power_of_two"), time.perf_counter() - start_s), flush=True)


def row(name: str, outcome: Outcome, base: Outcome | None, took_s: float) -> str:
    """Return a line of the table."""
    computed = outcome.num_computed / base.num_computed if base is not None else float("nan")
    digest_bytes = sum(outcome.update_bytes) / max(1, len(outcome.update_bytes))
    return (
        f"{name:16}{computed:8.2f}{outcome.hit_rate:10.2f}{outcome.ttft_s(0.5):9.2f} s{outcome.ttft_s(0.99):6.2f} s"
        f"{outcome.imbalance:10.2f}{digest_bytes:14.0f}   ({took_s:.0f} s)"
    )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--replicas", default="4,16,64", help="numbers of replicas")
    found.add_argument("--traces", default=",".join(TRACES), help="names, or files of JSON lines")
    found.add_argument(
        "--policies", default="power_of_two,random,round_robin,least_loaded,prefix_only,serve_prefix,ours"
    )
    found.add_argument("--load", type=float, default=0.8, help="requests a second and replica")
    found.add_argument("--requests", type=int, default=60, help="requests a replica")
    found.add_argument("--report-s", type=float, default=0.5)
    found.add_argument("--delay-s", type=float, default=0.1)
    found.add_argument("--lost", type=float, default=0.0, help="share of reports that are lost")
    found.add_argument("--seed", type=int, default=1)
    return found


if __name__ == "__main__":
    main()
