from __future__ import annotations

from pathlib import Path

import pytest

from eval.map.store import RESULTS, Store
from helm_rl.errors import UserError

OPTIONS = {"models": ("a", "b"), "pool_gib": 48.0}


def test_results_are_there_again_and_seeds_are_told_apart(tmp_path: Path) -> None:
    store = Store(tmp_path / "map", OPTIONS)
    store.add({"key": "setting", "rate": 5.0})
    store.add({"key": "cell", "seed": 1, "p99_ms": 7.0})
    store.add({"key": "cell", "seed": 2, "p99_ms": 8.0})
    again = Store(tmp_path / "map", OPTIONS)
    assert again.rows == store.rows
    assert again.get("cell", 2) == {"key": "cell", "seed": 2, "p99_ms": 8.0}
    assert again.get("setting") == {"key": "setting", "rate": 5.0}
    assert again.get("cell", 3) is None


def test_a_line_that_was_cut_short_is_dropped_and_the_next_one_is_whole(tmp_path: Path) -> None:
    store = Store(tmp_path / "map", OPTIONS)
    store.add({"key": "one", "seed": 1})
    store.add({"key": "two", "seed": 1})
    path = tmp_path / "map" / RESULTS
    path.write_bytes(path.read_bytes()[:-4])
    again = Store(tmp_path / "map", OPTIONS)
    assert list(again.rows) == [("one", 1)]
    again.add({"key": "three", "seed": 1})
    assert list(Store(tmp_path / "map", OPTIONS).rows) == [("one", 1), ("three", 1)]


def test_other_options_are_refused_by_name(tmp_path: Path) -> None:
    Store(tmp_path / "map", OPTIONS)
    with pytest.raises(UserError, match=r"holds a map with pool_gib = 48\.0, and this one has 24\.0; name another"):
        Store(tmp_path / "map", OPTIONS | {"pool_gib": 24.0})


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds other files and no map"):
        Store(tmp_path, OPTIONS)
    with pytest.raises(UserError, match="is not a folder"):
        Store(tmp_path / "notes.txt", OPTIONS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt"]


def test_a_line_that_is_no_result_is_named(tmp_path: Path) -> None:
    Store(tmp_path / "map", OPTIONS).add({"key": "one"})
    with open(tmp_path / "map" / RESULTS, "a") as file:
        file.write("garbage\n")
    with pytest.raises(UserError, match=r"results\.jsonl, line 2: not a result"):
        Store(tmp_path / "map", OPTIONS)


@pytest.mark.parametrize("text", ["[]", '"ab"', "3", "[" * 100_000, ""])
def test_options_that_are_no_table_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "options.json").write_text(text)
    with pytest.raises(UserError, match="cannot be read as the options of a map"):
        Store(tmp_path, {"pool_gib": 48.0})


@pytest.mark.parametrize("line", ['{"key": "a", "seed": Infinity}', "[" * 100_000])
def test_a_hostile_line_is_named(tmp_path: Path, line: str) -> None:
    Store(tmp_path, {})
    (tmp_path / "results.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match=r"results\.jsonl, line 1: not a result"):
        Store(tmp_path, {})
