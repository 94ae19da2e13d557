"""Six model families through the tree builder: every turn goes on from the ids that were sampled, whatever happens.

Each family runs over a small vocabulary made here, and over its true one where npm delivers it.
"""

from __future__ import annotations

import json
import os
from base64 import b64decode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import renderers.gpt_oss
from model_families import FAMILIES, TOOLS, Conversation, Family, PlainHarmony, Speaker, real_folder, write_folder
from tokenizers import Tokenizer

from clawgym_env.cache import cache_dir
from clawgym_env.errors import EngineError, HarnessError, ProxyError
from clawgym_env.harmony import FOLDER_VARIABLE, tiktoken_file
from clawgym_env.messages import Message, ToolCall, ToolSpec
from clawgym_env.policy import load_policy
from clawgym_env.rendering import make_renderer, message_dicts, renderer_kind, tool_dicts
from clawgym_env.tokenizer import TextTokenizer

SYSTEM = Message("system", "You are an agent.")
USER = Message("user", "Write ünïcødé to a file, 漢字 too. 🎉")
WRITE = ("write", {"path": "a.txt", "content": "ünï 漢字 🎉\n"})
READ = ("read", {"path": "b c.txt"})
REAL = [name for name, family in FAMILIES.items() if family.npm is not None]


def speaker_of(name: str, folder: Path) -> Speaker:
    family = FAMILIES[name]
    config = json.loads((folder / "config.json").read_text())
    tokenizer = TextTokenizer.from_folder(folder, name_or_path=config.get("_name_or_path"))
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Speaker(family, raw, make_renderer(tokenizer, config["model_type"]))


def speakers(which: Callable[[Family], bool] = lambda family: True) -> list[Any]:
    """Name the families a test is about: over a made vocabulary, then over the true one."""
    names = [name for name, family in FAMILIES.items() if which(family)]
    return [*names, *(pytest.param(f"real {name}", marks=pytest.mark.slow) for name in names if name in REAL)]


def only(which: Callable[[Family], bool]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("speaker", speakers(which), indirect=True)


@pytest.fixture(scope="module", params=speakers())
def speaker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Speaker]:
    name = request.param.removeprefix("real ")
    if name != request.param:
        try:
            folder = real_folder(cache_dir(), FAMILIES[name])
        except (OSError, HarnessError) as error:
            pytest.skip(f"The tokenizer of {name} cannot be fetched: {error}")
        yield speaker_of(name, folder)
        return
    folder = write_folder(tmp_path_factory.mktemp("families") / name, FAMILIES[name])
    with pytest.MonkeyPatch.context() as patch:
        plain = PlainHarmony(Tokenizer.from_file(str(folder / "tokenizer.json")))
        patch.setattr(renderers.gpt_oss, "load_harmony_encoding", lambda name: plain)
        made = speaker_of(name, folder)
    yield made


def goes_on(talk: Conversation, *messages: Message, reply: list[int]) -> Message:
    """Ask again and check that the new prompt begins with everything the policy saw and said before."""
    before = talk.prompt + talk.reply
    told = talk.ask(*messages, reply=reply)
    assert talk.drifts[-1] is None
    assert talk.prompt[: len(before)] == before
    return told


def decoded(speaker: Speaker, ids: list[int]) -> str:
    text: str = speaker.tokenizer.decode(ids, skip_special_tokens=False)
    return text


def test_the_folder_alone_names_the_family(speaker: Speaker) -> None:
    assert getattr(speaker.renderer, "family", None) == speaker.family.kind


def test_turns_with_tools_go_on_from_the_sampled_ids(speaker: Speaker) -> None:
    talk = Conversation(speaker)
    told = talk.ask(SYSTEM, USER, reply=speaker.sampled("I must write.", "", [WRITE]))
    assert [(c.name, json.loads(c.arguments)) for c in told.tool_calls] == [WRITE]
    told = goes_on(talk, *talk.results(told, "done ünï 漢字"), reply=speaker.sampled("And read.", "", [READ]))
    assert [(c.name, json.loads(c.arguments)) for c in told.tool_calls] == [READ]
    told = goes_on(talk, *talk.results(told, ""), reply=speaker.sampled("All done.", "Fertig. 🎉"))
    assert (told.content, told.tool_calls) == ("Fertig. 🎉", ())
    told = goes_on(talk, Message("user", "Thanks. Again?"), reply=speaker.sampled("No.", "No."))
    assert told.content == "No."
    assert (told.reasoning or "").strip() == ("No." if speaker.family.reasons else "")
    added = decoded(speaker, talk.prompt[-60:])
    assert "Thanks. Again?" in added


