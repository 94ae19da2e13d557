"""Policies on disk: names, folders, and what comes back from them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from clawgym_env import policy as policy_module
from clawgym_env.cache import cache_dir
from clawgym_env.engine.base import SamplingParams
from clawgym_env.engine.torch_engine import TorchEngine
from clawgym_env.errors import EngineError, PolicyNotBuilt
from clawgym_env.messages import Message
from clawgym_env.policy import Policy, build_policy, load_policy, policy_folder, save_policy
from clawgym_env.rendering import ChatMLRenderer, message_dicts
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
    assert type(policy.renderer).__name__ == "Qwen3Renderer"
    assert policy.context_length == 640
    assert isinstance(load_policy(tmp_path, cache=tmp_path, renderer="chatml").renderer, ChatMLRenderer)


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
