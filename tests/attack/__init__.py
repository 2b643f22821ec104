"""Attacks on a server of one's own, from outside and bounded: `python -m tests.attack` runs them and reports the results.

Each module has its attacks in a tuple `ATTACKS`; `harness.py` has the shared parts.
"""
