from __future__ import annotations

import logging
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from forest_fakes import FAMILIES, make_model, make_row, tries
from hypothesis import given
from hypothesis import strategies as st
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from learners.forest import BREAK_EVEN, Flops, Sharing, packed, plant, sharing, supported
from learners.rows import MicroBatch, TrainingRow
from learners.tree_attention import ForestLayout, Segment

SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}


def layout_of(batch: MicroBatch) -> ForestLayout:
    assert batch.layout is not None
    return batch.layout


def ancestors(batch: MicroBatch, place: int) -> list[int]:
    """What the token at a packed position looks at, as token ids."""
    allowed = layout_of(batch).allowed()[place]
    return batch.token_ids[0, allowed].tolist()


def test_shared_beginnings_are_packed_once_in_depth_first_order() -> None:
    rows = [make_row([1, 2, 5]), make_row([1, 2, 3, 4]), make_row([1, 2, 3, 6, 7]), make_row([8, 9])]
    (forest,) = plant(rows, max_tokens=100)
    layout = layout_of(forest)
    assert forest.token_ids.tolist() == [[1, 2, 3, 4, 6, 7, 5, 8, 9]]
    assert layout.position_ids.tolist() == [0, 1, 2, 3, 3, 4, 2, 0, 1]
    assert layout.end.tolist() == [7, 7, 6, 4, 6, 6, 7, 9, 9]
    assert layout.segments == (
        Segment(0, 2, ((0, 2),)),
        Segment(2, 3, ((0, 3),)),
        Segment(3, 4, ((0, 4),)),
        Segment(4, 6, ((0, 3), (4, 6))),
        Segment(6, 7, ((0, 2), (6, 7))),
        Segment(7, 9, ((7, 9),)),
    )


def test_a_row_inside_another_makes_no_fork() -> None:
    (forest,) = plant([make_row([1, 2]), make_row([1, 2, 3, 4]), make_row([1, 2, 3])], max_tokens=100)
    assert layout_of(forest).segments == (Segment(0, 4, ((0, 4),)),)
    assert forest.targets.tolist() == [2, 3, 4]


def test_rows_of_the_same_ids_share_every_position_and_keep_their_own_terms() -> None:
    (forest,) = plant([make_row([1, 2, 3], rollout=index) for index in range(2)], max_tokens=100)
    assert forest.token_ids.tolist() == [[1, 2, 3]]
    assert forest.predictors.tolist() == [1, 1]
    assert forest.advantages.tolist() == pytest.approx([1.0, 0.3])
    assert forest.weights.tolist() == [1.0, 0.5]
    assert forest.rollout_logprobs.tolist() == pytest.approx([-2.0, -2.1])
    assert forest.temperatures.tolist() == pytest.approx([0.7, 0.9])


def test_the_first_token_of_a_branch_is_predicted_by_the_last_of_its_parent() -> None:
    (forest,) = plant([make_row([1, 2, 3]), make_row([1, 2, 4])], max_tokens=100)
    assert forest.targets.tolist() == [3, 4]
    assert forest.predictors.tolist() == [1, 1]


@given(rows=tries(), max_tokens=st.integers(1, 60))
def test_every_term_is_predicted_from_its_own_row_at_its_own_position(rows: list[TrainingRow], max_tokens: int) -> None:
    forests = plant(rows, max_tokens=max_tokens)
    expected = sorted(
        (row.tokens.token_ids[:t].tolist(), int(row.tokens.token_ids[t]), row.weight, float(row.advantages[t]))
        for row in rows
        for t in np.flatnonzero(row.tokens.loss_mask)
    )
    got = []
    for forest in forests:
        terms = zip(
            *(part.tolist() for part in (forest.predictors, forest.targets, forest.weights, forest.advantages)),
            strict=True,
        )
        for place, target, weight, advantage in terms:
            context = ancestors(forest, place)
            assert layout_of(forest).position_ids[place] == len(context) - 1
            got.append((context, target, weight, advantage))
    assert len(got) == len(expected)
    for mine, theirs in zip(sorted(got), expected, strict=True):
        assert mine[:2] == theirs[:2]
        assert mine[2:] == pytest.approx(theirs[2:])


