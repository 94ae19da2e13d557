"""A bridge given only the end of the prompt adds the same tokens as one given all of it, for every model family."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import renderers.gpt_oss
from hypothesis import given, settings
from hypothesis import strategies as st
from model_families import PlainHarmony
from renderers.base import Renderer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from clawgym_env.messages import Message, ToolCall, ToolSpec
from clawgym_env.rendering import make_renderer, message_dicts, tool_dicts
from clawgym_env.tokenizer import CHATML_SPECIALS, TextTokenizer
from clawgym_env.trace.builder import TreeBuilder

GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<arg_key>", "</arg_key>")
GLM_ALL = (*GLM, "<arg_value>", "</arg_value>")
KIMI = (
    *(f"<|im_{name}|>" for name in ("user", "assistant", "system", "middle")),
    *(f"<|tool_{name}|>" for name in ("calls_section_begin", "calls_section_end", "call_begin", "call_end")),
    "<|tool_call_argument_begin|>",
)
LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>")
DEEPSEEK = (
    *(f"<｜{name}｜>" for name in ("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant", "tool▁sep")),
    *(f"<｜tool▁{name}▁{end}｜>" for name in ("calls", "call", "outputs", "output") for end in ("begin", "end")),
)
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
FAMILIES = {
    "chatml": (),
    "qwen3": (),
    "qwen3.5": VISION,
    "qwen3.6": VISION,
    "nemotron-3": (),
    "glm-4.5": GLM_ALL,
    "glm-5": GLM_ALL,
    "llama-3": LLAMA,
    "kimi-k2": KIMI,
    "gpt-oss": tuple(f"<|{name}|>" for name in ("start", "end", "message", "channel", "constrain", "return", "call")),
    "deepseek-v3": DEEPSEEK,
    "deepseek-r1": DEEPSEEK,
    "minimax-m2": ("]~!b[", "]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>"),
}
TOOLS = (ToolSpec("write", "Write.", {"type": "object"}),)


@functools.cache
def family(name: str) -> tuple[TextTokenizer, Renderer]:
    """Bytes with the family's special tokens; thinking tags are found in text, as the real vocabularies have it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = (*CHATML_SPECIALS, *FAMILIES[name])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ("<think>", "</think>")])
    text = TextTokenizer(tokenizer, eos_token="<|im_end|>")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(renderers.gpt_oss, "load_harmony_encoding", lambda name: PlainHarmony(tokenizer))
        return text, make_renderer(text, name)


words = st.text("ab \n<", max_size=6)
calls = st.lists(st.builds(lambda text: ToolCall("call1", "write", '{"x": 1}'), words), max_size=1).map(tuple)
turns = st.one_of(
    st.builds(lambda text: [Message("user", text)], words),
    st.builds(
        lambda text, call, result: [
            Message("assistant", text, tool_calls=call),
            *(Message("tool", result, tool_call_id="call1") for _ in call),
            Message("user", "go on"),
        ],
        words,
        calls,
        words,
    ),
)
new_messages = st.lists(
    st.one_of(
        st.builds(lambda t: Message("user", t), words),
        st.builds(lambda t: Message("tool", t, tool_call_id="call1"), words),
    ),
    min_size=1,
    max_size=3,
)
replies = st.lists(
    st.one_of(st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>"]), words), max_size=4
)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=40)
@given(st.lists(turns, max_size=3), replies, new_messages, st.booleans())
def test_the_tail_of_the_prompt_is_all_a_bridge_needs(
    name: str, before: list[list[Message]], reply: list[str], new: list[Message], closed: bool
) -> None:
    tokenizer, renderer = family(name)
    builder = TreeBuilder(renderer)
    messages = [Message("system", "s"), Message("user", "u"), *(message for turn in before for message in turn)]
    tools = tool_dicts(TOOLS)
    prompt = renderer.render_ids(message_dicts(messages), tools=tools, add_generation_prompt=True)
    drawn: list[int] = []
    for piece in reply:
        special = tokenizer.convert_tokens_to_ids(piece)
        drawn += tokenizer.encode(piece) if special is None else [special]
    drawn = [token for token in drawn if token not in renderer.get_stop_token_ids()]
    if closed:
        drawn.append(renderer.get_stop_token_ids()[0])
    tail = builder.tail(np.array(prompt, dtype=np.int32))
    assert prompt[-len(tail) :] == tail
    whole = renderer.bridge_to_next_turn(prompt, drawn, message_dicts(new), tools=tools)
    short = renderer.bridge_to_next_turn(tail, drawn, message_dicts(new), tools=tools)
    assert (whole is None) == (short is None)
    if whole is not None and short is not None:
        assert whole.token_ids[len(prompt) :] == short.token_ids[len(tail) :]


def test_the_tail_does_not_grow_with_the_history() -> None:
    _, renderer = family("chatml")
    builder = TreeBuilder(renderer)
    turns = [Message("user", "x" * 500)] * 40
    prompt = renderer.render_ids(message_dicts(turns), add_generation_prompt=True)
    assert len(builder.tail(np.array(prompt, dtype=np.int32))) < 20


def test_a_prompt_without_a_turn_close_is_its_own_tail() -> None:
    _, renderer = family("chatml")
    prompt = np.arange(200, dtype=np.int32)
    assert TreeBuilder(renderer).tail(prompt) == prompt.tolist()
