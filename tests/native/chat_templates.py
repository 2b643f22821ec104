"""Chat templates of our own, in the manner of real models' templates."""

from __future__ import annotations

from functools import cache
from typing import Any

from paceline.chat import ChatFormat
from paceline.demo import demo_model_path
from paceline.runtime import Model

CHATML = """
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# With bos, trimmed contents and a date, as Llama 3 has it.
HEADERS = """
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = "26 Jul 2024" %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# No system role, other names of roles, turns that have to alternate.
TURNS = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}
{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (message['content'] | trim) + '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""

# The system message goes into the last user message, eos behind each reply; a namespace, a macro and a loop with a filter.
INSTRUCTIONS = """
{%- macro instruction(text) -%}[INST] {{ text }}[/INST]{%- endmacro -%}
{%- set ns = namespace(system='', last=-1) -%}
{%- for message in messages if message.role == 'user' -%}{%- set ns.last = loop.index -%}{%- endfor -%}
{{- bos_token -}}
{%- set users = namespace(seen=0) -%}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}
        {%- set ns.system = message.content -%}
    {%- elif message.role == 'user' -%}
        {%- set users.seen = users.seen + 1 -%}
        {%- if users.seen == ns.last and ns.system -%}
            {{- instruction(ns.system ~ '\\n\\n' ~ message.content) -}}
        {%- else -%}
            {{- instruction(message.content) -}}
        {%- endif -%}
    {%- elif message.role == 'assistant' -%}
        {{- ' ' + message.content + eos_token -}}
    {%- else -%}
        {{- raise_exception('Only user, assistant and system roles are supported!') -}}
    {%- endif -%}
{%- endfor -%}
"""

# What templates with reasoning do to old replies: split, strip, replace, slices, tests.
THINKING = """
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' and ns.last == messages|length - 1 %}
        {%- set ns.last = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {{- '(' ~ thought.replace('\\n', ' / ') ~ ')' }}
    {%- endif %}
    {{- '<' ~ message.role|upper ~ ' ' ~ loop.index ~ '/' ~ loop.length ~ '>' ~ content ~ '\\n' }}
{%- endfor %}
{%- for word in ['a', 'b', 'c'][:2] %}{{ word|title if not loop.last else word|capitalize ~ '.' }}{% endfor %}
{{- ['x', 'y', 'z']|join('+') }} {{ ns.last }} {{ 'a,b,,c'.split(',', 1)|join('|') }} {{ 'a-b-c'.rsplit('-', 1)|last }}
{%- for key, value in {'k': 1, 'l': none}|items %}{{ ' ' ~ key }}{% endfor %} {{ messages[0].content[1:-1] }}
"""

TEMPLATES = {
    "chatml": CHATML,
    "headers": HEADERS,
    "turns": TURNS,
    "instructions": INSTRUCTIONS,
    "thinking": THINKING,
    "demo": None,
}

Messages = list[dict[str, Any]]

TALK: Messages = [
    {"role": "user", "content": "  How far is the moon?\n"},
    {"role": "assistant", "content": "<think>\nFar.\nVery.\n</think>\n\nAbout 384,000 km. "},
    {"role": "user", "content": "Grüße, 世界! 🚀 \"quoted\" 'too' {{ not a tag }}"},
]
SYSTEM: Messages = [{"role": "system", "content": " Be brief. "}]


@cache
def demo() -> Model:
    """Return the vocabulary of the demo model."""
    return Model.load(demo_model_path(), vocab_only=True)


def text_of(template: str, content: str = "hello", **kwargs: Any) -> str:
    """Return a template's rendering of one message."""
    return ChatFormat(demo(), template).render([{"role": "user", "content": content}], kwargs=kwargs or None).text