@given(rows=tries(), max_tokens=st.integers(1, 60))
def test_segments_hold_exactly_the_allowed_pairs(rows: list[TrainingRow], max_tokens: int) -> None:
    for forest in plant(rows, max_tokens=max_tokens):
        layout = layout_of(forest)
        mask = torch.zeros_like(layout.allowed())
        covered = []
        for segment in layout.segments:
            covered += range(segment.start, segment.stop)
            for query in range(segment.start, segment.stop):
                keys = [key for start, stop in segment.keys for key in range(start, stop)]
                mask[query, [key for key in keys if key <= query]] = True
        assert covered == list(range(len(layout.end)))
        assert torch.equal(mask, layout.allowed())


@given(rows=tries())
def test_no_packed_token_has_a_twin_and_no_segment_could_be_longer(rows: list[TrainingRow]) -> None:
    (forest,) = plant(rows, max_tokens=10_000)
    layout = layout_of(forest)
    size = len(layout.end)
    histories = [tuple(ancestors(forest, place)) for place in range(size)]
    assert len(set(histories)) == size
    for before, after in pairwise(layout.segments):
        parent = histories[before.stop - 1]
        children = [history for history in histories if history[:-1] == parent]
        assert children != [histories[after.start]]


@given(rows=tries(), max_tokens=st.integers(1, 60))
def test_a_budget_is_kept_but_for_rows_that_exceed_it_alone(rows: list[TrainingRow], max_tokens: int) -> None:
    longest = max(len(row) for row in rows)
    sizes = [forest.token_ids.numel() for forest in plant(rows, max_tokens=max_tokens)]
    assert max(sizes) <= max(max_tokens, longest)
    assert sum(len(forest.targets) for forest in plant(rows, max_tokens=max_tokens)) == sum(
        int(row.tokens.loss_mask.sum()) for row in rows
    )


def test_what_must_be_cut_is_cut_where_least_is_computed_twice() -> None:
    # Two pairs share 6 tokens each, all four share 1: the cut goes between the pairs.
    near = [[1, 2, 2, 2, 2, 2, 3], [1, 2, 2, 2, 2, 2, 4], [1, 5, 5, 5, 5, 5, 6], [1, 5, 5, 5, 5, 5, 7]]
    forests = plant([make_row(ids) for ids in near], max_tokens=13)
    assert [forest.token_ids[0].tolist() for forest in forests] == [
        [1, 2, 2, 2, 2, 2, 3, 4],
        [1, 5, 5, 5, 5, 5, 6, 7],
    ]


def test_small_tries_share_a_micro_batch() -> None:
    rows = [make_row([start, *range(100, 100 + length)]) for start, length in ((1, 5), (2, 5), (3, 3), (4, 3))]
    assert [forest.token_ids.numel() for forest in plant(rows, max_tokens=10)] == [10, 10]


@given(rows=tries(), seed=st.integers(0, 100))
def test_the_order_in_which_rows_arrive_does_not_matter(rows: list[TrainingRow], seed: int) -> None:
    shuffled = [rows[i] for i in np.random.default_rng(seed).permutation(len(rows))]
    for mine, theirs in zip(plant(rows, max_tokens=20), plant(shuffled, max_tokens=20), strict=True):
        assert torch.equal(mine.token_ids, theirs.token_ids)
        assert layout_of(mine).segments == layout_of(theirs).segments


def test_ids_are_compared_as_numbers_of_any_size() -> None:
    rows = [make_row([1, 70_000]), make_row([1, 255]), make_row([1, 256]), make_row([1, 151_643, 3])]
    (forest,) = plant(rows, max_tokens=100)
    assert forest.token_ids.tolist() == [[1, 255, 256, 70_000, 151_643, 3]]


