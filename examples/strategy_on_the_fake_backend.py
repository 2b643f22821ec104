"""Compare a batch strategy of your own with the default one, in virtual time, without a model.

python examples/strategy_on_the_fake_backend.py
"""

from collections.abc import Sequence

from paceline import Instrument, SchedulerView, TickRecord, TokenAllocation
from paceline.testing import FakeBackend, FakeCost, FakeEngine, ManualClock, check_strategy


class SmallChunks:
    """Decode first, then at most 16 prompt tokens a tick."""

    def plan(self, view: SchedulerView, budget: int) -> Sequence[TokenAllocation]:
        allocations, prefill = [], min(16, budget)
        for sequence in sorted(
            view.sequences, key=lambda sequence: (not sequence.is_decoding, sequence.last_tick, sequence.order)
        ):
            tokens = min(sequence.limit, budget if sequence.is_decoding else min(budget, prefill))
            if tokens > 0:
                allocations.append(TokenAllocation(sequence.key, tokens))
                budget -= tokens
                prefill -= 0 if sequence.is_decoding else tokens
        return allocations


class LongestTick(Instrument):
    """Return the longest tick after the first ticks."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def tick_finished(self, record: TickRecord) -> None:
        self.seconds = max(self.seconds, record.elapsed_s if record.index > 10 else 0.0)


def main() -> None:
    for name, strategy in (("small chunks", SmallChunks()), ("paced", "paced"), ("prefill first", "prefill_priority")):
        check_strategy(strategy)
        clock, ticks = ManualClock(), LongestTick()
        engine = FakeEngine(
            backend=FakeBackend(clock=clock, cost=FakeCost(base_s=0.01, token_s=0.002)),
            clock=clock,
            strategy=strategy,
            instruments=[ticks],
            n_batch=512,
            chunk_size=512,
            itl_target_ms=100,
        )
        stream = engine.submit("a stream that is running", max_tokens=200, ignore_eos=True)
        for _ in range(20):
            engine.tick()
        prompt = engine.submit("a long prompt " * 60, max_tokens=1, ignore_eos=True)
        engine.run()
        list(prompt)
        assert stream.is_finished
        assert prompt.usage is not None
        assert prompt.usage.ttft_s is not None
        print(f"{name:14} longest pause {ticks.seconds:.3f} s, first token after {prompt.usage.ttft_s:.2f} s")


if __name__ == "__main__":
    main()
