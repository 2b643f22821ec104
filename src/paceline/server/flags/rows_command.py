"""Rows of the table: the log, and the command itself."""

from __future__ import annotations

from typing import Final

from paceline.server.flags import applying, reading
from paceline.server.flags.flag import SAME, SWITCH, Flag, Group, Ignored, Prints, ReadsConfig, Refused, Sets

_LINES = "every line of the log begins with its time and its level"

_LOG: Final = (
    Flag(
        "-v --verbose --log-verbose",
        SWITCH,
        reading.switch,
        Sets(("server.log_level",), applying.verbose),
        "Log everything, llama.cpp's own log as well.",
        default="off",
    ),
    Flag(
        "-lv --verbosity --log-verbosity",
        "N",
        reading.integer(-(2**31)),
        Sets(("server.log_level",), applying.verbosity),
        "Log errors (1), warnings too (2), information too (3), everything (4).",
        env="LLAMA_ARG_LOG_VERBOSITY",
        default="3",
    ),
    Flag(
        "--log-level",
        "LEVEL",
        reading.one_of(("off", "error", "warning", "info", "debug")),
        Sets(("server.log_level",)),
        "The same as a word: off, error, warning, info or debug.",
        ours=True,
    ),
    Flag(
        "--log-disable", SWITCH, reading.switch, Sets(("server.log_level",), applying.no_log), "No log.", default="off"
    ),
    Flag(
        "--log-file",
        "FILE",
        reading.path,
        Sets(("server.log_file",)),
        "Log to a file.",
        env="LLAMA_ARG_LOG_FILE",
        default="stderr",
    ),
    Flag(
        "--log-jsonl",
        SWITCH,
        reading.switch,
        Sets(("server.log_json",)),
        "Log as JSON, one object a line.",
        env="LLAMA_ARG_LOG_JSONL",
        off="--no-log-jsonl",
    ),
    Flag(
        "--log-colors",
        "on|off|auto",
        reading.on_off_auto,
        Ignored("the log has no colours"),
        "Colours in the log.",
        env="LLAMA_ARG_LOG_COLORS",
        but={"off": SAME, "auto": SAME},
    ),
    Flag(
        "--log-prefix",
        SWITCH,
        reading.switch,
        SAME,
        "Levels in the log, which are always there.",
        env="LLAMA_ARG_LOG_PREFIX",
        off="--no-log-prefix",
        but={False: Ignored(_LINES)},
    ),
    Flag(
        "--log-timestamps",
        SWITCH,
        reading.switch,
        SAME,
        "Times in the log, which are always there.",
        env="LLAMA_ARG_LOG_TIMESTAMPS",
        off="--no-log-timestamps",
        but={False: Ignored(_LINES)},
    ),
    Flag(
        "--log-prompts-dir",
        "FOLDER",
        reading.unread,
        Refused("prompts are never written down; leave it out"),
        "Write prompts down.",
    ),
)

_COMMAND: Final = (
    Flag(
        "--config",
        "FILE",
        reading.path,
        ReadsConfig(),
        "A TOML file with flags: their long names, with _ or -, are its keys. What is given elsewhere wins.",
        default="none",
        ours=True,
    ),
    Flag(
        "--print-config",
        SWITCH,
        reading.switch,
        Prints("config"),
        "Print every setting with where it came from, and end.",
        ours=True,
    ),
    Flag("-h --help --usage", SWITCH, reading.switch, Prints("help"), "Print this and end."),
    Flag("--version", SWITCH, reading.switch, Prints("version"), "Print the version and end."),
    Flag(
        "--completion-bash",
        SWITCH,
        reading.switch,
        Refused("completion for shells is not supported yet; see --help"),
        "Completion for a shell.",
    ),
    Flag(
        "--list-devices",
        SWITCH,
        reading.switch,
        Refused("it is another command here: run paceline info"),
        "List devices.",
    ),
)

GROUPS: Final[dict[Group, tuple[Flag, ...]]] = {"Log": _LOG, "This command": _COMMAND}
