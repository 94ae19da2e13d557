"""The failure rules: one table. That docs/ shows it is tested with the README."""

import pytest

from clawgym_env.rollout import FAILURE_RULES, TRUNCATED, StopReason, failure_rule

INFRASTRUCTURE = {StopReason.SANDBOX_ERROR, StopReason.ENGINE_ERROR, StopReason.GRADER_ERROR}


def test_every_stop_reason_has_a_rule_and_every_rule_is_bounded() -> None:
    assert set(FAILURE_RULES) == set(StopReason)
    for rules in FAILURE_RULES.values():
        assert all(0 <= rule.retries <= 2 for rule in rules)


@pytest.mark.parametrize("reason", list(StopReason))
@pytest.mark.parametrize("asked", [True, False])
def test_what_is_graded_is_trained_on_and_never_run_again(reason: StopReason, asked: bool) -> None:
    rule = failure_rule(reason, policy_asked=asked)
    assert rule.graded == rule.trained == (asked and reason not in INFRASTRUCTURE)
    assert not (rule.graded and rule.retries)


def test_only_the_harness_ends_a_rollout_that_is_not_cut() -> None:
    assert set(StopReason) - TRUNCATED == {StopReason.COMPLETED, StopReason.HARNESS_ERROR}
