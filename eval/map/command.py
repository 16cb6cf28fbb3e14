"""`helm-rl eval map`: where adapting alpha pays, and where it does not."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from rich.table import Table

from eval.command import console
from eval.executor import Executor, ExecutorName
from eval.map.grid import HOST_GIB, HOT_SHARES, LINKS, LOADS, MODELS, MOST_SEEDS, Grid
from eval.map.store import CELLS, FILES, Store
from eval.map.summary import WORTH, Found, as_json, figures, slices, summarise
from helm_rl.errors import UserError
from helm_rl.figures import write_figures
from helm_rl.files import check_outputs, refuse_existing, write_text

TOP = 10
"""Cells that the table names."""


@dataclass
class Args:
    """Map what adapting alpha can gain: a burst of users who return on a base of users who hardly do.

    Each cell is a model, a link, a host tier for keys and values, a history length, a share of hot users and a load.
    It gets the best alpha of base and burst, the best static in hindsight, and the headroom that a quick search for
    schedules through the transitions finds. Results are kept as they come: after an interrupt the same command goes on.
    The default takes under three hours on 2 cores. --output gets map.png, map.svg and cells.json.

    Figures written by --json: map.{cells,out_of_reach,seeds,max_headroom,median_headroom,share_above_10_percent,
    max_shift,max_needed_shift,median_deployable_loss,share_bound_above_10_percent,max_planned_headroom}; and
    map.{max_headroom,median_headroom,share_above_10_percent,max_shift,median_deployable_loss}.<slice>, a slice being
    model.<profile>, link.<link>, host_gib.<GiB>, history.<tokens>, hot_percent.<percent> or load.<load>, with _ for
    each dot in it.
    """

    output: Path
    """Folder of the results; one that holds a part of this map is completed."""
    seeds: int = 5
    """Draws of arrivals per cell, at least 1; a later run with more adds them."""
    jobs: int = 2
    """Cells measured at a time, one core each; with --address as many as the cluster has cores."""
    executor: ExecutorName = "local"
    """Where cells are measured: local, in processes of this machine, or ray, on the nodes of a Ray cluster (needs
    the extra 'ray'); the figures are the same."""
    address: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT")] = None
    """With --executor ray: the cluster, of which this machine must be a node, or auto; without it Ray starts on this
    machine alone, for as long as the command takes."""
    models: tuple[str, ...] = MODELS
    """Model profiles."""
    links: tuple[str, ...] = LINKS
    """Where the embedding tables are: remote-ps, local-host."""
    host_gib: tuple[float, ...] = HOST_GIB
    """Host memory for keys and values that leave the pool, in GiB; 0 is none."""
    histories: tuple[float, ...] = ()
    """Mean tokens of a user's history; by default 1500 and 4000, and for models that are slow on those 500 and 1500."""
    hot_shares: tuple[float, ...] = HOT_SHARES
    """Shares of all requests that users who return make while the burst is at its height."""
    loads: tuple[str, ...] = tuple(LOADS)
    """limit: .95 of the largest load that the best static serves within the SLO; moderate: .7 of that."""
    hardware: str = "a100-80g"
    """Hardware profile."""
    pool_gib: float = 48.0
    """GPU memory that the two caches share, in GiB."""
    link_gb_s: float | None = None
    """GB/s over which missing embedding rows come; without it, the profile's for each link."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the figures here, for machines."""
    overwrite: bool = False
    """Replace a --json file that exists."""


def main(args: Args) -> None:
    """Measure what is missing, print the tables, draw the picture and write the figures."""
    grid = _grid(args)
    with Store(args.output, grid.options()) as store:
        from eval.map.run import run

        run(grid, args.seeds, _executor(args), store)
        found = summarise(grid, store, args.seeds)
        from eval.map.plot import draw

        cells = json.dumps([as_json(each) for each in found], indent=1, allow_nan=False)
        write_text(args.output / CELLS, cells + "\n")
        pictures = draw(args.output, grid, found)
    report(found)
    console().print(f"Written: {', '.join(map(str, [*pictures, args.output / CELLS]))}.")
    if args.json is not None:
        write_figures(args.json, figures(found))


def _executor(args: Args) -> Executor:
    return Executor(args.executor, args.jobs, args.address)


def _grid(args: Args) -> Grid:
    """Check the arguments and return the grid."""
    if not 1 <= args.seeds <= MOST_SEEDS:
        raise UserError(f"--seeds must lie in 1 to {MOST_SEEDS}, got {args.seeds}")
    _executor(args).check()
    _check_files(args)
    grid = Grid(
        args.models,
        args.links,
        args.host_gib,
        args.histories,
        args.hot_shares,
        args.loads,
        args.hardware,
        args.pool_gib,
        args.link_gb_s,
    )
    grid.check()
    return grid


