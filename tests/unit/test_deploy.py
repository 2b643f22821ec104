"""The files of `deploy/`: their flags, ports, paths, probes and metrics are the server's."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.unit.server.flags.world import resolved

from paceline.cli.endings import WRONG_USAGE
from paceline.server.application import health_routes
from paceline.server.settings import ServerSettings
from paceline.server.web_page import is_guarded

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DEFAULTS = ServerSettings()
SHUTDOWN_S = DEFAULTS.drain_s + 10  # ended streams have some seconds to send their last chunk
OF_NO_TABLE = {"up", "process_resident_memory_bytes", "paceline_worker_process_resident_memory_bytes"}


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")))


def settings(command: list[str], environment: dict[str, str], **files: str) -> ServerSettings:
    """The settings of a server that the image runs. files: by their names, their contents at the path of a flag."""
    assert command[0] == "serve"
    return resolved(*command[1:], env=environment, files=files).settings


class Dockerfile:
    """The last stage of a Dockerfile."""

    def __init__(self, name: str = "Dockerfile") -> None:
        text = (DEPLOY / name).read_text(encoding="utf-8")
        lines = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)).splitlines()
        last = max(index for index, line in enumerate(lines) if line.startswith("FROM "))
        self.instructions = dict(line.split(maxsplit=1) for line in lines[last + 1 :] if line)
        self.environment = dict(pair.split("=", 1) for pair in shlex.split(self.instructions["ENV"]))


def health_paths() -> set[str]:
    async def endpoint() -> None: ...

    return {str(getattr(route, "path", "")) for route in health_routes(endpoint, endpoint, endpoint, "", "")}


def test_the_image_runs_the_server_as_a_user_that_may_write_to_the_cache_alone() -> None:
    """Its check of health asks a route of the port that the server listens on; no instruction needs a shell."""
    image = Dockerfile()
    found = image.instructions
    assert json.loads(found["ENTRYPOINT"]) == ["paceline"]
    server = settings(json.loads(found["CMD"]), image.environment)
    assert server.hosts == ("0.0.0.0",)
    assert int(found["EXPOSE"]) == server.port
    assert set(json.loads(found["VOLUME"])) == {found["WORKDIR"], image.environment["XDG_CACHE_HOME"]}
    assert {image.environment[name] for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME")} == {"/cache"}
    user, group = map(int, found["USER"].split(":"))
    assert user == group > 0
    *_, check = found["HEALTHCHECK"].partition("CMD ")
    program = json.loads(check)
    assert program[:2] == ["python", "-c"]
    compile(program[2], "check", "exec")
    ((port, path),) = re.findall(r"http://127\.0\.0\.1:(\d+)([\w/]+)", program[2])
    assert int(port) == server.port and path in health_paths()
    assert "RUN" not in found
    cuda = Dockerfile("Dockerfile.cuda")
    same = ("USER", "WORKDIR", "VOLUME", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD")
    assert [cuda.instructions[name] for name in same] == [found[name] for name in same]
    assert {**cuda.environment, "PATH": ""} == {**image.environment, "PATH": ""}


def test_the_check_of_health_uses_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a container may name a proxy, which would look for the server on its own loopback."""
    *_, check = Dockerfile().instructions["HEALTHCHECK"].partition("CMD ")
    _, _, program = json.loads(check)
    asked: list[str] = []

    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        exec(program.replace(":8080/", f":{server.server_port}/"), {})
        server.shutdown()
    assert asked == ["/health"]


def test_the_compose_file_runs_the_image_with_keys_and_time_to_drain() -> None:
    """The root file system is read-only, and the port is published on the loopback."""
    (compose,) = documents("compose.yaml")
    service, image = compose["services"]["paceline"], Dockerfile()
    context = DEPLOY / service["build"]["context"]
    assert (context / service["build"]["dockerfile"]).resolve() == DEPLOY / "Dockerfile"
    assert context.resolve() == ROOT / "dist"
    (secret,) = service["secrets"]
    server = settings(service["command"], image.environment, **{"model.gguf": "", f"/run/secrets/{secret}": "a key\n"})
    assert server.api_keys and secret in compose["secrets"]
    assert service["ports"] == [f"127.0.0.1:{server.port}:{server.port}"]
    assert [volume.split(":")[-2 if volume.endswith(":ro") else -1] for volume in service["volumes"]] == json.loads(
        image.instructions["VOLUME"]
    )
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"] and "no-new-privileges:true" in service["security_opt"]
    assert int(service["stop_grace_period"].removesuffix("s")) > SHUTDOWN_S


def unit(name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None, delimiters="=")
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(DEPLOY / "systemd" / name)
    return parser


