"""The controllers of a suite, each as plain data that another process can make the controller of."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal

from eval.command import RESERVED, ablations, contestant, fitting_bundle
from eval.comparison import POLICY, Contestant, Row, figure_word
from eval.own_controller import load, own_contestants
from eval.peers import peer_contestants
from eval.routing import NAIVE, reallocating
from helm_rl.checkpoint import POLICY_FILE, Bundle, load_bundle
from helm_rl.control.layers import LAYERS, Layer, layers_of
from helm_rl.control.protocol import Controller
from helm_rl.control.rules import RegimeRule
from helm_rl.control.static import StaticAlpha
from helm_rl.errors import UserError
from helm_rl.scenario import Scenario
from helm_rl.shipped import FOLDER as SHIPPED
from helm_rl.shipped import bundle_path

HOST_GIB = (96.0, 960.0)
"""Host tiers for keys and values that stand in the table beside a static split; `helm-rl eval map` has the same."""
SINGLE = "single_static"
STORED = {"statics", "pace"}
"""What the store calls other results of a load than a controller's."""
TAKEN = RESERVED | STORED | {NAIVE, SINGLE} | {f"host_tier_{gib:g}" for gib in HOST_GIB}
"""Names in figures and store that no bundle beside the policy, and no controller of one's own, may take."""

Kind = Literal["policy", "rule", "own", "naive", "host"]


@dataclass(frozen=True)
class Entry(Row):
    """A controller of the table.

    source: a bundle's folder or the name of a shipped one, or MODULE:CLASS; layers: of a bundle, those above its base
    policy; host_gib: host memory for keys and values; identity: what it is beyond its name, for the hash of its runs.
    """

    kind: Kind = "rule"
    source: str = ""
    layers: tuple[Layer, ...] = ()
    host_gib: float = 0.0
    identity: str = ""


@dataclass(frozen=True)
class Prepared:
    """What of a family was chosen on arrivals that are not evaluated.

    deployable: the best static on its Steady load; host: the same with each host tier (GiB); cold, hot, threshold: the
    best statics of its Burst's base load and of the burst, and the hot-user ratio between them; whole: the best static
    of its Burst and what is around it.
    """

    deployable: float
    host: Mapping[float, float] = field(default_factory=dict)
    cold: float = float("nan")
    hot: float = float("nan")
    threshold: float = float("nan")
    whole: float = float("nan")

    def plain(self) -> dict[str, object]:
        """Return it as plain JSON."""
        return {**asdict(self), "host": {f"{gib:g}": alpha for gib, alpha in self.host.items()}}


def entries(
    policy: Path | None, own: Sequence[str], scenarios: Sequence[Scenario], beside: Sequence[Path] = ()
) -> list[Entry]:
    """Return the controllers that move alpha, and the host tiers; UserError unless all can serve every scenario.

    policy: the bundle that goals are asked of; beside: others, under the names of their folders.
    """
    if beside and policy is None:
        raise UserError("--beside is for bundles beside a policy; name that with --policy")
    found: list[Entry] = []
    for path in ([] if policy is None else [policy]) + list(beside):
        for scenario in scenarios:
            bundle = fitting_bundle(path, scenario)
            contestant(bundle, scenario, layers_of(bundle))
        name = "" if path == policy else bundle.path.resolve().name
        for entry in _policies(bundle, name):
            if any(one.identity == entry.identity for one in found):
                continue
            if any(one.key == entry.key for one in found):
                raise UserError(f"--beside {path}: a bundle of that name is measured already; rename its folder")
            if name and entry.key in TAKEN:
                raise UserError(
                    f"--beside {path}: {entry.key} is the name of another controller here; rename its folder"
                )
            found.append(entry)
    for scenario in scenarios:
        own_contestants(own, scenario, TAKEN | {one.key for one in found})
    found += [
        Entry(one.key, one.title, one.meaning, "own", one.origin, identity=_source_hash(one.origin))
        for one in own_contestants(own, scenarios[0], ())
    ]
    found += [Entry(one.key, one.title, one.meaning) for one in peer_contestants(scenarios[0])]
    found.append(
        Entry(
            NAIVE,
            "naive reallocation",
            "goes to the best static of the burst, and back, all pages at once, when the users change",
            "naive",
        )
    )
    found += [
        Entry(
            f"host_tier_{gib:g}",
            f"host tier, {gib:g} GiB",
            "keys and values that leave the pool stay in host memory; the static that is best on Steady with it",
            "host",
            host_gib=gib,
        )
        for gib in HOST_GIB
    ]
    return found


