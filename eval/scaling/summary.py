"""What the runs on clusters of all sizes come to: figures, tables in Markdown, and which part of a run is dearest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import MARKDOWN
from rich.table import Table

from eval.scaling.cost import Cost
from eval.suite.plan import FULL, Plan
from eval.wording import percent
from helm_rl.figures import Figure

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
PARTS = {
    "work": "node by node",
    "misses": "taking turns",
    "router": "router",
    "python": "Python",
    "arrivals": "arrivals",
    "setup": "set-up",
}
"""Parts of a run: what each node does with its requests while the processor's caches hold it alone; what that takes
more where nodes are served as requests arrive; the router; and the rest."""


@dataclass(frozen=True)
class Whole:
    """What a run of the suite's whole length comes to at one size: as measured, or from a shorter one."""

    cost: Cost

    @property
    def requests(self) -> float:
        """Requests of the run."""
        return self.cost.requests / self.cost.share

    @property
    def cpu_s(self) -> float:
        """CPU seconds: what depends on the length grows with it, the nodes are made once."""
        cost = self.cost
        return cost.setup_s + (cost.arrivals_s + cost.loop_s + cost.python_s) / cost.share

    @property
    def us_per_request(self) -> float:
        """CPU time of a request, all parts of the run included."""
        return self.cpu_s / self.requests * 1e6

    @property
    def runs_per_hour(self) -> float:
        """Runs that a core does in an hour."""
        return 3600.0 / self.cpu_s

    def parts_s(self) -> dict[str, float]:
        """Return the CPU seconds of PARTS; NaN where serving was not measured in parts."""
        cost = self.cost
        # Disturbed measurements may differ the wrong way: a part takes no less than nothing.
        work_s = min(cost.alone_s, cost.loop_s)
        misses_s = min(max(0.0, cost.placed_s - work_s), cost.loop_s - work_s)
        served = {"work": work_s, "misses": misses_s, "router": cost.loop_s - work_s - misses_s}
        rest = {"python": cost.python_s, "arrivals": cost.arrivals_s}
        return {name: each / cost.share for name, each in (served | rest).items()} | {"setup": cost.setup_s}


