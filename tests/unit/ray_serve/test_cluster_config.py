"""The file of `paceline cluster serve`: its contents, and its errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.app import build_app
from paceline.errors import InvalidParams
from paceline.ray_serve.cluster_config import ClusterConfig, ReplicaOptions, parse_cluster_config

WHOLE = """
[cluster]
port = 9000
ingresses = 2

[server]
api-key = "secret"
drain-s = 12

[defaults]
num_slots = 4

[defaults.replicas]
min = 2
max = 3
num_cpus = 0.5

[models.small]
aliases = ["tiny"]

[models.large]
model = "hf:someone/large:Q4_K_M"
num_slots = 16
offline = true

[models.large.replicas]
max = 8
num_gpus = 1
itl_ms = 50
"""


def parse(text: str) -> ClusterConfig:
    return parse_cluster_config(Path("/somewhere/cluster.toml"), text.encode())


def test_a_whole_file_is_read() -> None:
    """Models override options of the defaults, their replicas likewise, and the server has the server's flags."""
    config = parse(WHOLE)
    assert (config.options.port, config.options.ingresses, config.options.app) == (9000, 2, "paceline")
    small, large = config.models
    assert small.replicas == ReplicaOptions(min=2, max=3, num_cpus=0.5)
    assert small.entry.model is None
    assert small.settings.aliases == ("small", "tiny")
    assert small.settings.engine_options["num_slots"] == 4
    assert large.replicas == ReplicaOptions(min=2, max=8, num_cpus=0.5, num_gpus=1, itl_ms=50)
    assert large.entry.model == "hf:someone/large:Q4_K_M"
    assert large.entry.options == {"num_slots": 16, "isolation": "process", "offline": True}
    assert config.server.api_keys == large.settings.api_keys != ()
    assert large.settings.hosts == (config.options.host,)


def test_paths_are_relative_to_the_file() -> None:
    """A model's path is found from the folder of the file."""
    assert parse('[models.a]\nmodel = "a.gguf"\n').models[0].entry.model == "/somewhere/a.gguf"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no model"),
        ("[models.a\n", "not valid TOML"),
        ("[modles.a]\n", "did you mean 'models'"),
        ("[models.a]\n[models.a.replicas]\nmin = 0\n", r"\[models.a.replicas\]: min"),
        ("[models.a]\n[models.a.replicas]\nmin = 3\nmax = 2\n", "max must be at least min"),
        ("[models.a]\n[models.a.replicas]\nnum_cpu = 1\n", "num_cpus"),
        ("[models.a]\n[models.a.replicas]\nresources = 3\n", "must be a table"),
        ("[models.a]\nisolation = 'thread'\n", "not for replicas"),
        ("[models.a]\n[server]\nport = 1\n", "Serve's proxy listens"),
        ("[models.a]\n[server]\nmodel = 'x.gguf'\n", r"\[models.NAME\]"),
        ("[models.a]\n[server]\nslot-save-path = '/tmp'\n", "one machine"),
        ("[models.a]\n[server]\napi-kee = 'x'\n", "api-key"),
        ("[models.a]\n[cluster]\nroute_prefix = 'x'\n", "must begin with /"),
        ("[models.a]\n[cluster]\nport = '1'\n", r"\[cluster\]: port"),
        ("cluster = 3\n[models.a]\n", r"\[cluster\] must be a table"),
    ],
)
def test_a_wrong_file_is_refused(text: str, says: str) -> None:
    """An error has the file, the table, the key and the way out."""
    with pytest.raises(InvalidParams, match=says) as caught:
        parse(text)
    assert "/somewhere/cluster.toml" in str(caught.value)


def test_a_file_is_checked_without_ray(tmp_path: Path) -> None:
    """--check shows the models and starts nothing."""
    path = tmp_path / "cluster.toml"
    path.write_text(WHOLE)
    result = CliRunner().invoke(build_app(), ["cluster", "serve", "--check", str(path)])
    assert result.exit_code == 0, result.output
    assert "small: the demo model, 2 to 3 replicas" in result.output
    assert "large: hf:someone/large:Q4_K_M, 2 to 8 replicas" in result.output


def test_a_missing_file_is_an_error_of_one_line(tmp_path: Path) -> None:
    """A file that is not there ends the command with its name."""
    result = CliRunner().invoke(build_app(), ["cluster", "serve", str(tmp_path / "none.toml")])
    assert result.exit_code == 2
    assert "none.toml cannot be read" in result.output
