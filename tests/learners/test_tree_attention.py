from __future__ import annotations

import copy
import dataclasses
import inspect
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forest_fakes import FAMILIES, make_forest_policy, make_model, make_row
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

from learners import tree_attention
from learners.forest import plant
from learners.forward import token_logprobs
from learners.rows import pack
from learners.tree_attention import (
    DenseAttention,
    FlexAttention,
    ForestLayout,
    Kernel,
    SegmentAttention,
    VarlenAttention,
    attention_of,
    enable,
    reason_against,
)

ROWS = [
    make_row([1, 2, 3, 4, 5, 6], [2, 4, 5]),
    make_row([1, 2, 3, 4, 7], [3, 4], rollout=1),
    make_row([1, 2, 3, 8, 9, 9, 9, 9], [2, 7], rollout=2),
    make_row([5, 6], rollout=3),
]
SHAPE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def layout(kernel: Kernel | None = None) -> ForestLayout:
    (forest,) = plant(ROWS, max_tokens=100, kernel=kernel)
    assert forest.layout is not None
    return forest.layout


def states(size: int, *, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of four heads, keys and values of two."""
    torch.manual_seed(1)
    query, key, value = (torch.randn(1, heads, size, 8, dtype=dtype, requires_grad=True) for heads in (4, 2, 2))
    return query, key, value


def results(attention: tree_attention.TreeAttention, size: int) -> list[Tensor]:
    """The output, and the gradients of a function of it."""
    inputs = states(size)
    output = attention(*inputs, 0.3)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return [output, *torch.autograd.grad((output * weights).sum(), inputs)]


@pytest.mark.parametrize("chunk", [1, 2, 3, 512])
def test_segments_compute_what_the_dense_mask_does(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(tree_attention, "CHUNK", chunk)
    trees = layout()
    size = len(trees.end)
    expected = results(DenseAttention(trees), size)
    for mine, theirs in zip(results(SegmentAttention(trees), size), expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_dense_mask_computes_what_each_row_does_alone() -> None:
    trees = layout()
    query, key, value = states(len(trees.end))
    whole = DenseAttention(trees)(query, key, value, None)
    for place in range(len(trees.end)):
        path = trees.allowed()[place].nonzero()[:, 0]
        assert trees.position_ids[path].tolist() == list(range(len(path)))
        alone = F.scaled_dot_product_attention(
            query[:, :, place : place + 1], key[:, :, path], value[:, :, path], enable_gqa=True
        )
        torch.testing.assert_close(whole[:, :, place : place + 1], alone)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_computes_what_the_dense_mask_does() -> None:
    trees = layout()
    inputs = [part.detach() for part in states(len(trees.end), dtype=torch.float32)]
    query, key, value = inputs
    flex = FlexAttention(trees)(query, key, value, 0.3)
    torch.testing.assert_close(flex, DenseAttention(trees)(query, key, value, 0.3))


def fake_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    max_queries: int,
    max_keys: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """What the kernel of a GPU is documented to do: sequence by sequence, causal from the lower right corner."""
    assert (window_size, enable_gqa) == ((-1, 0), True)
    assert query_offsets.dtype == key_offsets.dtype == torch.int32
    assert (max_queries, max_keys) == (int(query_offsets.diff().max()), int(key_offsets.diff().max()))
    outputs = []
    for i in range(len(query_offsets) - 1):
        queries = query[query_offsets[i] : query_offsets[i + 1]].transpose(0, 1)
        keys, values = (part[key_offsets[i] : key_offsets[i + 1]].transpose(0, 1) for part in (key, value))
        size, width = queries.shape[1], keys.shape[1]
        mask = torch.ones(size, width, dtype=torch.bool).tril(width - size)
        outputs.append(
            F.scaled_dot_product_attention(
                queries[None], keys[None], values[None], attn_mask=mask, scale=scale, enable_gqa=True
            )[0].transpose(0, 1)
        )
    return torch.cat(outputs)


def test_varlen_gathers_what_the_dense_mask_allows() -> None:
    trees = layout()
    size = len(trees.end)
    expected = results(DenseAttention(trees), size)
    for mine, theirs in zip(results(VarlenAttention(trees, fake_varlen), size), expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_varlen_kernel_of_torch_takes_the_arguments_we_give() -> None:
    kernel = tree_attention._varlen_kernel()
    if kernel is None:
        pytest.skip("this torch has no varlen kernel that we can use")
    theirs = list(inspect.signature(kernel).parameters)
    assert theirs[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert "scale" in theirs


def test_kernels_are_chosen_by_name_and_off_cuda_it_is_segments() -> None:
    assert isinstance(attention_of(layout(), dtype=torch.float32), SegmentAttention)
    assert isinstance(attention_of(layout("dense"), dtype=torch.float32), DenseAttention)
    assert isinstance(attention_of(layout("flex"), dtype=torch.float32), FlexAttention)
    unknown: Any = "quantum"
    with pytest.raises(ValueError, match="kernel out of"):
        attention_of(dataclasses.replace(layout(), kernel=unknown), dtype=torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_enabled_model_answers_as_before(family: str) -> None:
    plain, enabled = make_model(family), make_model(family)
    enable(enabled)
    ids = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 0, 0]])
    padding = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    with torch.no_grad():
        for extra in ({}, {"attention_mask": padding}):
            assert torch.equal(plain(input_ids=ids, **extra).logits, enabled(input_ids=ids, **extra).logits)
        sampled = [
            model.generate(ids[:1], max_new_tokens=8, do_sample=False, pad_token_id=0) for model in (plain, enabled)
        ]
    assert torch.equal(*sampled)


def test_enabling_twice_is_enabling_once_and_leaves_other_models_alone(tmp_path: Path) -> None:
    mine, other = make_model(), make_model()
    enable(mine)
    enable(mine)
    assert mine.config._attn_implementation == tree_attention.NAME
    assert other.config._attn_implementation == "sdpa"
    mine.save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"
    assert copy.deepcopy(mine).config._attn_implementation == tree_attention.NAME


def test_importing_registers_nothing() -> None:
    code = "import sys, learners.forest, learners.tree_attention; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_forest_in_one_thread_does_not_reach_the_forwards_of_another() -> None:
    policy = make_forest_policy()
    (forest,) = plant(ROWS, max_tokens=100)
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        expected = policy.module(input_ids=ids).logits
        expected_forest = token_logprobs(policy.module, forest)[0]
    wrong: list[str] = []

    def sample() -> None:
        with torch.no_grad():
            for _ in range(30):
                if not torch.equal(policy.module(input_ids=ids).logits, expected):
                    wrong.append("plain")

    thread = threading.Thread(target=sample)
    thread.start()
    with torch.no_grad():
        for _ in range(30):
            if not torch.equal(token_logprobs(policy.module, forest)[0], expected_forest):
                wrong.append("forest")
    thread.join()
    assert wrong == []


def test_any_other_attention_stops_on_a_layout_instead_of_ignoring_it() -> None:
    module = make_model()
    extra = tree_attention.inputs(module, layout())
    module.set_attn_implementation("sdpa")
    model: Any = module
    with pytest.raises(RuntimeError):
        model.get_decoder()(input_ids=torch.zeros(1, len(layout().end), dtype=torch.int64), **extra)


def test_bfloat16_stays_close_to_flat_rows() -> None:
    module = make_model(dtype=torch.bfloat16)
    (forest,), (flat,) = plant(ROWS, max_tokens=100), pack(ROWS, max_tokens=100)
    with torch.no_grad():
        mine, theirs = token_logprobs(module, forest)[0], token_logprobs(module, flat)[0]
    assert mine.dtype == torch.float32
    torch.testing.assert_close(
        mine[by_term(forest.targets, forest.weights)], theirs[by_term(flat.targets, flat.weights)], rtol=0, atol=0.25
    )


def by_term(*keys: Tensor) -> Tensor:
    """An order of terms that does not depend on the packing."""
    order: Sequence[int] = sorted(range(len(keys[0])), key=lambda i: [float(key[i]) for key in keys])
    return torch.tensor(order)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "RoPE type 'dynamic'"),
        ({"attention_dropout": 0.1}, "layer 0 has attention_dropout=0.1"),
        ({"attn_implementation": "eager"}, "attention implementation 'eager'"),
    ],
)
def test_what_a_forest_cannot_compute_is_named(changes: dict[str, Any], reason: str) -> None:
    module = LlamaForCausalLM(LlamaConfig(vocab_size=8, **SHAPE, **changes))
    assert reason in str(reason_against(module))
    with pytest.raises(ValueError, match="full causal softmax attention"):
        enable(module)


def test_attention_sinks_are_named() -> None:
    config = GptOssConfig(
        vocab_size=8,
        **SHAPE,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        layer_types=["full_attention"] * 2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    module = GptOssForCausalLM(config)
    module.config._attn_implementation = "sdpa"  # which the class refuses, because of its sinks
    assert reason_against(module) == "layer 0 has attention sinks"
