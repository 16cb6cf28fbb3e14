"""The whole controller's decision beside its network elsewhere: what is timed is the same, and figures say what was."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from eval import whole_decision
from eval.bench_decision import times_table
from eval.decision_peers import ABOUT, HELM, PEERS, Call, Contest
from eval.whole_decision import Measured, figures_of, growth_bytes, interleaved, limits


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_decision, "CALLS", 300)
    monkeypatch.setattr(whole_decision, "ROUND", 100)
    monkeypatch.setattr(whole_decision, "REMEMBERED", 2_000)


def test_all_are_timed_and_say_the_same() -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    parts: list[str] = []
    measured = whole_decision.measure(parts.append)
    assert list(measured.times_ns) == list(ABOUT)
    assert {times.size for times in measured.times_ns.values()} == {300}
    assert measured.multiply_adds == 17 * 64 + 64 * 64 + 64
    assert len(parts) == 3
    figures = figures_of(measured)
    for name in ("decision.p99_us", "decision.ratio_vs_onnxruntime", "decision.p50_us.onnxruntime_export_bound"):
        assert figures[name].value > 0, name
    assert ("decision.p999_us.busy" in figures) == (measured.busy_ns is not None)
    assert "5,248 multiply-adds" in limits(measured)


def test_what_is_timed_as_learning_learns() -> None:
    contest = Contest()
    helm = contest._helm(acts=False)
    call = contest._learning(helm)
    for i in range(150):
        call(i % len(contest.observations))
    assert helm.adapter.guard.believed
    assert helm.adapter.net.weights[2].any()


def test_a_peer_that_decides_otherwise_is_found() -> None:
    contest = Contest()
    calls = contest.calls([])
    calls["numpy"] = lambda i: 0.25 if i == 7 else float(contest.helm.base.action(contest.observations[i])[0])
    with pytest.raises(ValueError, match=r"numpy decides 0\.25 upon observation 7"):
        contest.check(calls)


def test_without_onnxruntime_its_columns_are_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    left_out: list[str] = []
    calls = Contest().calls(left_out)
    assert set(ABOUT) - set(calls) == {name for name in PEERS if name.startswith("onnxruntime")}
    assert left_out == [
        "onnxruntime not installed, so onnxruntime is left out; pip install 'helm-rl[bench,onnx]' brings it"
    ]
    measured = Measured({name: np.full(10, 1000) for name in calls}, None, 1.0, 1, 0.0, left_out)
    figures = figures_of(measured)
    assert "decision.ratio_vs_onnxruntime" not in figures
    assert "decision.p999_us.busy" not in figures
    cells = [list(column.cells) for column in times_table(figures).columns]
    missing = [cells[0][row] for row in range(len(cells[0])) if cells[1][row] == "missing"]
    assert missing == [about for name, about in ABOUT.items() if name.startswith("onnxruntime")]


def test_times_are_those_of_single_calls_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]
    turns: list[str] = []
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now[0])

    def taking(name: str, ns: int) -> Call:
        def call(i: int) -> float:
            turns.append(name)
            now[0] += ns + (900 if i == 3 else 0)
            return 0.0

        return call

    times = interleaved({"a": taking("a", 100), "b": taking("b", 700)})
    assert np.median(times["a"]) == 100
    assert np.median(times["b"]) == 700
    assert (times["a"] == 1000).sum() == 6  # of each round of 100 numbers 3 and 67
    order = "".join(turns[200::100])
    assert sorted(order) == sorted("ab" * 3)
    assert all(set(order[k : k + 2]) == {"a", "b"} for k in (0, 2, 4))


def test_figures_are_quantiles_and_ratios_of_the_best() -> None:
    times = {name: np.full(1000, 2_000) for name in ABOUT}
    times[HELM] = np.arange(1000) * 10
    times["onnxruntime_bound"] = np.full(1000, 9_990)
    times["onnxruntime"] = np.full(1000, 20_000)
    times["onnxruntime_export"] = times["onnxruntime_export_bound"] = np.full(1000, 30_000)
    measured = Measured(times, np.arange(1000) * 20, 1.5, 5_248, 4096.0, [])
    figures = {name: figure.value for name, figure in figures_of(measured).items()}
    assert figures["decision.p50_us"] == pytest.approx(4.995)
    assert figures["decision.p99_us"] == pytest.approx(9.8901)
    assert figures["decision.p999_us.busy"] == pytest.approx(19.96002)
    assert figures["decision.ratio_vs_onnxruntime"] == pytest.approx(2.0)
    assert figures["decision.ratio_vs_torch"] == pytest.approx(2_000 / 4_995)
    assert figures["decision.memory_growth_bytes"] == 4096


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
def test_memory_that_grows_is_seen() -> None:
    kept: list[mmap.mmap] = []

    def leak(i: int) -> float:
        kept.append(mmap.mmap(-1, 65_536))  # from the system, not from what earlier tests have freed
        kept[-1].write(bytes([1 + i]) * 65_536)
        return 0.0

    assert growth_bytes(leak) > 20_000_000
    assert growth_bytes(lambda i: 0.5) < 4_000_000


def test_another_core_is_busy_for_as_long_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Kept(subprocess.Popen[bytes]):
        def __init__(self, command: list[str]) -> None:
            super().__init__(command)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Kept)
    with whole_decision._one_core() as other:
        if other is None:
            pytest.skip("one core")
        with whole_decision._busy(other):
            assert started[0].poll() is None
            assert other not in os.sched_getaffinity(0)
            assert os.sched_getaffinity(started[0].pid) == {other}
    assert started[0].poll() is not None
    assert other in os.sched_getaffinity(0)
