"""Learning curves: what is read from runs, laid side by side, and refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.learning import Args, curve_of, main
from helm_rl.checkpoint import ValidationSection, save_training_state
from helm_rl.errors import UserError
from tests.helm_rl.policies import ENVIRONMENT, NETWORK, net_tensors, network, training


def make_run(run: Path, name: str, seed: int, regrets: list[tuple[float, float]], reference_ms: float = 80.0) -> Path:
    """A run of 1,024 steps an iteration, which looked at two sets of arrivals after every fifth."""
    run.mkdir()
    looks = {5 * (i + 1): {"a": one, "b": other} for i, (one, other) in enumerate(regrets)}
    held = ValidationSection(reference_ms={"a": reference_ms, "b": 90.0}, regrets=looks, best=5 if looks else None)
    section = training(5 * len(regrets) or 5)
    update = {"validation": held, "seed": seed, "arguments": {"exp_name": name}, "seconds": 100.0}
    save_training_state(
        run,
        {f"net.{key}": array for key, array in net_tensors(network()).items()},
        network=NETWORK,
        environment=ENVIRONMENT,
        training=section.model_copy(update=update),
    )
    return run


def test_a_curve_counts_a_collapse_once_and_finds_the_goal(tmp_path: Path) -> None:
    from helm_rl.checkpoint import load_training_state

    run = make_run(tmp_path / "r", "ours", 1, [(99.0, 0.2), (0.06, 0.02), (0.05, -0.02), (0.3, 0.1)])
    curve = curve_of(load_training_state(run)[0].training)
    assert curve.steps.tolist() == [5120, 10240, 15360, 20480]
    assert curve.regret.tolist() == pytest.approx([0.6, 0.04, 0.015, 0.2])
    assert curve.steps_to_goal == 10240
    assert curve.seconds_to_goal == 50.0


def test_groups_are_laid_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        make_run(tmp_path / "a1", "ours", 1, [(0.2, 0.0), (0.02, 0.0)]),
        make_run(tmp_path / "a2", "ours", 2, [(0.04, 0.0), (0.06, 0.0)]),
        make_run(tmp_path / "b1", "no-pairing", 1, [(0.2, 0.2), (0.3, 0.3)]),
    ]
    main(Args(runs=tuple(runs), plot=tmp_path / "p.png", json=tmp_path / "f.json"))
    figures = {n: f["value"] for n, f in json.loads((tmp_path / "f.json").read_text())["figures"].items()}
    assert figures == pytest.approx(
        {
            "learning.ours.regret": 0.015,
            "learning.ours.reached": 1.0,
            "learning.ours.seconds": 100.0,
            "learning.ours.steps_to_goal": 7680.0,
            "learning.ours.seconds_to_goal": 75.0,
            "learning.no_pairing.regret": 0.2,
            "learning.no_pairing.reached": 0.0,
            "learning.no_pairing.seconds": 100.0,
        }
    )
    out = capsys.readouterr().out
    assert "1.5 % (2.0 %)" in out
    assert "0 of 1 runs" in out
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    one = make_run(tmp_path / "one", "ours", 1, [(0.1, 0.1)])
    for other, message in (
        (make_run(tmp_path / "blind", "ours", 2, []), "blind: this run has not looked at held-out arrivals yet"),
        (make_run(tmp_path / "else", "ours", 2, [(0.1, 0.1)], 70.0), "else: was held against other arrivals than"),
        (make_run(tmp_path / "twin", "ours", 1, [(0.1, 0.1)]), "twin: two runs of one --exp-name have the seed 1"),
        (make_run(tmp_path / "alike", "Ours", 1, [(0.1, 0.1)]), "differ in punctuation alone: ours, Ours"),
        (tmp_path / "nowhere", "nowhere: no such run folder"),
    ):
        with pytest.raises(UserError, match=message):
            main(Args(runs=(one, other)))
    with pytest.raises(UserError, match="no run was given"):
        main(Args(runs=()))
