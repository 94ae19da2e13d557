from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from learner_fakes import Turn, make_rollout

from clawgym_env.engine.base import SamplingParams
from clawgym_env.trace.calls import CallTiming
from clawgym_env.trace.prefix_tree import PrefixTree, Selection
from learners.export import slime_rows, trl_rows, verl_rows, write_jsonl

BRANCHED = make_rollout(
    [
        Turn([1, 2], [3, 4], logprobs=[-0.5, -1.5]),
        Turn([5], [6], parent=0, logprobs=[-0.25]),
        Turn([7, 8], [9], parent=0, logprobs=[-2.0]),
    ],
    0.75,
    index=1,
)
"""Two calls went on from the first one's reply."""
PLAIN = make_rollout([Turn([1], [2], logprobs=[-1.0])], 0.0, group="h")
LEFT_OUT = [make_rollout([Turn([1], [2])], 1.0, exclusion="stale"), make_rollout([Turn([1], [2])], None)]
ALL = [BRANCHED, *LEFT_OUT, PLAIN]


def test_a_path_is_cut_before_its_first_trained_token() -> None:
    first, second, plain = trl_rows(ALL)
    assert (first["prompt_ids"], first["completion_ids"]) == ([1, 2], [3, 4, 5, 6])
    assert first["env_mask"] == [1, 1, 0, 1]
    assert first["logprobs"] == [-0.5, -1.5, 0.0, -0.25]
    assert (second["prompt_ids"], second["completion_ids"]) == ([1, 2, 3, 4, 7, 8], [9])
    assert (first["reward"], second["reward"], plain["reward"]) == (0.75, 0.75, 0.0)
    assert plain["group_id"] == "h"


def test_every_trained_token_has_mask_1_once() -> None:
    masks = [row["response_mask"] for row in verl_rows([BRANCHED])]
    assert sum(map(sum, masks)) == BRANCHED.tree.buckets()["trained"]


def test_verl_rows_count_turns_and_name_the_group() -> None:
    first, second, plain = verl_rows(ALL)
    assert [row["num_turns"] for row in (first, second, plain)] == [4, 2, 2]
    timing = CallTiming(arrived_s=1.0, generated_s=3.5, delivered_s=4.0)
    timed = replace(BRANCHED, tree=PrefixTree([replace(call, timing=timing) for call in BRANCHED.tree]))
    assert [row["metrics"] for row in verl_rows([timed])] == [{"generate_sequences": seconds} for seconds in (5.0, 2.5)]
    assert first["response_logprobs"] == [-0.5, -1.5, 0.0, -0.25]
    assert first["reward_score"] == 0.75
    assert first["extra_fields"]["uid"] == second["extra_fields"]["uid"] == "g"


def test_slime_rows_hold_the_response_at_the_end_of_the_tokens() -> None:
    rows = list(slime_rows(ALL))
    assert [(row["group_index"], row["index"]) for row in rows] == [(0, 0), (0, 1), (1, 2)]
    for row in rows:
        assert len(row["loss_mask"]) == len(row["rollout_log_probs"]) == row["response_length"] < len(row["tokens"])
    assert rows[0]["tokens"] == [1, 2, 3, 4, 5, 6]
    assert rows[0]["weight_versions"] == ["0"]
    assert rows[0]["status"] == "completed"
    assert rows[0]["metadata"]["rollout_id"] == "g/1"


def test_rows_survive_a_file(tmp_path: Path) -> None:
    for rows in (trl_rows, verl_rows, slime_rows):
        file = tmp_path / "deeper" / f"{rows.__name__}.jsonl"
        assert write_jsonl(rows(ALL), file) == 3
        assert [json.loads(line) for line in file.read_text().splitlines()] == list(rows(ALL))


def test_what_could_not_be_trained_here_is_not_handed_on() -> None:
    greedy = make_rollout([Turn([1], [2], sampling=SamplingParams(temperature=0.0))], 1.0)
    with pytest.raises(ValueError, match="temperature > 0"):
        list(trl_rows([greedy]))


def test_a_checkpoint_is_a_plain_folder_with_its_chat_template(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from learners.checkpoint import save_checkpoint
    from learners.grpo import TreeGRPO
    from learners.testing import small_policy

    policy = small_policy()
    save_checkpoint(tmp_path / "checkpoint", policy=policy, learner=TreeGRPO(policy), cursor={})
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "checkpoint")
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert list(ids) == policy.renderer.render_ids(messages, add_generation_prompt=False)
    module = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    for name, parameter in policy.module.named_parameters():
        np.testing.assert_array_equal(module.get_parameter(name).detach().numpy(), parameter.detach().numpy())


def test_branching_is_judged_by_the_selection_of_the_export() -> None:
    rollout = make_rollout([Turn([1, 2], [3 + turn]) for turn in range(6)], 1.0)
    assert len(list(trl_rows([rollout]))) == 6
    assert not list(trl_rows([rollout], Selection(max_leaves=4)))
