"""What of a suite a cluster serves: routers at one static, and controllers on every node behind HELM's router."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from eval.comparison import DEPLOYABLE
from eval.routing import NAIVE, NAIVE_ROUTER, ROUTERS
from eval.suite import tasks
from eval.suite.cells import Cell
from eval.suite.entries import Entry, without_layers
from eval.suite.plan import cluster_cpu_s
from eval.suite.records import ServedRecord
from eval.suite.tasks import Result, Source, Stage

if TYPE_CHECKING:
    from eval.suite.suite import Suite

ROUTED = "one_node_static"
"""The static of the routers: the best one of one node, on arrivals that are not evaluated."""


class Cluster:
    """The part of a suite that a cluster serves: the Burst of the first family."""

    def __init__(self, suite: Suite) -> None:
        cell = suite.plan.clustered
        assert cell is not None
        self.cell: Cell = cell
        self._suite = suite
        self._size = suite.plan.size
        self._prepared = suite.prepared(cell.family)

    def served_of(self, number: int, router: str, key: str, source: Source) -> Result[ServedRecord]:
        """A draw behind a router, under a controller."""
        cell, nodes = self.cell, self._size.nodes
        settings = {
            "cell": cell.identity,
            "draw": number,
            "nodes": nodes,
            "router": router,
            "controller": f"{source.key} {source.identity}" if isinstance(source, Entry) else source,
            "prepared": self._prepared.plain(),
        }
        work = partial(tasks.clustered, cell, number, nodes, router, source, self._prepared)
        name = f"{cell.name}.{nodes}_nodes.{router}.{key}"
        return Result(name, number, "served", settings, work, cluster_cpu_s(cell, self._size))

    def routed(self, number: int, router: str) -> Result[ServedRecord]:
        """A draw behind a router, at the static of all routers."""
        return self.served_of(number, router, ROUTED, self._prepared.whole)

    def controlled(self, number: int, key: str) -> Result[ServedRecord]:
        """A draw under one of `controllers`."""
        router, source = self.controllers()[key]
        return self.served_of(number, router, key, source)

    def hindsight(self, number: int) -> tuple[float, ServedRecord]:
        """Return the alpha of the best static that a draw was served with, and what it came to."""
        return self._best(number, self._alphas())

    def controllers(self) -> dict[str, tuple[str, Source]]:
        """Return what the draws are served with, by key: its router, and the controller or a static's alpha.

        The hindsight static is not among them: it is found as the best of several.
        """
        found: dict[str, tuple[str, Source]] = {}
        entries = self._suite.plan.entries
        policy = next((entry for entry in entries if entry.kind == "policy"), None)
        if policy is not None:  # no burst detector looks at a node of a cluster
            found[policy.key] = "helm", without_layers(policy)
        rule = self.best_rule()
        found[rule.key] = "helm", rule
        found[DEPLOYABLE] = "helm", self._prepared.deployable
        found[NAIVE] = NAIVE_ROUTER, next(entry for entry in entries if entry.kind == "naive")
        return found

    def best_rule(self) -> Entry:
        """Return the rule that did best on one node: the strongest opponent, chosen with all in sight."""

        def mean(entry: Entry) -> float:
            runs = [self._suite.needed(self._suite.run_of(self.cell, number, entry)) for number in self._size.numbers]
            return float(np.mean([np.log(run.p99_ms) for run in runs]))

        return min((entry for entry in self._suite.plan.entries if entry.kind == "rule"), key=mean)

    def stages(self) -> Iterator[Stage]:
        """Yield the stages: routers and controllers, then the statics, ever finer around each draw's best."""
        numbers, nodes = self._size.cluster_numbers, self._size.nodes
        found: list[Result[Any]] = [self.routed(number, router) for number in numbers for router in ROUTERS]
        found += [self.controlled(number, key) for number in numbers for key in self.controllers()]
        yield Stage(f"{nodes} nodes", found)
        # Around the best of what earlier steps looked at, not of all in the store: a suite that goes on does the same
        looked: dict[int, set[float]] = {number: set() for number in numbers}
        before = math.inf
        for step in self._size.cluster_steps:
            every = max(1, round(step / self._size.step))
            alphas = self._alphas(every)
            statics = []
            for number in numbers:
                near = alphas
                if looked[number]:
                    best, _ = self._best(number, looked[number])
                    near = [alpha for alpha in near if abs(alpha - best) < before - 1e-9]
                looked[number].update(near)
                statics += [self._static(number, alpha) for alpha in near]
            yield Stage(f"statics of {nodes} nodes", statics)
            before = step

    def _best(self, number: int, alphas: Iterable[float]) -> tuple[float, ServedRecord]:
        """Return the alpha of least P99 among those that a draw was served with, and what it came to."""
        found = {}
        for alpha in sorted(alphas):
            record = self._suite.get(self._static(number, alpha))
            if record is not None:
                found[alpha] = record
        best = min(found, key=lambda alpha: found[alpha].p99_ms)
        return best, found[best]

    def _alphas(self, every: int = 1) -> list[float]:
        """Return every so manieth alpha of the grid, and what was deployed, which is no better than the best."""
        return sorted({*self._suite.grid(self.cell.scenario)[::every], self._prepared.deployable})

    def _static(self, number: int, alpha: float) -> Result[ServedRecord]:
        return self.served_of(number, "helm", f"static_{alpha:g}", alpha)
