"""Where in a trace an episode begins and ends, and what its agent sees, for the environments on the model clock."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from envs.training_traces import TrainingTraces
from helm_rl.errors import UserError
from helm_rl.metrics import WindowStats
from helm_rl.observation import SIZE, ObservationBuilder
from helm_rl.scenario import Scenario
from helm_rl.telemetry import Telemetry

FloatArray = npt.NDArray[np.float32]

WARM_S = 30.0
"""Served before an episode, as far as the trace has it."""
DEFAULT_EPISODE_S = 300.0
_SECOND_NS = 1_000_000_000


@dataclass(frozen=True)
class Episode:
    """trace: its number in the set; first: interval of the trace's measured part at which it begins; steps: intervals
    that it lasts; alpha: of each node, [N]; begin_ns: where the warm-up starts; start_ns: where the episode does.
    """

    trace: int
    first: int
    steps: int
    alpha: npt.NDArray[np.float64]
    begin_ns: int
    start_ns: int


def check_episode_s(episode_s: float | None, scenario: Scenario) -> None:
    """Raise UserError unless an episode has at least one interval."""
    if episode_s is not None and not round(scenario.control.interval_s * 1e9) <= episode_s * 1e9 < math.inf:
        raise UserError(f"episode_s must be at least one interval ({scenario.control.interval_s:g} s), got {episode_s}")


def draw_episode(
    traces: TrainingTraces, rng: np.random.Generator, options: dict[str, Any] | None, episode_s: float | None
) -> Episode:
    """Draw a trace, an instant in it, and an alpha for each node; options take the place of what is drawn.

    Raises UserError for options that cannot be.
    """
    chosen = options or {}
    unknown = set(chosen) - {"trace", "start", "alpha"}
    if unknown:
        raise UserError(f"unknown reset options {sorted(unknown)}; known: trace, start, alpha")
    control = traces.scenario.control
    i = int(chosen.get("trace", rng.integers(len(traces))))
    if not 0 <= i < len(traces):
        raise UserError(f"option trace must be in [0, {len(traces)}), got {i}")
    trace = traces.trace(i)
    intervals = traces.intervals(i)
    if intervals < 1:
        raise UserError(
            f"trace {trace.meta.name} has less than one interval ({control.interval_s:g} s) after its warm-up"
        )
    asked_s = DEFAULT_EPISODE_S if episode_s is None else episode_s
    steps = min(intervals, max(1, round(asked_s / control.interval_s)))
    first = int(chosen.get("start", rng.integers(intervals - steps + 1)))
    if not 0 <= first < intervals:
        raise UserError(f"option start must be in [0, {intervals}), got {first}")
    nodes = traces.scenario.hardware.nodes
    drawn = rng.uniform(control.alpha_min, control.alpha_max, nodes)
    alpha = np.array(chosen.get("alpha", drawn), np.float64)
    if alpha.shape not in ((), (nodes,)):
        raise UserError(f"option alpha must be one number or one for each of {nodes} nodes, got shape {alpha.shape}")
    if not ((control.alpha_min <= alpha) & (alpha <= control.alpha_max)).all():
        raise UserError(
            f"option alpha must be in [{control.alpha_min:g}, {control.alpha_max:g}], got {chosen['alpha']}"
        )
    start = trace.meta.measure_from_ns + first * traces.interval_ns
    begin = max(start - round(WARM_S * 1e9), min(int(trace.arrival_ns[0]), start))
    return Episode(i, first, min(steps, intervals - first), np.broadcast_to(alpha, nodes).copy(), begin, start)


def warm_up_ends(episode: Episode, interval_ns: int) -> list[int]:
    """Return the ends of the windows before an episode: intervals in the last second, which is observed."""
    ends = [episode.start_ns]
    while True:
        step_ns = interval_ns if episode.start_ns - ends[-1] < _SECOND_NS else max(interval_ns, _SECOND_NS)
        if ends[-1] - step_ns <= episode.begin_ns:
            return ends[::-1]
        ends.append(ends[-1] - step_ns)


class Observer:
    """What a node's agent sees: the observation of the windows that telemetry lets through.

    While none arrives, the last observation stands; before the first one, zeros.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._builder = ObservationBuilder(scenario.slo_ms)
        self._telemetry = Telemetry(scenario.telemetry)
        self._last = np.zeros(SIZE, np.float32)

    def reset(self, seed: int) -> None:
        """Forget all windows; what is lost from now on depends on the seed alone."""
        self._builder.reset()
        self._telemetry.reset(seed)
        self._last = np.zeros(SIZE, np.float32)

    def see(self, window: WindowStats) -> FloatArray:
        """Take the newest window; return the observation, [17], a new array."""
        for arrived in self._telemetry.pass_on(window):
            self._last = self._builder.update(arrived)
        return self._last.copy()

    @property
    def last(self) -> FloatArray:
        """The last observation again, [17], a new array."""
        return self._last.copy()


def telemetry_seed(scenario: Scenario, rng: np.random.Generator) -> int:
    """Return a seed for what telemetry loses; where it loses nothing, nothing is drawn."""
    return int(rng.integers(2**31)) if scenario.telemetry.loss > 0 else 0
