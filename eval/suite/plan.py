"""How much a suite measures, and about what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from eval.reference import EFFORT, Effort
from eval.routing import ROUTERS, stretch
from eval.suite.cells import NODE, RECORDED, Cell
from eval.suite.entries import HOST_GIB, Entry
from eval.suite.families import FAMILIES
from helm_rl.scenario import LoadPhase, LoadSection, Scenario

US_PER_REQUEST = {"decoder": 12.0, "hstu": 21.0, "large": 8.5}
"""CPU time to simulate a request of a family, in us, on a core of the machine that the README's figures come from."""
STEADY_REPLAYS, REGIMES_REPLAYS, SINGLE_REPLAYS, CAPACITY_REPLAYS = 17, 45, 4, 9
"""Replays of a sweep of Steady, of a family's regimes, of a draw for the best single static, of a capacity, about."""
SEARCH = 1.3
"""What a search for the reference costs over its budget, about."""
OVERHEAD_S = 20.0
"""Until every process has its compiled code."""


@dataclass(frozen=True)
class Size:
    """How finely it is measured.

    seeds, first: draws of arrivals, and the number of the first; step, coarse_step: of the statics; effort: of the
    search for the reference, None: it is the best of the statics and the per-segment optimum; deployable_draws: that
    the deployable statics are chosen on; capacity_draws, tolerance: of the capacities; nodes, cluster_seeds,
    cluster_steps: of the cluster (0: none), the spacings of its statics, each around the best of the one before.
    """

    seeds: int = 5
    first: int = 1
    step: float = 0.02
    coarse_step: float = 0.08
    effort: Effort | None = EFFORT
    deployable_draws: int = 2
    capacity_draws: int = 5
    tolerance: float = 0.02
    nodes: int = 32
    cluster_seeds: int = 3
    cluster_steps: tuple[float, ...] = (0.08, 0.02)

    @property
    def static_replays(self) -> int:
        """Replays of a draw's sweep, about: half of what it leaves out of the fine grid may be asked for after all."""
        return round((0.8 / self.step + 0.8 / self.coarse_step) / 2) + 2

    @property
    def numbers(self) -> range:
        """Numbers of the draws."""
        return range(self.first, self.first + self.seeds)

    @property
    def capacity_numbers(self) -> range:
        """Numbers of the draws of which capacities are sought."""
        return range(self.first, self.first + min(self.seeds, self.capacity_draws))

    @property
    def cluster_numbers(self) -> range:
        """Numbers of the draws that the cluster serves."""
        return range(self.first, self.first + (self.cluster_seeds if self.nodes else 0))


FULL = Size()
QUICK = Size(
    seeds=2,
    step=0.05,
    coarse_step=0.1,
    effort=None,
    deployable_draws=1,
    capacity_draws=1,
    tolerance=0.05,
    nodes=4,
    cluster_seeds=1,
    cluster_steps=(0.4,),
)


@dataclass(frozen=True)
class Plan:
    """What a suite measures: cells, in the order of families; entries; size; the cell whose load the cluster serves."""

    cells: tuple[Cell, ...]
    entries: tuple[Entry, ...]
    size: Size

    @property
    def families(self) -> list[str]:
        """Families of loads that are drawn, in order."""
        return [name for name in dict.fromkeys(cell.family for cell in self.cells) if name != RECORDED]

    def of(self, family: str) -> list[Cell]:
        """Return the cells of a family."""
        return [cell for cell in self.cells if cell.family == family]

    def cell(self, family: str, pattern: str) -> Cell:
        """Return a cell."""
        return next(cell for cell in self.of(family) if cell.pattern == pattern)

    @property
    def clustered(self) -> Cell | None:
        """The cell that is also served by a cluster: the first family's Burst."""
        return self.cell(self.families[0], "burst") if self.size.nodes else None

    @property
    def capacity_sources(self) -> int:
        """Controllers whose capacity is sought: two statics, and the policy where there is one."""
        return 2 + any(entry.kind == "policy" for entry in self.entries)

    def stage_cpu_s(self) -> dict[str, float]:
        """CPU time of each stage, about, by arithmetic from US_PER_REQUEST."""
        size = self.size
        every = sum(cell_cpu_s(cell) for cell in self.cells)
        own = [cell for cell in self.cells if cell.family != RECORDED]
        steady = sum(cell_cpu_s(self.cell(family, "steady")) for family in self.families)
        burst = sum(cell_cpu_s(self.cell(family, "burst")) for family in self.families)
        found = {
            "alphas": STEADY_REPLAYS * size.deployable_draws * (1 + len(HOST_GIB)) * steady + REGIMES_REPLAYS * burst,
            "statics": size.seeds * size.static_replays * every,
            "single": size.seeds * SINGLE_REPLAYS * sum(map(cell_cpu_s, own)),
            "reference": size.seeds * every * (0 if size.effort is None else SEARCH * size.effort.replays),
            "controllers": size.seeds * len(self.entries) * every,
            "capacity": len(size.capacity_numbers) * CAPACITY_REPLAYS * self.capacity_sources * every,
        }
        if self.clustered is not None:
            found["cluster"] = len(size.cluster_numbers) * self.cluster_replays * cluster_cpu_s(self.clustered, size)
        recorded = self.of(RECORDED)
        if recorded:
            found["pace"] = 5 * CAPACITY_REPLAYS * sum(map(cell_cpu_s, recorded))
        return found

    @property
    def cluster_replays(self) -> int:
        """Replays of a draw on the cluster, about."""
        coarse = round(0.8 / self.size.cluster_steps[0]) + 1
        return len(ROUTERS) + 3 + self.capacity_sources - 2 + coarse + 6 * (len(self.size.cluster_steps) - 1)


def cell_cpu_s(cell: Cell) -> float:
    """CPU time of one replay of a cell, about."""
    family = cell.family if cell.family in FAMILIES else NODE
    return expected_requests(cell.scenario) * US_PER_REQUEST[family] * 1e-6


def cluster_cpu_s(cell: Cell, size: Size) -> float:
    """CPU time of one replay on the cluster, about: each request twice that on a node, for all nodes are looked at."""
    return cell_cpu_s(replace(cell, scenario=stretch(cell.scenario, 1, size.nodes))) * 2.0


def expected_requests(scenario: Scenario) -> float:
    """Requests that a scenario draws in the mean."""
    load = scenario.load

    def mean(part: LoadSection | LoadPhase) -> float:
        return part.rate if part.rate_end is None else (part.rate + part.rate_end) / 2

    phases = sum(mean(phase) * (phase.seconds - phase.ramp_s) for phase in load.phase)
    return mean(load) * scenario.seconds + load.rate * scenario.warm_s + phases


def minutes(cpu_s: Sequence[float], jobs: int) -> float:
    """Minutes that so much CPU time takes on so many cores."""
    return (sum(cpu_s) / jobs + OVERHEAD_S) / 60.0
