"""A guard for what learns in service: it may act while its feedback is to be believed and latency is no worse for it.

What the learner is told must agree with what the observation shows. It begins with a small reach. Blocks in which it
acts and blocks in which it has one step less of reach, drawn by lot so that no rhythm of the load can be taken for an
effect, then tell whether it harms: of their latency, what the load explains is taken out by a regression. The longer no
harm shows, the further it may go. One node sees no counterfactual; in a cluster control nodes show it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from helm_rl.errors import UserError
from helm_rl.metrics import WindowStats

FEATURES = 4
"""Of a sample's load, on which alpha has no influence: a constant, ln of the arrivals and of the history per request,
share of returning users."""
Gains = tuple[float, float]
"""How much better latency was than the load explains, in ln of P99, by the feedback and by the observation."""
_MOST_SETTING = 1_000_000
_MOST_S = {"sample_s": 600.0, "block_s": 1e6, "rest_s": 1e6}
_MOST_REST = 1 << 30  # intervals: with one a second, 34 years
_MOST_REACH = 1_000
_FIRST_VARIANCE = 100.0  # of each weight, before any sample
_LEAST_SAMPLES, _LEAST_BLOCKS = 8, 3  # before anything is said of them
_PLAN = (False, True, True, True)  # whether the learner has its whole reach, for blocks in an order drawn by lot


class Mode(Enum):
    """What a block is for: to show what one step less of reach would have been, to act, or to keep still after harm."""

    CONTROL = 0
    ACT = 1
    REST = 2


@dataclass(frozen=True)
class GuardSettings:
    """How long samples and blocks are, and what a verdict needs.

    Args:
        sample_s: seconds of a sample, to the nearest whole interval, at least one.
        block_s: seconds of a block, to the nearest whole sample, at least one.
        settle_s: of these, the first that are not counted: what the block before left.
        agree: standard errors by which latencies of the feedback must go with those of the observation, from sample to
            sample, for the feedback to be believed.
        patience: samples within which it must have come to be believed.
        harm: standard errors by which blocks of acting must be worse than control blocks to end it.
        widen: blocks of acting, no worse than those of control, after which the learner may go one step further.
        rest_s: seconds for which it keeps still after harm, or if it is not believed; doubled each time.
        memory: samples and blocks that are remembered.

    Raises:
        UserError: a value lies outside its range.
    """

    sample_s: float = 5.0
    block_s: float = 60.0
    settle_s: float = 20.0
    agree: float = 3.0
    patience: int = 60
    harm: float = 2.33
    widen: int = 8
    rest_s: float = 1_000.0
    memory: int = 150

    def __post_init__(self) -> None:
        for name, least in (("patience", 2), ("widen", 1), ("memory", _LEAST_SAMPLES)):
            value = getattr(self, name)
            if not least <= value <= _MOST_SETTING:
                raise UserError(f"guard: {name} must be at least {least} and at most {_MOST_SETTING:,}, not {value!r}")
        for name, most in _MOST_S.items():
            if not 0.0 < getattr(self, name) <= most:
                raise UserError(f"guard: {name} must be above 0 and at most {most:g}, not {getattr(self, name)!r}")
        if not 0.0 <= self.settle_s < self.block_s:
            raise UserError(
                f"guard: settle_s must be at least 0 and below block_s = {self.block_s:g}, not {self.settle_s!r}"
            )
        for name in ("agree", "harm"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise UserError(f"guard: {name} must be a number of at least 0, not {getattr(self, name)!r}")


@dataclass(frozen=True)
class ExpectedState:
    """What `Expected` has learnt: weights [FEATURES], inverse [FEATURES][FEATURES], and from how many samples."""

    weights: list[float]
    inverse: list[list[float]]
    seen: int


@dataclass(frozen=True)
class GuardState:
    """What a guard has seen, so that after a restart it need not see all of it again; the block in progress is lost.

    claimed, observed: ln of the P99 of the samples that are remembered, by the feedback and by the observation; acting,
    control: gains by both of the blocks that are remembered; cost, p99: what loads cost by either; reach: steps that
    the learner may go; since: blocks of acting since that changed; samples: how many of them had numbers; left:
    intervals of rest still to come.
    """

    claimed: list[float]
    observed: list[float]
    acting: list[Gains]
    control: list[Gains]
    cost: ExpectedState
    p99: ExpectedState
    reach: int
    since: int
    samples: int
    tripped: int
    left: int


@dataclass
class Sums:
    """Sums over the intervals of a sample.

    claimed, observed: P99, in ms by the feedback and over the SLO as observations had it, of each interval in which it
    was a number and a request completed: else it is that of the interval before. The margins are weighted with the
    arrivals.
    """

    arrivals: int = 0
    returning: int = 0
    history_tokens: int = 0
    link_busy_ns: int = 0
    compute_busy_ns: int = 0
    length_ns: int = 0
    emb_margin_ms: float = 0.0
    kv_margin_ms: float = 0.0
    kv_margin_link_ms: float = 0.0
    claimed: list[float] = field(default_factory=list)
    observed: list[float] = field(default_factory=list)

    def add(self, window: WindowStats, observed: float) -> None:
        """Add one interval."""
        for name in ("arrivals", "returning", "history_tokens", "link_busy_ns", "compute_busy_ns"):
            setattr(self, name, getattr(self, name) + getattr(window, name))
        for name in ("emb_margin_ms", "kv_margin_ms", "kv_margin_link_ms"):
            setattr(self, name, getattr(self, name) + window.arrivals * getattr(window, name))
        self.length_ns += window.length_ns
        for values, value in ((self.claimed, window.p99_ms), (self.observed, observed)):
            if window.completed and math.isfinite(value) and value > 0:
                values.append(value)

    def costs(self) -> tuple[float, float]:
        """Return the mean ln of P99 as claimed and as observed; NaN where nothing was measured."""
        claimed, observed = (
            float(np.mean(np.log(values))) if values else math.nan for values in (self.claimed, self.observed)
        )
        return claimed, observed

    def load(self) -> npt.NDArray[np.float64]:
        """Return the features of the load, float64 [FEATURES]."""
        requests = max(self.arrivals, 1)
        return np.array(
            [1.0, math.log(requests), math.log1p(self.history_tokens / requests), self.returning / requests]
        )


class Expected:
    """Recursive least squares with forgetting: what a load costs on average.

    What a load does not tell, such as the weight of users who never return, is forgotten down to what was known at
    first, and no further: without that bound it is forgotten without end, until nothing comes out but noise.
    """

    def __init__(self, state: ExpectedState | None = None, forget: float = 0.995) -> None:
        self._forget = forget
        self._weights = np.zeros(FEATURES) if state is None else np.array(state.weights)
        self._inverse = np.eye(FEATURES) * _FIRST_VARIANCE if state is None else np.array(state.inverse)
        self._seen = 0 if state is None else state.seen

    def state(self) -> ExpectedState:
        """Return what was learnt; nothing in it is shared."""
        return ExpectedState(self._weights.tolist(), self._inverse.tolist(), self._seen)

    def better(self, load: npt.NDArray[np.float64], cost: float) -> float:
        """Return expectation less cost, before this sample is learnt from; NaN where too few were seen, or it is."""
        if not math.isfinite(cost):
            return math.nan
        gain = self._inverse @ load
        gain = gain / (self._forget + load @ gain)
        off = cost - float(self._weights @ load)
        self._weights += gain * off
        self._inverse = (self._inverse - np.outer(gain, load @ self._inverse)) / self._forget
        within = np.sqrt(_FIRST_VARIANCE / np.maximum(self._inverse.diagonal(), _FIRST_VARIANCE))
        self._inverse *= np.outer(within, within)
        self._seen += 1
        return -off if self._seen > 2 * FEATURES else math.nan


def agreement(first: Sequence[float] | deque[float], second: Sequence[float] | deque[float]) -> float:
    """Return the slope of a straight line through pairs of numbers, in standard errors; 0 where nothing varies.

    Infinity where the pairs lie on a line that rises, and its negative where it falls.
    """
    if len(first) < _LEAST_SAMPLES:
        return 0.0
    x, y = np.array(first), np.array(second)
    x, y = x - x.mean(), y - y.mean()
    if min(x @ x, y @ y) <= 1e-9 * x.size:
        return 0.0
    r = float(x @ y) / math.sqrt(float(x @ x) * float(y @ y))
    rest = 1.0 - min(r * r, 1.0)
    return math.copysign(math.inf, r) if rest < 1e-12 else r * math.sqrt((x.size - 2) / rest)


def worse(acting: Sequence[Gains] | deque[Gains], control: Sequence[Gains] | deque[Gains]) -> float:
    """Return by how many standard errors gains of acting are below those of control, by feedback or observation.

    NaN with too few of them. It is Student's t of two samples of one variance, as the number that is as unlikely by the
    normal law: of a few blocks, two standard errors say little (Wallace, "Bounds on normal approximations to Student's
    and the chi-square distributions", 1959).
    """
    counts = len(acting), len(control)
    if min(counts) < _LEAST_BLOCKS:
        return math.nan
    with_, without = np.array(acting), np.array(control)
    free = sum(counts) - 2
    variance = (with_.var(axis=0) * counts[0] + without.var(axis=0) * counts[1]) / free
    error = np.sqrt(variance * (1 / counts[0] + 1 / counts[1]))
    t = float(np.max((without.mean(axis=0) - with_.mean(axis=0)) / np.maximum(error, 1e-9)))
    return math.copysign((8 * free + 1) / (8 * free + 3) * math.sqrt(free * math.log1p(t * t / free)), t)


class Block:
    """The samples of a block on one node; `gains` are those of its samples that count, `done` says when it is over."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._sums = Sums()
        self._intervals = self._samples = 0
        self.gains: list[Gains] = []

    @property
    def done(self) -> bool:
        """Whether all of its samples are there."""
        return self._samples == self._judge.block

    def add(self, window: WindowStats, observed: float) -> Sums | None:
        """Add one interval; return the sample that ends with it; observed: P99 over the SLO by the observation."""
        self._sums.add(window, observed)
        self._intervals += 1
        if self._intervals % self._judge.sample:
            return None
        sums, self._sums = self._sums, Sums()
        gains = self._judge.learn(sums)
        self._samples += 1
        if self._samples > self._judge.settle:
            self.gains.append(gains)
        return sums

    def gain(self) -> Gains:
        """Return the mean gain by the feedback and by the observation; NaN where a sample had none."""
        claimed, observed = np.mean(self.gains, axis=0).tolist()
        return claimed, observed


class Judge:
    """What samples and blocks have told: whether the feedback is to be believed, and whether the learner harms.

    A subclass says which node is in which block, and what to rest means.
    """

    def __init__(self, settings: GuardSettings | None, interval_s: float, state: GuardState | None = None) -> None:
        self.settings = GuardSettings() if settings is None else settings
        self.sample = max(1, round(self.settings.sample_s / interval_s))
        """Intervals of a sample."""
        sample_s = self.sample * interval_s
        self.block = max(1, round(self.settings.block_s / sample_s))
        """Samples of a block."""
        self.settle = min(round(self.settings.settle_s / sample_s), self.block - 1)
        """Of these, the first that are not counted."""
        self._rest_intervals = max(1, round(self.settings.rest_s / interval_s))
        self.tripped = 0
        """Times that the learner was made to rest."""
        self._forget()
        if state is not None:
            self._claimed.extend(state.claimed)
            self._observed.extend(state.observed)
            self._acting.extend(state.acting)
            self._control.extend(state.control)
            self._cost, self._p99 = Expected(state.cost), Expected(state.p99)
            self._reach, self._since, self._samples = state.reach, state.since, state.samples
            self.tripped, self._left = state.tripped, state.left

    def state(self) -> GuardState:
        """Return what was seen; nothing in it is shared."""
        return GuardState(
            claimed=list(self._claimed),
            observed=list(self._observed),
            acting=list(self._acting),
            control=list(self._control),
            cost=self._cost.state(),
            p99=self._p99.state(),
            reach=self._reach,
            since=self._since,
            samples=self._samples,
            tripped=self.tripped,
            left=self._left,
        )

    @property
    def believed(self) -> bool:
        """Whether what the learner is told agrees with the observation."""
        return agreement(self._claimed, self._observed) > self.settings.agree

    @property
    def may_act(self) -> bool:
        """Whether the learner may act: it is told what is to be believed, and does not rest."""
        return self.believed and not self._left

    @property
    def reach(self) -> int:
        """Steps that the learner may go, from 1."""
        return self._reach

    def learn(self, sums: Sums) -> Gains:
        """Learn what a sample's load costs; return how much better it was than that, in ln of P99, by both."""
        claimed, observed = sums.costs()
        if math.isfinite(claimed) and math.isfinite(observed):
            self._samples += 1
            self._claimed.append(claimed)
            self._observed.append(observed)
        load = sums.load()
        return self._cost.better(load, claimed), self._p99.better(load, observed)

    def _remember(self, acts: bool, gains: Gains) -> None:
        """Remember a block by what it was for."""
        if not all(map(math.isfinite, gains)):
            return
        (self._acting if acts else self._control).append(gains)
        if acts:
            self._since += 1

    def _verdict(self) -> bool:
        """Return whether the learner must rest, and let it go further where it has long shown no harm."""
        harm = worse(self._acting, self._control)
        if harm > self.settings.harm or (self._samples >= self.settings.patience and not self.believed):
            return True
        if self._since >= self.settings.widen and harm <= 0.0:
            self._reach, self._since = min(self._reach + 1, _MOST_REACH), 0
        return False

    def _rest(self) -> None:
        self._left = min(self._rest_intervals * 2 ** min(self.tripped, 30), _MOST_REST)
        self.tripped += 1

    def _forget(self) -> None:
        memory = self.settings.memory
        self._claimed, self._observed = (deque[float](maxlen=memory) for _ in range(2))
        self._acting, self._control = (deque[Gains](maxlen=memory) for _ in range(2))
        self._cost, self._p99 = Expected(), Expected()
        self._samples = self._since = self._left = 0
        self._reach = 1


class Guard(Judge):
    """Draws what each block of one node is for, measures it, and ends what harms or is not to be believed.

    Args:
        settings: of blocks and verdicts.
        seed: of what is drawn.
        interval_s: seconds between decisions.
        state: what another one has seen, to go on from there.
    """

    def __init__(
        self,
        settings: GuardSettings | None = None,
        seed: int = 0,
        interval_s: float = 1.0,
        state: GuardState | None = None,
    ) -> None:
        self._plan: list[bool] = []
        super().__init__(settings, interval_s, state)
        self._rng = np.random.default_rng([seed, 0x5EED])
        if self._left:
            self.mode = Mode.REST
        else:
            self._start_block()

    def take(self, window: WindowStats, observed: float) -> Sums | None:
        """Take the window that the last decision ruled; return the sample that ends with it.

        observed: P99 over the SLO as the observation has it; a number that is none counts for nothing.
        """
        if self.mode is Mode.REST:
            self._left -= 1
            if self._left == 0:
                self._forget()
                self._plan = []
                self._start_block()
            return None
        sums = self._block.add(window, observed)
        if self._block.done:
            self._remember(self.mode is Mode.ACT, self._block.gain())
            if self._verdict():
                self._rest()
                self.mode = Mode.REST
            else:
                self._start_block()
        return sums

    def interrupt(self) -> None:
        """Begin the block anew, after something else has steered or where the service does: its windows are not one."""
        if self.mode is not Mode.REST:
            self._block = Block(self)

    def _start_block(self) -> None:
        acts = False
        if self.believed:
            if not self._plan:
                self._plan = [*_PLAN]
                self._rng.shuffle(self._plan)
            acts = self._plan.pop()
        self.mode = Mode.ACT if acts else Mode.CONTROL
        self._block = Block(self)


class NodeGuard(Protocol):
    """The guard as the adapter of one node sees it: `Guard`, or a node of `ControlNodes`."""

    @property
    def mode(self) -> Mode:
        """What the block is for."""

    @property
    def reach(self) -> int:
        """As `Judge.reach`."""

    @property
    def sample(self) -> int:
        """As `Judge.sample`."""

    def take(self, window: WindowStats, observed: float) -> Sums | None:
        """As `Guard.take`."""

    def interrupt(self) -> None:
        """As `Guard.interrupt`; a node of a cluster, whose block goes on, counts for nothing until it is over."""


class ControlNodes(Judge):
    """A guard for a cluster: in each block the learner acts on some nodes, and others, drawn anew, are controls.

    What the hour does to latency it does to all of them, so that of a block one number counts: by how much acting nodes
    were better than control nodes. A quarter of the nodes, at least one, are controls. A node that has not reported in
    a whole block, being down, or that was interrupted in it counts for nothing in it.

    Args:
        nodes: how many there are, at least 2.
        settings: as for `Guard`; patience counts samples of all nodes.
        seed: of what is drawn.
        interval_s: seconds between decisions.

    Raises:
        UserError: there are too few nodes for a control.
    """

    def __init__(
        self, nodes: int, settings: GuardSettings | None = None, seed: int = 0, interval_s: float = 1.0
    ) -> None:
        if nodes < 2:
            raise UserError(f"guard: control nodes need a cluster of at least 2 nodes, not {nodes}")
        super().__init__(settings, interval_s)
        self._rng = np.random.default_rng([seed, 0x5EED])
        self.nodes = [_Node(self) for _ in range(nodes)]
        self._reported: set[_Node] = set()
        self._start_block()

    def report(self, node: _Node, window: WindowStats, observed: float) -> Sums | None:
        """Take the window of one node. When one reports again, all that are up have, and an interval is over."""
        if node in self._reported:
            self._reported.clear()
            self._end_interval()
        self._reported.add(node)
        return None if node.mode is Mode.REST else node.block.add(window, observed)

    def _end_interval(self) -> None:
        if self._left:
            self._left -= 1
            if self._left == 0:
                self._forget()
                self._start_block()
            return
        self._at += 1
        if self._at < self.block * self.sample:
            return
        gains: dict[Mode, list[Gains]] = {Mode.ACT: [], Mode.CONTROL: []}
        for node in self.nodes:
            if node.block.done and not node.interrupted and all(map(math.isfinite, gain := node.block.gain())):
                gains[node.mode].append(gain)
        if all(gains.values()):
            acting, control = (np.mean(each, axis=0) for each in gains.values())
            self._remember(True, tuple((acting - control).tolist()))
            self._remember(False, (0.0, 0.0))
        if self._verdict():
            self._rest()
            for node in self.nodes:
                node.mode = Mode.REST
        else:
            self._start_block()

    def _start_block(self) -> None:
        count = len(self.nodes)
        acting = count - max(1, count // 4) if self.believed else 0
        modes = [Mode.ACT] * acting + [Mode.CONTROL] * (count - acting)
        self._rng.shuffle(modes)
        self._at = 0
        for node, mode in zip(self.nodes, modes, strict=True):
            node.mode, node.block, node.interrupted = mode, Block(self), False


class _Node:
    """One node of `ControlNodes`."""

    def __init__(self, cluster: ControlNodes) -> None:
        self._cluster = cluster
        self.mode = Mode.CONTROL
        self.block = Block(cluster)
        self.interrupted = False

    @property
    def reach(self) -> int:
        """Steps that the cluster's learner may go."""
        return self._cluster.reach

    @property
    def sample(self) -> int:
        """Intervals of a sample."""
        return self._cluster.sample

    def take(self, window: WindowStats, observed: float) -> Sums | None:
        """Report a window; return the sample that ends with it."""
        return self._cluster.report(self, window, observed)

    def interrupt(self) -> None:
        """Count for nothing until the block is over."""
        self.interrupted = True
