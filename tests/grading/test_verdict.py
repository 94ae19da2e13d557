"""A judge's reply: exactly the scores asked for, or words that say what is wrong."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_env.grading.specs import ANCHORS, Criterion
from clawgym_env.grading.verdict import Verdict, read_verdict

ONE = (Criterion(name="a", question="?"),)
CHECKS = (Criterion(name="a", question="?", checks=("x", "y")),)


def says(scores: object, notes: object = "n") -> str:
    return json.dumps({"scores": scores, "notes": notes})


@pytest.mark.parametrize(
    "reply",
    [
        says({"criterion_1": 0.5}),
        "I think {this} is half done.\n" + says({"criterion_1": 0.5}) + "\n",
        "```json\n" + says({"criterion_1": 0.5}) + "\n```",
        says({"criterion_1": 1}) + "\nNo, rather:\n" + says({"criterion_1": 0.5}),
        '{"scores": {"criterion_1": 5e-1}, "notes": "n"}',
    ],
)
def test_the_object_at_the_end_is_the_verdict(reply: str) -> None:
    assert read_verdict(reply, ONE) == Verdict((0.5,), "n")


@pytest.mark.parametrize(
    ("reply", "wrong"),
    [
        ("", "does not end with one JSON object"),
        ("0.5", "does not end with one JSON object"),
        ("[" * 10_000, "does not end with one JSON object"),
        ('{"a":' * 10_000, "does not end with one JSON object"),
        (says({"criterion_1": 0.5}) + " Done.", "does not end with one JSON object"),
        ('{"scores": {"criterion_1": 0.5}, "notes": "cut', "does not end with one JSON object"),
        ('{"criterion_1": 0.5}', "keys besides scores and notes: criterion_1"),
        ('{"scores": {"criterion_1": 0.5}, "notes": "", "total": 1}', "keys besides scores and notes: total"),
        (says([0.5]), "scores is no object"),
        (says({"criterion_1": 0.5}, 3), "notes is no text"),
        (says({}), "scores has the keys"),
        (says({"criterion_2": 0.5}), "scores has the keys"),
        (says({"criterion_1": 0.5, "criterion_2": 1}), "scores has the keys"),
        (says({"criterion_1": 0.6}), "criterion_1 is 0.6, expected is one of 0, 0.25, 0.5, 0.75, 1"),
        (says({"criterion_1": "1"}), 'criterion_1 is "1", expected'),
        (says({"criterion_1": True}), "criterion_1 is true, expected"),
        (says({"criterion_1": None}), "criterion_1 is null, expected"),
        (says({"criterion_1": float("nan")}), "criterion_1 is NaN, expected"),
        (says({"criterion_1": -1}), "criterion_1 is -1, expected"),
        ('{"scores": {"criterion_1": 0, "criterion_1": 1}}', "stands there twice"),
    ],
)
def test_anything_else_is_refused_with_the_reason(reply: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        read_verdict(reply, ONE)


def test_checks_hold_all_or_the_criterion_scores_nothing() -> None:
    assert read_verdict(says({"criterion_1": [True, True]}), CHECKS).scores == (1.0,)
    assert read_verdict(says({"criterion_1": [True, False]}), CHECKS).scores == (0.0,)
    for answer in (1, True, [True], [True, 1], [True, True, True], {"1": True}):
        with pytest.raises(ValueError, match="expected is a list of 2 times true or false"):
            read_verdict(says({"criterion_1": answer}), CHECKS)


@given(st.text())
def test_any_text_is_a_verdict_of_anchors_or_a_value_error(reply: str) -> None:
    try:
        verdict = read_verdict(reply, ONE)
    except ValueError:
        return
    assert verdict.scores[0] in ANCHORS
