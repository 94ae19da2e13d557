"""The Jinja chat template of a saved policy, so that others (transformers, vLLM, SGLang) prompt it as it was trained.

Written by `policy.save_policy` beside the weights. Invariant: `CHATML` gives the text that `ChatMLRenderer` renders,
with every past turn kept as it is: a conversation only ever grows at its end.
"""

from __future__ import annotations

import json
from pathlib import Path

FILE = "chat_template.jinja"

CHATML = """\
{%- macro text(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- elif content -%}
        {%- for part in content -%}{{- part.text -}}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set leading = messages and messages[0].role == "system" -%}
{%- if leading or tools -%}
    {{- "<|im_start|>system\\n" -}}
    {%- set system = text(messages[0].content) if leading else "" -%}
    {{- system -}}
    {%- if tools -%}
        {{- "\\nTools:" if system else "Tools:" -}}
        {%- for tool in tools -%}
            {{- "\\n" + ((tool.function if tool.function is defined else tool) | tojson(separators=(",", ":"))) -}}
        {%- endfor -%}
    {%- endif -%}
    {{- "<|im_end|>\\n" -}}
{%- endif -%}
{%- for message in messages -%}
    {%- set content = text(message.content) -%}
    {%- if message.role == "tool" -%}
        {%- if loop.first or loop.previtem.role != "tool" -%}{{- "<|im_start|>user\\n" -}}{%- endif -%}
        {{- "<tool_response>" + content + "</tool_response>" -}}
        {%- if loop.last or loop.nextitem.role != "tool" -%}{{- "<|im_end|>\\n" -}}{%- endif -%}
    {%- elif not (loop.first and leading) -%}
        {{- "<|im_start|>" + message.role + "\\n" + content -}}
        {%- if message.role == "assistant" and message.tool_calls -%}
            {{- "\\n" if content else "" -}}
            {%- for call in message.tool_calls -%}
                {%- set function = call.function -%}
                {%- set arguments = {} if function.arguments is none else function.arguments -%}
                {{- '<tool_call>{"name": ' + (function.name | tojson) + ', "arguments": ' -}}
                {{- arguments if arguments is string else (arguments | tojson) -}}
                {{- "}</tool_call>" -}}
            {%- endfor -%}
        {%- endif -%}
        {{- "<|im_end|>\\n" -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\\n" -}}{%- endif -%}
"""


def folder_template(folder: Path) -> str | None:
    """Return the chat template of a Hugging Face folder: a file of its own, or in `tokenizer_config.json`."""
    file = folder / FILE
    if file.is_file():
        return file.read_text(encoding="utf-8")
    config = folder / "tokenizer_config.json"
    if not config.is_file():
        return None
    value = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
    if isinstance(value, list):  # older folders name several
        value = next((entry.get("template") for entry in value if entry.get("name") == "default"), None)
    return value if isinstance(value, str) else None
