from pathlib import Path

from learners.curve import draw_curve, draw_panels


def test_a_curve_is_a_png(tmp_path: Path) -> None:
    file = tmp_path / "new" / "curve.png"
    draw_curve([{"update": 0, "eval/reward": 0.2}, {"update": 1, "reward/mean": 0.3}], file, title="tiny")
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_run_that_recorded_nothing_still_draws(tmp_path: Path) -> None:
    draw_curve([], tmp_path / "curve.png")
    assert (tmp_path / "curve.png").exists()


def test_panels_draw_the_metrics_there_are(tmp_path: Path) -> None:
    records = [{"update": 1, "entropy": 0.4}, {"update": 2, "entropy": 0.3, "reward/mean": 1.0}]
    draw_panels(records, tmp_path / "panels.png", {"reward": ["reward/mean"], "rest": ["entropy", "absent"]})
    assert (tmp_path / "panels.png").read_bytes().startswith(b"\x89PNG")
