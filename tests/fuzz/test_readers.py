"""Two seconds of mutations a reader: nothing but a sound trace or a UserError comes out."""

from __future__ import annotations

import random

import pytest

from fuzz.__main__ import main
from fuzz.mutate import fuzz, mutated
from fuzz.targets import SEEDS, target
from helm_rl.errors import UserError


@pytest.mark.parametrize("name", SEEDS)
def test_only_documented_errors_come_out(name: str) -> None:
    run = target(name)
    assert all(run(seed) for seed in SEEDS[name] if name != "any" or seed is not SEEDS["any"][-1])
    inputs, traces = fuzz(run, SEEDS[name], 2.0)
    assert inputs >= 20
    assert 0 < traces < inputs


def test_a_fault_is_raised_with_the_input_that_shows_it() -> None:
    def faulty(data: bytes) -> bool:
        raise KeyError("x")

    with pytest.raises(AssertionError, match=r"input 0 of seed 1, b'.*KeyError"):
        fuzz(faulty, [b"abc"], 1.0)


def test_an_unsound_trace_is_a_fault_and_no_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helm_rl.workloads.readers.tables._NO_ITEMS", 0)
    with pytest.raises(AssertionError, match="an unsound trace"):
        target("lists")(b'{"t": 1, "u": 1, "i": [], "c": 1}\n{"t": 2, "u": 1, "i": 5, "c": 1}\n')


def test_what_cannot_be_loaded_again_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object) -> None:
        raise UserError("no sound trace")

    monkeypatch.setattr("fuzz.targets.Trace.load", refuse)
    with pytest.raises(AssertionError, match="an unsound trace: no sound trace"):
        target("generic")(SEEDS["generic"][0])


def test_mutations_are_seeded() -> None:
    first, second = (mutated(random.Random(3), SEEDS["any"]) for _ in range(2))
    assert first == second
    assert first not in SEEDS["any"]


@pytest.mark.parametrize("arguments", [["soon"], ["0"], ["nan"], ["2", "no-reader"]])
def test_wrong_arguments_show_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("usage: python -m fuzz [SECONDS] [READER ...], readers: any, kuairand")
