from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from eval.map.command import Args, main
from eval.map.store import RESULTS, Store
from helm_rl.errors import UserError


def tiny(folder: Path, **changes: Any) -> Args:
    """A model so slow that its cells have few requests: one in reach, one out of it."""
    fields: dict[str, Any] = {
        "models": ("decoder-1.5b",),
        "links": ("local-host",),
        "host_gib": (0.0,),
        "histories": (1500.0, 4000.0),
        "hot_shares": (0.5,),
        "loads": ("limit",),
        "seeds": 2,
        "jobs": 1,
    }
    return Args(folder / "map", **(fields | changes))


def test_a_map_that_was_interrupted_goes_on_and_is_the_same_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "map" / RESULTS
    add = Store.add

    def interrupted(self: Store, row: dict[str, Any]) -> None:
        add(self, row)
        if len(self.rows) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Store, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main(tiny(tmp_path))
    assert not multiprocessing.active_children()
    kept = path.read_text()
    assert kept.count("\n") == 3
    monkeypatch.setattr(Store, "add", add)
    main(tiny(tmp_path, json=tmp_path / "figures.json"))
    whole = path.read_text()
    assert whole.startswith(kept)
    assert whole.count("\n") == 4  # two settings, two seeds of the one in reach
    rows = [json.loads(line) for line in whole.splitlines()]
    assert [row["rate"] is None for row in rows[:2]].count(True) == 1
    for row in rows[2:]:
        assert row["reference_ms"] <= row["hindsight_ms"] <= row["deployable_ms"]
        assert row["hindsight_ms"] < 1.3 * 200  # it was to hold an SLO of 200 ms on other arrivals
        assert row["requests"] >= 1000
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert figures["map.cells"]["value"] == figures["map.out_of_reach"]["value"] == 1
    assert {file.name for file in (tmp_path / "map").iterdir()} == {
        RESULTS, "options.json", "cells.json", "map.png", "map.svg"
    }  # fmt: skip
    assert "out of reach" in capsys.readouterr().out
    main(tiny(tmp_path))
    assert path.read_text() == whole


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": 0}, "--seeds must lie in 1 to 1000, got 0"),
        ({"jobs": 0}, "--jobs must be at least 1, got 0"),
        ({"models": ("decoder-9b",)}, "decoder-9b"),
        ({"json": Path("/nowhere/figures.json")}, "the folder /nowhere does not exist"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as error:
        main(tiny(tmp_path, **changes))
    assert message in str(error.value)
    assert not (tmp_path / "map").exists()
