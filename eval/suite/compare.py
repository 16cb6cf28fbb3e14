"""`helm-rl eval compare`: two suites side by side, draw by draw of the arrivals that both have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.table import Table

from eval.command import console
from eval.comparison import Estimate, estimate
from eval.statistics import improvement, improvement_interval, interquartile_mean, stratified_interval
from eval.suite.goals import change
from eval.suite.runs import Cell, Read, read_runs
from eval.wording import counted, milliseconds
from helm_rl.errors import UserError
from helm_rl.figures import Figure, write_figures
from helm_rl.files import check_outputs


@dataclass
class Args:
    """Lay two suites side by side: P99 of each controller in RUN_B over that in RUN_A, on the same arrivals.

    Loads that both have are compared, on the draws that both have; controllers that both have, by their names: the
    policies of both are one pair, whatever their bundles. Whoever came to the same in both is counted, not listed; what
    only one of them has is named.

    Figures written by --json: compare.<family>.<pattern>.<controller>.p99_ratio (interquartile mean over the draws),
    compare.all.<controller>.{p99_ratio, improvement}: over all loads, and the probability that a draw's P99 is lower in
    RUN_B.
    """

    run_a: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_A")]
    """Output folder of a suite."""
    run_b: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_B")]
    """Output folder of another one."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the figures here."""
    overwrite: bool = False
    """Replace --json if it exists."""


@dataclass(frozen=True)
class Pair:
    """One controller in one cell of both suites: P99 on the draws that both have, in one order."""

    cell: str
    key: str
    title: str
    first: tuple[float, ...]
    second: tuple[float, ...]

    @property
    def ratio(self) -> Estimate:
        """P99 in the second over that in the first, draw by draw."""
        return estimate([two / one for one, two in zip(self.first, self.second, strict=True)])

    @property
    def same(self) -> bool:
        """Whether nothing changed."""
        return self.first == self.second


def main(args: Args) -> None:
    """Print the tables and write the figures."""
    check_outputs(args.overwrite, (args.run_a, args.run_b), json=args.json)
    first, second = read_runs(args.run_a), read_runs(args.run_b)
    found = pairs(first, second)
    out = console()
    differ = [pair for pair in found if not pair.same]
    if differ:
        out.print(_table(differ))
        out.print(_overall(found, {pair.key for pair in differ}))
    rest = len(found) - len(differ)
    out.print(f"{rest} of {len(found)} controllers on the loads of both came to the same P99s in both.", style="dim")
    if lines := left_out(first, second):
        out.print(f"Not compared: {'; '.join(lines)}.", style="dim")
    if args.json is not None:
        write_figures(args.json, figures(found))


def pairs(first: Read, second: Read) -> list[Pair]:
    """Return what both suites measured on the same arrivals; UserError where there is nothing."""
    found = []
    for name, one in first.runs.cells.items():
        other = second.runs.cells.get(name)
        if other is None or other.scenario != one.scenario:
            continue
        both = [trace for trace in one.traces if trace in other.traces]
        for key in one.controllers if both else ():
            if key in other.controllers:
                title = one.controllers[key].title
                found.append(Pair(name, key, title, _p99(one, key, both), _p99(other, key, both)))
    if not found:
        raise UserError(f"{first.folder} and {second.folder} have no load with the same arrivals in common")
    return found


def left_out(first: Read, second: Read) -> list[str]:
    """Return what `pairs` leaves out, and why: loads, then draws and controllers of the loads that are compared."""
    loads, draws = [], []
    controllers: dict[str, str] = {}
    for name in dict.fromkeys((*first.runs.cells, *second.runs.cells)):
        one, other = first.runs.cells.get(name), second.runs.cells.get(name)
        if one is None or other is None:
            loads.append(f"{name} (only in {'B' if one is None else 'A'})")
        elif one.scenario != other.scenario:
            loads.append(f"{name} (another scenario in B)")
        elif not set(one.traces) & set(other.traces):
            loads.append(f"{name} (other arrivals in B)")
        else:
            if alone := len(set(one.traces) ^ set(other.traces)):
                draws.append(f"{counted(alone, 'draw')} of {name} (only in one)")
            controllers |= {key: "A" for key in one.controllers if key not in other.controllers}
            controllers |= {key: "B" for key in other.controllers if key not in one.controllers}
    return [*loads, *draws, *(f"{key} (only in {where})" for key, where in controllers.items())]


def _p99(cell: Cell, key: str, traces: list[str]) -> tuple[float, ...]:
    values = cell.controllers[key].values["p99_ms"]
    found = [values[cell.traces.index(trace)] for trace in traces]
    return tuple(value if value is not None else float("nan") for value in found)


def figures(found: list[Pair]) -> dict[str, Figure]:
    """Return the figures that `Args` lists."""
    shown = {f"compare.{pair.cell}.{pair.key}.p99_ratio": Figure(pair.ratio.value, "ratio", "lower") for pair in found}
    for key in dict.fromkeys(pair.key for pair in found):
        ratio, better = _over_all(found, key)
        shown[f"compare.all.{key}.p99_ratio"] = Figure(ratio.value, "ratio", "lower")
        shown[f"compare.all.{key}.improvement"] = Figure(better.value, "probability", "higher")
    return shown


def _over_all(found: list[Pair], key: str) -> tuple[Estimate, Estimate]:
    """Ratio of P99, and the probability that it is lower in the second, over all loads, each resampled by itself."""
    mine = [pair for pair in found if pair.key == key]
    strata = [pair.ratio.per_seed for pair in mine]
    values = tuple(value for ratios in strata for value in ratios)
    first, second = [pair.first for pair in mine], [pair.second for pair in mine]
    return (
        Estimate(interquartile_mean(values), stratified_interval(strata), values),
        Estimate(improvement(second, first), improvement_interval(second, first), ()),
    )


def _table(found: list[Pair]) -> Table:
    table = Table(title="P99 on the same arrivals", title_justify="left")
    table.add_column("load")
    table.add_column("controller")
    for heading in ("A, ms", "B, ms", "B against A", "95 % interval"):
        table.add_column(heading, justify="right")
    for pair in found:
        first, second = interquartile_mean(pair.first), interquartile_mean(pair.second)
        table.add_row(
            pair.cell,
            pair.title,
            milliseconds(first),
            milliseconds(second),
            change(pair.ratio.value),
            _ends(pair.ratio),
        )
    return table


def _overall(found: list[Pair], keys: set[str]) -> Table:
    table = Table(title="over all loads", title_justify="left")
    table.add_column("controller")
    for heading in ("B against A", "95 % interval", "probability that B is lower", "95 % interval"):
        table.add_column(heading, justify="right")
    for title, key in dict.fromkeys((pair.title, pair.key) for pair in found if pair.key in keys):
        ratio, better = _over_all(found, key)
        ends = "" if better.interval is None else " to ".join(f"{end:.2f}" for end in better.interval)
        table.add_row(title, change(ratio.value), _ends(ratio), f"{better.value:.2f}", ends)
    return table


def _ends(found: Estimate) -> str:
    return "" if found.interval is None else " to ".join(change(end) for end in found.interval)
