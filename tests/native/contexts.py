"""Parts that tests of contexts share."""

from __future__ import annotations

from paceline.params import SamplingParams
from paceline.runtime import Context, Sampler, StepRow

DECODERS = [
    "llama",
    "mixtral",
    "qwen2moe",
    "gemma3",
    "gemma4",
    "mamba",
    "rwkv6",
    "rwkv7",
    "falcon-h1",
    "lfm2",
    "granitehybrid",
    "hy_v3",
    "qwen35",
]


def goes_on(context: Context, seq_id: int = 0) -> None:
    """Check that a context still decodes and samples."""
    held = context.positions(seq_id)
    sampler = Sampler(SamplingParams(seed=1), context.native.model)
    row = StepRow(seq_id=seq_id, position=0 if held is None else held.last + 1, token_ids=[5, 6], samplers=(sampler,))
    draws = context.step([row]).rows[0].draws[0]
    assert draws.error is None
    assert len(draws.token_ids) == 1
