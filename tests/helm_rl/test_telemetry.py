"""What reaches a controller of what was measured: late, in order, with losses that follow from the seed."""

from __future__ import annotations

import pytest

from helm_rl.metrics import WindowStats
from helm_rl.scenario import TelemetrySection
from helm_rl.telemetry import Telemetry
from tests.helm_rl.test_observation import window

HALF = 500_000_000


def windows(count: int) -> list[WindowStats]:
    return [window(start_ns=k * HALF, end_ns=(k + 1) * HALF) for k in range(count)]


def arrived(telemetry: Telemetry, count: int) -> list[list[int]]:
    """Return, for each of `count` windows of half a second, the numbers of those that arrive at its end."""
    return [[one.start_ns // HALF for one in telemetry.pass_on(each)] for each in windows(count)]


def test_as_it_is() -> None:
    assert arrived(Telemetry(TelemetrySection()), 3) == [[0], [1], [2]]


@pytest.mark.parametrize(("delay_s", "behind"), [(0.5, 1), (1.0, 2), (1.2, 3), (0.4, 1)])
def test_late(delay_s: float, behind: int) -> None:
    """A window ends, and arrives with the first end of a window that lies delay_s later."""
    expected: list[list[int]] = [[] for _ in range(behind)] + [[k] for k in range(6 - behind)]
    assert arrived(Telemetry(TelemetrySection(delay_s=delay_s)), 6) == expected


def test_a_long_window_lets_several_in_at_once() -> None:
    telemetry = Telemetry(TelemetrySection(delay_s=1.0))
    assert arrived(telemetry, 2) == [[], []]
    late = window(start_ns=2 * HALF, end_ns=10 * HALF)
    assert [one.start_ns // HALF for one in telemetry.pass_on(late)] == [0, 1]


def test_lost() -> None:
    telemetry = Telemetry(TelemetrySection(loss=0.3), seed=4)
    got = arrived(telemetry, 4_000)
    assert all(each in ([], [k]) for k, each in enumerate(got))  # what is lost never comes
    assert sum(map(len, got)) / 4_000 == pytest.approx(0.7, abs=0.03)
    telemetry.reset(4)
    assert arrived(telemetry, 4_000) == got
    telemetry.reset(5)
    assert arrived(telemetry, 4_000) != got


def test_late_and_lost() -> None:
    prompt = arrived(Telemetry(TelemetrySection(loss=0.5), seed=1), 50)
    late = arrived(Telemetry(TelemetrySection(loss=0.5, delay_s=1.0), seed=1), 50)
    assert late == [[], [], *prompt[:-2]]


def test_reset_forgets_what_is_under_way() -> None:
    telemetry = Telemetry(TelemetrySection(delay_s=1.0))
    arrived(telemetry, 2)
    telemetry.reset()
    assert arrived(telemetry, 3) == [[], [], [0]]
