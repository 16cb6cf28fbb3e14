"""A hardware profile in a file: written and read alike, and what is wrong in one is told with its line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from helm_rl.errors import UserError
from helm_rl.profiles.hardware import HARDWARE, resolve_hardware
from helm_rl.profiles.hardware_file import load_hardware, save_hardware
from helm_rl.scenario import HardwareSection, load_scenario


@pytest.mark.parametrize("name", HARDWARE)
def test_what_is_written_is_read(name: str, tmp_path: Path) -> None:
    profile = replace(
        HARDWARE[name],
        source='a "source", of\nlines \\ and ümlauts \U0001f600 \x7f',
        linear_efficiency=0.123456789012345,
    )
    save_hardware(tmp_path / "p.toml", profile)
    assert load_hardware(tmp_path / "p.toml") == profile
    assert resolve_hardware(HardwareSection(profile=str(tmp_path / "p.toml"))) == profile


def test_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    import os

    file = tmp_path / "p.toml"
    for k in range(3):
        save_hardware(file, replace(HARDWARE["cpu"], batch_ms=float(k)))
        os.utime(file, ns=(k, k))
        assert load_hardware(file).batch_ms == k


def test_a_scenario_takes_a_file(tmp_path: Path) -> None:
    save_hardware(tmp_path / "mine.toml", HARDWARE["h100"])
    scenario = tmp_path / "s.toml"
    scenario.write_text(f'name = "s"\nslo_ms = 10\n[hardware]\nprofile = "{tmp_path}/mine.toml"\n')
    assert resolve_hardware(load_scenario(scenario).hardware) == HARDWARE["h100"]
    scenario.write_text('name = "s"\nslo_ms = 10\n[hardware]\nprofile = "absent.toml"\n')
    with pytest.raises(UserError, match=r"absent\.toml: no such file; a hardware profile is what"):
        load_scenario(scenario)


@pytest.mark.parametrize(
    ("line", "changed", "message"),
    [
        ("peak_tflop_s", "peak_tflop_s = 0.0", "line 1: peak_tflop_s: input should be greater than 0"),
        ("linear_efficiency", "linear_efficiency = 1.5", "line 2: linear_efficiency: input should be less than or eq"),
        ("batch_ms", 'batch_ms = "1"', "line 4: batch_ms: input should be a valid number"),
        ("batch_ms", "batch_ms = nan", "line 4: batch_ms: input should be"),
        ("hbm_gib", "", "hbm_gib: field required"),
        ("hbm_gib", "hbm_gib = 1.0\nspeed = 3", "speed: extra inputs are not permitted"),
        ("hbm_gib", "hbm_gib = = 1", "is not valid TOML"),
    ],
)
def test_what_is_wrong_is_told_in_a_sentence(line: str, changed: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    save_hardware(file, HARDWARE["cpu"])
    lines = file.read_text().splitlines()
    file.write_text("\n".join(changed if one.startswith(f"{line} =") else one for one in lines))
    with pytest.raises(UserError, match=r"p\.toml") as caught:
        load_hardware(file)
    assert message in str(caught.value)
