"""`paceline info` as a user runs it."""

from __future__ import annotations

import json

import pytest
from tests.e2e.commands import ESCAPE, output

import paceline
from paceline.demo import demo_model_path

pytestmark = pytest.mark.native


def test_info_shows_version_build_and_machine() -> None:
    """Everything that a bug report needs, for people and for programs."""
    facts = json.loads(output("info", "--json"))
    assert facts["version"] == paceline.__version__
    assert facts["build"]["backend"] in {"cpu", "cuda", "metal", "vulkan", "hip"} and facts["build"]["cache_dir"]
    assert "CPU" in {device["name"] for device in facts["devices"]} and facts["physical_cores"] >= 1
    text = output("info")
    for value in (
        facts["version"],
        facts["build"]["llama_cpp_commit"],
        facts["build"]["cache_dir"],
        str(demo_model_path()),
    ):
        assert value in text
    assert ESCAPE not in text


def test_info_of_a_model_agrees_with_the_loaded_model() -> None:
    """The facts of a file are those of the loaded model, without loading the weights."""
    facts = json.loads(output("info", str(demo_model_path()), "--json", "--metadata"))
    model = paceline.Model.load(demo_model_path())
    shape = facts["model"]
    for name in ("size_bytes", "n_params", "n_ctx_train", "n_layer", "n_embd", "n_head", "n_head_kv", "n_swa"):
        assert shape[name] == getattr(model, name), name
    assert (shape["quantisation"], shape["memory_class"]) == (model.ftype, model.memory_class.value)
    assert facts["vocabulary"]["special_tokens"] == dict(model.tokenizer.special_tokens)
    assert set(facts["vocabulary"]["end_of_generation"]) == model.tokenizer.eog_ids
    assert facts["metadata"] == dict(model.metadata) and facts["chat_templates"] == sorted(model.chat_templates)
    assert "Q8_0" in output("info", str(demo_model_path()))