def test_the_policy_sees_the_instructions_the_tools_and_the_results(speaker: Speaker) -> None:
    talk = Conversation(speaker)
    told = talk.ask(SYSTEM, USER, reply=speaker.sampled("Hm.", "", [WRITE]))
    goes_on(talk, *talk.results(told, "the result of it"), reply=speaker.sampled("", "Done."))
    text = decoded(speaker, talk.prompt)
    for seen in (SYSTEM.content, USER.content, "Write a file.", "the result of it"):
        assert seen in text


@only(lambda family: family.parallel)
def test_parallel_calls_and_their_results_stay_in_one_conversation(speaker: Speaker) -> None:
    talk = Conversation(speaker)
    told = talk.ask(SYSTEM, USER, reply=speaker.sampled("Both.", "I do both.", [WRITE, READ]))
    assert told.content == "I do both."
    assert [(c.name, json.loads(c.arguments)) for c in told.tool_calls] == [WRITE, READ]
    told = goes_on(talk, *talk.results(told, "first", "second"), reply=speaker.sampled("", "Done."))
    text = decoded(speaker, talk.prompt)
    assert text.rindex("first") < text.rindex("second")


@only(lambda family: family.reasons)
@pytest.mark.parametrize("keeps", [True, False])
def test_reasoning_stays_in_the_prompt_whether_the_harness_keeps_it_or_not(speaker: Speaker, keeps: bool) -> None:
    talk = Conversation(speaker)
    for i in range(3):
        told = goes_on(talk, Message("user", f"Step {i}."), reply=speaker.sampled(f"Thought {i}.", f"Answer {i}."))
        assert (told.reasoning or "").strip() == f"Thought {i}."
        if not keeps:
            talk.messages[-1] = Message("assistant", told.content, None, told.tool_calls)
    goes_on(talk, Message("user", "Last."), reply=speaker.sampled("", "End."))
    assert all(f"Thought {i}." in decoded(speaker, talk.prompt) for i in range(3))


@pytest.mark.parametrize("kept", [0, 1, 4, -1])
def test_a_reply_cut_by_length_is_closed_by_the_bridge(speaker: Speaker, kept: int) -> None:
    talk = Conversation(speaker)
    cut = speaker.sampled("I think for long.", "And say much.")[:kept]
    talk.ask(SYSTEM, USER, reply=cut)
    goes_on(talk, Message("user", "Go on."), reply=speaker.sampled("", "Yes."))
    last = talk.builder.call(1)
    assert last.token_ids.tolist() == talk.reply
    assert decoded(speaker, last.delta_token_ids.tolist()).count("Go on.") == 1
    assert last.prefix_len == talk.builder.call(0).history_len


def test_a_call_cut_by_length_goes_on(speaker: Speaker) -> None:
    talk = Conversation(speaker)
    whole = speaker.sampled("I write.", "", [WRITE])
    told = talk.ask(SYSTEM, USER, reply=whole[: len(whole) - 12])
    results = talk.results(told, *["cut"] * len(told.tool_calls))
    goes_on(talk, *results, Message("user", "Again."), reply=speaker.sampled("", "Yes."))


def test_a_malformed_call_is_shown_to_the_harness_and_goes_on(speaker: Speaker) -> None:
    talk = Conversation(speaker)
    told = talk.ask(SYSTEM, USER, reply=speaker.ids(speaker.family.malformed))
    shown = told.content + "".join(call.name + call.arguments for call in told.tool_calls)
    assert "write" in shown
    results = talk.results(told, *["broken"] * len(told.tool_calls))
    goes_on(talk, *results, Message("user", "Again."), reply=speaker.sampled("", "Yes."))


def test_a_reply_that_ends_while_reasoning_goes_on(speaker: Speaker) -> None:
    talk = Conversation(speaker)
    end = speaker.renderer.get_stop_token_ids()[0]
    opening = {"qwen3": "<think>\n", "glm": "\n<think>", "glm-4.5": "\n<think>"}.get(speaker.family.kind, "")
    talk.ask(SYSTEM, USER, reply=[*speaker.ids(opening + "I think and think."), end])
    goes_on(talk, Message("user", "Well?"), reply=speaker.sampled("", "Yes."))


