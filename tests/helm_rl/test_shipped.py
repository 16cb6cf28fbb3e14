from __future__ import annotations

from pathlib import Path

import pytest

from eval.command import fitting_bundle
from helm_rl import shipped
from helm_rl.checkpoint import CARD_FILE, CONFIG_FILE, POLICY_FILE, load_bundle
from helm_rl.cli import main as cli
from helm_rl.scenario import load_scenario
from tests.eval.conftest import bundle_maker


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of shipped bundles with two of them, and something else."""
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    make = bundle_maker(tmp_path)
    make("helm-base-v1")
    make("helm-base-v2", action=0.5)
    (tmp_path / "notes").mkdir()
    return tmp_path


def test_what_is_shipped_is_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shipped.shipped_names() == ["helm-base-v1", "helm-base-v2"]
    assert cli(["checkpoints", "list"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "helm-base-v1" in line]
    assert all(word in line for word in ("base", "burst", "1,234", "1 s"))


def test_the_newest_base_policy_is_that_of_the_highest_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    assert shipped.newest_base() is None
    for name in ("helm-adaptive-v11", "helm-base-v9", "helm-base-v10", "helm-base-v10-small", "zebra"):
        (tmp_path / name).mkdir()
        (tmp_path / name / CONFIG_FILE).touch()
    assert shipped.newest_base() == "helm-base-v10"


def test_nothing_shipped_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    assert cli(["checkpoints", "list"]) == 0
    assert capsys.readouterr().out.startswith("No bundle is shipped with this version")


@pytest.mark.parametrize("by_name", [True, False])
def test_a_bundle_is_shown_by_its_name_or_its_folder(
    folder: Path, by_name: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    which = "helm-base-v2" if by_name else str(folder / "helm-base-v2")
    assert cli(["checkpoints", "show", which]) == 0
    out = capsys.readouterr().out
    bundle = load_bundle(folder / "helm-base-v2")
    assert bundle.config.files[POLICY_FILE] in out
    for said in (
        "1,234 steps, seed 7",
        "burst (sha256 abababababab)",
        "0.1 to 0.9, at most 0.06 per second",
        "17 signals",
    ):
        assert said in out
    assert cli(["checkpoints", "show", which, "--card"]) == 0
    assert capsys.readouterr().out.strip() == (folder / "helm-base-v2" / CARD_FILE).read_text().strip()


def test_what_is_no_bundle_is_a_sentence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["checkpoints", "show", "helm-base-v3"]) == 2
    assert "helm-base-v3: no such bundle folder" in capsys.readouterr().err
    (folder / "helm-base-v1" / POLICY_FILE).write_bytes(b"spoilt")
    assert cli(["checkpoints", "show", "helm-base-v1"]) == 2
    assert POLICY_FILE in capsys.readouterr().err


def test_a_policy_may_be_named(folder: Path) -> None:
    found = fitting_bundle(Path("helm-base-v2"), load_scenario("burst"))
    assert found.path == folder / "helm-base-v2"


def test_what_this_version_ships_can_be_read() -> None:
    for name in shipped.shipped_names():
        assert shipped.described(load_bundle(shipped.bundle_path(name)))["layers"].startswith("base")
