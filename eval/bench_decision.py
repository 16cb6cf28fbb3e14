"""`helm-rl bench decision`: how long it takes to decide on alpha, and on which node serves a request."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import numpy.typing as npt
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from eval import whole_decision
from eval.command import console, figure_table
from eval.decision_peers import ABOUT, HELM
from helm_rl.figures import Figure, write_figures
from helm_rl.files import check_outputs

if TYPE_CHECKING:
    from envs.serving.cluster import ClusterSim

GOAL_US = 5.0
NODES = (8, 32, 128)
REFERENCE_NODES = 32
SCENARIO = "burst"
SERVED_S = 90.0
"""Of the base load and of the burst, before decisions are timed."""
BATCH = 2_000
BATCHES = 200
OTHER_BYTES = 1 << 17
"""Of other memory that is read before each decision: more than a first-level cache holds."""


@dataclass
class Args:
    """Time decisions on one core: the whole controller's on alpha, called from Python, and a router's on requests.

    On alpha: a policy of the usual size with all layers (checks, normaliser, network, offset, recovery, bounds), beside
    normaliser and network alone in torch (eager), onnxruntime (session.run, io binding) and NumPy, and beside what
    helm-rl export --onnx writes, in the same run: each call is timed, 100,000 of each, in rounds of 250 in an order
    drawn anew. Memory is looked at before and after the second 1,000,000 decisions, each after a window to learn from.
    onnxruntime needs the extras bench and onnx.

    On requests, in the compiled loop: loads, rows and histories of all nodes looked up, the best chosen. A cluster has
    served Burst into its plateau. Then the decisions on its last 2,000 requests are taken again, in a row: a time is
    that of 2,000 decisions over 2,000, and what is quoted the median of 200 such times. Disturbed: 128 KiB of other
    memory are read before each decision, as serving does, whose time is taken off.

    Figures written by --json: decision.{p50,p99,p999}_us, decision.p999_us.busy (another core copies memory
    meanwhile), decision.ratio_vs_{torch,onnxruntime,numpy} (the peer's best p50 over ours),
    decision.{p50,p99,p999}_us.<what> (torch, onnxruntime, onnxruntime_bound, onnxruntime_export,
    onnxruntime_export_bound, numpy, feedback: with a window to learn from before each, kernel: the compiled call alone,
    empty_call, clock), decision.network_us (normaliser and network in a compiled loop), decision.memory_growth_bytes;
    router.p50_us (HELM's router, 32 nodes), router.p50_us.disturbed (the same, disturbed),
    router.p50_us.<nodes>_nodes (HELM's, 8, 32 and 128 nodes), router.p50_us.<policy> (32 nodes).
    """

    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the figures here."""
    overwrite: bool = False
    """Replace --json if it exists."""


def main(args: Args) -> None:
    """Print the table and write the figures."""
    check_outputs(args.overwrite, json=args.json)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("parts"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("routing", total=len(NODES) + 3)
        routing = measure(lambda: progress.advance(task))
        measured = whole_decision.measure(lambda text: progress.update(task, description=text, advance=1))
    figures = whole_decision.figures_of(measured)
    out = console()
    out.print(times_table(figures))
    shown = {name: figure for name, figure in figures.items() if name.rpartition(".")[2] not in ABOUT}
    out.print(figure_table("The whole controller, on one core", shown))
    out.print(whole_decision.limits(measured))
    for sentence in measured.left_out:
        out.print(f"{sentence}.")
    out.print(figure_table("Routing, on one core", routing))
    if args.json is not None:
        write_figures(args.json, figures | routing)


def times_table(figures: dict[str, Figure]) -> Table:
    """Return a table of the times of all that was timed call by call."""
    table = Table(title="A decision on alpha, called from Python (us)", title_justify="left")
    table.add_column("what")
    for quantile in ("p50", "p99", "p99.9"):
        table.add_column(quantile, justify="right")
    for name, about in ABOUT.items():
        ending = "" if name == HELM else f".{name}"
        found = [figures.get(f"decision.{quantile}_us{ending}") for quantile in ("p50", "p99", "p999")]
        table.add_row(about, *("missing" if figure is None else f"{figure.value:.2f}" for figure in found))
    return table


def measure(advance: Callable[[], None]) -> dict[str, Figure]:
    """Time the decisions of clusters of NODES nodes; `advance` is called after each."""
    from helm_rl.routing import ROUTERS

    figures: dict[str, Figure] = {}
    for nodes in NODES:
        cluster = warmed_cluster(nodes, SERVED_S)
        took_us = decision_us(cluster)
        if nodes == REFERENCE_NODES:
            figures["router.p50_us"] = Figure(took_us, "us", "lower", GOAL_US)
            figures["router.p50_us.disturbed"] = Figure(decision_us(cluster, OTHER_BYTES), "us", "lower", GOAL_US)
            policy = cluster.state.router.policy
            for name, number in ROUTERS.items():
                policy[0] = number
                figures[f"router.p50_us.{name}"] = Figure(decision_us(cluster), "us", "lower")
        figures[f"router.p50_us.{nodes}_nodes"] = Figure(took_us, "us", "lower")
        advance()
    return figures


def warmed_cluster(nodes: int, seconds: float) -> ClusterSim:
    """Return a cluster that has served `seconds` of Burst, half of them before the burst, half in it."""
    from envs.serving.cluster import ClusterSim
    from eval.routing import stretch
    from helm_rl.scenario import load_scenario
    from helm_rl.workloads.generate import generate

    scenario = load_scenario(SCENARIO)
    burst = scenario.load.phase[0]
    phase = burst.model_copy(update={"start_s": seconds / 2, "ramp_s": 0.0, "seconds": seconds / 2})
    load = scenario.load.model_copy(update={"phase": (phase,)})
    scaled = stretch(scenario.model_copy(update={"load": load}), 1, nodes)
    cluster = ClusterSim(scaled, generate(scaled))
    cluster.run(round(seconds * 1e9))
    return cluster


def decision_us(
    cluster: ClusterSim, other_bytes: int = 0, batch: int | None = None, batches: int | None = None
) -> float:
    """Return the us that a decision takes, the median of `batches` means over `batch` of them.

    other_bytes: of other memory that is read before each decision; its time is taken off.
    """
    from envs.serving import cluster_loop
    from eval.timed_kernels import decide_all, read_all

    batch = BATCH if batch is None else batch
    batches = BATCHES if batches is None else batches
    last = int(cluster.state.clocks[cluster_loop.NEXT_REQUEST])
    if last < batch:
        raise ValueError(f"the cluster has served {last} requests, fewer than a batch of {batch}")
    other = np.zeros(other_bytes, np.uint8)
    batches = batches if other_bytes == 0 else max(1, batches // 10)

    def times_us(work: Callable[[], object]) -> npt.NDArray[np.float64]:
        work()  # compiles
        found = np.empty(batches)
        for k in range(batches):
            begun = time.perf_counter()
            work()
            found[k] = (time.perf_counter() - begun) / batch * 1e6
        return found

    taken = float(np.median(times_us(lambda: decide_all(cluster.state, last - batch, last, cluster.now_ns, other))))
    return taken - float(np.median(times_us(lambda: read_all(last - batch, last, other)))) if other_bytes else taken
