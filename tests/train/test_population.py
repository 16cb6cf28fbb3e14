"""Several seeds at once: each run is what its seed alone would have made, and what is missing is trained, once."""

from __future__ import annotations

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

import pytest

import train
import train.ppo_base
from eval.results import OPTIONS
from helm_rl.checkpoint import STATE_FILE, load_training_state
from helm_rl.cli import main as cli
from helm_rl.errors import UserError
from tests.train.test_ppo_base import assert_same_state, logged, toy
from train import population
from train.population import Args, inputs_of, parse_seeds

ITERATION = 4 * 64  # steps


def several(name: str, runs: Path, *seeds: str, **changes: Any) -> Args:
    """Arguments of `toy` for a population; changes: those of a population among them."""
    return Args(**{**vars(toy(name, runs)), "seeds": seeds, **changes})


def command(name: str, runs: Path, seeds: str, iterations: int) -> list[str]:
    """Return a command line for such a population."""
    sizes = {"num-envs": 4, "num-steps": 64, "num-minibatches": 2, "update-epochs": 2}
    sizes["total-timesteps"] = iterations * ITERATION
    options = [word for size, value in sizes.items() for word in (f"--{size}", str(value))]
    return ["train", "base", "--env-id", f"tests.train.toys:{name}-v0", "--runs", str(runs), "--seeds", seeds, *options]


def runs_of(folder: Path) -> dict[int, Path]:
    """Return a population's runs that have a checkpoint, by seed."""
    return {load_training_state(path.parent)[0].training.seed: path.parent for path in folder.glob(f"*/{STATE_FILE}")}


