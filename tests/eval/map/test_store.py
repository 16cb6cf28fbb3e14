from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eval.map.store import RESULTS, Store
from eval.results import OPTIONS as OPTIONS_FILE
from helm_rl.errors import UserError
from tests.eval.map.fakes import later_row, row, setting_row

OPTIONS = {"models": ("a", "b"), "pool_gib": 48.0, "loads": ("limit",)}
CELL = row()["key"]


def test_results_are_there_again_and_seeds_are_told_apart(tmp_path: Path) -> None:
    shift = dict.fromkeys(("before", "during", "after"), 0.5) | {
        "go_s": -10.0, "go_ramp_s": 20.0, "return_s": 0.0, "return_ramp_s": 0.0
    }  # fmt: skip
    with Store(tmp_path / "map", OPTIONS) as store:
        store.add(setting_row())
        store.add(setting_row(key="other", rate=None, deployable={}))
        store.add(row(shift=shift))
        store.add(later_row())
    with Store(tmp_path / "map", OPTIONS) as again:
        assert again.rows == store.rows
        assert again.get(CELL, 2) == later_row()
        assert again.get(setting_row()["key"]) == setting_row()
        assert again.get(CELL, 3) is None


def test_a_line_that_was_cut_short_is_dropped_and_the_next_one_is_whole(tmp_path: Path) -> None:
    with Store(tmp_path / "map", OPTIONS) as store:
        store.add(row(key="one"))
        store.add(row(key="two"))
    path = tmp_path / "map" / RESULTS
    path.write_bytes(path.read_bytes()[:-4])
    with Store(tmp_path / "map", OPTIONS) as again:
        assert list(again.rows) == [("one", 1)]
        again.add(row(key="three"))
    with Store(tmp_path / "map", OPTIONS) as third:
        assert list(third.rows) == [("one", 1), ("three", 1)]


def test_a_result_never_goes_on_a_line_that_something_else_left_unfinished(tmp_path: Path) -> None:
    path = tmp_path / "map" / RESULTS
    with Store(tmp_path / "map", OPTIONS) as store:
        with open(path, "a") as file:
            file.write('{"key": ')
        store.add(row())
    assert [json.loads(line) for line in path.read_text().splitlines()[1:]] == [row()]


def test_a_map_is_measured_by_one_process_at_a_time(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from eval.map.store import Store; "
        "store = Store(Path(sys.argv[1]), {}); print('open', flush=True); sys.stdin.read()"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "map")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(UserError, match="map is being measured by another process"):
            Store(tmp_path / "map", {})
        other.kill()
    Store(tmp_path / "map", {}).close()  # the killed one has left no lock


def test_other_options_are_refused_by_name(tmp_path: Path) -> None:
    Store(tmp_path / "map", OPTIONS).close()
    with pytest.raises(UserError, match=r"holds a map with pool_gib = 48\.0, and this one has 24\.0; name another"):
        Store(tmp_path / "map", OPTIONS | {"pool_gib": 24.0})


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds other files and no map"):
        Store(tmp_path, OPTIONS)
    with pytest.raises(UserError, match="is not a folder"):
        Store(tmp_path / "notes.txt", OPTIONS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt"]


def test_results_without_their_options_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / RESULTS).write_text("mine\n")
    with pytest.raises(UserError, match="holds other files and no map"):
        Store(tmp_path, OPTIONS)
    assert (tmp_path / RESULTS).read_text() == "mine\n"


def test_what_a_killed_run_left_as_it_began_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / ".options.json.ab12_x9z.tmp").write_text('{"models": [')
    (tmp_path / RESULTS).touch()
    Store(tmp_path, OPTIONS).close()
    (tmp_path / ".map.png.ab12_x9z.tmp").touch()
    Store(tmp_path, OPTIONS).close()
    assert {path.name for path in tmp_path.iterdir()} == {OPTIONS_FILE, RESULTS}


def test_a_full_disk_is_told_with_the_name_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Store(tmp_path / "map", OPTIONS) as store:
        monkeypatch.setattr("eval.results.os.fsync", full)
        with pytest.raises(OSError, match="No space left") as error:
            store.add(row())
    assert error.value.filename == str(tmp_path / "map" / RESULTS)


def without(table: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key != name}


STATIC = setting_row()["deployable"]["limit"]


@pytest.mark.parametrize(
    ("hostile", "named"),
    [
        ({"key": "one"}, "rate: field required"),
        (without(row(), "reference_ms"), "reference_ms: field required"),
        (row(reference_ms=None), "reference_ms: input should be a valid number"),
        (row(reference_ms="80"), "reference_ms: input should be a valid number"),
        (row(hindsight_ms=0), "hindsight_ms: input should be greater than"),
        (row(bound_ms=float("nan")), "bound_ms: input should be a finite number"),
        (row(deployable_ms=float("inf")), "deployable_ms: input should be a finite number"),
        (row(seed=float("inf")), "seed: input should be a valid integer"),
        (row(seed=0), "seed: input should be greater than or equal to 1"),
        (row(seed="1"), "seed: input should be a valid integer"),
        (row(seed=2), "known_static_ms: field required"),
        (later_row(known_ms=None), "known_ms: input should be a valid number"),
        (row(burst_flat=[]), "burst_flat: tuple should have at least 1 item"),
        (row(burst_flat=[[0.1]]), "burst_flat.0.1: field required"),
        (row(burst=1.5), "burst: input should be less than or equal to 0.9"),
        (row(shift={"before": 0.5}), "shift.during: field required"),
        (row(rate=True), "rate: input should be a valid number"),
        (row(colour="red"), "colour: extra inputs are not permitted"),
        (setting_row(deployable={}), "deployable.limit is missing"),
        (setting_row(deployable={"limit": STATIC | {"flat": [["a", 1]]}}), "deployable.limit.flat.0.0: input should"),
        (setting_row(slo_ms=10**400), "slo_ms: "),
        ([row()], "no table"),
        ("garbage", "no table"),
    ],
)
def test_a_row_that_no_run_has_written_is_named(tmp_path: Path, hostile: Any, named: str) -> None:
    with Store(tmp_path / "map", OPTIONS) as store:
        store.add(row(key="one"))
    with open(tmp_path / "map" / RESULTS, "a") as file:
        file.write(json.dumps(hostile) + "\n")
    message = rf"results\.jsonl, line 2: not a result of this command \({re.escape(named)}"
    with pytest.raises(UserError, match=message):
        Store(tmp_path / "map", OPTIONS)
    with pytest.raises(UserError, match=message):  # and the map is not held by the one that was refused
        Store(tmp_path / "map", OPTIONS)


@pytest.mark.parametrize("line", [b"garbage", b"", b"[" * 100_000, b'{"key": "\xff"}', b"1" * 5_000])
def test_a_line_that_is_no_json_is_named(tmp_path: Path, line: bytes) -> None:
    Store(tmp_path, {}).close()
    (tmp_path / RESULTS).write_bytes(line + b"\n")
    with pytest.raises(UserError, match=r"results\.jsonl, line 1: not a result of this command \(no JSON\)"):
        Store(tmp_path, {})


@pytest.mark.parametrize("text", ["[]", '"ab"', "3", "[" * 100_000, ""])
def test_options_that_are_no_table_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "options.json").write_text(text)
    with pytest.raises(UserError, match="cannot be read as the options of a map"):
        Store(tmp_path, {"pool_gib": 48.0})
