"""`helm-rl checkpoints list` and `show`: the bundles that ship with helm-rl, and what is in one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from helm_rl.checkpoint import CARD_FILE, CONFIG_FILE, Bundle, load_bundle
from helm_rl.control.layers import layers_of
from helm_rl.errors import printable

FOLDER = Path(__file__).resolve().parent.parent / "checkpoints"


def shipped_names() -> list[str]:
    """Return the names of the bundles that ship with helm-rl."""
    return sorted(path.parent.name for path in FOLDER.glob(f"*/{CONFIG_FILE}"))


def newest_base() -> str | None:
    """Return the name of the shipped base policy of the highest version, None where none is shipped."""
    versions = {int(found[1]): name for name in shipped_names() if (found := re.fullmatch(r"helm-base-v(\d+)", name))}
    return versions[max(versions)] if versions else None


def bundle_path(name_or_path: str | Path) -> Path:
    """Return the folder of a shipped bundle by its name, or the path as it is."""
    return FOLDER / name_or_path if str(name_or_path) in shipped_names() else Path(name_or_path)


@dataclass
class ListArgs:
    """List the bundles that ship with helm-rl: a policy each, trained and frozen, with its model card."""


@dataclass
class ShowArgs:
    """Say what is in a bundle, after checking all of it: how it came to be, what it reads, how far it did.

    Example: helm-rl checkpoints show helm-base-v1
    """

    bundle: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME|FOLDER")]
    """A shipped bundle, as `helm-rl checkpoints list` names it, or a bundle's folder."""
    card: bool = False
    """Print the whole model card instead."""


def list_shipped(args: ListArgs) -> None:
    """Print a line for each bundle."""
    from rich.console import Console
    from rich.table import Column, Table

    from helm_rl.export import first_few

    names = shipped_names()
    if not names:
        print("No bundle is shipped with this version; helm-rl train base and helm-rl export make one.")
        return
    table = Table(Column("bundle", no_wrap=True), "layers", "trained on", "steps", "decides every")
    for name in names:
        bundle = load_bundle(FOLDER / name)
        training, environment = bundle.config.training, bundle.config.environment
        intervals = ", ".join(f"{interval_s:g}" for interval_s in bundle.config.bounds.interval_s)
        scenarios = first_few([source.name for source in environment.scenarios])
        table.add_row(name, _layers(bundle), scenarios, f"{training.steps:,}", f"{intervals} s")
    Console(highlight=False, markup=False).print(table)


def show(args: ShowArgs) -> None:
    """Print what is in a bundle."""
    path = bundle_path(args.bundle)
    bundle = load_bundle(path)
    if args.card:
        card = (path / CARD_FILE).read_text(encoding="utf-8", errors="replace")
        print("\n".join(printable(line) for line in card.splitlines()))
        return
    for name, value in described(bundle).items():
        print(f"{name + ':':<14} {printable(value)}")


def described(bundle: Bundle) -> dict[str, str]:
    """Return what a bundle is, in words, by what it is about."""
    config = bundle.config
    training, bounds, network = config.training, config.bounds, config.network
    units = " x ".join(map(str, network.hidden))
    intervals = ", ".join(f"{interval_s:g}" for interval_s in bounds.interval_s)
    found = {
        "folder": str(bundle.path),
        "layers": _layers(bundle),
        "network": f"{len(config.observation.names)} signals, {units} {network.activation} units",
        "observation": f"schema v{config.observation.schema_version}, {config.observation.schema_hash}",
        "alpha": f"{bounds.alpha_min:g} to {bounds.alpha_max:g}, at most {bounds.rate_per_s:g} per second",
        "decides every": f"{intervals} s",
        "trained on": ", ".join(f"{one.name} (sha256 {one.sha256[:12]})" for one in config.environment.scenarios),
        "training": f"{training.method}; {training.steps:,} steps, seed {training.seed}, {training.seconds:.0f} s, "
        f"helm-rl {training.helm_rl_version}",
        "commands": "; ".join(training.commands) or "not recorded",
    }
    best = training.validation.best
    if best is not None:
        regrets = training.validation.regrets[best]
        told = ", ".join(f"{name} {100 * regret:+.1f} %" for name, regret in regrets.items())
        found["validation"] = f"P99 above that of the best schedule known, on arrivals that chose it: {told}"
    found |= {name: f"sha256 {sha256}" for name, sha256 in config.files.items()}
    return found


def _layers(bundle: Bundle) -> str:
    return " + ".join(("base", *layers_of(bundle)))