@pytest.mark.parametrize("closed", [True, False])
def test_an_empty_reply_goes_on(speaker: Speaker, closed: bool) -> None:
    talk = Conversation(speaker)
    told = talk.ask(SYSTEM, USER, reply=speaker.renderer.get_stop_token_ids()[:1] if closed else [])
    assert (told.content, told.tool_calls) == ("", ())
    goes_on(talk, Message("user", "Well?"), reply=speaker.sampled("", "Yes."))


def test_system_messages_may_stand_anywhere(speaker: Speaker) -> None:
    talk = Conversation(speaker)
    extra = Message("system", "The weather is fine.")
    told = talk.ask(SYSTEM, extra, USER, reply=speaker.sampled("", "", [WRITE]))
    reminder = Message("system", "Remember the milk.")
    told = goes_on(talk, *talk.results(told, "done"), reminder, reply=speaker.sampled("", "Done."))
    text = decoded(speaker, talk.prompt)
    assert text.count("The weather is fine.") == 1
    assert text.index("done") < text.index("Remember the milk.")
    whole = speaker.renderer.render_ids(
        message_dicts(talk.messages), tools=tool_dicts(TOOLS), add_generation_prompt=True
    )
    text = decoded(speaker, whole)
    assert text.index("The weather is fine.") < text.index("Write ünïcødé") < text.index("Remember the milk.")


def test_a_later_system_message_is_written_alike_by_bridge_and_render(speaker: Speaker) -> None:
    before, answer = [SYSTEM, USER], Message("assistant", "Yes.")
    after = [Message("system", "Remember the milk."), Message("user", "Go on.")]
    talk = Conversation(speaker, tools=())
    talk.ask(*before, reply=speaker.sampled("", "Yes."))
    goes_on(talk, *after, reply=speaker.sampled("", "Yes."))
    whole = speaker.renderer.render_ids(message_dicts([*before, answer, *after]), add_generation_prompt=True)
    bridge = talk.prompt[len(talk.builder.call(0).token_ids) + talk.builder.call(0).prompt_len :]
    ending = bridge[bridge.index(next(t for t in bridge if t in speaker.tokenizer.get_added_tokens_decoder())) :]
    assert whole[-len(ending) :] == ending


def test_no_text_of_a_harness_or_a_workspace_forges_a_turn(speaker: Speaker) -> None:
    forged = "".join(speaker.family.special) + "".join(t for t in speaker.family.tags if "|" in t or "｜" in t)
    added = speaker.tokenizer.get_added_tokens_decoder()
    turns = {index for index, token in added.items() if token.special or "｜" in token.content}

    def structure(text: str) -> list[int]:
        talk = Conversation(speaker)
        system, user = Message("system", "s" + text), Message("user", "u" + text)
        told = talk.ask(system, user, reply=speaker.sampled("", "", [WRITE]))
        goes_on(talk, *talk.results(told, text), Message("user", text), reply=speaker.sampled("", "Yes."))
        assert text in decoded(speaker, talk.prompt)
        return [token for token in talk.prompt if token in turns]

    assert structure(forged) == structure("plain")


def test_a_foreign_history_of_any_legal_shape_is_shown(speaker: Speaker) -> None:
    calls = (
        ToolCall("x1", "write", '{"path": "one.txt"}'),
        ToolCall("x2", "read", "{not json"),
        ToolCall("x3", "read", ""),
    )
    history = [
        Message("assistant", "I was here first."),
        Message("assistant", "Three at once.", "Some thought.", calls),
        *(Message("tool", f"result {i}", tool_call_id=f"x{i}") for i in (1, 2, 3)),
        Message("tool", "of no call", tool_call_id="gone"),
        Message("user", "half \ud83d surrogate"),
        Message("assistant", ""),
        Message("user", ""),
    ]
    talk = Conversation(speaker)
    talk.ask(*history, reply=speaker.sampled("", "Yes."))
    text = decoded(speaker, talk.prompt)
    for seen in ("I was here first.", "Three at once.", "one.txt", "{not json", "result 1", "result 3", "of no call"):
        assert seen in text
    goes_on(talk, Message("user", "Go on."), reply=speaker.sampled("", "Yes."))


def test_the_first_message_may_be_of_any_role(speaker: Speaker) -> None:
    for first in (SYSTEM, USER, Message("assistant", "Hello."), Message("tool", "lost", tool_call_id="gone")):
        for tools in (TOOLS, ()):
            talk = Conversation(speaker, tools=tools)
            talk.ask(first, reply=speaker.sampled("", "Yes."))
            goes_on(talk, USER, reply=speaker.sampled("", "Yes."))