def _check_files(args: Args) -> None:
    """Raise UserError unless every file can be written, now and not after the work."""
    if args.json is not None:
        figures_path, folder = Path(os.path.realpath(args.json)), Path(os.path.realpath(args.output))
        if figures_path in [folder / name for name in FILES]:
            raise UserError(f"--json names the map's own file, {args.json}; name another")
        if figures_path in (folder, *folder.parents):
            raise UserError(f"--json names the map's own folder, or one that it is in, {args.json}; name a file")
    check_outputs(args.overwrite, json=args.json)
    if args.output.is_dir():
        for path in (args.output / name for name in FILES):
            refuse_existing(path, overwrite=True)
            if path.is_dir():
                raise UserError(f"{path} is a folder, and the map's own file goes there; name another --output")


def report(found: Sequence[Found]) -> None:
    """Print the cells of most headroom, the slices, and what that says in a sentence."""
    out = console()
    measured = [each for each in found if each.measured]
    lost = sum(each.rate is None for each in found)
    if not measured:
        out.print(f"There is nothing to map: in all of {lost} cells even a light load misses the SLO.")
        return
    out.print(_top(measured))
    out.print(_slices(measured))
    worth = sum(each.headroom > WORTH for each in measured)
    bound = sum(each.bound > WORTH for each in measured)
    best = max(measured, key=lambda each: each.headroom)
    out.print(
        f"Adapting alpha through the burst saves at most {_percent(best.headroom)} of P99 over the best static in "
        f"hindsight, and over {_percent(WORTH)} in {worth} of {len(measured)} cells; twice the memory would save over "
        f"{_percent(WORTH)} in {bound} of them. The static that is best on the base alone is {_median_loss(measured)} "
        "slower in the median."
    )
    if lost:
        out.print(f"{lost} more cells are out of reach: even a light load misses the SLO.")


def _top(measured: Sequence[Found]) -> Table:
    table = Table(title=f"The {min(TOP, len(measured))} cells with the most headroom", title_justify="left")
    table.add_column("cell", no_wrap=True)
    for title in ("req/s", "headroom", "planned", "2x mem.", "alpha*", "static", "ms", "deploy"):
        table.add_column(title, justify="right", no_wrap=title in ("headroom", "alpha*"))
    for each in sorted(measured, key=lambda each: -each.headroom)[:TOP]:
        error = f" ± {100 * each.error:.1f}" if np.isfinite(each.error) else ""
        table.add_row(
            name(each),
            f"{each.rate:,.0f}",
            f"{100 * each.headroom:.1f}{error} %",
            _percent(each.planned),
            _percent(each.bound),
            f"{each.base:.2f} → {each.burst:.2f}",
            f"{each.hindsight:.2f}",
            f"{each.hindsight_ms:.0f}",
            f"+{100 * each.deployable_loss:,.0f} %",
        )
    return table


def name(each: Found) -> str:
    """A cell in two lines."""
    setting = each.cell.setting
    tier = "no tier" if setting.host_gib == 0 else f"{setting.host_gib:g} GiB"
    users = f"{setting.history:.0f} tokens, {_percent(setting.hot_share)} hot"
    return f"{setting.model}, {setting.link}, {tier},\n{users}, {each.cell.load}"


def _slices(measured: Sequence[Found]) -> Table:
    table = Table(title="Slices: medians over their cells", title_justify="left")
    table.add_column("slice")
    names = ("cells", "headroom", "largest", f"over {_percent(WORTH)}", "2x memory", "shift", "needed", "deployable")
    for name in names:
        table.add_column(name, justify="right")
    for name, part in {"all": list(measured), **slices(measured)}.items():
        table.add_row(
            name,
            str(len(part)),
            f"{100 * np.median([each.headroom for each in part]):.1f} %",
            f"{100 * max(each.headroom for each in part):.1f} %",
            str(sum(each.headroom > WORTH for each in part)),
            f"{100 * np.median([each.bound for each in part]):.1f} %",
            f"{np.median([each.shift for each in part]):.2f}",
            f"{np.median([each.needed_shift for each in part]):.2f}",
            f"+{_median_loss(part)}",
        )
    return table


def _median_loss(part: Sequence[Found]) -> str:
    return f"{100 * np.median([each.deployable_loss for each in part]):,.0f} %"


def _percent(share: float) -> str:
    return "" if np.isnan(share) else f"{100 * share:.0f} %"