@dataclass(frozen=True)
class Scaling:
    """All that was measured.

    costs: a run at each size; checked: the size that was served both at the whole length and at the short one, and
    that one; beside: CPU seconds of one process alone over those of two at once, serving and in plain arithmetic;
    policy: CPU seconds of a run under a policy over those under a static, None: no policy is shipped.
    """

    costs: Sequence[Cost]
    checked: tuple[Cost, Cost]
    beside: tuple[float, float]
    policy: float | None

    @property
    def wholes(self) -> list[Whole]:
        """Runs of the whole length, by size."""
        return [Whole(cost) for cost in sorted(self.costs, key=lambda cost: cost.nodes)]

    @property
    def suite_runs(self) -> int:
        """Runs on a cluster in a suite: draws, each behind every router, under controllers and many statics."""
        sought = self.policy is not None  # one more controller, then
        return len(FULL.cluster_numbers) * (Plan((), (), FULL).cluster_replays + sought)

    @property
    def linearity(self) -> float:
        """What the whole run took over what the short one foretold for it."""
        whole, short = self.checked
        return Whole(whole).cpu_s / Whole(short).cpu_s

    @property
    def bytes_per_request(self) -> float:
        """Memory that a longer run takes for each further request; at small sizes what else is held may hide it."""
        whole, short = self.checked
        return max(0.0, (whole.peak_bytes - short.peak_bytes) / (whole.requests - short.requests))

    def gb(self, whole: Whole) -> float:
        """Return the peak memory of a run of the whole length, in 10^9 bytes."""
        more = whole.requests - whole.cost.requests
        return (whole.cost.peak_bytes + self.bytes_per_request * more) * 1e-9

    def figures(self) -> dict[str, Figure]:
        """Return the figures that `helm-rl bench scaling --help` lists."""
        nodes = self.checked[0].nodes
        figures = {}
        for whole in self.wholes:
            size = f"{whole.cost.nodes}_nodes"
            figures[f"scaling.run_cpu_s.{size}"] = Figure(whole.cpu_s, "s", "lower")
            figures[f"scaling.cost_us.{size}"] = Figure(whole.us_per_request, "us", "lower")
            figures[f"scaling.suite_core_h.{size}"] = Figure(self.suite_runs * whole.cpu_s / 3600, "h", "lower")
            figures[f"scaling.runs_per_hour.{size}"] = Figure(whole.runs_per_hour, "1/h", "higher")
            figures[f"scaling.gb.{size}"] = Figure(self.gb(whole), "GB", "lower")
            figures[f"scaling.load_ns.{size}"] = Figure(whole.cost.load_ns, "ns", "lower")
            if whole.cost.alone_s == whole.cost.alone_s:
                for name, part_s in whole.parts_s().items():
                    figures[f"scaling.share.{name}.{size}"] = Figure(part_s / whole.cpu_s, "", "lower")
        figures["scaling.node_mib"] = Figure(self.costs[0].node_bytes / 2**20, "MiB", "lower")
        figures["scaling.bytes_per_request"] = Figure(self.bytes_per_request, "B", "lower")
        figures[f"scaling.linearity.{nodes}_nodes"] = Figure(self.linearity, "", "lower")
        figures["scaling.two_processes"] = Figure(2 * self.beside[0], "", "higher")
        figures["scaling.two_processes.arithmetic"] = Figure(2 * self.beside[1], "", "higher")
        if self.policy is not None:
            figures[f"scaling.policy_ratio.{nodes}_nodes"] = Figure(self.policy, "", "lower")
        return figures

    def tables(self) -> list[Table]:
        """Return a table of what a run costs at each size, and one of its parts, both in Markdown."""
        runs = Table(box=MARKDOWN)
        run = ("nodes", "requests of a run", "served", "CPU s of a run", "us per request", "runs/h per core", "GB")
        for heading in (*run, f"core h of {self.suite_runs} runs"):
            runs.add_column(heading, justify="right", no_wrap=True)
        parts = Table(box=MARKDOWN)
        for heading in ("nodes", *PARTS.values()):
            parts.add_column(heading, justify="right", no_wrap=True)
        for whole in self.wholes:
            cost = whole.cost
            runs.add_row(
                f"{cost.nodes:,}",
                f"{whole.requests:,.0f}",
                "all" if cost.share == 1.0 else percent(cost.share),
                f"{whole.cpu_s:,.1f}" if whole.cpu_s < 100 else f"{whole.cpu_s:,.0f}",
                f"{whole.us_per_request:.1f}",
                f"{whole.runs_per_hour:,.0f}" if whole.runs_per_hour >= 10 else f"{whole.runs_per_hour:.1f}",
                f"{self.gb(whole):.2f}",
                f"{self.suite_runs * whole.cpu_s / 3600:.2f}",
            )
            if cost.alone_s == cost.alone_s:
                parts_s = whole.parts_s()
                parts.add_row(f"{cost.nodes:,}", *(percent(parts_s[name] / whole.cpu_s) for name in PARTS))
        return [runs, parts]

    def notes(self) -> list[str]:
        """Return the sentences that go with the tables."""
        whole, short = self.checked
        loads_ns = [cost.load_ns for cost in self.costs]
        node_mib = whole.node_bytes / 2**20
        found = [
            f"Linear in its length: the whole run of {whole.nodes} nodes took {self.linearity:.2f} times what "
            f"{percent(short.share)} of it foretold.",
            f"A node's state takes {node_mib:.1f} MiB; the processor's caches: {', '.join(caches()) or 'unknown'}.",
            f"A longer run takes {self.bytes_per_request:.0f} bytes for each further request.",
            f"Two processes at once did {2 * self.beside[0]:.2f} times the work of one, of plain arithmetic "
            f"{2 * self.beside[1]:.2f} times (by CPU time, {whole.nodes} nodes each).",
            f"Beside the runs a dependent load from 64 MiB took {min(loads_ns):.0f} to {max(loads_ns):.0f} ns: the "
            "wider apart, the more other work on the machine has moved the figures.",
        ]
        if self.policy is not None:
            found.append(
                f"Under a policy a run of {whole.nodes} nodes costs {self.policy:.2f} times one under a static."
            )
        return found


def caches() -> list[str]:
    """Return the first core's caches that hold data, such as `L2 2048K`; empty where the system does not tell."""
    found = []
    for index in sorted(CACHES.glob("index*")):
        try:
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        except OSError:
            continue
        if kind != "Instruction":
            found.append(f"L{level} {size}")
    return found
