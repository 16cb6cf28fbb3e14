from __future__ import annotations

import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest

from eval.map.command import Args, _grid, main
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
    deadline = time.monotonic() + 10
    while multiprocessing.active_children():  # the pool's own thread may be about to note that they have ended
        assert time.monotonic() < deadline
        time.sleep(0.01)
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
        ({"jobs": 0}, "--jobs must be at least 1 and at most 1024, got 0"),
        ({"jobs": 3_000_000_000}, "--jobs must be at least 1 and at most 1024, got 3000000000"),
        ({"models": ("decoder-9b",)}, "--models decoder-9b is unknown; known: decoder-0.2b"),
        ({"hardware": "gpu"}, "--hardware gpu is unknown; known: a100-80g"),
        ({"pool_gib": 0.001}, "--pool-gib 0.001 holds 0 pages of 2048 KiB; there must be 16 to"),
        ({"pool_gib": 100.0}, "--pool-gib 100 does not fit beside 2.44 GiB of model weights on --hardware a100-80g,"),
        ({"host_gib": (99_999.0,)}, "--host-gib must lie in 0 to 16,384, got 99999"),
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


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ("map/results.jsonl", "--json names the map's own file"),
        ("map/../map/cells.json", "--json names the map's own file"),
        ("link/options.json", "--json names the map's own file"),
        ("map/map.png", "--json names the map's own file"),
        ("map", "--json names the map's own folder"),
    ],
)
@pytest.mark.parametrize("made", [False, True])
def test_figures_never_take_the_place_of_the_map(tmp_path: Path, figures: str, message: str, made: bool) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "map")
    if made:
        (tmp_path / "map").mkdir()
    with pytest.raises(UserError, match=message):
        main(tiny(tmp_path, json=tmp_path / figures, overwrite=True))
    assert not (tmp_path / "map" / "options.json").exists()


@pytest.mark.parametrize("name", ["results.jsonl", "cells.json", "map.png", "map.svg"])
def test_a_folder_in_the_place_of_a_file_is_found_before_the_work(tmp_path: Path, name: str) -> None:
    Store(tmp_path / "map", _grid(tiny(tmp_path)).options()).close()
    (tmp_path / "map" / RESULTS).unlink()
    (tmp_path / "map" / name).mkdir()
    with pytest.raises(UserError, match=rf"{name} is a folder, and the map's own file goes there"):
        main(tiny(tmp_path))
    assert sorted(path.name for path in (tmp_path / "map").iterdir()) == sorted(["options.json", name])
