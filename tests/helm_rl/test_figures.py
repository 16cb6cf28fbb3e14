"""The JSON beside every table: layout, numbers that are not finite, machine, command."""

from __future__ import annotations

import json
import math
import platform
import re
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from helm_rl.figures import Figure, command, machine, write_figures


def strict(text: str) -> dict:
    """Parse JSON as other languages do: NaN and Infinity are errors."""

    def refuse(constant: str) -> NoReturn:
        raise AssertionError(constant)

    return json.loads(text, parse_constant=refuse)


def test_the_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/helm-rl", "bench", "env", "--json", "my figures.json"])
    path = tmp_path / "figures.json"
    write_figures(
        path,
        {
            "env.requests_per_s.hot": Figure(41_234.5, "1/s", "higher", goal=30_000),
            "burst.steady.p99_ms": Figure(63.25, "ms", "lower"),
        },
    )
    document = strict(path.read_text())
    assert list(document) == ["figures", "machine", "command"]
    assert document["figures"] == {
        "burst.steady.p99_ms": {"value": 63.25, "unit": "ms", "better": "lower", "goal": None},
        "env.requests_per_s.hot": {"value": 41_234.5, "unit": "1/s", "better": "higher", "goal": 30_000},
    }
    assert list(document["figures"]) == sorted(document["figures"])
    assert document["command"] == "helm-rl bench env --json 'my figures.json'"
    assert document["machine"] == machine()
    assert path.read_text().endswith("}\n")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_null(tmp_path: Path, value: float) -> None:
    path = tmp_path / "figures.json"
    write_figures(path, {"a.b": Figure(value, "ms", "lower", goal=1.0), "a.c": Figure(0.0, "ms", "lower")})
    figures = strict(path.read_text())["figures"]
    assert figures["a.b"] == {"value": None, "unit": "ms", "better": "lower", "goal": 1.0}
    assert figures["a.c"]["value"] == 0.0


def test_values_keep_all_their_digits(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    write_figures(path, {"a.b": Figure(0.1 + 0.2, "", "lower")})
    assert strict(path.read_text())["figures"]["a.b"]["value"] == 0.1 + 0.2


def test_same_figures_in_another_order_are_the_same_bytes(tmp_path: Path) -> None:
    rows = {"b.x": Figure(1.0, "s", "lower"), "a.x": Figure(2.0, "s", "lower")}
    write_figures(tmp_path / "1", rows)
    write_figures(tmp_path / "2", dict(reversed(rows.items())))
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_a_failure_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    path.write_text("old")
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_figures(path, {"a.b": Figure(1.0, "s", "lower", goal=math.nan)})
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_machine_is_this_one() -> None:
    found = machine()
    assert set(found) == {"processor", "cores", "python", "system"}
    assert found["python"] == platform.python_version()
    assert isinstance(found["cores"], int)
    assert found["cores"] >= 1
    assert str(found["system"]).startswith(platform.system())
    assert re.search(r"\w", str(found["processor"]))


def test_the_command_can_be_pasted_into_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train/ppo_base.py", "--exp-name", "it's", "--seed", "1"])
    assert command() == "ppo_base.py --exp-name 'it'\"'\"'s' --seed 1"
