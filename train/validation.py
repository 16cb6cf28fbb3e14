"""How a policy in training does on arrivals that it is not trained on: its P99 over that of the best schedule known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eval.reference import best_schedule
from eval.segments import Run, measured_part, reduce_replay
from eval.sweep import Work, half_of
from helm_rl.checkpoint import BoundsSection, NetworkSection, Tensors
from helm_rl.control.base import BasePolicy
from helm_rl.scenario import Scenario
from helm_rl.workloads.generate import generate
from helm_rl.workloads.trace import Trace

SEEDS_FROM = 4_000_000
"""Validation draws its arrivals from here up: training has seeds from 2**32, evaluations and the map smaller ones."""
STEP = 0.05
"""Spacing of the statics that a policy is held against while it trains; evaluations look closer."""


@dataclass(frozen=True)
class Held:
    """One set of arrivals, what serves them, and from which alpha a policy starts there."""

    name: str
    scenario: Scenario
    trace: Trace
    alpha0: float


def hold_out(scenarios: Sequence[Scenario], draws: int) -> list[Held]:
    """Draw `draws` sets of arrivals for each scenario; a policy starts at .5, or as near to it as the bounds allow."""
    held = []
    for scenario in scenarios:
        for draw in range(draws):
            name = scenario.name if draws == 1 else f"{scenario.name}-{draw + 1}"
            held.append(Held(name, scenario, generate(scenario, seed=SEEDS_FROM + draw), half_of(scenario)))
    return held


def find_references(held: Sequence[Held], work: Work) -> dict[str, float]:
    """Return P99 (ms) of the best schedule known on each set: of every static, and of each segment's best one.

    Raises:
        UserError: There are too few requests for a P99.
    """
    found = {}
    for each in held:
        work.describe(f"held-out arrivals of {each.name}: the best schedule")
        found[each.name] = best_schedule(each.scenario, each.trace, work, STEP).p99_ms
    return found


@dataclass(frozen=True)
class Validation:
    """Held-out arrivals, the P99 (ms) of the best schedule known on each by name, and where replays run."""

    held: list[Held]
    reference_ms: dict[str, float]
    work: Work

    def look(self, policy: Tensors, network: NetworkSection, bounds: BoundsSection) -> dict[str, Run]:
        """Replay the policy, without noise and frozen, on each set of arrivals; return what came of it, by name.

        Args:
            policy: Tensors of its actor and normaliser, as a bundle has them.
            network, bounds: What they belong to.
        """

        def one(held: Held) -> Run:
            controller = BasePolicy(policy, network, bounds, held.scenario.control.interval_s)
            replayed = self.work.replay(held.scenario, held.trace, controller, held.alpha0)
            return reduce_replay(replayed, held.trace, measured_part(held.trace), held.scenario.slo_ms)

        return dict(zip((held.name for held in self.held), self.work.map(one, self.held), strict=True))

    def regrets(self, replays: Mapping[str, Run]) -> dict[str, float]:
        """Return the P99 of each replay over the best schedule's, less 1, by name."""
        return {name: run.p99_ms / self.reference_ms[name] - 1.0 for name, run in replays.items()}
