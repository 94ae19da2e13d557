from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from learners.metrics_log import MetricsLog, read_metrics


def test_each_update_is_one_json_object(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.write(1, {"reward/mean": 0.25})
        assert read_metrics(tmp_path) == [{"update": 1, "reward/mean": 0.25}]
        log.write(2, {"reward/mean": 0.5, "eval/reward": 0.75})
    assert read_metrics(tmp_path)[1] == {"update": 2, "reward/mean": 0.5, "eval/reward": 0.75}


def test_a_run_that_goes_on_appends(tmp_path: Path) -> None:
    for update in (1, 2):
        with MetricsLog(tmp_path) as log:
            log.write(update, {"a/b": 1.0})
    assert [record["update"] for record in read_metrics(tmp_path)] == [1, 2]


def test_tensorboard_holds_the_same_numbers(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.write(3, {"reward/mean": 0.25})
        log.write(4, {"reward/mean": 0.5})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(3, 0.25), (4, 0.5)]


def test_a_run_that_goes_on_forgets_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        for update in range(4):
            log.write(update, {"reward/mean": update / 4})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"update": 4, "rew')  # the crash
    with MetricsLog(tmp_path, after=1) as log:
        assert [record["update"] for record in log.records] == [0, 1]
        log.write(2, {"reward/mean": 0.9})
        assert log.records == read_metrics(tmp_path)
    assert [record["reward/mean"] for record in read_metrics(tmp_path)] == [0.0, 0.25, 0.9]