def test_the_unit_of_systemd_has_the_flags_of_its_page_and_time_to_drain() -> None:
    """The socket is the address that the server has by itself."""
    service = unit("paceline.service")["Service"]
    assert service["Type"] == "notify" and service["KillMode"] == "mixed"
    program, *command = shlex.split(service["ExecStart"])
    assert program.endswith("/bin/paceline")
    page = (ROOT / "docs/guide/deploy.md").read_text(encoding="utf-8")
    (config,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    name, _ = service["LoadCredential"].split(":")
    files = {f"%d/{name}": config, "/srv/models/model.gguf": ""}
    server = settings(command, {}, **files)
    assert server.api_keys and str(server.model) == "/srv/models/model.gguf"
    assert int(service["TimeoutStopSec"]) > SHUTDOWN_S
    assert int(service["SuccessExitStatus"]) == 128 + signal.SIGTERM
    assert int(service["RestartPreventExitStatus"]) == WRONG_USAGE
    assert unit("paceline.socket")["Socket"]["ListenStream"] == f"{DEFAULTS.hosts[0]}:{DEFAULTS.port}"


def test_the_manifest_of_kubernetes_probes_the_server_and_mounts_its_cache() -> None:
    """The user is that of the image; the pod ends after its server; the monitor has the key."""
    claim, service, deployment = documents("kubernetes/paceline.yaml")
    (monitor,) = documents("kubernetes/servicemonitor.yaml")
    image, pod = Dockerfile(), deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
    assert volumes[mounts["/cache"]]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    secret = volumes[mounts["/etc/paceline"]]["secret"]["secretName"]
    server = settings(container["args"], image.environment, **{"/etc/paceline/keys": "a key\n"})
    assert server.api_keys and is_guarded(server)
    assert container["ports"] == [{"name": "http", "containerPort": server.port}]
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
    assert [probe["path"] for probe in probes] == ["/health", "/health/ready", "/health/live"]
    assert {probe["path"] for probe in probes} <= health_paths() and {probe["port"] for probe in probes} == {"http"}
    before_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > before_s + SHUTDOWN_S
    context = pod["securityContext"]
    assert image.instructions["USER"] == f"{context['runAsUser']}:{context['runAsGroup']}"
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] == labels
    assert monitor["spec"]["selector"]["matchLabels"] == service["metadata"]["labels"]
    (endpoint,) = monitor["spec"]["endpoints"]
    (port,) = service["spec"]["ports"]
    assert endpoint["port"] == port["name"] and port["targetPort"] == "http"
    assert endpoint["authorization"]["credentials"] == {"name": secret, "key": "keys"}


def exposed() -> dict[str, set[str]]:
    """The names in the exposition, with their labels."""
    suffixes = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
    found: dict[str, set[str]] = {name: set() for name in OF_NO_TABLE}
    text = (ROOT / "tests/frozen/metrics.txt").read_text(encoding="utf-8")
    for name, kind, labels in re.findall(r"^(\S+) (counter|gauge|histogram) \{(.*?)\}", text, re.MULTILINE):
        for suffix in suffixes[kind]:
            found.setdefault(name + suffix, set()).update(labels.split(", "))
    return found


def alerts() -> list[str]:
    (rules,) = documents("prometheus/alerts.yml")
    return [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


def dashboard() -> list[str]:
    board = json.loads((DEPLOY / "grafana/paceline.json").read_text(encoding="utf-8"))
    return [
        *(target["expr"] for panel in board["panels"] for target in panel["targets"]),
        *(variable["query"]["query"] for variable in board["templating"]["list"] if variable["type"] == "query"),
    ]


def test_the_cases_of_alerts_name_alerts_and_metrics() -> None:
    """Names that are gone are found without promtool, which runs the cases."""
    (rules,), (cases,) = documents("prometheus/alerts.yml"), documents("prometheus/alerts_test.yml")
    names = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    assert cases["rule_files"] == ["alerts.yml"]
    for case in cases["tests"]:
        assert {expected["alertname"] for expected in case["alert_rule_test"]} <= names, case["name"]
        assert {series["series"].partition("{")[0] for series in case["input_series"]} <= exposed().keys(), case["name"]


@pytest.mark.parametrize("expressions", [alerts, dashboard])
def test_every_metric_and_label_of_a_query_exists(expressions: Any) -> None:
    """With the suffix of its kind. Prometheus adds job and instance, several models add model."""
    metrics = exposed()
    for expression in expressions():
        bare = re.sub(r'"[^"]*"|\[[^\]]*\]', "", expression)
        names = re.findall(r"\b(?:paceline|process|llamacpp)[\w:]+|\bup\b", bare)
        assert names and set(names) <= metrics.keys(), expression
        labels = {"job", "instance", "model"}.union(*(metrics[name] for name in names))
        grouped = re.findall(r"\b(?:by|ignoring|on) \(([^)]*)\)", bare)
        matched = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", " ".join(re.findall(r"\{([^}]*)\}", bare)))
        assert {label.strip() for group in grouped for label in group.split(",")} | set(matched) <= labels, expression


def test_the_scrape_configuration_reads_the_alerts_of_its_job() -> None:
    """From the server's default address."""
    (config,) = documents("prometheus/prometheus.yml")
    (job,) = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"{DEFAULTS.hosts[0]}:{DEFAULTS.port}"]}]
    assert [(DEPLOY / "prometheus" / name).is_file() for name in config["rule_files"]] == [True]
    assert any(f'job="{job["job_name"]}"' in expression for expression in alerts())
