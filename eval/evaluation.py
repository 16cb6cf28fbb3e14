"""One call that measures a controller on a scenario, for notebooks and scripts: `eval.evaluate`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from helm_rl.errors import UserError
from helm_rl.scenario import Load, Scenario, load_scenario

if TYPE_CHECKING:
    import pyarrow as pa

    from eval.comparison import Comparison, Contestant
    from helm_rl.control.protocol import Controller
    from helm_rl.workloads.trace import Trace


def evaluate(
    controller: Controller | Callable[[], Controller] | str | Path,
    scenario: Scenario | str | Path = "burst",
    *,
    load: Load = "limit",
    trace: Trace | None = None,
    seeds: int | None = None,
    first_seed: int = 1,
    peers: bool = False,
    step: float = 0.02,
    reference: Literal["quick", "full"] = "quick",
    jobs: int = 2,
) -> pa.Table:
    """Measure a controller beside static splits and the per-segment optimum, on arrivals that nothing is trained on.

    This is what `helm-rl eval p99` does.

    Args:
        controller: an object that follows `helm_rl.control.protocol.Controller`, of which each replay has a copy; or a
            class or function that makes one; or a bundle's folder.
        scenario: what serves under which load: a Scenario, the name of a shipped one, or a TOML file.
        load: "moderate" takes 70 % of the rates of a scenario that is named.
        trace: recorded arrivals in place of the scenario's load.
        seeds, first_seed: draws of arrivals (3 by default, 1 of a trace), and the number of the first.
        peers: also measure the rules that divide memory today.
        step: spacing of the statics around each minimum; larger is faster and coarser.
        reference: what regret is held against; "full" searches for a better schedule, in three times the time.
        jobs: replays at a time.

    Returns:
        A pyarrow.Table with a row for each controller and draw: `controller` (the given one is "controller"), `title`,
        `seed` (null of a trace), `p99_ms`, `p50_ms`, `windowed_p99_ms`, `onset_p99_ms`, `slo`, `throughput`,
        `ratio_gap`, `ratio_gap_transition`, `flat_gap`, `flat_gap_transition`, `regret`; null where there is no value.
        `.to_pandas()` (where pandas is installed) and `polars.from_arrow` make a data frame of it.

    Raises:
        UserError: an argument does not fit, or the controller raises or returns what is no alpha.
    """
    from eval.comparison import check_draws, compare
    from eval.peers import peer_contestants
    from eval.reference import EFFORT
    from eval.sweep import alpha_grid, check_jobs, working

    found = scenario if isinstance(scenario, Scenario) else load_scenario(scenario, load)
    if reference not in ("quick", "full"):
        raise UserError(f"reference must be 'quick' or 'full', got {reference!r}")
    draws = seeds if seeds is not None else (3 if trace is None else 1)
    check_draws(first_seed, draws)
    check_jobs(jobs)
    alpha_grid(found.control.alpha_min, found.control.alpha_max, step)
    contestants = [_contestant(controller, found), *(peer_contestants(found) if peers else [])]
    with working(jobs) as work:
        comparison = compare(
            found,
            work,
            seeds=draws,
            first_seed=first_seed,
            trace=trace,
            policies=contestants,
            step=step,
            effort=EFFORT if reference == "full" else None,
        )
    return table(comparison)


def table(comparison: Comparison) -> pa.Table:
    """Return a comparison as a table, as `evaluate` says."""
    import pyarrow as pa

    from eval.comparison import METRICS

    rows = [
        {"controller": row.key, "title": row.title, "seed": result.seed}
        | {metric.key: result.metric(row.key, metric.key) for metric in METRICS}
        for row in comparison.rows
        for result in comparison.results
    ]
    texts = [pa.field(name, pa.string()) for name in ("controller", "title")]
    numbers = [pa.field(metric.key, pa.float64()) for metric in METRICS]
    schema = pa.schema([*texts, pa.field("seed", pa.int64()), *numbers])
    columns = {
        name: pa.array([row[name] for row in rows], schema.field(name).type, from_pandas=True) for name in rows[0]
    }
    return pa.table(columns, schema=schema)


def _contestant(controller: Controller | Callable[[], Controller] | str | Path, scenario: Scenario) -> Contestant:
    from eval.command import policy_contestant
    from eval.comparison import Contestant
    from eval.own_controller import made

    key = "controller"
    if isinstance(controller, (str, Path)):
        return replace(policy_contestant(Path(controller), scenario), key=key, title=Path(controller).name)
    made_by = isinstance(controller, type) or (callable(controller) and not hasattr(controller, "decide"))
    name = getattr(controller, "__name__", "controller") if made_by else type(controller).__name__
    make = cast("Callable[[], Controller]", controller if made_by else partial(copy.deepcopy, controller))
    made(name, make, scenario)  # what is wrong with it shows before any replay
    return Contestant(key, name, name, lambda: made(name, make, scenario), own=True)