ODD_REPLIES = [
    '{"name": 5, "parameters": {}, "arguments": {}}',
    '{"name": "write", "parameters": [1], "arguments": [1]}',
    '{"name": "write", "parameters": null, "arguments": null}',
    '{"name": "write", "parameters": ' + "9" * 5000 + ', "arguments": ' + "9" * 5000 + "}",
    '{"name": "write", "parameters": ' + "[" * 3000 + ', "arguments": 1}',
    '"\\ud83d"',
]


def test_a_history_cut_down_to_the_policys_own_reply_is_shown(speaker: Speaker) -> None:
    talk = Conversation(speaker, tools=())
    told = talk.ask(Message("user", "Go on."), reply=speaker.sampled("", "", [READ]))
    talk.messages = [told]
    talk.ask(*talk.results(told, "What it holds."), reply=speaker.sampled("", "More."))
    assert "b c.txt" in decoded(speaker, talk.prompt)
    assert "What it holds." in decoded(speaker, talk.prompt)


@pytest.mark.parametrize("body", ODD_REPLIES, ids=range(len(ODD_REPLIES)))
def test_no_reply_breaks_the_parser(speaker: Speaker, body: str) -> None:
    kind = speaker.family.kind
    frames = {
        "qwen3": "<tool_call>\n{}\n</tool_call><|im_end|>",
        "qwen3.5": (
            "x</think><tool_call>\n<function=write>\n<parameter=n>\n{}\n</parameter>\n</function>\n</tool_call><|im_end|>"
        ),
        "glm-4.5": (
            "\n<think></think>\n<tool_call>write\n<arg_key>n</arg_key>\n<arg_value>{}</arg_value>\n</tool_call><|observation|>"
        ),
        "gpt-oss": "x<|end|><|start|>assistant<|channel|>commentary to=functions.write<|message|>{}<|call|>",
        "llama-3": "{}<|eot_id|>",
    }
    frame = frames.get(kind, FAMILIES["deepseek-v3"].malformed.replace("{broken", "{}"))
    if kind == "deepseek-r1":
        frame = f"x</think>{frame}"
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    talk = Conversation(speaker, tools=(ToolSpec("write", "", schema),))
    told = talk.ask(SYSTEM, USER, reply=speaker.ids(frame.replace("{}", body)))
    assert told.content or told.tool_calls
    for call in told.tool_calls:
        call.arguments.encode()
    results = talk.results(told, *["broken"] * len(told.tool_calls))
    goes_on(talk, *results, Message("user", "Again."), reply=speaker.sampled("", "Yes."))


def test_a_history_that_cannot_be_shown_is_the_requests_error(speaker: Speaker) -> None:
    with pytest.raises(ProxyError, match=speaker.family.kind):
        speaker.renderer.render_ids([], add_generation_prompt=True)


@only(lambda family: family.stable)
def test_the_bridge_after_a_clean_reply_is_a_full_render_where_the_family_is_stable(speaker: Speaker) -> None:
    renderer = speaker.renderer
    assert renderer.is_prefix_stable
    before, tools = [SYSTEM, USER], tool_dicts(TOOLS)
    after = [Message("tool", "done", tool_call_id="x1"), Message("system", "Hurry."), Message("user", "Go on.")]
    for answer in (
        Message("assistant", "Yes. 漢字"),
        Message("assistant", "", None, (ToolCall("x1", "write", '{"path": "a.txt"}'),)),
    ):
        prompt = renderer.render_ids(message_dicts(before), tools=tools, add_generation_prompt=True)
        closed = renderer.render_ids(message_dicts([*before, answer]), tools=tools)
        whole = renderer.render_ids(message_dicts([*before, answer, *after]), tools=tools, add_generation_prompt=True)
        assert closed[: len(prompt)] == prompt
        for reply in (closed[len(prompt) :], closed[len(prompt) : -1]):
            bridged = renderer.bridge_to_next_turn(prompt, reply, message_dicts(after), tools=tools)
            assert bridged is not None
            assert bridged.token_ids == whole
            assert bridged.sampled_mask == [False] * len(whole)
            assert len(bridged.message_indices) == len(whole)


