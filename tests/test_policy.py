"""Policies on disk: names, folders, and what comes back from them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from renderers.base import ToolSpec as ToolDict
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from clawgym_env import chat_template
from clawgym_env import policy as policy_module
from clawgym_env.cache import cache_dir
from clawgym_env.engine.base import SamplingParams
from clawgym_env.engine.torch_engine import TorchEngine
from clawgym_env.errors import EngineError, PolicyNotBuilt
from clawgym_env.messages import Message, ToolCall, ToolSpec
from clawgym_env.policy import Policy, build_policy, load_policy, load_text, policy_folder, save_policy
from clawgym_env.rendering import ChatMLRenderer, message_dicts, tool_dicts
from clawgym_env.tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()


def small_policy(name: str = "small") -> Policy:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=TOKENIZER.vocab_size,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    return Policy(LlamaForCausalLM(config).eval(), TOKENIZER, ChatMLRenderer(TOKENIZER), name, None, 300)


def logits(policy: Policy) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = policy.module(input_ids=torch.arange(20)[None]).logits
    return result


def test_a_saved_policy_comes_back_the_same(tmp_path: Path) -> None:
    policy = small_policy()
    folder = save_policy(policy, tmp_path / "out")
    loaded = load_policy(folder, cache=tmp_path)
    assert torch.equal(logits(loaded), logits(policy))
    assert (loaded.name, loaded.context_length, loaded.version, loaded.path) == ("small", 300, 0, folder)
    assert isinstance(loaded.renderer, ChatMLRenderer)
    text = "a file \n with <|im_end|> in it"
    assert loaded.tokenizer.encode(text) == TOKENIZER.encode(text)
    assert load_policy(folder, cache=tmp_path, context_length=77).context_length == 77


def test_a_saved_policy_is_a_plain_hugging_face_folder(tmp_path: Path) -> None:
    policy = small_policy()
    folder = save_policy(policy, tmp_path / "out")
    module = AutoModelForCausalLM.from_pretrained(folder)
    with torch.inference_mode():
        assert torch.equal(module(input_ids=torch.arange(20)[None]).logits, logits(policy))
    names = {file.name for file in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names


def test_saving_replaces_the_old_folder_and_leaves_no_scratch(tmp_path: Path) -> None:
    save_policy(small_policy("first"), tmp_path / "out")
    (tmp_path / "out" / "stale").write_text("old")
    save_policy(small_policy("second"), tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    assert not (tmp_path / "out" / "stale").exists()
    assert load_policy(tmp_path / "out", cache=tmp_path).name == "second"


def test_a_save_that_fails_keeps_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_policy(small_policy("first"), tmp_path / "out")
    broken = small_policy("second")

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(broken.module, "save_pretrained", fail)
    with pytest.raises(OSError, match="disk full"):
        save_policy(broken, tmp_path / "out")
    assert load_policy(tmp_path / "out", cache=tmp_path).name == "first"
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_a_hugging_face_folder_of_a_known_family_gets_its_own_renderer(tmp_path: Path) -> None:
    config = Qwen3Config(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=640,
    )
    tokenizer = byte_tokenizer(extra_specials=("<think>", "</think>"))
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save(tmp_path)
    policy = load_policy(str(tmp_path), cache=tmp_path)
    assert getattr(policy.renderer, "family", None) == "qwen3"
    assert policy.context_length == 640
    assert isinstance(load_policy(tmp_path, cache=tmp_path, renderer="chatml").renderer, ChatMLRenderer)


def hub_folder(folder: Path, config: PreTrainedConfig, *specials: str, name: str | None = None) -> Path:
    """Write a folder of random weights as the hub has it, with a chat template in `tokenizer_config.json`."""
    tokenizer = byte_tokenizer(extra_specials=specials)
    config.vocab_size = tokenizer.vocab_size
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save(folder)
    for file, more in [("config.json", {"_name_or_path": name}), ("tokenizer_config.json", {"chat_template": "{{1}}"})]:
        (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | more))
    return folder


SMALL = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 640,
}


@pytest.mark.parametrize("config", [LlamaConfig(**SMALL), Qwen2Config(**SMALL)], ids=["llama", "qwen2"])
def test_llama_and_qwen2_folders_that_speak_chatml_are_loaded(config: PreTrainedConfig, tmp_path: Path) -> None:
    policy = load_policy(hub_folder(tmp_path / "hub", config), cache=tmp_path)
    assert isinstance(policy.renderer, ChatMLRenderer)
    saved = save_policy(policy, tmp_path / "out")
    assert json.loads((saved / "clawgym.json").read_text())["renderer"] == "chatml"


def test_a_renderer_that_was_asked_for_and_the_template_survive_a_save(tmp_path: Path) -> None:
    folder = hub_folder(tmp_path / "hub", LlamaConfig(**SMALL), "<think>", "</think>")
    policy = load_policy(folder, cache=tmp_path, renderer="qwen3")
    saved = save_policy(policy, tmp_path / "first")
    again = load_policy(saved, cache=tmp_path)
    assert getattr(again.renderer, "family", None) == "qwen3"
    twice = load_policy(save_policy(again, tmp_path / "second"), cache=tmp_path)
    assert getattr(twice.renderer, "family", None) == "qwen3"
    assert AutoTokenizer.from_pretrained(tmp_path / "second").chat_template == "{{1}}"


def test_the_name_of_a_hub_folder_finds_its_renderer_and_is_kept_as_a_kind(tmp_path: Path) -> None:
    name = "PrimeIntellect/Qwen3-0.6B"
    folder = hub_folder(tmp_path / "hub", LlamaConfig(**SMALL), "<think>", "</think>", name=name)
    policy = load_policy(folder, cache=tmp_path)
    assert policy.renderer_kind == "prime-qwen3"
    again = load_policy(save_policy(policy, tmp_path / "out"), cache=tmp_path)
    assert type(again.renderer) is type(policy.renderer)


TOOLS = tool_dicts((ToolSpec("write", "Schreibe \u00e4 <b>'\"", {"type": "object", "properties": {"path": {}}}),))
CONVERSATION = message_dicts(
    [
        Message("system", "Be \u00fc brief.\n"),
        Message("user", "  Go.\n\n"),
        Message(
            "assistant", "Yes.", tool_calls=(ToolCall("1", "write", '{"path": "<\u00e4>"}'), ToolCall("2", "ls", ""))
        ),
        Message("tool", "done {{ x }} ", tool_call_id="1"),
        Message("tool", "a\nb\n", tool_call_id="2"),
        Message(
            "assistant", "", tool_calls=(ToolCall("3", "ls", '{"a": [1, null, true]}'), ToolCall("4", "x", "raw{"))
        ),
        Message("tool", "", tool_call_id="3"),
        Message("assistant", " Now?\n"),
        Message("system", "Hurry."),
        Message("user", "y"),
    ]
)


@pytest.mark.parametrize("tools", [TOOLS, None], ids=["tools", "no_tools"])
@pytest.mark.parametrize("prompt", [True, False], ids=["prompt", "no_prompt"])
@pytest.mark.parametrize(("start", "stop"), [(0, None), (1, None), (0, 5), (1, 2), (3, 4)])
def test_transformers_renders_the_saved_template_to_the_ids_of_our_renderer(
    tools: list[ToolDict] | None, prompt: bool, start: int, stop: int | None, tmp_path: Path
) -> None:
    policy = small_policy()
    TOKENIZER.save(tmp_path)
    (tmp_path / chat_template.FILE).write_text(chat_template.CHATML)
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path)
    messages = CONVERSATION[start:stop]
    ids = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=prompt, return_dict=False)
    ours = policy.renderer.render_ids(messages, tools=tools, add_generation_prompt=prompt)
    assert TOKENIZER.decode(ids) == TOKENIZER.decode(ours)
    assert ids == ours


def test_a_chatml_policy_is_saved_with_its_template(tmp_path: Path) -> None:
    folder = save_policy(small_policy(), tmp_path / "out")
    assert AutoTokenizer.from_pretrained(folder).chat_template == chat_template.CHATML


@pytest.mark.parametrize("name", ["tiny", "smollm2"])
def test_a_policy_that_is_not_built_names_the_command(name: str, tmp_path: Path) -> None:
    with pytest.raises(PolicyNotBuilt, match=f"clawgym policy build {name}"):
        load_policy(name, cache=tmp_path)


def test_a_folder_without_a_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"tiny, smollm2 or a Hugging Face folder .* got .*nowhere"):
        load_policy(tmp_path / "nowhere", cache=tmp_path)


def test_building_calls_the_recipe_with_the_folder_that_loading_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_module, "BUILDERS", {"toy": f"{__name__}:build_toy"})
    folder = build_policy("toy", tmp_path)
    assert folder == policy_folder("toy", tmp_path)
    assert load_policy("toy", cache=tmp_path).name == "toy"
    with pytest.raises(EngineError, match="out of toy, got 'tiny'"):
        build_policy("tiny", tmp_path)


def build_toy(folder: Path) -> None:
    save_policy(small_policy("toy"), folder)


def test_the_note_beside_the_weights_is_plain_json(tmp_path: Path) -> None:
    folder = save_policy(small_policy(), tmp_path / "out")
    note = json.loads((folder / "clawgym.json").read_text())
    assert note == {"name": "small", "renderer": "chatml", "context_length": 300}


@pytest.mark.policy
@pytest.mark.slow
def test_smollm2_knows_the_capital_of_france() -> None:
    policy = load_policy("smollm2", cache=cache_dir(), context_length=32_768)
    ids = policy.renderer.render_ids(
        message_dicts([Message("user", "What is the capital of France?")]), add_generation_prompt=True
    )

    async def ask() -> str:
        engine = TorchEngine(policy)
        generation = await engine.generate(ids, SamplingParams(temperature=0.0, max_tokens=20))
        await engine.close()
        return policy.tokenizer.decode(generation.token_ids)

    assert "Paris" in asyncio.run(ask())


def test_the_text_of_bytes_needs_no_file_and_has_no_weights(tmp_path: Path) -> None:
    text = load_text("bytes", cache=tmp_path)
    assert text.tokenizer.decode(text.tokenizer.encode("☃")) == "☃"
    assert text.renderer_kind == "chatml"
    with pytest.raises(EngineError, match="weights"):
        load_policy("bytes", cache=tmp_path)
