"""A detector's file: what is written is read, and what was not written so is refused in a sentence."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helm_rl.control.burst import BurstSettings
from helm_rl.control.detector_file import Detector, Origin, load_detector, save_detector
from helm_rl.control.recovery import Recovery, RecoveryRule
from helm_rl.control.static import StaticAlpha
from helm_rl.errors import UserError

ORIGIN = Origin(
    scenario="burst", scenario_hash="0" * 64, false_alarm_s=1000.0, measured={"burst.false_alarm_s": 1234.5}
)
DETECTOR = Detector(BurstSettings(threshold=7.25, p99_sigmas=11.5, tick_s=0.02), RecoveryRule(0.6, 0.2), ORIGIN)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    for detector in (DETECTOR, Detector(BurstSettings(), None, ORIGIN)):
        save_detector(tmp_path / "detector.json", detector)
        assert load_detector(tmp_path / "detector.json") == detector
    assert os.listdir(tmp_path) == ["detector.json"]


def test_recovery_takes_it(tmp_path: Path) -> None:
    save_detector(tmp_path / "detector.json", DETECTOR)
    found = load_detector(tmp_path / "detector.json")
    assert found.rule is not None
    recovery = Recovery(StaticAlpha(0.5), found.rule, found.settings)
    assert recovery.detector.params[1] == 7.25


def remove(field: str) -> Callable[[dict[str, Any]], object]:
    return lambda document: document["settings"].pop(field)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (remove("threshold"), r"settings.threshold: field required"),
        (lambda d: d["settings"].update(threshold=0.0), r"burst detector: threshold must be a number above 0, not 0.0"),
        (lambda d: d["settings"].update(threshold="8"), r"settings.threshold: input should be a valid number"),
        (lambda d: d["settings"].update(sigma=3.0), r"settings.sigma: extra inputs are not permitted"),
        (lambda d: d["rule"].update(alpha_hot=1.5), r"recovery rule's alpha_hot must be within 0 and 1, not 1.5"),
        (lambda d: d.update(format_version=2), r"format_version: 2 is newer than 1"),
        (lambda d: d.update(kind="base"), r"kind: input should be 'burst_detector'"),
        (lambda d: d["origin"].update(false_alarm_s=-1), r"origin.false_alarm_s: input should be greater than 0"),
    ],
)
def test_a_spoilt_file_is_refused(tmp_path: Path, spoil: Callable[[dict[str, Any]], object], message: str) -> None:
    path = tmp_path / "detector.json"
    save_detector(path, DETECTOR)
    document = json.loads(path.read_text())
    spoil(document)
    path.write_text(json.dumps(document))
    with pytest.raises(UserError, match=message) as error:
        load_detector(path)
    assert str(error.value).startswith(str(path))


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b'{"format_version": 1', b"NaN"])
def test_what_is_no_such_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "detector.json"
    with pytest.raises(UserError, match="no such file"):
        load_detector(path)
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"detector\.json"):
        load_detector(path)
