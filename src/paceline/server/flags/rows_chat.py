"""Rows of the table: chat, embeddings and infill."""

from __future__ import annotations

from typing import Final

from paceline.server.flags import applying, reading
from paceline.server.flags.flag import SAME, SWITCH, Flag, Group, Ignored, Refused, Sets

_THINKING = "taking thoughts out of answers is not supported yet; leave it out, or give none: they stay in the content"
_BUDGET = "a budget for thinking is not supported yet; leave it out, or limit answers with -n"

_CHAT: Final = (
    Flag(
        "--chat-template",
        "JINJA",
        reading.some_text,
        Sets(("server.chat_template",), applying.chat_template),
        "Chat template in place of the model's; or chatml, which has a name.",
        env="LLAMA_ARG_CHAT_TEMPLATE",
        default="the model's",
    ),
    Flag(
        "--chat-template-file",
        "FILE",
        reading.path,
        Sets(("server.chat_template",), applying.chat_template_file),
        "A file with a chat template.",
        env="LLAMA_ARG_CHAT_TEMPLATE_FILE",
        default="the model's",
    ),
    Flag(
        "--chat-template-kwargs",
        "JSON",
        reading.json_object,
        Sets(("server.chat_template_kwargs",), applying.template_variables),
        "Variables for the template, as a JSON object.",
        env="LLAMA_ARG_CHAT_TEMPLATE_KWARGS",
        default="none",
    ),
    Flag(
        "-rea --reasoning",
        "on|off|auto",
        reading.on_off_auto,
        Sets(("server.chat_template_kwargs",), applying.reasoning),
        "Tells the template whether to think (enable_thinking); auto leaves it to the template.",
        env="LLAMA_ARG_REASONING",
        default="auto",
    ),
    Flag(
        "--reasoning-effort",
        "LEVEL",
        reading.some_text,
        Sets(("server.chat_template_kwargs",), applying.reasoning_effort),
        "Tells the template how much to think (reasoning_effort); default leaves it to the template.",
        env="LLAMA_ARG_REASONING_EFFORT",
        default="default",
    ),
    Flag(
        "--reasoning-preserve",
        SWITCH,
        reading.switch,
        Sets(("server.chat_template_kwargs",), applying.reasoning_preserve),
        "Tells the template to show earlier thoughts (preserve_reasoning).",
        env="LLAMA_ARG_REASONING_PRESERVE",
        off="--no-reasoning-preserve",
        default="as the template has it",
    ),
    Flag(
        "--pooling",
        "TYPE",
        reading.one_of(("none", "mean", "cls", "last", "rank")),
        Sets(("server.pooling",)),
        "How the vectors of tokens become an embedding: none, mean, cls, last or rank.",
        env="LLAMA_ARG_POOLING",
        default="as the model was made",
    ),
    Flag(
        "--embd-normalize",
        "N",
        reading.integer(-1),
        Sets(("server.embd_normalize",)),
        "Length of llama-server's embeddings: -1 as it is, 0 by the greatest, 1 taxicab, 2 Euclidean, above: p-norm.",
    ),
    Flag(
        "--spm-infill",
        SWITCH,
        reading.switch,
        Sets(("server.spm_infill",)),
        "Infill with the suffix before the prefix.",
    ),
    Flag(
        "--jinja",
        SWITCH,
        reading.switch,
        SAME,
        "Chat templates are Jinja, which is how it always is.",
        env="LLAMA_ARG_JINJA",
        off="--no-jinja",
        but={False: Ignored("chat templates are always read as Jinja")},
    ),
    Flag(
        "--reasoning-format",
        "FORMAT",
        reading.one_of(("none", "auto", "deepseek", "deepseek-legacy")),
        Refused(_THINKING),
        "Where thoughts stand in an answer: none and auto leave them in the content.",
        env="LLAMA_ARG_THINK",
        but={"none": SAME, "auto": Ignored("thoughts stay in the content; taking them out is not supported yet")},
    ),
    Flag(
        "--reasoning-budget",
        "N",
        reading.integer(-1),
        Refused(_BUDGET),
        "Most tokens of thoughts.",
        env="LLAMA_ARG_THINK_BUDGET",
        but={-1: SAME},
    ),
    Flag(
        "--reasoning-budget-message",
        "TEXT",
        reading.unread,
        Refused(_BUDGET),
        "What ends thoughts at the budget.",
        env="LLAMA_ARG_THINK_BUDGET_MESSAGE",
    ),
    Flag(
        "--skip-chat-parsing",
        SWITCH,
        reading.switch,
        SAME,
        "Leave all of an answer in the content, which is how it is now.",
        env="LLAMA_ARG_SKIP_CHAT_PARSING",
        off="--no-skip-chat-parsing",
    ),
    Flag(
        "--prefill-assistant",
        SWITCH,
        reading.switch,
        Sets(("server.prefill_assistant",)),
        "Continue a conversation's last message where it is the assistant's and the request does not say. "
        "By itself /apply-template does, as in llama-server, and OpenAI's chat does not.",
        env="LLAMA_ARG_PREFILL_ASSISTANT",
        off="--no-prefill-assistant",
        default="as the API has it",
    ),
    Flag(
        "-sp --special",
        SWITCH,
        reading.switch,
        Refused("showing control tokens in texts is not supported yet; leave it out"),
        "Show control tokens.",
        but={False: SAME},
    ),
)

GROUPS: Final[dict[Group, tuple[Flag, ...]]] = {"Chat, embeddings, infill": _CHAT}
