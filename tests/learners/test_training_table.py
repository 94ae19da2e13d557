import io

from rich.console import Console

from learners.training_table import COLUMNS, TrainingTable


def test_a_row_shows_what_is_known_under_its_heading() -> None:
    out = io.StringIO()
    with TrainingTable(3, console=Console(file=out, width=200)) as table:
        table.row(1, {"reward/mean": 0.25, "grad/norm": 1.5, "unknown/metric": 9.0})
    head, row = (line for line in out.getvalue().splitlines()[:2])
    assert head.split() == " ".join(COLUMNS).split()
    assert row.split() == ["1", "0.25", "1.5"]
    assert row.index("0.25") + 4 == head.index("reward") + 6
