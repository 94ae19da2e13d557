from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_families import FAMILIES, write_folder

from clawgym_env.cache import cache_dir
from clawgym_env.engine.base import Generation
from clawgym_env.errors import ClawGymError
from clawgym_env.fidelity import SCENARIOS, FidelityReport, PolicyText, run_fidelity
from clawgym_env.policy import BUILDERS
from clawgym_env.registry import adapter
from clawgym_env.rendering import ChatMLRenderer
from clawgym_env.tokenizer import byte_tokenizer

SHORT = ["write-check-answer", "hang-up"]


def told(report: FidelityReport) -> str:
    return "\n".join([report.table(), *(f"{one.outline}\n{one.output}" for one in report.results)])


@pytest.mark.parametrize("harness", ["mini", "mini?dialect=messages"])
def test_the_bundled_harness_keeps_every_token_in_every_scenario(harness: str) -> None:
    report = run_fidelity(harness, "bytes")
    assert report.passed, told(report)
    verdicts = {one.scenario: one.verdict for one in report.results}
    assert set(verdicts) == {scenario.name for scenario in SCENARIOS}
    assert [name for name, verdict in verdicts.items() if verdict == "n/a"] == ["sub-agent", "compaction"]
    twenty = report.result("twenty-turns")
    assert (twenty.calls, twenty.kept, twenty.forks, twenty.drift) == (20, 1, 0, ())
    assert report.result("hang-up").calls == 3, "the retry is answered with the reply that was lost"
    assert report.first_divergence is None


@pytest.mark.parametrize(
    ("kind", "not_written"),
    [
        ("qwen3", set()),
        ("qwen3.5", {"malformed-arguments"}),
        ("glm", {"malformed-arguments"}),
        ("llama-3", {"malformed-arguments", "parallel-tools"}),
        ("deepseek-v3", set()),
    ],
)
def test_every_family_of_templates_can_be_examined(kind: str, not_written: set[str], tmp_path: Path) -> None:
    chosen = ["write-check-answer", "parallel-tools", "malformed-arguments", "length-stop"]
    report = run_fidelity("mini", write_folder(tmp_path / kind, FAMILIES[kind]), scenarios=chosen)
    assert report.passed, told(report)
    assert {one.scenario for one in report.results if one.verdict == "n/a"} == not_written
    if kind == "qwen3":  # a full render forgets the empty reasoning of a turn that the policy has sampled
        drift = report.result("write-check-answer").template_drift
        assert drift is not None
        assert drift.got_text.startswith("<think>")


@pytest.mark.harness
@pytest.mark.policy
@pytest.mark.parametrize(("harness", "policy"), [("pi", "tiny"), ("claude-code", "tiny")])
def test_a_real_harness_keeps_every_token(harness: str, policy: str) -> None:
    adapter(harness).install(cache_dir())
    assert policy in BUILDERS
    report = run_fidelity(harness, policy)
    assert report.passed, told(report)
    assert report.result("compaction").segments >= 2
    assert (report.result("sub-agent").subagent_calls >= 2) == (harness == "claude-code")


class ForgetfulRenderer(ChatMLRenderer):
    """Leaves out the newline behind a reply when it goes on, but not when it renders the whole."""

    def bridge_to_next_turn(self, *arguments: Any, **options: Any) -> Any:
        bridged = super().bridge_to_next_turn(*arguments, **options)
        assert bridged is not None
        prior = len(arguments[0]) + len(arguments[1])
        assert self.tokenizer.decode(bridged.token_ids[prior]) == "\n"
        ids = [*bridged.token_ids[:prior], *bridged.token_ids[prior + 1 :]]
        return dataclasses.replace(bridged, token_ids=ids, message_indices=[], sampled_mask=[])


def test_a_renderer_whose_bridge_is_not_its_render_fails_at_the_first_token_of_the_bridge() -> None:
    tokenizer = byte_tokenizer()
    text = PolicyText("forgetful", tokenizer, ForgetfulRenderer(tokenizer))
    report = run_fidelity("mini", text, scenarios=SHORT[:1])
    assert not report.passed
    where = report.first_divergence
    assert where is not None
    assert (where.call, tokenizer.decode(where.expected), tokenizer.decode(where.got)) == (1, "\n", "<|im_start|>")
    assert where.before.endswith("</tool_call><|im_end|>")
    assert where.expected_text.startswith("\n<|im_start|>user")
    assert str(where) in report.table()
    assert f"position {where.position}" in report.table()


def one_id_off(generation: Generation) -> Generation:
    ids = generation.token_ids.copy()
    ids[2] += 1
    return dataclasses.replace(generation, token_ids=ids)


def last_logprob_off(generation: Generation) -> Generation:
    logprobs = generation.logprobs.copy()
    logprobs[-1] = np.nextafter(logprobs[-1], np.float32(1.0))
    return dataclasses.replace(generation, logprobs=logprobs)


def test_an_engine_that_hands_out_other_ids_than_it_sampled_fails_at_the_first() -> None:
    report = run_fidelity("mini", "bytes", scenarios=SHORT[:1], tamper=one_id_off)
    where = report.first_divergence
    assert where is not None
    assert (where.call, where.position) == (0, 2)
    assert where.got == (where.expected or 0) + 1
    assert where.expected_text.startswith("write a.txt")
    assert not report.result(SHORT[0]).identical


def test_one_bit_of_one_log_probability_is_enough_to_fail() -> None:
    report = run_fidelity("mini", "bytes", scenarios=SHORT[:1], tamper=last_logprob_off)
    assert not report.passed
    assert "bit for bit" in report.table()


def test_an_unknown_scenario_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ClawGymError, match=r"twenty-turns.*got thirty-turns"):
        run_fidelity("mini", "bytes", scenarios=["thirty-turns"])
