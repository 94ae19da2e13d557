"""The scorer of short answers: what is the same answer, and what is none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_env.grading.answer import score_answer

RIGHT = [
    ("507", "507"),
    ("507", "I read it twice.\n<FINAL_ANSWER> 507 </FINAL_ANSWER>\nDone."),
    ("507", "<FINAL_ANSWER>506</FINAL_ANSWER> no, <final_answer>507</final_answer>"),
    ("507", "The answer is 507 million dollars."),
    ("507", "$507"),
    ("2.5 million", "2,500,000"),
    ("2500000", "2.5 million"),
    ("1.5 billion", "1,500 million"),
    ("(1,234)", "-1234"),
    ("-1234", "(1,234)"),
    ("-5 million", "(5 million)"),
    ("-3.2", "−3.2"),
    ("-$7", "$-7"),
    ("12.5%", "12.5 percent"),
    ("12.5%", "12.5"),
    ("1e3", "1,000"),
    ("35", "In 1941 it was 35"),
    ("1941: 35", "35"),
    ("1941: 35", "1941: 35"),
    ("1953", "1953"),
    ("1953", "1,953"),
    ("5", "between 1941-1945 it was 5"),
    ("March 1977", "In March of 1977"),
    ("Canada", "the Canada."),
    ("U.S. savings bonds", "U.S. Savings-Bonds"),
    ("[1, 2, 3]", "[1, 2, 3]"),
    ("[100,200]", "[100, 200]"),
    ("[1,234, 5,678]", "[1234, 5678]"),
    ("[1; 2]", "1, 2"),
    ("[Ohio, 3%]", '["ohio", 3 percent]'),
    ("5", "[5]"),
    ("0", "0.0"),
]
WRONG = [
    ("507", ""),
    ("507", "   \n"),
    ("507", "508"),
    ("507", "-507"),
    ("507", "507 or 508"),
    ("507", "507\n508"),
    ("507", "**507**"),
    ("507", "# 507"),
    ("507", "<b>507</b>"),
    ("507", "`507`"),
    ("507", "507 " + "x" * 250),
    ("507", "<FINAL_ANSWER></FINAL_ANSWER>"),
    ("507", "<FINAL_ANSWER>507\nor so</FINAL_ANSWER>"),
    ("507", "Unable to determine, but 507 is near"),
    ("unable to determine", "unable to determine"),
    ("507", "not available"),
    ("2.5 million", "2.5 billion"),
    ("2.5 million", "2.5%"),
    ("12.5%", "12.5 million"),
    ("12.5%", "0.125"),
    ("1941: 35", "1942: 35"),
    ("March 1977", "1977"),
    ("March 1977", "March 1978"),
    ("Canada", "Canada and Mexico"),
    ("Canada", "not Canada"),
    ("[1, 2, 3]", "[3, 2, 1]"),
    ("[1, 2, 3]", "[1, 2]"),
    ("[1, 2]", "[1, 2, 3]"),
    ("5", "[5, 6]"),
    ("5", "1e999"),
    ("", "5"),
    ("…", "!"),
]


@pytest.mark.parametrize(("expected", "answer"), RIGHT)
def test_the_same_answer_in_other_words_is_right(expected: str, answer: str) -> None:
    assert score_answer(expected, answer) == 1.0


@pytest.mark.parametrize(("expected", "answer"), WRONG)
def test_another_answer_or_none_is_wrong(expected: str, answer: str) -> None:
    assert score_answer(expected, answer) == 0.0


@pytest.mark.parametrize(("answer", "tolerance", "score"), [("101", 0.01, 1.0), ("99", 0.01, 1.0), ("102", 0.01, 0.0)])
def test_the_tolerance_is_relative_to_the_truth(answer: str, tolerance: float, score: float) -> None:
    assert score_answer("100", answer, tolerance=tolerance) == score
    assert score_answer("0", "0.0001", tolerance=tolerance) == 0.0


@pytest.mark.parametrize("tolerance", [-0.1, 1.0, float("nan")])
def test_a_tolerance_that_allows_anything_is_refused(tolerance: float) -> None:
    with pytest.raises(ValueError, match="tolerance"):
        score_answer("1", "1", tolerance=tolerance)


def test_many_lone_tags_cost_no_more_than_their_length() -> None:
    assert score_answer("1", "<FINAL_ANSWER>" * 50_000) == 0.0
    assert score_answer("1", "</FINAL_ANSWER>" * 50_000 + "<FINAL_ANSWER>") == 0.0


amounts = st.decimals(min_value=-(10**12), max_value=10**12, places=2, allow_nan=False)


@given(amounts)
def test_a_number_is_itself_however_it_is_written(amount: object) -> None:
    plain, grouped = f"{amount}", f"{amount:,}"
    assert score_answer(plain, grouped) == 1.0
    assert score_answer(grouped, plain) == 1.0
    assert score_answer(plain, f"<FINAL_ANSWER>{grouped}</FINAL_ANSWER>") == 1.0


@given(amounts, amounts, st.floats(0.0, 0.5))
def test_more_tolerance_never_makes_a_right_answer_wrong(truth: object, answer: object, tolerance: float) -> None:
    assert score_answer(f"{truth}", f"{answer}", tolerance=tolerance) >= score_answer(f"{truth}", f"{answer}")


@given(st.lists(st.integers(2_100, 10**6), min_size=2, max_size=6, unique=True))
def test_a_list_is_right_in_its_own_order_only(values: list[int]) -> None:
    written = f"[{', '.join(map(str, values))}]"
    assert score_answer(written, written) == 1.0
    assert score_answer(written, f"[{', '.join(map(str, reversed(values)))}]") == 0.0


@given(st.text(max_size=300), st.text(max_size=300), st.sampled_from([0.0, 0.01]))
def test_any_text_scores_0_or_1(expected: str, answer: str, tolerance: float) -> None:
    assert score_answer(expected, answer, tolerance=tolerance) in (0.0, 1.0)
