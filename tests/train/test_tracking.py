"""Weights and Biases: never loaded unasked, and no network needed when offline."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helm_rl.errors import UserError
from tests.train.test_ppo_base import toy
from train.ppo_base import check_args

SMALL = "--num-envs 2 --num-steps 8 --num-minibatches 2 --update-epochs 1 --total-timesteps 32"


def test_wandb_is_not_imported_without_track(tmp_path: Path) -> None:
    code = (
        "import sys, tyro; from train.ppo_base import Args, main; main(tyro.cli(Args)); print('wandb' in sys.modules)"
    )
    arguments = ["--env-id", "tests.train.toys:Reach-v0", "--runs", str(tmp_path), *SMALL.split()]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed (extra 'track')")
def test_track_offline_needs_no_network(tmp_path: Path) -> None:
    # Every proxy leads to a port where nobody listens.
    dead = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
    env = {**os.environ, **dead, **{name.upper(): url for name, url in dead.items()}, "WANDB_MODE": "offline"}
    for name in ("WANDB_API_KEY", "NO_PROXY", "no_proxy"):
        env.pop(name, None)
    env["HOME"] = str(tmp_path / "home")  # no login of the tester's
    command = [sys.executable, "-m", "train.ppo_base", "--runs", str(tmp_path / "runs")]
    arguments = ["--track", "--env-id", "tests.train.toys:Reach-v0", *SMALL.split()]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    (log,) = run.glob("wandb/offline-run-*/*.wandb")
    assert b"losses/value_loss" in log.read_bytes()  # TensorBoard's charts arrived there


def test_track_without_wandb_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"--track needs .*'helm-rl\[track\]'"):
        check_args(toy("Reach", tmp_path, track=True))