def _policies(bundle: Bundle, name: str) -> list[Entry]:
    """The bundle whole, then its ablations; name: of one that stands beside the policy."""
    whole = layers_of(bundle)
    found = []
    for layers in (whole, *ablations(bundle)):
        stack = " + ".join(("base", *layers))
        suffix = "" if layers == whole else f" ({stack})"
        found.append(
            Entry(
                figure_word((name or POLICY) + suffix),
                (name or "HELM") + suffix,
                f"{stack}: the bundle {bundle.path.resolve().name}",
                "policy",
                _source(bundle),
                layers,
                identity=_bundle_identity(bundle, layers),
            )
        )
    return found


def without_layers(entry: Entry) -> Entry:
    """Return a policy's base alone, under its key."""
    return replace(entry, layers=(), identity=_bundle_identity(_bundle(entry.source), ()))


def _source(bundle: Bundle) -> str:
    """Return the name of a shipped bundle, which other machines may have elsewhere, and the folder of any other."""
    path = bundle.path.resolve()
    return path.name if path.parent == SHIPPED else str(path)


def _bundle_identity(bundle: Bundle, layers: Sequence[Layer]) -> str:
    used = (POLICY_FILE, *(LAYERS[layer] for layer in layers))  # the rest of a bundle changes nothing that it does
    files = hashlib.sha256("".join(bundle.config.files[file] for file in used).encode()).hexdigest()
    return " ".join((files, " + ".join(("base", *layers))))


def serving(entry: Entry, scenario: Scenario, prepared: Prepared) -> tuple[Scenario, Callable[[], Controller], float]:
    """Return what serves under an entry, what makes its controller, and the alpha that it starts at.

    Raises:
        UserError: Where this runs the bundle, or the class of one's own, is missing or another one.
    """
    match entry.kind:
        case "policy":
            bundle = _bundle(entry.source)
            _refuse_another(entry, _bundle_identity(bundle, entry.layers))
            return scenario, contestant(bundle, scenario, entry.layers).make, prepared.deployable
        case "own":
            _refuse_another(entry, _imported_hash(entry.source))
            (one,) = own_contestants([entry.source], scenario, ())
            return scenario, one.make, prepared.deployable
        case "naive":
            rule = partial(RegimeRule, prepared.cold, prepared.hot, prepared.threshold)
            return reallocating(scenario, NAIVE), rule, prepared.cold
        case "host":
            alpha = prepared.host[entry.host_gib]
            return with_host_tier(scenario, entry.host_gib), partial(StaticAlpha, alpha), alpha
        case _:
            return scenario, _rule(entry.key, scenario).make, prepared.deployable


def _refuse_another(entry: Entry, identity: str) -> None:
    if identity != entry.identity:
        raise UserError(f"{entry.source}: is not the one here that the suite was planned with")


def with_host_tier(scenario: Scenario, gib: float) -> Scenario:
    """Return the scenario with so much host memory for keys and values."""
    return scenario.model_copy(update={"hardware": scenario.hardware.model_copy(update={"kv_host_gib": gib})})


def _rule(key: str, scenario: Scenario) -> Contestant:
    return next(one for one in peer_contestants(scenario) if one.key == key)


@lru_cache(maxsize=2)
def _bundle(path: str) -> Bundle:
    return load_bundle(bundle_path(path))


@lru_cache(maxsize=8)
def _imported_hash(spec: str) -> str:
    """Return `_source_hash` as it was when this process first asked: it does not import again what is edited later."""
    return _source_hash(spec)


def _source_hash(spec: str) -> str:
    """Return a hash of the file that a class of one's own stands in: another version of it is another controller."""
    try:
        path = inspect.getsourcefile(load(spec))
    except TypeError:  # built in, or made by a call
        path = None
    if path is None:
        raise UserError(f"controller {spec}: the file that it comes from cannot be found; define a class in a module")
    return f"{spec} {hashlib.sha256(Path(path).read_bytes()).hexdigest()}"
