"""A guard for what learns in service: blocks of trying, of acting and of neither tell whether it may act.

Latency is all that counts, and it is noisy: what a load does to it is taken out by a regression on the load, and a
verdict needs many blocks. What is tried in a block is drawn by lot, so that no rhythm of the load can be taken for an
effect. One node sees no counterfactual; in a cluster control nodes show it.
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
"""Of a block's load, on which alpha has no influence: a constant, ln of the arrivals and of the history per request,
share of returning users."""
_MOST_SETTING = 1_000_000
_MOST_REST = 1 << 30  # intervals: with one a second, 34 years
_FIRST_VARIANCE = 100.0  # of each weight, before any block


class Mode(Enum):
    """What a block is for: neither, trying one of two sides, acting on what was learnt, or keeping still after harm."""

    OFF = 0
    TRY = 1
    ACT = 2
    REST = 3


@dataclass(frozen=True)
class GuardSettings:
    """How long blocks are, and what a verdict needs.

    Args:
        block: intervals of a block.
        settle: of these, the first that are not counted: what the block before left.
        probation: blocks of trying after which the learner must have proven itself.
        proof: standard errors by which blocks must have been the better, the more they followed what had been learnt
            before them, by the feedback and by the observation.
        harm: standard errors by which blocks of acting must be worse than those without to end it.
        rest: intervals for which it then keeps still; doubled each time.
        memory: blocks that are remembered.

    None of the whole numbers may be above 1,000,000.

    Raises:
        UserError: a value lies outside its range.
    """

    block: int = 20
    settle: int = 6
    probation: int = 40
    proof: float = 1.28
    harm: float = 1.64
    rest: int = 1_000
    memory: int = 150

    def __post_init__(self) -> None:
        if not 0 <= self.settle < self.block:
            raise UserError(f"guard: settle must be at least 0 and below block = {self.block}, not {self.settle!r}")
        for name, least in (("block", 1), ("probation", 2), ("rest", 2), ("memory", 2)):
            value = getattr(self, name)
            if not least <= value <= _MOST_SETTING:
                most = f" and at most {_MOST_SETTING:,}" if value > _MOST_SETTING else ""
                raise UserError(f"guard: {name} must be at least {least}{most}, not {value!r}")
        for name in ("proof", "harm"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise UserError(f"guard: {name} must be a number of at least 0, not {getattr(self, name)!r}")


@dataclass(frozen=True)
class Verdict:
    """A block that is over.

    mode: what it was for; claimed: how much better latency was than the load explains, in ln of the mean tail cost, by
    the feedback; observed: the same by the observation. NaN where nothing was measured.
    """

    mode: Mode
    claimed: float
    observed: float


@dataclass(frozen=True)
class ExpectedState:
    """What `Expected` has learnt: weights [FEATURES], inverse [FEATURES][FEATURES], and from how many blocks."""

    weights: list[float]
    inverse: list[list[float]]
    seen: int


@dataclass(frozen=True)
class GuardState:
    """What a guard has seen, so that after a restart it need not see all of it again; the block in progress is lost.

    claimed, observed: gains of the blocks of trying and of neither that are remembered, and followed: what the learner
    expected of what each tried, 0 where it was not followed; acting, without: gains of the blocks of acting and of
    neither; left: intervals of rest still to come.
    """

    followed: list[float]
    claimed: list[float]
    observed: list[float]
    acting: list[float]
    without: list[float]
    cost: ExpectedState
    p99: ExpectedState
    tried: int
    tripped: int
    left: int


@dataclass
class Sums:
    """Sums over the counted intervals of a block.

    observed: P99 over the SLO as observations had it, of each interval in which it was a number.
    """

    tail_cost: float = 0.0
    completed: int = 0
    arrivals: int = 0
    returning: int = 0
    history_tokens: int = 0
    observed: list[float] = field(default_factory=list)

    def add(self, window: WindowStats, observed: float) -> None:
        """Add one interval."""
        for name in ("completed", "arrivals", "returning", "history_tokens"):
            setattr(self, name, getattr(self, name) + getattr(window, name))
        self.tail_cost += window.tail_cost_sum
        if math.isfinite(observed) and observed > 0:
            self.observed.append(observed)

    def cost(self) -> tuple[float, float]:
        """Return ln of the mean tail cost, and the mean ln of the observed P99; NaN where nothing was measured."""
        claimed = math.log(self.tail_cost / self.completed) if self.completed and self.tail_cost > 0 else math.nan
        return claimed, float(np.mean(np.log(self.observed))) if self.observed else math.nan

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

    def __init__(self, state: ExpectedState | None = None, forget: float = 0.99) -> None:
        self._forget = forget
        self._weights = np.zeros(FEATURES) if state is None else np.array(state.weights)
        self._inverse = np.eye(FEATURES) * _FIRST_VARIANCE if state is None else np.array(state.inverse)
        self._seen = 0 if state is None else state.seen

    def state(self) -> ExpectedState:
        """Return what was learnt; nothing in it is shared."""
        return ExpectedState(self._weights.tolist(), self._inverse.tolist(), self._seen)

    def better(self, load: npt.NDArray[np.float64], cost: float) -> float:
        """Return expectation less cost, before this block is learnt from; NaN where too few were seen, or it is NaN."""
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


def standing(followed: Sequence[float] | deque[float], gains: Sequence[float] | deque[float]) -> float:
    """Return the slope of the gains over how far the learner was followed, in standard errors; 0 where nothing varies.

    The straight line has an intercept: what the hours did to blocks of all kinds alike is no merit of the learner.
    """
    if len(gains) < 3:
        return 0.0
    x, y = np.array(followed), np.array(gains)
    x, y = x - x.mean(), y - y.mean()
    spread = float(x @ x)
    if spread <= 1e-12:
        return 0.0
    slope = float(x @ y) / spread
    rest = y - slope * x
    error = math.sqrt(float(rest @ rest) / (y.size - 2) / spread)
    return slope / error if error > 1e-12 else 0.0


class Judge:
    """What blocks have told: whether a learner has proven itself, and whether it harms.

    Gains of blocks are remembered as in `GuardState`. A subclass says what blocks are, and what to rest means.
    """

    def __init__(self, settings: GuardSettings | None) -> None:
        self.settings = GuardSettings() if settings is None else settings
        self.tripped = 0
        """Times that the learner was made to rest."""
        self._forget()

    @property
    def proven(self) -> bool:
        """Whether what was learnt may be acted on."""
        if self._tried < self.settings.probation:
            return False
        found = (standing(self._followed, gains) for gains in (self._claimed, self._observed))
        return min(found) > self.settings.proof

    def judge(self, verdict: Verdict, followed: float) -> None:
        """Learn from a block of trying how good it would have been to follow the learner.

        followed: what the learner expected of the side that was tried, from -1 to 1, before this block taught it.
        While it rests nothing is judged: of the last blocks several may come in together.
        """
        if self._left or not self._weigh(verdict, followed):
            return
        self._tried += 1
        if self._tried >= self.settings.probation and not self.proven:
            self._rest()

    def _weigh(self, verdict: Verdict, followed: float) -> bool:
        """Remember a block with what it says of the learner; False: nothing was measured in it."""
        measured = math.isfinite(verdict.claimed) and math.isfinite(verdict.observed)
        if measured:
            self._followed.append(followed)
            self._claimed.append(verdict.claimed)
            self._observed.append(verdict.observed)
        return measured

    def _remember(self, verdict: Verdict) -> None:
        """Remember a block of acting, or one without, which shows what comes of following nobody."""
        if verdict.mode is Mode.OFF:
            self._weigh(verdict, 0.0)
        if math.isfinite(verdict.claimed) and verdict.mode in (Mode.ACT, Mode.OFF):
            (self._acting if verdict.mode is Mode.ACT else self._without).append(verdict.claimed)

    def _harms(self) -> bool:
        """Whether acting has been worse than not, beyond chance."""
        if min(len(self._acting), len(self._without)) < 5:
            return False
        acting, without = np.array(self._acting), np.array(self._without)
        error = math.sqrt(acting.var(ddof=1) / acting.size + without.var(ddof=1) / without.size)
        return bool(acting.mean() - without.mean() < -self.settings.harm * error)

    def _rest(self) -> None:
        self._left = min(self.settings.rest * 2 ** min(self.tripped, 30), _MOST_REST)
        self.tripped += 1

    def _forget(self) -> None:
        memory = self.settings.memory
        self._followed = deque[float](maxlen=memory)
        self._claimed, self._observed = deque[float](maxlen=memory), deque[float](maxlen=memory)
        self._acting, self._without = deque[float](maxlen=memory), deque[float](maxlen=memory)
        self._cost, self._p99 = Expected(), Expected()
        self._tried = self._left = 0


class Guard(Judge):
    """Draws what each block of one node is for, measures it, and ends what harms or proves nothing.

    Args:
        settings: of blocks and verdicts.
        seed: of what is drawn.
        state: what another one has seen, to go on from there.
    """

    def __init__(self, settings: GuardSettings | None = None, seed: int = 0, state: GuardState | None = None) -> None:
        self._plan: list[Mode] = []
        super().__init__(settings)
        self._rng = np.random.default_rng([seed, 0x5EED])
        if state is not None:
            self._followed.extend(state.followed)
            self._claimed.extend(state.claimed)
            self._observed.extend(state.observed)
            self._acting.extend(state.acting)
            self._without.extend(state.without)
            self._cost, self._p99 = Expected(state.cost), Expected(state.p99)
            self._tried, self.tripped, self._left = state.tried, state.tripped, state.left
        if self._left:
            self.mode = Mode.REST
        else:
            self._start_block()

    def state(self) -> GuardState:
        """Return what was seen; nothing in it is shared."""
        return GuardState(
            followed=list(self._followed),
            claimed=list(self._claimed),
            observed=list(self._observed),
            acting=list(self._acting),
            without=list(self._without),
            cost=self._cost.state(),
            p99=self._p99.state(),
            tried=self._tried,
            tripped=self.tripped,
            left=self._left,
        )

    def take(self, window: WindowStats, observed: float) -> Verdict | None:
        """Take the window that the last decision ruled; return what its block came to, if that is over.

        observed: P99 over the SLO as the observation has it; a number that is none counts for nothing.
        """
        if self.mode is Mode.REST:
            self._left -= 1
            if self._left == 0:
                self._forget()
                self._start_block()
            return None
        if self._at >= self.settings.settle:
            self._sums.add(window, observed)
        self._at += 1
        return self._end_block() if self._at == self.settings.block else None

    def interrupt(self) -> None:
        """Begin the block anew, after something else has steered or where the service does: its windows are not one."""
        if self.mode is not Mode.REST:
            self._at, self._sums = 0, Sums()

    def _end_block(self) -> Verdict:
        sums, mode = self._sums, self.mode
        claimed, observed = (
            expected.better(sums.load(), cost)
            for expected, cost in zip((self._cost, self._p99), sums.cost(), strict=True)
        )
        verdict = Verdict(mode, claimed, observed)
        self._remember(verdict)
        self._start_block()
        if self._harms():
            self._rest()
        return verdict

    def _start_block(self) -> None:
        if not self._plan:
            acting = [Mode.ACT] * 6 if self.proven else []
            self._plan = [Mode.TRY, Mode.TRY, Mode.OFF, *acting]
            self._rng.shuffle(self._plan)
        self.mode = self._plan.pop()
        self._at, self._sums = 0, Sums()

    def _rest(self) -> None:
        super()._rest()
        self.mode = Mode.REST

    def _forget(self) -> None:
        super()._forget()
        self._plan = []


class NodeGuard(Protocol):
    """The guard as the adapter of one node sees it: `Guard`, or a node of `ControlNodes`."""

    @property
    def mode(self) -> Mode:
        """What the block is for."""

    def take(self, window: WindowStats, observed: float) -> Verdict | None:
        """As `Guard.take`."""

    def interrupt(self) -> None:
        """As `Guard.interrupt`; a node of a cluster, whose block goes on, counts for nothing until it is over."""

    def judge(self, verdict: Verdict, followed: float) -> None:
        """As `Guard.judge`."""


class ControlNodes(Judge):
    """A guard for a cluster: in each block some nodes act or try, and others, drawn anew, show what would have been.

    What the hour does to latency it does to all of them, so that a gain is held against that of the control nodes in
    the same block. Until the learner is proven half of the nodes try and half are controls; from then on a quarter
    each, and the others act. A node that has not reported in a whole block, being down, or that was interrupted in it
    counts for nothing in it: what its block came to is no number.

    Args:
        nodes: how many there are, at least 2.
        settings: as for `Guard`; rest counts intervals of the cluster.
        seed: of what is drawn.

    Raises:
        UserError: there are too few nodes for a control.
    """

    def __init__(self, nodes: int, settings: GuardSettings | None = None, seed: int = 0) -> None:
        if nodes < 2:
            raise UserError(f"guard: control nodes need a cluster of at least 2 nodes, not {nodes}")
        super().__init__(settings)
        self._rng = np.random.default_rng([seed, 0x5EED])
        self.nodes = [_Node(self) for _ in range(nodes)]
        self._reported: set[_Node] = set()
        self._start_block()

    def report(self, node: _Node, window: WindowStats, observed: float) -> None:
        """Take the window of one node. When one reports again, all that are up have, and an interval is over."""
        if node in self._reported:
            self._reported.clear()
            self._end_interval()
        self._reported.add(node)
        if node.mode is not Mode.REST and self._at >= self.settings.settle:
            node.sums.add(window, observed)
            node.counted += 1

    def _end_interval(self) -> None:
        if self._left:
            self._left -= 1
            if self._left == 0:
                self._forget()
                self._start_block()
            return
        self._at += 1
        if self._at < self.settings.block:
            return
        for node in self.nodes:
            node.verdict = Verdict(node.mode, math.nan, math.nan)
        counted = self._at - self.settings.settle
        whole = [node for node in self.nodes if node.counted == counted and not node.interrupted]
        gains = {}
        for node in whole:
            load, costs = node.sums.load(), node.sums.cost()
            gains[node] = self._cost.better(load, costs[0]), self._p99.better(load, costs[1])
        controls = [gains[node] for node in whole if node.mode is Mode.OFF]
        without = np.mean(controls, axis=0) if controls else np.full(2, math.nan)
        for node, gain in gains.items():
            claimed, observed = (float(one) for one in gain - without)
            node.verdict = Verdict(node.mode, claimed, observed)
            self._remember(node.verdict)
        self._start_block()
        if self._harms():
            self._rest()

    def _start_block(self) -> None:
        count = len(self.nodes)
        trying = max(1, count // 4 if self.proven else count // 2)
        controls = max(1, count // 4) if self.proven else count - trying
        modes = [Mode.TRY] * trying + [Mode.OFF] * controls + [Mode.ACT] * (count - trying - controls)
        self._rng.shuffle(modes)
        self._at = 0
        for node, mode in zip(self.nodes, modes, strict=True):
            node.mode, node.sums, node.counted, node.interrupted = mode, Sums(), 0, False

    def _rest(self) -> None:
        super()._rest()
        for node in self.nodes:
            node.mode = Mode.REST


class _Node:
    """One node of `ControlNodes`; verdict: of its last block, until it is taken."""

    def __init__(self, cluster: ControlNodes) -> None:
        self._cluster = cluster
        self.mode = Mode.OFF
        self.sums = Sums()
        self.counted = 0
        self.interrupted = False
        self.verdict: Verdict | None = None

    def take(self, window: WindowStats, observed: float) -> Verdict | None:
        """Report a window; return what this node's block came to, in the first interval after it."""
        self._cluster.report(self, window, observed)
        verdict, self.verdict = self.verdict, None
        return verdict

    def interrupt(self) -> None:
        """Count for nothing until the block is over."""
        self.interrupted = True

    def judge(self, verdict: Verdict, followed: float) -> None:
        """Tell the cluster's guard what was expected of a block of trying."""
        self._cluster.judge(verdict, followed)
