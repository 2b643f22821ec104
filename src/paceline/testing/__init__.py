"""Things for tests, shipped so that users can test their own code with them too.

`check_strategy` tries a batch strategy out. `paceline.testing.models` writes tiny random models of many architectures (it
needs the optional package `gguf`).
"""

from paceline.testing.strategy_check import check_strategy

__all__ = ["check_strategy"]