@pytest.mark.parametrize(
    ("texts", "seeds"),
    [(["1..3"], (1, 2, 3)), (["7"], (7,)), (["5", "1..2", "0"], (5, 1, 2, 0)), (["4..4"], (4,))],
)
def test_seeds_are_numbers_and_ranges(texts: list[str], seeds: tuple[int, ...]) -> None:
    assert parse_seeds(texts) == seeds


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1-3", "must be a number, or FIRST..LAST"),
        ("3..1", "must ascend"),
        ("-1", "must be a number"),
        ("4294967296", "below 2\\^32"),
        ("0..2000", "more than 1024"),
        ("٣", "must be a number"),
    ],
)
def test_seeds_that_are_none_are_refused(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse_seeds([text])
    with pytest.raises(UserError, match=r"names one twice: 1 1\.\.2"):
        parse_seeds(["1", "1..2"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seeds", "1..2", "--seed", "3"], "--seed and --seeds: give one of them"),
        (["--seeds", "1..2", "--seed", "1"], "--seed and --seeds: give one of them"),
        (["--seeds", "1..2", "--jobs", "0"], "--jobs must be at least 1"),
        (["--seeds", "1..2", "--num-envs", "0"], "--num-envs must be at least 1"),
        (["--seeds", "1..2", "--scenario", "nowhere"], "nowhere"),
        (["--seeds", "1..2", "--start", "nowhere"], "nowhere: there is no such file"),
        (["--seeds", "1..2", "--address", "host:1"], "--address is that of a Ray cluster"),
        (["--seeds", "1..2", "--bundle", "b"], "--bundle is made of one run"),
        (["--env-id", "tests.train.toys:Reach-v0", "--bundle", "b"], "only a controller of alpha makes one"),
        (["--scenario", "steady", "--bundle", "tests"], "tests exists already"),
        (["--executor", "ray"], "--executor and --address go with several runs"),
    ],
)
def test_what_does_not_fit_is_said_before_the_work(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(["train", "base", "--runs", str(tmp_path / "runs"), *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_every_run_is_what_its_seed_alone_makes(tmp_path: Path) -> None:
    folder = population.train(several("Reach", tmp_path, "3", "1..2", jobs=2))
    assert folder.name.startswith("Reach-v0__ppo_base__3,1..2__")
    runs = runs_of(folder)
    assert sorted(runs) == [1, 2, 3]
    assert runs[3].name == "Reach-v0__ppo_base__3"
    for seed in (1, 3):
        alone = train.ppo_base.train(toy("Reach", tmp_path / "alone", seed=seed))
        assert_same_state(alone, runs[seed])
        arguments = load_training_state(runs[seed])[0].training.arguments
        assert arguments == {**load_training_state(alone)[0].training.arguments, "runs": str(tmp_path)}
    assert load_training_state(runs[1])[0].training.statistics != load_training_state(runs[2])[0].training.statistics
    log = folder / "logs" / f"{runs[2].name}.log"
    assert "training on tests.train.toys:Reach-v0: 4 iterations" in log.read_text()


def test_a_stopped_population_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    whole = population.train(several("Reach", tmp_path, "1..3", total_timesteps=8 * ITERATION, jobs=1))
    part = shutil.copytree(whole, tmp_path / "part" / whole.name)
    runs = runs_of(part)
    before = (runs[1] / STATE_FILE).read_bytes()
    # One is complete, one was stopped halfway, and of one there is nothing but what a killed process leaves.
    shutil.rmtree(runs[2])
    runs[2].mkdir()
    (runs[2] / "events.out.tfevents.1").write_text("")
    halfway(runs[3])
    assert population.train(Args(resume=part, jobs=2)) == part
    assert (runs[1] / STATE_FILE).read_bytes() == before
    assert not (runs[2] / "events.out.tfevents.1").exists()
    for seed, run in runs_of(whole).items():
        assert_same_state(run, runs[seed])
    assert len(load_training_state(runs[3])[0].training.commands) == 2
    assert len(load_training_state(runs[2])[0].training.commands) == 1


def halfway(run: Path) -> None:
    """Put the state of the same run in its place, interrupted after 5 of its 8 iterations."""
    script = (
        "import sys; from pathlib import Path; import train.ppo_base as p; from tests.train.test_ppo_base import toy\n"
        f"args = toy('Interrupting', Path({str(run)!r}), seed=3, total_timesteps={8 * ITERATION})\n"
        f"p.train(args, Path({str(run)!r}))"
    )
    arguments = load_training_state(run)[0].training.arguments
    shutil.rmtree(run)
    environment = {**os.environ, "TOY_INTERRUPT_AT": str(5 * ITERATION + 100), "PYTHONPATH": os.getcwd()}
    subprocess.run([sys.executable, "-c", script], env=environment, check=False, stderr=subprocess.DEVNULL)
    state = json.loads((run / STATE_FILE).read_text())
    assert state["training"]["iterations"] == 5
    # Interrupting is Reach, until it interrupts.
    state["training"]["arguments"] = arguments
    state["environment"]["env_id"] = arguments["env_id"]
    (run / STATE_FILE).write_text(json.dumps(state))


def test_a_finished_population_can_be_made_longer(tmp_path: Path) -> None:
    folder = population.train(several("Reach", tmp_path, "1..2", anneal_lr=False, jobs=1))
    population.train(Args(resume=folder, total_timesteps=6 * ITERATION, jobs=1))
    alone = train.ppo_base.train(toy("Reach", tmp_path, seed=2, anneal_lr=False, total_timesteps=6 * ITERATION))
    assert_same_state(alone, runs_of(folder)[2])
    with pytest.raises(UserError, match=r"--seeds: .* has the seeds 1\.\.2; start a new population for others"):
        population.train(Args(resume=folder, seeds=("1..3",)))


def test_what_is_given_with_its_default_value_is_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small: dict[str, Any] = {"num_envs": 8, "num_steps": 1024, "total_timesteps": 8192, "learning_rate": 0.01}
    folder = population.train(several("Reach", tmp_path, "1..2", **small))
    resume = ["train", "base", "--jobs", "1", "--resume", str(folder)]
    for words, said in {
        "--learning-rate 1e-3": "--learning-rate 0.001: a resumed run keeps --learning-rate 0.01; start a new run",
        "--total-timesteps 512": "--total-timesteps 512: a resumed run cannot become shorter than it was, 8192",
        "--seed 1": "--seed and --seeds: give one of them; a population has the seeds",
    }.items():
        shutil.rmtree(folder / "Reach-v0__ppo_base__2", ignore_errors=True)  # as if it had never begun
        assert cli([*resume, *words.split()]) == 2
        assert said in capsys.readouterr().err
    assert list(runs_of(folder)) == [1]
    assert cli([*resume, "--learning-rate", "0.01", "--total-timesteps", "61440"]) == 0
    for run in runs_of(folder).values():
        training = load_training_state(run)[0].training
        assert (training.steps, training.arguments["learning_rate"]) == (7 * 8192, 0.01)
        assert training.arguments["total_timesteps"] == 61_440


def test_one_run_that_goes_wrong_leaves_the_others_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(command("FaultySecond", tmp_path, "1..3", 4)) == 2
    (folder,) = tmp_path.iterdir()
    said = capsys.readouterr()
    assert "seed 2 ended early: tests.train.toys:FaultySecond-v0, step" in said.err
    assert "the reward of an environment is not finite" in said.err
    steps = {seed: load_training_state(run)[0].training.steps for seed, run in runs_of(folder).items()}
    assert steps == {1: 4 * ITERATION, 2: 2 * ITERATION, 3: 4 * ITERATION}
    assert f"{4 * ITERATION:,}" in said.out


def test_ctrl_c_saves_what_every_run_has(tmp_path: Path) -> None:
    given = [*command("Sleepy", tmp_path, "1..2", 100), "--checkpoint-every", "90"]
    environment = {**os.environ, "TOY_SLEEP_S": "0.0005", "PYTHONPATH": os.getcwd()}
    process = subprocess.Popen(
        [sys.executable, "-m", "helm_rl.cli", *given], env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_for(
            lambda: len(list(tmp_path.glob("*/*/events.*"))) == 2 and len(list(tmp_path.glob(f"*/*/{STATE_FILE}"))) == 2
        )
        time.sleep(3)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    (folder,) = tmp_path.iterdir()
    assert f"goes on by: helm-rl train base --resume {folder}" in said
    # Far from the first checkpoint that it would have made of itself.
    done = [load_training_state(run)[0].training.iterations for run in runs_of(folder).values()]
    assert all(0 < each < 90 for each in done), done


def test_a_run_that_is_told_to_end_ends_even_if_it_cannot_be_saved() -> None:
    """Its process would else wait for work, and the one that told it so for its end."""
    program = (
        "import os, signal, sys\n"
        "from train.population import _saved_when_terminated\n"
        "try:\n"
        "    with _saved_when_terminated():\n"
        "        try:\n"
        "            os.kill(os.getpid(), signal.SIGTERM)\n"
        "        finally:\n"
        "            sys.stderr.write('saving')\n"
        "            raise OSError(28, 'No space left on device')\n"
        "except OSError:\n"
        "    print('goes on')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGTERM, "", "saving")


def test_a_full_disk_ends_a_population_in_a_sentence_and_it_goes_on(tmp_path: Path) -> None:
    """A limit on the size of files fails in the middle of a write, as a full disk does; workers inherit it."""
    program = (
        "import resource, sys; from helm_rl.cli import main;"
        "unlimited = resource.RLIM_INFINITY; resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, unlimited));"
        "sys.exit(main(sys.argv[1:]))"
    )
    given = [*command("Reach", tmp_path, "1..2", 4), "--checkpoint-every", "2"]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", program, *given], env=environment, capture_output=True, text=True, timeout=200
    )
    (folder,) = tmp_path.iterdir()
    *_, told, error = done.stderr.splitlines()
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert told.startswith("stopped: ")
    assert told.endswith(f"helm-rl train base --resume {folder}")
    assert error.startswith(f"error: {folder}/Reach-v0__ppo_base__"), error
    assert error.endswith(f"/training_state-2.safetensors: {os.strerror(errno.EFBIG)}")
    population.train(Args(resume=folder))
    for seed, run in runs_of(folder).items():
        alone = train.ppo_base.train(toy("Reach", tmp_path / "alone", seed=seed, checkpoint_every=2))
        assert_same_state(alone, run)


def wait_for(reached: Any, limit_s: float = 120.0) -> None:
    until = time.monotonic() + limit_s
    while not reached():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_inputs_are_hashed_and_compared(tmp_path: Path) -> None:
    folder = population.train(several("Reach", tmp_path, "1"))
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "policy").write_text("one")
    args = toy("Reach", tmp_path, start=tmp_path / "bundle")
    before = inputs_of(args)
    assert list(before) == [str(tmp_path / "bundle" / "policy")]
    given = (train.ppo_base.plain_arguments(args), before, {}, folder / "new", "0" * 64, 1, {})
    with pytest.raises(UserError, match="is not here what it is where the command runs; all nodes must share --runs"):
        population.train_run(*given)
    (tmp_path / "bundle" / "policy").write_text("two")
    with pytest.raises(UserError, match="policy: is not here what it was when the population was started"):
        population.find_reference(train.ppo_base.plain_arguments(args), before, "burst")
    (folder / OPTIONS).write_text('{"seeds": "x"}')
    with pytest.raises(UserError, match="it is no population of this version"):
        population.train(Args(resume=folder))


@pytest.mark.slow
def test_validation_finds_the_best_schedules_once_for_all(tmp_path: Path) -> None:
    scenario = tmp_path / "small.toml"
    scenario.write_text(
        'name = "small"\nslo_ms = 100\nseconds = 60\nwarm_s = 10\n[load]\nrate = 40\nusers = 1000\n'
        '[[load.phase]]\nlabel = "burst"\nstart_s = 20\nseconds = 20\nrate = 20\nrequests_per_visit = 4\n'
    )
    small: dict[str, Any] = {
        "scenario": (str(scenario),),
        "num_envs": 2,
        "num_steps": 16,
        "total_timesteps": 64,
        "num_minibatches": 2,
        "validate_every": 1,
    }
    folder = population.train(Args(runs=tmp_path / "runs", seeds=("1..2",), **small))
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert [row["key"] for row in rows] == [f"reference {scenario}", "run", "run"]
    alone = train.ppo_base.train(train.ppo_base.Args(runs=tmp_path / "alone", seed=2, **small))
    found = runs_of(folder)[2]
    assert_same_state(alone, found)
    validation = load_training_state(found)[0].training.validation
    assert validation == load_training_state(alone)[0].training.validation
    assert rows[0]["p99_ms"] == validation.reference_ms
    assert len(validation.regrets) == 2
    one, other = logged(alone), logged(found)
    one.pop("charts/SPS"), other.pop("charts/SPS")
    assert one == other
