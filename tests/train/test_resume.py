"""Stopping and going on: a resumed run is the one that was never stopped, bit for bit."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

import train.ppo_base
from helm_rl.checkpoint import load_training_state
from helm_rl.cli import main as cli
from helm_rl.control.policy_net import ActorCritic
from helm_rl.errors import UserError
from tests.train import toys
from tests.train.test_ppo_base import assert_same_state, logged, toy
from train.charts import Hyperparameters
from train.ppo_base import Args, changes_of
from train.state import Loop, capture, restore

ITERATION = 4 * 64  # steps


def interrupt(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Have the environments send Ctrl-C in their step number `at`; 0 for never."""
    monkeypatch.setattr(toys.Interrupting, "steps", 0)
    monkeypatch.setenv("TOY_INTERRUPT_AT", str(at))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train.ppo_base.train(toy("Interrupting", tmp_path_factory.mktemp("runs"), total_timesteps=8 * ITERATION))


def test_a_generator_that_is_none_is_refused() -> None:
    generator = torch.Generator().manual_seed(1)
    net = ActorCritic(2, 1, generator=generator)
    optimiser = torch.optim.Adam(net.parameters())
    loop = Loop(np.zeros((1, 2)), np.zeros((0, 1, 1)), np.zeros(1), np.zeros(1, np.int64), np.zeros((0, 2)))
    tensors = capture(net, optimiser, generator, loop, {})
    restore("run", dict(tensors), net, optimiser, generator)
    tensors["generator"] = np.zeros_like(tensors["generator"])
    with pytest.raises(UserError, match="run: tensor 'generator' is no state of torch's generator"):
        restore("run", tensors, net, optimiser, generator)


@pytest.mark.parametrize(
    ("step", "finished"),
    [
        (4 * ITERATION + 1, 4),  # half of it: N + N = 2N; environments reset there (checkpoint_every = 2)
        (5 * ITERATION + 100, 5),  # within an iteration, between two resets: they are replayed
        (8 * ITERATION - 1, 7),
        (10, 0),
    ],
)
def test_n_and_n_is_2n_bit_for_bit(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    step: int,
    finished: int,
) -> None:
    # What is restored: optimiser, schedule, RNG, normaliser, and the environments with them.
    args = toy("Interrupting", tmp_path, total_timesteps=8 * ITERATION, checkpoint_every=2)
    whole = tmp_path / "whole"
    interrupt(monkeypatch, 0)
    shutil.move(train.ppo_base.train(args), whole)
    interrupt(monkeypatch, step)
    with pytest.raises(KeyboardInterrupt):
        train.ppo_base.train(args)
    (run,) = (path for path in tmp_path.iterdir() if path != whole)
    assert f"stopped: {finished} of 8 iterations are saved" in capsys.readouterr().err
    assert load_training_state(run)[0].training.iterations == finished
    interrupt(monkeypatch, 0)
    assert train.ppo_base.train(Args(resume=run)) == run
    assert_same_state(whole, run)
    # The log holds what an uninterrupted one does: each point once.
    one, other = logged(whole), logged(run)
    one.pop("charts/SPS"), other.pop("charts/SPS")
    assert one == other
    assert len(load_training_state(run)[0].training.commands) == 2


def test_stopping_twice_is_as_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted: Path) -> None:
    args = toy("Interrupting", tmp_path, total_timesteps=8 * ITERATION)
    interrupt(monkeypatch, 3 * ITERATION + 7)
    with pytest.raises(KeyboardInterrupt):
        train.ppo_base.train(args)
    (run,) = tmp_path.iterdir()
    interrupt(monkeypatch, 6 * ITERATION + 7)  # three of them replayed
    with pytest.raises(KeyboardInterrupt):
        train.ppo_base.train(Args(resume=run))
    interrupt(monkeypatch, 0)
    train.ppo_base.train(Args(resume=run))
    assert_same_state(uninterrupted, run)


def test_a_finished_run_can_be_made_longer(tmp_path: Path) -> None:
    args = toy("Reach", tmp_path, anneal_lr=False, checkpoint_every=3)
    whole = train.ppo_base.train(dataclasses.replace(args, total_timesteps=8 * ITERATION))
    run = train.ppo_base.train(args)
    with pytest.raises(UserError, match=r"the run is complete \(1024 of 1024 steps\); give a larger --total-timesteps"):
        train.ppo_base.train(Args(resume=run))
    with pytest.raises(UserError, match="--total-timesteps 512: a resumed run cannot become shorter than it was, 1024"):
        train.ppo_base.train(Args(resume=run, total_timesteps=512))
    train.ppo_base.train(Args(resume=run, total_timesteps=8 * ITERATION))
    assert_same_state(whole, run)


