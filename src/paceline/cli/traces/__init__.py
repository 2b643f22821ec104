"""The command `paceline trace`: the figures of a recorded trace, and its picture."""

from paceline.cli.traces.trace_command import commands

__all__ = ["commands"]
