"""Attacks on a server of one's own, from outside and bounded: `python -m tests.attack` runs them and says which ones were held.

Each module has its attacks in a tuple `ATTACKS`; `harness.py` has what they share.
"""
