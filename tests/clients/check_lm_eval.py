"""EleutherAI's lm-eval over completions and chats, on tasks that are made here; run by `python -m tests.clients lm-eval`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import requests
from lm_eval.tasks import TaskManager

URL = os.environ["PACELINE_URL"]
SUBJECTS = ("girl", "boy", "dog", "cat", "bird", "mother", "friend", "bear")
CHOICES = ("park", "big red ball", "sun", "house of her friend")
QUESTIONS = [f"Once upon a time there was a little {subject}. The {subject} liked the" for subject in SUBJECTS]

CHOOSING = """\
task: tiny_choices
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: "{{gold}}"
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
GENERATING = """\
task: tiny_texts
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{gold}}"
generation_kwargs: {until: ["."], max_gen_toks: 24, temperature: 0}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    folder: Path = tmp_path_factory.mktemp("tasks")
    rows = [
        {"question": question, "choices": CHOICES, "gold": number % len(CHOICES)}
        for number, question in enumerate(QUESTIONS)
    ]
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name, text in (("choosing", CHOOSING), ("generating", GENERATING)):
        (folder / f"{name}.yaml").write_text(text.replace("DATA", str(data)), encoding="utf-8")
    return TaskManager(include_path=str(folder), include_defaults=False)


def evaluated(tasks: TaskManager, model: str, task: str, **options: Any) -> dict[str, Any]:
    route = "chat/completions" if "chat" in model else "completions"
    found: dict[str, Any] = lm_eval.simple_evaluate(
        model=model,
        model_args={"model": "paceline-demo", "base_url": f"{URL}/{route}", "num_concurrent": 4},
        tasks=[task],
        task_manager=tasks,
        bootstrap_iters=0,
        **options,
    )
    return found


def test_log_likelihoods_are_those_of_score_choices(tasks: TaskManager) -> None:
    """Of each choice, and so are the accuracies."""
    found = evaluated(tasks, "local-completions", "tiny_choices")
    right = right_by_length = 0
    for sample in found["samples"]["tiny_choices"]:
        body = {"prompt": sample["doc"]["question"], "choices": [f" {choice}" for choice in CHOICES]}
        reply = requests.post(f"{URL}/score_choices", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        scores = [entry["logprob"] for entry in reply.json()["data"]]
        theirs = [float(response[0]) for response in sample["filtered_resps"]]
        assert theirs == pytest.approx(scores, abs=1e-2)
        by_length = [score / len(choice) for score, choice in zip(scores, CHOICES, strict=True)]
        right += scores.index(max(scores)) == sample["doc"]["gold"]
        right_by_length += by_length.index(max(by_length)) == sample["doc"]["gold"]
    results = found["results"]["tiny_choices"]
    assert results["acc,none"] == pytest.approx(right / len(QUESTIONS))
    assert results["acc_norm,none"] == pytest.approx(right_by_length / len(QUESTIONS))


@pytest.mark.parametrize("model", ["local-completions", "local-chat-completions"])
def test_generated_texts_are_those_of_the_api(tasks: TaskManager, model: str) -> None:
    """Completions, and chats with the server's template."""
    is_chat = "chat" in model
    found = evaluated(tasks, model, "tiny_texts", apply_chat_template=is_chat)
    samples = found["samples"]["tiny_texts"]
    assert len(samples) == len(QUESTIONS)
    for sample in samples:
        question = sample["doc"]["question"]
        prompt = {"messages": [{"role": "user", "content": question}]} if is_chat else {"prompt": question}
        body = {"model": "paceline-demo", "temperature": 0, "max_tokens": 24, "stop": ["."], **prompt}
        route = "chat/completions" if is_chat else "completions"
        (choice,) = requests.post(f"{URL}/{route}", json=body, timeout=60).json()["choices"]
        assert sample["filtered_resps"] == [choice["message"]["content"] if is_chat else choice["text"]]
