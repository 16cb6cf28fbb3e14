"""Weights and Biases: never loaded unasked, and no network needed when offline."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from helm_rl.checkpoint import load_bundle, load_training_state
from helm_rl.errors import UserError
from helm_rl.export import export
from tests.envs.worlds import QUICK, scenario
from tests.helm_rl.policies import make_adapting_bundle, network
from tests.test_examples import toml
from tests.train.test_ppo_base import toy
from train.ppo_base import Args, check_args

ROOT = Path(__file__).resolve().parent.parent.parent

SMALL = "--num-envs 2 --num-steps 8 --num-minibatches 2 --update-epochs 1 --total-timesteps 32"


def test_wandb_is_not_imported_without_track(tmp_path: Path) -> None:
    code = (
        "import sys, tyro; from train.ppo_base import Args, main; main(tyro.cli(Args)); print('wandb' in sys.modules)"
    )
    arguments = ["--env-id", "tests.train.toys:Reach-v0", "--runs", str(tmp_path), *SMALL.split()]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False"


needs_wandb = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason="wandb is not installed (extra 'track')"
)


@pytest.fixture
def offline(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which every proxy leads to a port where nobody listens."""
    dead = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
    env = {**os.environ, **dead, **{name.upper(): url for name, url in dead.items()}, "WANDB_MODE": "offline"}
    for name in ("WANDB_API_KEY", "NO_PROXY", "no_proxy"):
        env.pop(name, None)
    env["HOME"] = str(tmp_path / "home")  # no login of the tester's
    env["PYTHONPATH"] = str(ROOT)
    return env


@needs_wandb
def test_track_offline_needs_no_network(tmp_path: Path, offline: dict[str, str]) -> None:
    command = [sys.executable, "-m", "train.ppo_base", "--runs", str(tmp_path / "runs")]
    arguments = ["--track", "--env-id", "tests.train.toys:Reach-v0", *SMALL.split()]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=200, env=offline, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    # TensorBoard's charts arrived there
    assert [row["global_step"] for row in history(wandb_records(tmp_path)) if "losses/value_loss" in row] == [16, 32]


def wandb_records(folder: Path) -> list[Any]:
    """Return the records of the one offline run under `folder`.

    Its file is a log of LevelDB's: 7 bytes of its own, then blocks of 32 KiB of (crc32, length, kind) and data; kinds
    2, 3 and 4 are the first, middle and last part of a record.
    """
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[import-untyped]

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    data, at, whole, found = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32_768 - at % 32_768 < 7:  # what is left of a block is padding
            at += 32_768 - at % 32_768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            found.append(Record.FromString(whole))
            whole = b""
    assert found
    return found


def history(records: list[Any]) -> list[dict[str, Any]]:
    """Return what was logged, a row for each step."""
    rows = [record.history for record in records if record.HasField("history")]
    return [{i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in row.item} for row in rows]


def artefacts(records: list[Any]) -> list[Any]:
    """Return the artefacts that were logged."""
    requests = [record.request.log_artifact.artifact for record in records if record.request.HasField("log_artifact")]
    return requests + [record.artifact for record in records if record.HasField("artifact")]


def bundle_of(artefact: Any, folder: Path) -> Path:
    """Put the files that were copied aside for an artefact into the folder `folder`, and return it."""
    folder.mkdir()
    for entry in artefact.manifest.contents:
        shutil.copy(entry.local_path, folder / entry.path)
    return folder


SWEEP = yaml.safe_load((ROOT / "examples" / "sweep.yaml").read_text())

# What `wandb agent` does once the server has told it what to run next.
AGENT = """
import json, os, sys
from wandb.wandb_agent import Agent
command, arguments = json.loads(sys.argv[1])
os.environ["WANDB_SWEEP_ID"] = "s1"
agent = Agent(None, None)
agent._sweep_command = command
agent._command_run({"run_id": "r1", "program": None, "args": {name: {"value": v} for name, v in arguments.items()}})
sys.exit(agent._run_processes["r1"].wait())
"""


