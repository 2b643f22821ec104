"""The examples of clusters: manifests that parse, with configurations that `paceline cluster serve` takes."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import yaml

import paceline.ray_serve
from paceline.ray_serve.cluster_config import parse_cluster_config, read_cluster_config
from paceline.server.web_page import is_guarded

EXAMPLES = Path(__file__).parents[3] / "examples" / "cluster"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def test_the_configuration_is_one() -> None:
    """cluster.toml has two models, of which one grows."""
    config = read_cluster_config(EXAMPLES / "cluster.toml")
    assert [(model.name, model.replicas.min, model.replicas.max) for model in config.models] == [
        ("stories", 1, 4),
        ("tales", 1, 1),
    ]
    assert config.notes == ()


def test_the_compose_file_starts_a_head_and_nodes_that_share_a_token() -> None:
    """Both services are of the image that the Dockerfile makes, and the head's configuration joins the running cluster."""
    (compose,) = documents("compose.yaml")
    head, node = compose["services"]["head"], compose["services"]["node"]
    assert head["image"] == node["image"]
    assert (EXAMPLES / head["build"]["context"] / head["build"]["dockerfile"]).resolve() == EXAMPLES / "Dockerfile"
    assert head["environment"] == node["environment"]
    target = head["configs"][0]["target"]
    assert head["command"][-1].endswith(f"paceline cluster serve {target}")
    config = parse_cluster_config(Path(target), compose["configs"][head["configs"][0]["source"]]["content"].encode())
    assert config.options.address == "auto"
    assert head["ports"] == [f"127.0.0.1:8000:{config.options.port}"]
    assert not is_guarded(config.models[0].settings)


def test_the_kuberay_manifest_names_the_builder_and_mounts_its_configuration() -> None:
    """The RayService imports a function that is there, with a file that every pod has."""
    config_map, service = documents("kuberay.yaml")
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    served = yaml.safe_load(service["spec"]["serveConfigV2"])
    (application,) = served["applications"]
    module, _, function = application["import_path"].partition(":")
    source = Path(paceline.ray_serve.__path__[0]) / f"{module.rpartition('.')[2]}.py"
    names = {entry.name for entry in ast.parse(source.read_text()).body if isinstance(entry, ast.FunctionDef)}
    assert function in names
    assert application["args"].keys() == {"config", "revision"}
    path = Path(application["args"]["config"])
    config = parse_cluster_config(path, config_map["data"][path.name].encode())
    assert config.models[0].replicas.max == 8
    assert config.options.host == served["http_options"]["host"]
    settings = config.models[0].settings
    assert not is_guarded(settings) and "paceline-serve-svc" in settings.allowed_hosts
    cluster = service["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        assert [volumemount["mountPath"] for volumemount in pod["containers"][0]["volumeMounts"]] == [str(path.parent)]
        assert [volume["configMap"]["name"] for volume in pod["volumes"]] == [config_map["metadata"]["name"]]


def test_the_image_has_the_extra() -> None:
    """The Dockerfile installs paceline with Ray."""
    assert re.search(r"pip install .*\[ray\]", (EXAMPLES / "Dockerfile").read_text())
