"""The view of a training run: before it begins, while it trains, when it is resumed, and at its end."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
from torch.utils.tensorboard import SummaryWriter

from helm_rl import cli
from helm_rl.checkpoint import STATE_FILE, TrainingSection, ValidationSection, save_training_state
from helm_rl.watch import run as watch_run
from helm_rl.watch.frame import Frame
from helm_rl.watch.run import RunSource
from tests.helm_rl import policies

ARGUMENTS: dict[str, Any] = {"total_timesteps": 1_000, "num_envs": 2, "num_steps": 32}  # 15 iterations of 64


def row(frame: Frame, name: str) -> str:
    (found,) = [each.text for each in frame.rows if each.name == name]
    return found


def save(run: Path, iterations: int, **changes: Any) -> None:
    given = policies.training().model_dump() | {"arguments": ARGUMENTS, "iterations": iterations}
    section = TrainingSection(**(given | {"steps": 64 * iterations} | changes))
    tensors = policies.net_tensors(policies.network(0))
    save_training_state(run, tensors, network=policies.NETWORK, environment=policies.ENVIRONMENT, training=section)


def train(run: Path, first: int, last: int, purge: int | None = None, value: float = 1.0) -> None:
    """Log the iterations from `first` to `last`, as a training does."""
    with SummaryWriter(str(run), purge_step=purge, filename_suffix=f".{first}") as writer:
        for k in range(first, last + 1):
            writer.add_scalar("charts/episodic_return", -k, 64 * k)
            writer.add_scalar("charts/learning_rate", 1e-3, 64 * k)
            writer.add_scalar("charts/SPS", 16, 64 * k)
            writer.add_scalar("losses/value_loss", value / k, 64 * k)
            writer.add_scalar("losses/explained_variance", math.nan, 64 * k)
            if k % 5 == 0:
                for name, regret in (("burst", 0.1 / k), ("trend", 0.3 / k)):
                    writer.add_scalar(f"validation/p99_regret/{name}", regret, 64 * k)
                writer.add_scalar("validation/mean_p99_regret", 0.2 / k, 64 * k)


def test_a_run_from_before_it_begins_to_its_end(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    source = RunSource(run)
    assert (source.look().state, source.look().warn) == ("no such folder yet", True)
    run.mkdir(parents=True)
    assert source.look().state == "no run has begun in this folder"
    with SummaryWriter(str(run)) as writer:
        writer.add_text("hyperparameters", "|param|value|")
    save(run, 0)
    frame = source.look()
    assert frame.state.startswith("has not trained yet")
    assert row(frame, "steps") == "0 of 960 (0 %)"

    train(run, 1, 7)
    frame = source.look()
    assert (frame.state, frame.warn) == ("trains", False)
    assert row(frame, "steps") == "448 of 960 (47 %)"
    assert row(frame, "steps/s") == "16, 32 s left"
    assert row(frame, "episodic return") == "-7"
    assert row(frame, "P99 regret") == "4.0 %, best 4.0 %"
    assert (row(frame, "  on burst"), row(frame, "  on trend")) == ("2.0 %", "6.0 %")
    assert row(frame, "value loss") == "0.1429"
    assert row(frame, "explained variance") == "-"
    assert row(frame, "policy loss") == "-"
    (curve,) = [each.curve for each in frame.rows if each.name == "episodic return"]
    assert curve == (-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0)
    assert frame.events[-1].text == "validation after 320 steps: P99 regret 4.0 %, the best so far"

    train(run, 8, 15)
    validation = ValidationSection(
        reference_ms={"burst": 80.0}, regrets={5: {"burst": 0.04}, 10: {"burst": 0.02}, 15: {"burst": 0.03}}, best=10
    )
    save(run, 15, validation=validation)
    frame = source.look()
    assert frame.state == "finished"
    assert row(frame, "steps") == "960 of 960 (100 %)"
    assert row(frame, "checkpoint") == "after 15 iterations, its policy is that of iteration 10, P99 regret 2.0 %"
    assert [event.text for event in frame.events if "checkpoint" in event.text] == [
        "checkpoint after 0 iterations",
        "checkpoint after 15 iterations",
    ]
    assert source.look().events == frame.events  # nothing is told twice


def test_a_run_without_validation_is_told_from_one_whose_first_look_is_to_come(tmp_path: Path) -> None:
    save(tmp_path, 3, validation=ValidationSection(reference_ms={"burst": 80.0}))
    assert row(RunSource(tmp_path).look(), "checkpoint") == "after 3 iterations, no validation yet"
    save(tmp_path, 15, validation=ValidationSection())
    frame = RunSource(tmp_path).look()
    assert frame.state == "finished"
    assert row(frame, "checkpoint") == "after 15 iterations, its policy is the last one, without validation"


def test_what_a_resumed_run_does_again_takes_the_place_of_what_it_did(tmp_path: Path) -> None:
    train(tmp_path, 1, 9)
    train(tmp_path, 6, 8, purge=5 * 64 + 1, value=100.0)
    (losses,) = [each for each in RunSource(tmp_path).look().rows if each.name == "value loss"]
    assert [round(value, 3) for value in losses.curve] == [1.0, 0.5, 0.333, 0.25, 0.2, 16.667, 14.286, 12.5]


def test_of_a_folder_of_runs_the_newest_is_watched(tmp_path: Path) -> None:
    source = RunSource(tmp_path)
    assert source.look().state == "no run has begun in this folder"
    train(tmp_path / "old", 1, 3)
    assert row(source.look(), "steps") == "192"
    train(tmp_path / "new", 1, 2)
    for file in (tmp_path / "old").iterdir():
        os.utime(file, (1e9, 1e9))
    assert row(source.look(), "steps") == "128"
    assert source.look().title.endswith("new")


def test_the_newest_run_may_be_one_of_a_population(tmp_path: Path) -> None:
    train(tmp_path / "alone", 1, 3)
    (tmp_path / "seeds" / "logs").mkdir(parents=True)
    for k, seed in enumerate(("1", "2")):
        train(tmp_path / "seeds" / seed, 1, 5 + k)
    for run, at_s in (("alone", 1e9), ("seeds/1", 1.2e9), ("seeds/2", 1.1e9)):
        for file in (tmp_path / run).iterdir():
            os.utime(file, (at_s, at_s))
    frame = RunSource(tmp_path).look()
    assert frame.title.endswith("seeds/1")
    assert row(frame, "steps") == "320"


def test_a_folder_that_cannot_be_read_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path / "seeds" / "1", 1, 3)
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "seeds" / "private").mkdir()
    is_file = Path.is_file

    def refused(path: Path) -> bool:  # as the system does, but for root
        if path.parent.name in ("lost+found", "private"):
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refused)
    frame = RunSource(tmp_path).look()
    assert frame.title.endswith("seeds/1")
    assert row(frame, "steps") == "192"


def test_a_long_run_is_read_on_until_its_newest_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, 1, 40)  # more than 200 values
    monkeypatch.setattr(watch_run, "_MOST_SCALARS", 20)
    source = RunSource(tmp_path)
    frame = source.look()
    assert (frame.whole, frame.behind, frame.state) == (False, True, "reads what has been written so far")
    looks = 1
    while not frame.whole:
        frame = source.look()
        looks += 1
    assert looks > 10  # more than --once takes for what is not behind
    assert (frame.behind, row(frame, "episodic return")) == (False, "-40")
    assert cli.main(["watch", str(tmp_path), "--once", "--interval-s", "0.1"]) == 0
    assert "episodic return     -40" in capsys.readouterr().out


def test_event_files_of_one_second_are_read_in_the_order_in_which_they_were_made(tmp_path: Path) -> None:
    for number, value in ((9, 1.0), (10, 100.0)):
        run = tmp_path / str(number)
        train(run, 1, 2, value=value)
        (events,) = run.glob("events.out.tfevents.*")
        events.rename(tmp_path / f"events.out.tfevents.1700000000.host.7.{number}")
    (losses,) = [each for each in RunSource(tmp_path).look().rows if each.name == "value loss"]
    assert losses.curve[-1] == 50.0


def test_a_run_that_stopped_early_or_has_gone_quiet_says_so(tmp_path: Path) -> None:
    train(tmp_path, 1, 4)
    save(tmp_path, 4, stopped="no lower regret on held-out arrivals in 3 looks, after 4 iterations")
    frame = RunSource(tmp_path).look()
    assert (frame.state[:31], frame.warn) == ("stopped early: no lower regret ", False)
    save(tmp_path, 3)
    with SummaryWriter(str(tmp_path), filename_suffix=".old") as writer:
        writer.add_scalar("charts/SPS", 5, 999, walltime=1e9)
    frame = RunSource(tmp_path).look()
    assert frame.warn
    assert frame.state.startswith("nothing new for ")


def test_neither_a_damaged_file_nor_a_bad_checkpoint_ends_the_view(tmp_path: Path) -> None:
    train(tmp_path, 1, 3)
    (file,) = tmp_path.glob("events.*")
    with file.open("ab") as end:
        end.write(b"\x00" * 300)
    (tmp_path / STATE_FILE).write_text('{"format_version": 99}')
    source = RunSource(tmp_path)
    told = [event.text for event in source.look().events]
    assert len(told) == 2
    assert "is damaged at byte" in told[0]
    assert "format_version" in told[1]
    assert [event.text for event in source.look().events] == told  # once
    save(tmp_path, 3)
    frame = source.look()
    assert row(frame, "steps") == "192 of 960 (20 %)"
    assert frame.events[-1].text == "checkpoint after 3 iterations"


def test_names_from_the_file_are_bounded_and_harmless(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        for k in range(400):
            writer.add_scalar(f"validation/p99_regret/\x1b[2J{k:03}", 0.5, 1)
    frame = RunSource(tmp_path).look()
    assert len(frame.rows) < 40
    assert [each.name for each in frame.rows if "000" in each.name] == ["  on \\x1b[2J000"]