def test_every_value_of_the_sweep_is_one_that_training_takes() -> None:
    names = {field.name for field in dataclasses.fields(Args)}
    assert SWEEP["parameters"].keys() <= names
    for name, given in SWEEP["parameters"].items():
        values = given.get("values") or ([given["value"]] if "value" in given else [given["min"], given["max"]])
        assert len(values) == len(set(values))
        for value in values:
            check_args(dataclasses.replace(Args(), **{name: value}))
    largest = {name: max(given["values"]) for name, given in SWEEP["parameters"].items() if "values" in given}
    check_args(dataclasses.replace(Args(), **largest, total_timesteps=SWEEP["parameters"]["total_timesteps"]["value"]))


@needs_wandb
@pytest.mark.slow
def test_a_run_of_the_sweep_logs_its_metric_and_its_bundle(tmp_path: Path, offline: dict[str, str]) -> None:
    """The sweep's own command, expanded and started by the agent's own code, with everything made small."""
    world = scenario(**QUICK, load__rate=100)  # where the split matters
    (tmp_path / "small.toml").write_text(toml(world.model_dump(mode="json", exclude_defaults=True)))
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "helm-rl"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m helm_rl.cli "$@"\n')
    program.chmod(0o755)
    small = {"scenario": "small.toml", "num_envs": 2, "num_steps": 32, "num_minibatches": 2, "total_timesteps": 192}
    chosen = {name: given["values"][-1] for name, given in SWEEP["parameters"].items() if "values" in given}
    told = chosen | {"learning_rate": 0.002} | small | {"validate_every": 1}
    env = offline | {"PATH": f"{tmp_path / 'bin'}:{offline['PATH']}", "WANDB_DIR": str(tmp_path)}
    command = [sys.executable, "-c", AGENT, json.dumps([SWEEP["command"], told])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr

    (run,) = (tmp_path / "runs").iterdir()
    state = load_training_state(run)[0]
    assert (state.training.arguments["learning_rate"], state.training.seed, state.training.steps) == (0.002, 3, 192)
    assert state.wandb_id == "r1"  # the sweep's run, not one beside it
    records = wandb_records(tmp_path)
    metric = [row[SWEEP["metric"]["name"]] for row in history(records) if SWEEP["metric"]["name"] in row]
    assert state.training.validation.regrets[1] != {"small": 0.0}
    looks = [np.mean(list(regrets.values())) for regrets in state.training.validation.regrets.values()]
    assert metric == pytest.approx(np.minimum.accumulate(np.clip(looks, None, 1.0)).tolist(), rel=1e-5)

    (artefact,) = artefacts(records)
    assert (artefact.name, artefact.type) == ("ppo_base-bundle", "model")
    bundle = load_bundle(bundle_of(artefact, tmp_path / "fetched"))
    told_of = json.loads(artefact.metadata)
    assert told_of["policy_sha256"] == bundle.config.files["policy.safetensors"]
    assert bundle.config.training.seed == 3
    export(run, tmp_path / "bundle")
    assert load_bundle(tmp_path / "bundle").config.files == bundle.config.files


@needs_wandb
def test_an_exported_bundle_is_logged_as_it_is(tmp_path: Path, offline: dict[str, str]) -> None:
    bundle = make_adapting_bundle(tmp_path / "full", network(3))
    command = [sys.executable, "-m", "helm_rl.cli", "export", str(bundle), "--output", str(tmp_path / "of mine")]
    done = subprocess.run([*command, "--track"], capture_output=True, text=True, timeout=120, env=offline, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (artefact,) = artefacts(wandb_records(tmp_path))
    assert artefact.name == "of-mine"
    assert json.loads(artefact.metadata)["layers"] == ["residual.json"]
    fetched = load_bundle(bundle_of(artefact, tmp_path / "fetched"))
    assert fetched.config == load_bundle(tmp_path / "of mine").config
    without = subprocess.run(
        [*command[:5], "--header", "x.h", "--track"],
        capture_output=True,
        text=True,
        env=offline,
        cwd=tmp_path,
    )
    assert (without.returncode, without.stderr.splitlines()[0]) == (
        2,
        "error: --track logs the bundle that is made: name it with --output",
    )


def test_track_without_wandb_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"--track needs .*'helm-rl\[track\]'"):
        check_args(toy("Reach", tmp_path, track=True))
