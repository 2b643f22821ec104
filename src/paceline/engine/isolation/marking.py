"""An executor that writes down whom a pass is for before it begins, for the case that nobody lives to tell."""

from __future__ import annotations

from paceline.engine.backend import Backend
from paceline.engine.executor import Executor
from paceline.engine.isolation.black_box import BlackBox
from paceline.scheduling.clock import Clock
from paceline.scheduling.plan import EmbeddingPlan, Plan, PlanOutput


class MarkingExecutor(Executor):
    """See the module. Engine's thread."""

    def __init__(self, backend: Backend, clock: Clock, box: BlackBox) -> None:
        super().__init__(backend, clock)
        self._box = box

    def run(self, plan: Plan) -> PlanOutput:
        """As `Executor.run`."""
        if plan.is_empty:
            return super().run(plan)
        self._box.begin_pass(_keys(plan))
        try:
            return super().run(plan)
        finally:
            self._box.end_pass()


def _keys(plan: Plan) -> set[int]:
    if isinstance(plan, EmbeddingPlan):
        return {item.request.key for item in plan.items}
    return {row.sequence.request.key for row in plan.rows}
