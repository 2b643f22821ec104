"""Options with which a model's greedy text does not depend on which cells its sequence has.

With flash attention or f16 caches, sums over cells are rounded in the order of the cells, and a trained model has near ties
that fall one way or the other. Passes of other sizes may still round otherwise: text is compared between passes of one size.
"""

from __future__ import annotations

from typing import Any

EXACT: dict[str, Any] = {"n_threads": 1, "flash_attn": "off", "type_k": "f32", "type_v": "f32"}
EXACT_FLAGS = ("-t", "1", "-fa", "off", "-ctk", "f32", "-ctv", "f32")
