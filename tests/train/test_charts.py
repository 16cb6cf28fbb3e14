"""TensorBoard: each point of each tag has a step of its own, and the HParams page knows the run."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData  # type: ignore[import-untyped]
from tensorboard.summary.writer import event_file_writer  # type: ignore[import-untyped]

import train.ppo_base
from tests.train.test_ppo_base import logged, toy
from tests.train.test_resume import ITERATION, interrupt
from train.charts import MOST_PANELS, episode_steps, event_log, look_figure
from train.ppo_base import Args


def points(run: Path) -> dict[str, list[int]]:
    """Return the steps of everything in the log, by tag."""
    sizes = dict.fromkeys(("scalars", "images", "tensors"), 0)
    log = EventAccumulator(str(run), size_guidance=sizes).Reload()
    tags = log.Tags()
    read = {"scalars": log.Scalars, "images": log.Images, "tensors": log.Tensors}
    return {tag: [event.step for event in read[kind](tag)] for kind in read for tag in tags[kind]}


def test_every_tag_ascends_in_step_through_stops_and_a_longer_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several episodes end in one round, training stops between two checkpoints, is evaluated, and goes on."""
    args = toy("Interrupting", tmp_path, total_timesteps=6 * ITERATION + 5, checkpoint_every=2, eval_episodes=2)
    interrupt(monkeypatch, 3 * ITERATION + 7)
    with pytest.raises(KeyboardInterrupt):
        train.ppo_base.train(args)
    (run,) = tmp_path.iterdir()
    interrupt(monkeypatch, 0)
    train.ppo_base.train(Args(resume=run))
    train.ppo_base.train(Args(resume=run, total_timesteps=8 * ITERATION))
    found = points(run)
    for tag, steps in found.items():
        assert all(one < other for one, other in itertools.pairwise(steps)), (tag, steps)
    assert found["charts/SPS"] == [ITERATION * k for k in range(1, 9)]
    assert found["charts/eval_return"] == [6 * ITERATION, 8 * ITERATION]  # what was trained, not what was asked for
    assert len(found["charts/episodic_return"]) > 8
    assert found["hyperparameters/text_summary"] == [0, 3 * ITERATION + 1, 6 * ITERATION + 1]


def test_readers_find_the_logs_of_a_run_in_the_order_of_their_making(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process counts its logs, and the tenth of a second would come before the ninth: readers sort by name."""
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(9))
    for step in (1, 2):
        with event_log(tmp_path, purge_step=None) as writer:
            writer.add_scalar("step", step, step)
    assert points(tmp_path)["step"] == [1, 2]


def test_episodes_that_end_in_one_round_have_steps_of_their_own() -> None:
    assert [episode_steps(64, 4, env) for env in range(4)] == [61, 62, 63, 64]
    assert episode_steps(68, 4, 0) == 65


def test_the_hparams_page_knows_arguments_charts_and_the_end(tmp_path: Path) -> None:
    run = train.ppo_base.train(dataclasses.replace(toy("Reach", tmp_path), learning_rate=0.0025, seed=3))
    assert not [path for path in run.iterdir() if path.is_dir()]  # no run within the run
    log = EventAccumulator(str(run)).Reload()
    told = {
        tag.rpartition("/")[2]: HParamsPluginData.FromString(content)
        for tag, content in log.PluginTagToContent("hparams").items()
    }
    arguments = told["session_start_info"].session_start_info.hparams
    assert arguments["learning_rate"].number_value == 0.0025
    assert arguments["seed"].number_value == 3
    assert arguments["scenario"].string_value == "burst trend steady"
    assert arguments["load"].string_value == "limit"
    assert {field.name for field in dataclasses.fields(Args)} == set(arguments)
    charts = {info.name.tag for info in told["experiment"].experiment.metric_infos}
    assert charts == {"charts/episodic_return"}  # nothing was held out
    assert charts <= logged(run).keys()
    assert told["session_end_info"].session_end_info.status == 1  # success


def test_the_picture_of_a_look_shows_alpha_and_p99() -> None:
    def run(k: int) -> Any:
        times = np.arange(1.0, 31.0)
        windows = np.array([5.0, 15.0, 25.0])
        tail = np.array([40.0, 80.0, 160.0])
        return SimpleNamespace(time_s=times, alpha=times / 100, window_s=windows, window_p99_ms=tail, p99_ms=90.0 + k)

    held: list[Any] = [
        SimpleNamespace(name=f"load-{k}", scenario=SimpleNamespace(slo_ms=80.0)) for k in range(MOST_PANELS + 2)
    ]
    figure = look_figure(held, {each.name: run(k) for k, each in enumerate(held)})
    panels, tails = figure.axes[:MOST_PANELS], figure.axes[MOST_PANELS:]
    assert len(tails) == MOST_PANELS
    assert [panel.get_title() for panel in panels[:2]] == [
        "load-0: P99 90.0 ms, SLO 80 ms",
        "load-1: P99 91.0 ms, SLO 80 ms",
    ]
    np.testing.assert_array_equal(panels[0].lines[0].get_ydata(), np.arange(1.0, 31.0) / 100)
    np.testing.assert_array_equal(tails[0].lines[0].get_ydata(), [0.5, 1.0, 2.0])