def test_two_do_not_train_one_run_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One would remove the tensors that the other one's checkpoint names."""
    folder = tmp_path / "run"
    begun: list[str] = []
    learn = train.ppo_base.learn

    def learn_and_be_resumed(*arguments: Any) -> ActorCritic:
        net = learn(*arguments)
        program = (
            "import sys; from pathlib import Path; from train.ppo_base import Args, train; "
            "train(Args(resume=Path(sys.argv[1]), total_timesteps=4096))"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, str(folder)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        begun.append(done.stderr.splitlines()[-1])
        return net

    monkeypatch.setattr(train.ppo_base, "learn", learn_and_be_resumed)
    train.ppo_base.train(toy("Interrupting", tmp_path, total_timesteps=ITERATION), folder)
    monkeypatch.undo()
    (last,) = begun
    assert last.endswith(f"{folder} is being written to by another process; wait for its end")
    assert load_training_state(folder)[0].training.iterations == 1
    again = train.ppo_base.train(Args(resume=folder, total_timesteps=2 * ITERATION))  # which has let it go
    assert load_training_state(again)[0].training.iterations == 2


def test_other_arguments_stay(tmp_path: Path) -> None:
    run = train.ppo_base.train(toy("Reach", tmp_path))
    with pytest.raises(UserError, match=r"--learning-rate 0\.1: a resumed run keeps --learning-rate 0\.001"):
        train.ppo_base.train(Args(resume=run, learning_rate=0.1, total_timesteps=8 * ITERATION))
    # To say again what holds anyway is no change.
    train.ppo_base.train(Args(resume=run, num_envs=4, total_timesteps=5 * ITERATION))
    assert load_training_state(run)[0].training.iterations == 5


def test_what_is_given_with_its_default_value_is_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train.ppo_base.train(toy("Reach", tmp_path, total_timesteps=4 * 1024, num_steps=1024, learning_rate=0.01))
    resume = ["train", "base", "--resume", str(run)]
    assert cli([*resume, "--learning-rate", "1e-3", "--total-timesteps", "8192"]) == 2
    assert "--learning-rate 0.001: a resumed run keeps --learning-rate 0.01; start" in capsys.readouterr().err
    assert cli([*resume, "--num-envs", "8", "--total-timesteps", "8192"]) == 2
    assert "--num-envs 8: a resumed run keeps --num-envs 4; start" in capsys.readouterr().err
    assert cli([*resume, "--learning-rate", "0.01", "--total-timesteps", "8192"]) == 0
    assert load_training_state(run)[0].training.steps == 8192
    assert Args.total_timesteps == 61_440
    assert cli([*resume, "--total-timesteps", "61440"]) == 0
    training = load_training_state(run)[0].training
    assert (training.steps, training.arguments["learning_rate"]) == (61_440, 0.01)
    # A patience of none, the default, takes back the one of before.
    assert cli([*resume, "--patience", "3", "--total-timesteps", "65536"]) == 0
    assert cli([*resume, "--patience", "0", "--total-timesteps", "69632"]) == 0
    assert load_training_state(run)[0].training.arguments["patience"] == 0


def test_without_a_command_line_what_is_no_default_is_given(tmp_path: Path) -> None:
    args = Args(resume=tmp_path, total_timesteps=61_440, patience=2)
    assert changes_of(args) == {"patience": 2}
    assert changes_of(args, {"resume", "total_timesteps", "jobs"}) == {"total_timesteps": 61_440}


def test_an_environment_that_is_not_deterministic_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = train.ppo_base.train(toy("Entropic", tmp_path))
    before = (run / "training_state.json").read_bytes()
    with pytest.raises(UserError, match="did not come back to the saved observations"):
        train.ppo_base.train(Args(resume=run, total_timesteps=8 * ITERATION))
    assert (run / "training_state.json").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["training"]["arguments"].pop("gamma"), "of another version of helm-rl; they differ in: gamma"),
        (lambda d: d["training"]["arguments"].update(theta=1), "they differ in: theta"),
        (lambda d: d["training"]["arguments"].update(num_envs="many"), "the saved argument num_envs is wrong"),
        (lambda d: d["training"]["arguments"].update(num_envs=0), "--num-envs must be at least 1"),
        (lambda d: d["training"]["arguments"].update(num_envs=8), r"tensor 'loop\.\w+' .* shape"),
        (
            lambda d: d["environment"].update(observation_size=5),
            "no longer the one trained on; changed: observation_size",
        ),
        (lambda d: d["tensors"].update(sha256="0" * 64), "damaged or replaced"),
    ],
)
def test_a_state_that_was_tampered_with_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    run = train.ppo_base.train(toy("Reach", tmp_path))
    document = json.loads((run / "training_state.json").read_text())
    change(document)
    (run / "training_state.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match=message):
        train.ppo_base.train(Args(resume=run, total_timesteps=16 * ITERATION))


def test_ctrl_c_to_a_real_process_saves_what_resume_continues(tmp_path: Path) -> None:
    small = (
        "--num-envs 2 --num-steps 16 --num-minibatches 2 --update-epochs 1 --total-timesteps 960 --checkpoint-every 4"
    )
    start = ["--env-id", "tests.train.toys:Sleepy-v0", "--runs", str(tmp_path), *small.split()]
    command = [sys.executable, "-m", "helm_rl.cli", "train", "base"]
    slow = {**os.environ, "TOY_SLEEP_S": "0.01"}
    process = subprocess.Popen([*command, *start], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=slow)
    try:
        deadline = time.monotonic() + 100
        while not (states := list(tmp_path.glob("*/training_state-[48]*.safetensors"))):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "no checkpoint came"
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    run = states[0].parent
    finished = load_training_state(run)[0].training.iterations
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert 4 <= finished < 30
    assert f"stopped: {finished} of 30 iterations are saved" in err
    assert f"helm-rl train base --resume {run}" in err
    done = subprocess.run([*command, "--resume", str(run)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"run: {run}\n"
    # The same as if nobody had interrupted it.
    args = Args(env_id="tests.train.toys:Sleepy-v0", runs=tmp_path / "whole", num_envs=2, num_steps=16)
    args = dataclasses.replace(args, num_minibatches=2, update_epochs=1, total_timesteps=960, checkpoint_every=4)
    assert_same_state(train.ppo_base.train(args), run)


def test_a_log_that_cannot_be_written_ends_a_run_in_a_sentence_and_it_goes_on(tmp_path: Path) -> None:
    """TensorBoard writes in a thread, whose traceback is no news, and whose error names no file."""
    program = (
        "import resource, sys; from helm_rl.cli import main;"
        "unlimited = resource.RLIM_INFINITY; resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, unlimited));"
        "sys.exit(main(sys.argv[1:]))"
    )
    options = "--num-envs 2 --num-steps 16 --num-minibatches 2 --update-epochs 1 --total-timesteps 12800"
    args = ["train", "base", "--env-id", "tests.train.toys:Reach-v0", "--runs", str(tmp_path / "runs")]
    command = [sys.executable, "-c", program, *args, *options.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    (run,) = (tmp_path / "runs").iterdir()
    finished = load_training_state(run)[0].training.iterations
    assert 10 < finished < 400
    (log,) = run.glob("events.*")
    *_, told, error = done.stderr.splitlines()
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert told.startswith(f"stopped: {finished} of 400 iterations are saved")
    assert told.endswith(f"--resume {run}")
    assert error == f"error: {log}: {os.strerror(errno.EFBIG)}"
    # The same as if there had been room.
    train.ppo_base.train(Args(resume=run))
    whole = Args(env_id="tests.train.toys:Reach-v0", runs=tmp_path / "whole", num_envs=2, num_steps=16)
    whole = dataclasses.replace(whole, num_minibatches=2, update_epochs=1, total_timesteps=12_800)
    assert_same_state(train.ppo_base.train(whole), run)
    assert sorted(logged(run)) == sorted(logged(tmp_path / "whole" / next((tmp_path / "whole").iterdir()).name))


def test_a_log_that_fails_at_the_end_is_told_though_all_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def full_from_now_on(self: Hyperparameters, step: int) -> None:
        monkeypatch.setattr(RecordWriter, "write", full)
        end(self, step)

    end = Hyperparameters.end
    monkeypatch.setattr(Hyperparameters, "end", full_from_now_on)
    with pytest.raises(OSError, match=r"No space left on device: '.*/events\.out\.tfevents\.") as error:
        train.ppo_base.train(toy("Reach", tmp_path))
    (run,) = tmp_path.iterdir()
    assert load_training_state(run)[0].training.steps == 4 * ITERATION
    assert Path(error.value.filename).parent == run
