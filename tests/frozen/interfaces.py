"""Make the frozen texts of the command line, of /metrics, of traces and of engine events."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from tests.cluster_world import ClusterWorld
from tests.frozen.exchanges import Script, scripted_server
from tests.frozen.text import laid_out
from tests.server.event_client import watching
from tests.server.probe import ENDLESS
from tests.server.router_world import RouterWorld
from tests.server.running import RunningServer
from tests.server.world import World
from tests.unit.observability.test_trace_file import ONE_OF_EACH
from tests.unit.server.flags.world import FILES, FakeFiles
from typer.main import get_command

from paceline.cli.app import build_app
from paceline.errors import PacelineError
from paceline.observability.trace_file import Trace, TraceRecorder
from paceline.ray_serve.cluster_app import cluster_app
from paceline.ray_serve.cluster_config import parse_cluster_config
from paceline.server.flags import resolve
from paceline.server.flags.display import default_of
from paceline.server.flags.table import FLAGS
from paceline.testing import FakeEngine

_TRIED = ("1", "x?")  # values that show the type of a flag and its choices


def flags_of_serve() -> str:
    """Return every flag of `paceline serve`: names, variables, default, and the result of some values."""
    lines = []
    for flag in FLAGS:
        variables = [name for name in (flag.env, flag.off_env, *flag.own_envs) if name is not None]
        marks = [name for name in ("many", "secret", "ours", "table") if getattr(flag, name)]
        lines.append(" ".join([*flag.names, flag.metavar or "(switch)", *marks]))
        lines += [f"  off: {' '.join(flag.off_names)}"] if flag.off_names else []
        lines.append(f"  variables: {' '.join(variables)}")
        lines.append(f"  default: {default_of(flag)}")
        tried = [flag.names[:1], flag.off_names[:1]] if not flag.metavar else [(flag.names[0], text) for text in _TRIED]
        lines += [f"  {' '.join(words)}: {_resolved(words)}" for words in tried if words]
    return "\n".join(lines) + "\n"


def _resolved(words: tuple[str, ...]) -> str:
    """Return the settings that these words change, with the notes, or the error."""
    try:
        found = resolve(words, {}, FakeFiles(FILES))
    except PacelineError as error:
        return f"{type(error).__name__}: {error}"
    default = resolve((), {}, FakeFiles(FILES)).settings
    changed: dict[str, Any] = {"prints": found.prints} if found.prints else {}
    for name in type(default).__dataclass_fields__:
        before, now = getattr(default, name), getattr(found.settings, name)
        if before != now:
            changed[name] = now
    return ", ".join([*(f"{name} = {value!r}" for name, value in changed.items()), *found.notes]) or "nothing"


def options_of_commands() -> str:
    """Return every option of every command, from the parser."""
    return "\n".join(_command_lines(get_command(build_app()))) + "\n"


def _command_lines(command: Any, *path: str) -> Iterator[str]:
    yield " ".join(("paceline", *path))
    for parameter in command.params:
        names = [*parameter.opts, *parameter.secondary_opts]
        facts = {
            "metavar": parameter.metavar,
            "default": getattr(parameter.default, "value", parameter.default),
            "shown default": getattr(parameter, "show_default", None),
            "variable": parameter.envvar,
            "required": parameter.required,
            "nargs": parameter.nargs,
            "multiple": getattr(parameter, "multiple", False),
            "flag": getattr(parameter, "is_flag", False),
            "hidden": getattr(parameter, "hidden", False),
        }
        ordinary = (None, False, 1, True)  # of most options
        shown = [f"{name} {value!r}" for name, value in facts.items() if not any(value is usual for usual in ordinary)]
        yield f"  {' '.join(names)}: {', '.join(shown)}"
    for name, inner in getattr(command, "commands", {}).items():
        yield from _command_lines(inner, *path, name)


def metrics() -> str:
    """Return the metrics of one model, of a router and of a cluster, with types, helps and labels but without values."""
    body, script, found = {"prompt": "Once", "n_predict": 3}, Script(), {}
    with scripted_server(script) as server, server.client() as client:
        script.begin("Once upon a time")
        client.post("/completion", json=body)
        client.post("/embedding", json={"content": "One"})
        found["one model"] = client.get("/metrics").text
    router = RouterWorld()
    router.client.post("/completion", json={**body, "model": "small"})
    found["several models"] = router.client.get("/metrics").text
    router.close()
    replicas = ClusterWorld("a")
    config = parse_cluster_config(Path("/cluster.toml"), b"[models.tiny]\n")
    build: Any = lambda *_: cluster_app(config, {"tiny": replicas._make_calls})  # noqa: E731
    with RunningServer(config.models[0].settings, build=build) as server, server.client() as client:
        client.get("/health")
        found["a cluster"] = client.get("/metrics").text
    replicas.close()
    return "\n".join(line for title, text in found.items() for line in ("", title, *_families(text))) + "\n"


def _families(text: str) -> Iterator[str]:
    for family in text_string_to_metric_families(text):
        if "process_" in family.name or family.name.startswith("python_"):
            continue  # prometheus_client adds these, if the system has their values
        labels = {label for sample in family.samples for label in sample.labels}
        yield f"{family.name} {family.type} {{{', '.join(sorted(labels))}}} {family.documentation}"


def trace() -> str:
    """Return one line for each kind of event, then the trace of three requests on the fake backend."""
    each, engine_trace = io.StringIO(), io.StringIO()
    with TraceRecorder(each, start_s=0.0) as recorder:
        Trace(ONE_OF_EACH).replay(recorder)
    with TraceRecorder(engine_trace, start_s=0.0) as recorder:
        engine = FakeEngine(instruments=[recorder], num_slots=2)
        streams = [engine.submit(f"a prompt {' of the same words' * 3} {name}", max_tokens=3) for name in "abc"]
        engine.tick()
        streams[1].cancel()
        engine.run()
    return each.getvalue() + "\n" + engine_trace.getvalue()


def engine_events() -> str:
    """Return the names of the events of a watched engine, and the names of their members."""
    world = World(num_slots=2, num_cells=400_000)
    found: Any = {}
    seen = (
        "ticks longest_ms",
        "slots id",
        "queue sequences key",
        "tree nodes id",
        "marks reason",
        "histograms itl_s p50",
    )
    try:
        with watching(world.client) as events:
            world.post(prompts=["a prompt of many words"])
            streams = [world.raw(prompts=["another prompt"], sampling=ENDLESS, stream=True) for _ in range(3)]
            for _ in range(100):  # events; the second or third one has all members as a rule
                found = _merged(found, _shape(events.next()[1]))
                if all(_has(found, path.split()) for path in seen):
                    break
            for stream in streams:
                stream.close()
            world.server.call(world.server.service.drain)
            while events.names[-1] != "end":
                _, ending = events.next()
    finally:
        world.close()
    shapes = {"names": sorted({*events.names}), "members": found, "members of end": _shape(ending)}
    return laid_out(json.loads(json.dumps(shapes, sort_keys=True)), 120) + "\n"


def _has(shape: Any, path: list[str]) -> bool:
    for name in path:
        shape = shape[0] if isinstance(shape, list) else shape
        if name not in shape:
            return False
        shape = shape[name]
    return True


def _shape(value: Any) -> Any:
    """Return the names of all members; the items of a list are merged into one."""
    if isinstance(value, dict):
        return {name: _shape(member) for name, member in value.items()}
    return [reduce(_merged, map(_shape, value), "")] if isinstance(value, list) else ""


def _merged(shape: Any, other: Any) -> Any:
    if isinstance(shape, dict) and isinstance(other, dict):
        return {name: _merged(shape.get(name, ""), other.get(name, "")) for name in shape | other}
    if isinstance(shape, list) and isinstance(other, list):
        return [_merged(shape[0], other[0])]
    return shape or other