def test_nothing_is_planted_from_nothing() -> None:
    assert plant([], max_tokens=8) == []
    assert sharing([], []).dedup_ratio == 1.0


def test_sharing_is_counted_in_tokens_and_pairs() -> None:
    rows = [make_row([1, 2, 3, 4], [2, 3]), make_row([1, 2, 3, 5])]
    shared = sharing(rows, plant(rows, max_tokens=100))
    assert shared == Sharing(flat_tokens=8, packed_tokens=5, flat_pairs=20, packed_pairs=14, targets=3)
    assert shared.dedup_ratio == 1.6
    assert shared.ideal_saving(Flops(1.0, 0.0, 0.0)) == 1.6
    assert shared.ideal_saving(Flops(1.0, 0.5, 2.0)) == (8 + 10 + 6) / (5 + 7 + 6)


@pytest.mark.parametrize("family", FAMILIES)
def test_flops_are_those_that_torch_counts(family: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    module = make_model(family)
    # The counter does not know the fused operations of the CPU.
    module.set_attn_implementation("eager")
    if family == "qwen3_moe":
        module.set_experts_implementation("eager")
    length = 32
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(input_ids=torch.zeros(1, length, dtype=torch.int64))
    flops = Flops.of(module)
    # Torch counts attention as if nothing were masked.
    expected = length * (flops.per_token + flops.per_target) + length**2 * flops.per_pair
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-6)


def test_auto_plants_where_enough_is_shared() -> None:
    module = make_model()
    alike = [make_row([1, 2, 3, 4, end], rollout=end) for end in range(5)]
    batches, metrics = packed(alike, packing="auto", max_tokens=100, module=module)
    assert (len(batches), batches[0].layout is not None) == (1, True)
    assert metrics["forest/dedup_ratio"] == pytest.approx(25 / 9)
    assert metrics["forest/planted"] == 1.0
    assert 1.0 < metrics["forest/ideal_saving"] < 25 / 9


def test_auto_leaves_rows_flat_where_little_is_shared_unless_told() -> None:
    module = make_model()
    unlike = [make_row([start, 2, 3, 4, 5]) for start in range(5)]
    batches, metrics = packed(unlike, packing="auto", max_tokens=100, module=module)
    assert batches[0].layout is None
    assert (metrics["forest/dedup_ratio"], metrics["forest/planted"]) == (1.0, 0.0)
    assert BREAK_EVEN > 1.0
    batches, metrics = packed(unlike, packing="forest", max_tokens=100, module=module)
    assert batches[0].layout is not None
    assert metrics["forest/planted"] == 1.0
    batches, metrics = packed(unlike, packing="flat", max_tokens=100, module=module)
    assert (batches[0].layout, metrics) == (None, {})


def sliding() -> PreTrainedModel:
    windows: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=8, **SMALL, **windows))


def test_a_model_with_a_sliding_window_trains_flat_rows_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="learners.forest"):
        assert supported("auto", sliding()) == "flat"
    (record,) = caplog.records
    assert "layer 1 is 'sliding_attention'" in record.getMessage()


def test_a_forest_is_refused_for_such_a_model_with_the_layer_named() -> None:
    with pytest.raises(ValueError, match=r"packing='forest', but layer 1 is 'sliding_attention'"):
        supported("forest", sliding())
    mistral = MistralForCausalLM(MistralConfig(vocab_size=8, **SMALL, num_key_value_heads=2, sliding_window=4))
    with pytest.raises(ValueError, match=r"layer 0 .*sliding"):
        supported("forest", mistral)


def test_an_unknown_packing_is_refused() -> None:
    packing: Any = "wood"
    with pytest.raises(ValueError, match="packing out of"):
        supported(packing, make_model())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_meant_for_forests_is_supported(family: str) -> None:
    assert supported("auto", make_model(family)) == "auto"
    assert math.isfinite(Flops.of(make_model(family)).per_token)
