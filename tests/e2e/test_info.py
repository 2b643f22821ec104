"""`paceline info` as a user runs it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.e2e.commands import ESCAPE, output

import paceline
from paceline.demo import demo_model_path
from paceline.testing.models import Qwen2VlSpec, Qwen25VisionSpec, write_model

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
        facts["core"]["reason"],
        str(demo_model_path()),
    ):
        assert value in text
    assert ESCAPE not in text


def test_info_of_a_model_agrees_with_the_loaded_model() -> None:
    """The facts of a file equal the loaded model's, without loading the weights."""
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


def test_info_of_a_model_shows_what_it_needs_and_whether_it_fits() -> None:
    """By device, for the context and slots that are given; the same as a dry run."""
    asked = ("-c", "2048", "-np", "2", "--cache-type", "q8_0")
    memory = json.loads(output("info", str(demo_model_path()), "--json", *asked))["memory"]
    estimate = paceline.estimate_memory(
        demo_model_path(), n_ctx=2048, num_slots=2, type_k="q8_0", type_v="q8_0", flash_attn="auto"
    )
    needed = memory["needed"]
    assert (needed["n_ctx"], needed["num_slots"], needed["is_measured"]) == (2048, 2, True)
    for name in ("weights_bytes", "cache_bytes", "compute_bytes"):
        assert sum(device[name] for device in needed["devices"]) == getattr(estimate, name)
    choice = {"n_ctx": 2048, "num_slots": 2, "n_gpu_layers": None, "n_cpu_moe": 0, "no_repack": False}
    assert memory["fitted"]["choice"] == choice
    text = output("info", str(demo_model_path()), *asked)
    assert "2,048 cells, 2 slots, 1,024 tokens for one request" in text and "KV cache and states" in text
    assert "fits" in text and " yes\n" in text


def test_info_of_a_model_shows_the_projectors_beside_it(tmp_path: Path) -> None:
    """The kinds of media with it; of two projectors none is taken, and a file that is none is reported with the reason."""
    model = write_model(tmp_path / "model.gguf", Qwen2VlSpec())
    facts = json.loads(output("info", str(model), "--json"))
    assert (facts["modalities"], facts["projectors"]) == (["text"], [])
    projector = write_model(tmp_path / "mmproj-a.gguf", Qwen25VisionSpec())
    facts = json.loads(output("info", str(model), "--json"))
    assert facts["modalities"] == ["image", "text"]
    (found,) = facts["projectors"]
    assert (found["path"], found["modalities"], found["kinds"]) == (str(projector), ["image"], ["qwen2.5vl_merger"])
    assert 0 < found["weights_bytes"] < projector.stat().st_size
    text = output("info", str(model))
    assert re.search(r"may have +text, image\n", text) and "mmproj-a.gguf" in text and "qwen2.5vl_merger" in text
    (tmp_path / "mmproj-b.gguf").write_bytes(b"no model")
    text = output("info", str(model))
    assert re.search(r"may have +text\n", text) and "none of them is taken" in text and "not a GGUF file" in text
