"""`helm-rl bench scaling`: what is refused, what is measured in which process, and what becomes of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress

from eval import bench_scaling
from eval.bench_scaling import Args, main
from eval.processes import Task, Workers, working_processes
from eval.results import Row
from eval.scaling.cost import measure, measure_beside, measure_policy, prepare
from helm_rl.errors import UserError
from tests.eval.scaling.test_summary import cost


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": (0, 32)}, "--nodes 0 32: expected ascending sizes of 1 to 4,096 nodes"),
        ({"nodes": (32, 5000)}, "--nodes 32 5000: expected ascending"),
        ({"nodes": (32, 16)}, "--nodes 32 16: expected ascending"),
        ({"nodes": (32, 32)}, "--nodes 32 32: expected ascending"),
        ({"checked": 3}, "--checked 3 is not among --nodes"),
        ({"nodes": ()}, "--checked 32 is not among --nodes"),
        ({"share": 0.001}, r"--share must lie in 0.005 to 0.5, got 0.001"),
        ({"share": float("nan")}, r"--share must lie in 0.005 to 0.5, got nan"),
        ({"json": Path(), "overwrite": True}, "is a folder; name a file"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        main(Args(**change))


class Told(Workers):
    """Workers that measure nothing: a run costs what `cost` of tests.eval.scaling.test_summary says."""

    def __init__(self) -> None:
        super().__init__(Progress(disable=True))
        self.tasks: list[Task] = []

    def results(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Row]]:
        for task in tasks:
            self.tasks.append(task)
            yield task, self._row(task, at_once=len(tasks))

    @staticmethod
    def _row(task: Task, at_once: int) -> Row:
        if task.function is prepare:
            return {}
        if task.function is measure_policy:
            return {"static_s": 2.0, "policy_s": 3.0}
        if task.function is measure_beside:
            return {"serve_s": 1.0 if at_once == 1 else 1.25, "arithmetic_s": 1.0}
        nodes, share, parts, _ = task.arguments
        served_s = (5.0 * nodes * share, 4.0 * nodes * share) if parts else ()
        return vars(cost(nodes, share, *served_s, peak_bytes=int(1e9 * (1 + share))))


def test_what_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told, asked = Told(), []

    class Context:
        def __enter__(self) -> Told:
            return told

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(
        bench_scaling, "working_processes", lambda *given, **named: asked.append((given, named)) or Context()
    )
    plot, figures = tmp_path / "scaling.svg", tmp_path / "figures.json"
    main(Args(nodes=(1, 2, 4, 8), checked=2, share=0.1, plot=plot, json=figures))
    assert asked == [((1,), {"tasks_each": 1}), ((2,), {})]
    runs = [task.arguments[:3] for task in told.tasks if task.function is measure]
    assert runs == [(1, 1.0, True), (2, 1.0, False), (4, 0.1, True), (8, 0.1, False), (2, 0.1, False)]
    assert told.tasks[0].function is prepare
    assert [task.arguments[2] for task in told.tasks if task.function is measure_policy] == ["helm-base-v1"]
    assert [task.function for task in told.tasks[-3:]] == [measure_beside] * 3  # one, then two at once
    assert told.tasks[-1].arguments[3] is told.tasks[-2].arguments[3] is not told.tasks[-3].arguments[3]
    found = {name: figure["value"] for name, figure in json.loads(figures.read_text())["figures"].items()}
    assert found["scaling.run_cpu_s.8_nodes"] == pytest.approx(82)
    assert found["scaling.linearity.2_nodes"] == pytest.approx(1.0)
    assert found["scaling.two_processes"] == pytest.approx(1.6)
    assert found["scaling.policy_ratio.2_nodes"] == pytest.approx(1.5)
    assert found["scaling.bytes_per_request"] == pytest.approx(500)
    assert len([name for name in found if name.startswith("scaling.gb.")]) == 4
    assert plot.read_text().startswith("<?xml")
    out = capsys.readouterr().out
    assert "|     8 |         8,000,000 |   10 % |           82.0 |" in out
    assert max(map(len, out.split("Linear in its length")[0].splitlines())) <= 120


def test_each_run_has_a_process_of_its_own() -> None:
    pids: list[int] = []
    with working_processes(1, tasks_each=1) as workers:
        workers.run([Task(os.getpid, (), 1.0)] * 2, pids.append, workers.progress.add_task("", total=2))
    assert len({*pids, os.getpid()}) == 3
