from pathlib import Path

from learners.curve import draw_curve


def test_a_curve_is_a_png(tmp_path: Path) -> None:
    file = tmp_path / "new" / "curve.png"
    draw_curve([{"update": 0, "eval/reward": 0.2}, {"update": 1, "reward/mean": 0.3}], file, title="tiny")
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_run_that_recorded_nothing_still_draws(tmp_path: Path) -> None:
    draw_curve([], tmp_path / "curve.png")
    assert (tmp_path / "curve.png").exists()
