"""`helm-rl bench scaling`: what a run of the suite costs on clusters of 1 to 1,024 nodes, and what limits it."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from eval.command import console
from eval.processes import Task, Workers, working_processes
from eval.results import Row
from helm_rl.errors import UserError
from helm_rl.figures import write_figures
from helm_rl.files import check_outputs
from helm_rl.shipped import newest_base

if TYPE_CHECKING:
    from eval.scaling.summary import Scaling

MOST_NODES = 4096
LEAST_SHARE, MOST_SHARE = 0.005, 0.5
PARTS_EVERY = 4
"""Serving is measured in parts at powers of this."""
LEAST_S = 2.0
"""Small sizes are measured again until they took so long, in CPU time."""
ROUNDS_BESIDE = 3


@dataclass
class Args:
    """Measure what one run of `helm-rl eval suite` on a cluster costs, over the number of its nodes, on one core.

    A run is one controller, a static, on the suite's load of a cluster: Burst of the family decoder, its rates and
    users times the nodes, 360 s with the warm-up, behind HELM's router. Up to --checked nodes all of it is served; of
    more nodes --share of it, all its times shortened alike, and what grows with the length is scaled to the whole. At
    --checked nodes both are done: that is how far the scaling holds. Each size has a process of its own, one after the
    other. All times are CPU time of one thread, so other work on the machine counts only as far as it slows the
    processor down; loads from 64 MiB of memory, timed beside each run, show how far that may be. Of 1, 4, 16, ... nodes
    the same requests are served again without a router, each where it was: in order of arrival, then node by node; the
    difference is what it costs that the processor's caches hold one node and not all. Tables are in Markdown. About 6
    minutes; 1,024 nodes take 9 GB of memory.

    Figures written by --json: scaling.<figure>.<nodes>_nodes: run_cpu_s, cost_us (of a request, all parts of the run
    included), runs_per_hour (on one core), suite_core_h (of all runs on a cluster in a suite), gb (peak memory of a
    whole run), load_ns (of one dependent load from 64 MiB, timed beside the run), share.{work, misses, router, python,
    arrivals, setup} (of a whole run's CPU time: serving node by node, what it takes more in order of arrival, the
    router, Python once per interval, drawing arrivals, making nodes);
    scaling.linearity.<checked>_nodes (what the whole run took over what the short one foretold),
    scaling.policy_ratio.<checked>_nodes (CPU time of a run under the shipped base policy over that under a static),
    scaling.node_mib (a node's state), scaling.bytes_per_request (memory of a longer run), scaling.two_processes (work
    of two processes at once over that of one, by CPU time), scaling.two_processes.arithmetic (the same of plain
    arithmetic: what the machine allows).
    """

    nodes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    """Sizes of the cluster."""
    checked: int = 32
    """The largest size that is served whole; one of --nodes."""
    share: float = 0.05
    """Of the suite's length, that larger clusters serve."""
    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE.png|svg")] = None
    """Draw the cost of a request and runs per hour over the number of nodes here."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the figures here."""
    overwrite: bool = False
    """Replace --json and --plot files that exist."""


def main(args: Args) -> None:
    """Print the tables and write the files."""
    check_outputs(args.overwrite, (), json=args.json, plot=args.plot)
    _check(args)
    with working_processes(1, tasks_each=1) as workers:
        rows = measure(args, workers)
    with working_processes(2) as workers:
        found = beside(args, workers, rows)
    out = console()
    for table in found.tables():
        out.print(table)
    for note in found.notes():
        out.print(f"- {note}", soft_wrap=True)
    if args.plot is not None:
        from eval.scaling.plot import draw_scaling

        draw_scaling(args.plot, found)
    if args.json is not None:
        write_figures(args.json, found.figures())


def measure(args: Args, workers: Workers) -> list[Row]:
    """Run every size, the checked one at both lengths, and a policy; return what came of each, the policy's last."""
    from eval.scaling import cost

    tasks = [Task(cost.prepare, (), 2.0)]
    sizes = [(nodes, 1.0 if nodes <= args.checked else args.share) for nodes in args.nodes]
    for nodes, share in (*sizes, (args.checked, args.share)):
        parts = nodes in (PARTS_EVERY**k for k in range(nodes.bit_length()))
        tasks.append(Task(cost.measure, (nodes, share, parts, LEAST_S), 4.0 + nodes * share * (3.0 if parts else 1.5)))
    policy = newest_base()
    if policy is not None:
        tasks.append(Task(cost.measure_policy, (args.checked, args.share, policy), 10.0))
    return _results(workers, tasks, "runs")


def beside(args: Args, workers: Workers, rows: list[Row]) -> Scaling:
    """Serve in one process and then in two at once, and put it together with what `measure` returned."""
    from eval.scaling import cost
    from eval.scaling.summary import Scaling

    found: list[list[Row]] = []
    with multiprocessing.get_context("spawn").Manager() as manager:
        for count in (1, 2):
            arguments = (args.checked, args.share, ROUNDS_BESIDE, manager.Barrier(count))
            found.append(_results(workers, [Task(cost.measure_beside, arguments, 1.0)] * count, f"{count} at once"))
    (one,), two = found
    ratios = [one[name] / (sum(row[name] for row in two) / 2) for name in ("serve_s", "arithmetic_s")]
    costs = [cost.Cost(**row) for row in rows if "nodes" in row]
    policy = next((row["policy_s"] / row["static_s"] for row in rows if "policy_s" in row), None)
    short = next(one for one in costs if one.nodes == args.checked and one.share < 1.0)
    costs.remove(short)
    whole = next(one for one in costs if one.nodes == args.checked)
    return Scaling(costs, (whole, short), (ratios[0], ratios[1]), policy)


def _results(workers: Workers, tasks: list[Task], title: str) -> list[Row]:
    rows: list[Row] = []
    bar = workers.progress.add_task(title, total=sum(task.share for task in tasks))
    workers.run(tasks, rows.append, bar)
    return rows


def _check(args: Args) -> None:
    nodes = args.nodes
    if not all(1 <= count <= MOST_NODES for count in nodes) or list(nodes) != sorted(set(nodes)):
        raise UserError(f"--nodes {' '.join(map(str, nodes))}: expected ascending sizes of 1 to {MOST_NODES:,} nodes")
    if args.checked not in nodes:
        raise UserError(f"--checked {args.checked} is not among --nodes; name a size that is measured")
    if not LEAST_SHARE <= args.share <= MOST_SHARE:  # NaN is not
        raise UserError(f"--share must lie in {LEAST_SHARE:g} to {MOST_SHARE:g}, got {args.share:g}")