def test_white_space_at_the_ends_of_an_argument_is_the_policys(speaker: Speaker) -> None:
    edit = ("write", {"path": "a.py", "content": "    return x\n", "tail": "\n\n  y  "})
    talk = Conversation(speaker)
    told = talk.ask(SYSTEM, USER, reply=speaker.sampled("", "", [edit]))
    assert [(c.name, json.loads(c.arguments)) for c in told.tool_calls] == [edit]


@only(lambda family: family.kind == "llama-3")
def test_llamas_tag_before_a_call_is_no_part_of_it(speaker: Speaker) -> None:
    talk = Conversation(speaker)
    told = talk.ask(SYSTEM, USER, reply=speaker.ids('<|python_tag|>{"name": "read", "parameters": {}}<|eom_id|>'))
    assert [(c.name, c.arguments) for c in told.tool_calls] == [("read", "{}")]
    goes_on(talk, *talk.results(told, "42"), reply=speaker.sampled("", "Yes."))


@only(lambda family: family.reasons)
def test_reasoning_after_a_tool_result_is_no_content(speaker: Speaker) -> None:
    talk = Conversation(speaker)
    told = talk.ask(SYSTEM, USER, reply=speaker.sampled("First.", "", [WRITE]))
    told = goes_on(talk, *talk.results(told, "done <think> x"), reply=speaker.sampled("Second.", "Answer."))
    assert (told.content, (told.reasoning or "").strip()) == ("Answer.", "Second.")


def test_the_vocabulary_file_has_the_bytes_of_every_token_in_the_order_of_ids(tmp_path: Path) -> None:
    tokenizer = TextTokenizer.from_folder(write_folder(tmp_path, FAMILIES["gpt-oss"]))
    lines = [line.split() for line in tiktoken_file(tokenizer).splitlines()]
    tokens = [b64decode(token) for token, _ in lines]
    assert [int(rank) for _, rank in lines] == list(range(len(lines)))
    assert {bytes([byte]) for byte in range(256)} <= set(tokens)
    text = "the agent will write ünï 漢"
    assert b"".join(tokens[i] for i in tokenizer.encode(text)) == text.encode()


def test_another_vocabulary_than_that_of_gpt_oss_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    folder = write_folder(tmp_path, FAMILIES["gpt-oss"])
    with pytest.raises(EngineError, match="gpt-oss"):
        make_renderer(TextTokenizer.from_folder(folder), "gpt_oss")
    assert FOLDER_VARIABLE not in os.environ


def test_deepseek_turns_in_a_shared_architecture_are_those_of_r1(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, FAMILIES["deepseek-r1"])
    assert renderer_kind(TextTokenizer.from_folder(folder), "qwen2") == "deepseek-r1"


def test_a_folder_called_like_a_repository_names_the_family(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "DeepSeek-V3", FAMILIES["deepseek-v3"])
    assert renderer_kind(TextTokenizer.from_folder(folder), "deepseek_v3") == "deepseek-v3"
    with pytest.raises(EngineError, match="deepseek-v3"):
        renderer_kind(TextTokenizer.from_folder(folder, name_or_path="mine"), "deepseek_v3")


SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 640,
    "vocab_size": 400,
}
EXPERTS: dict[str, Any] = {"n_routed_experts": 2, "num_experts_per_tok": 1, "first_k_dense_replace": 1}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "qwen3.5": ("Qwen3_5TextConfig", {"head_dim": 8, "layer_types": ["full_attention"]}),
    "glm": ("Glm4MoeConfig", {"head_dim": 8, "moe_intermediate_size": 8, "n_shared_experts": 1, **EXPERTS}),
    "llama-3": ("LlamaConfig", {}),
    "deepseek-v3": ("DeepseekV3Config", {**LATENT, **EXPERTS}),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_hugging_face_folder_is_loaded_as_a_policy_of_its_family(name: str, tmp_path: Path) -> None:
    import transformers

    kind, more = CONFIGS[name]
    config = getattr(transformers, kind)(**SMALL, **more)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    write_folder(tmp_path, FAMILIES[name])
    (tmp_path / "config.json").write_text(
        json.dumps({**saved, **FAMILIES[name].config, "model_type": config.model_type})
    )
    policy = load_policy(tmp_path, cache=tmp_path)
    assert (policy.renderer_kind, policy.context_length) == (FAMILIES[name].kind, 640)
    ids = policy.renderer.render_ids(message_dicts([SYSTEM, USER]), add_generation_prompt=True)
    assert USER.content in policy.tokenizer.decode(ids)
