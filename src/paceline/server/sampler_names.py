"""What llama-server calls samplers beside their names, in flags and in bodies alike. Facts; any thread."""

from __future__ import annotations

LETTERS = {
    "d": "dry",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "s": "top_n_sigma",
    "m": "min_p",
    "t": "temperature",
    "x": "xtc",
    "i": "infill",
    "e": "penalties",
    "a": "adaptive_p",
}
OTHER_NAMES = {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p"}
