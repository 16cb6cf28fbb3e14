"""`helm-rl eval map`: where adapting alpha pays, and where it does not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eval.map.grid import HOST_GIB, HOT_SHARES, LINKS, LOADS, MODELS, MOST_SEEDS, Grid
from helm_rl.errors import UserError


@dataclass
class Args:
    """Map the headroom."""

    output: Path = Path("map")
    """Folder of the results; one that holds a part of this map is completed."""
    seeds: int = 5
    """Draws of arrivals per cell, at least 1; a later run with more adds them."""
    jobs: int = 2
    """Cells measured at a time, one core each."""
    models: tuple[str, ...] = MODELS
    """Model profiles."""
    links: tuple[str, ...] = LINKS
    """Where the embedding tables are: remote-ps, local-host."""
    host_gib: tuple[float, ...] = HOST_GIB
    """Host memory for keys and values that leave the pool, in GiB; 0 is none."""
    histories: tuple[float, ...] = ()
    """Mean tokens of a user's history; by default 1500 and 4000, and for models that are slow on those 500 and 1500."""
    hot_shares: tuple[float, ...] = HOT_SHARES
    """Shares of all requests that users who stay make while the burst is at its height."""
    loads: tuple[str, ...] = tuple(LOADS)
    """limit: .95 of the largest load that the best static serves within the SLO; moderate: .7 of that."""
    hardware: str = "a100-80g"
    """Hardware profile."""
    pool_gib: float = 48.0
    """GPU memory that the two caches share, in GiB."""


def main(args: Args) -> None:
    """Measure what is missing, print the table, draw the picture and write the figures."""
    grid = Grid(
        args.models,
        args.links,
        args.host_gib,
        args.histories,
        args.hot_shares,
        args.loads,
        args.hardware,
        args.pool_gib,
    )
    grid.check()
    if not 1 <= args.seeds <= MOST_SEEDS:
        raise UserError(f"--seeds must lie in 1 to {MOST_SEEDS}, got {args.seeds}")
    if args.jobs < 1:
        raise UserError(f"--jobs must be at least 1, got {args.jobs}")
    from eval.map.run import run
    from eval.map.store import Store

    run(grid, args.seeds, args.jobs, Store(args.output, grid.options()))
