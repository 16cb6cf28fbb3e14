"""A guard for what learns in service: blocks of trying, of acting and of neither tell whether it may act.

Latency is all that counts, and it is noisy: what a load does to it is taken out by a regression on the load (no
counterfactual is seen on one node), and a verdict needs many blocks. What is tried in a block is drawn by lot, so that
no rhythm of the load can be taken for an effect.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from helm_rl.errors import UserError
from helm_rl.metrics import WindowStats

FEATURES = 4
"""Of a block's load, on which alpha has no influence: a constant, ln of the arrivals and of the history per request,
share of returning users."""


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
        proof: standard errors by which following what was learnt must have been better than not, judged before each
            lesson was learnt, by the feedback and by the observation.
        harm: standard errors by which blocks of acting must be worse than those without to end it.
        rest: intervals for which it then keeps still; doubled each time.
        memory: blocks that are remembered.

    Raises:
        UserError: a value lies outside its range.
    """

    block: int = 20
    settle: int = 6
    probation: int = 40
    proof: float = 1.28
    harm: float = 1.64
    rest: int = 1_000
    memory: int = 100

    def __post_init__(self) -> None:
        if not 0 <= self.settle < self.block:
            raise UserError(f"guard: settle must be at least 0 and below block = {self.block}, not {self.settle!r}")
        for name in ("probation", "rest", "memory"):
            if getattr(self, name) < 2:
                raise UserError(f"guard: {name} must be at least 2, not {getattr(self, name)!r}")
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
    """What `_Expected` has learnt: weights [FEATURES], inverse [FEATURES][FEATURES], and from how many blocks."""

    weights: list[float]
    inverse: list[list[float]]
    seen: int


@dataclass(frozen=True)
class GuardState:
    """What a guard has seen, so that after a restart it need not see all of it again; the block in progress is lost.

    claimed, observed, acting, without: gains of the blocks that are remembered; left: intervals of rest still to come.
    """

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
class _Sums:
    """Sums over the counted intervals of a block."""

    tail_cost: float = 0.0
    completed: int = 0
    arrivals: int = 0
    returning: int = 0
    history_tokens: int = 0
    observed: list[float] = field(default_factory=list)

    def add(self, window: WindowStats, observed: float) -> None:
        for name in ("completed", "arrivals", "returning", "history_tokens"):
            setattr(self, name, getattr(self, name) + getattr(window, name))
        self.tail_cost += window.tail_cost_sum
        if math.isfinite(observed) and observed > 0:
            self.observed.append(observed)

    def load(self) -> npt.NDArray[np.float64]:
        """Return the features of the load, float64 [FEATURES]."""
        requests = max(self.arrivals, 1)
        return np.array(
            [1.0, math.log(requests), math.log1p(self.history_tokens / requests), self.returning / requests]
        )


class _Expected:
    """Recursive least squares with forgetting: what a load costs on average."""

    def __init__(self, state: ExpectedState | None = None, forget: float = 0.99) -> None:
        self._forget = forget
        self._weights = np.zeros(FEATURES) if state is None else np.array(state.weights)
        self._inverse = np.eye(FEATURES) * 100.0 if state is None else np.array(state.inverse)
        self._seen = 0 if state is None else state.seen

    def state(self) -> ExpectedState:
        return ExpectedState(self._weights.tolist(), self._inverse.tolist(), self._seen)

    def better(self, load: npt.NDArray[np.float64], cost: float) -> float:
        """Return expectation less cost, before this block is learnt from; NaN where too few were seen."""
        gain = self._inverse @ load
        gain = gain / (self._forget + load @ gain)
        off = cost - float(self._weights @ load)
        self._weights += gain * off
        self._inverse = (self._inverse - np.outer(gain, load @ self._inverse)) / self._forget
        self._seen += 1
        return -off if self._seen > 2 * FEATURES else math.nan


def _z(values: deque[float]) -> float:
    """Return the mean over its standard error; 0 where nothing varies."""
    if len(values) < 2:
        return 0.0
    spread = float(np.std(values, ddof=1))
    return 0.0 if spread <= 1e-12 else float(np.mean(values)) / spread * math.sqrt(len(values))


class Guard:
    """Draws what each block is for, measures it, and ends what harms or proves nothing.

    Args:
        settings: of blocks and verdicts.
        seed: of what is drawn.
        state: what another one has seen, to go on from there.
    """

    def __init__(self, settings: GuardSettings | None = None, seed: int = 0, state: GuardState | None = None) -> None:
        self.settings = GuardSettings() if settings is None else settings
        self._rng = np.random.default_rng([seed, 0x5EED])
        self._plan: list[Mode] = []
        self.tripped = 0
        """Times that the learner was made to rest."""
        self._forget()
        if state is not None:
            self._claimed.extend(state.claimed)
            self._observed.extend(state.observed)
            self._acting.extend(state.acting)
            self._without.extend(state.without)
            self._cost, self._p99 = _Expected(state.cost), _Expected(state.p99)
            self._tried, self.tripped, self._left = state.tried, state.tripped, state.left
        if self._left:
            self.mode = Mode.REST
        else:
            self._start_block()

    def state(self) -> GuardState:
        """Return what was seen; nothing in it is shared."""
        return GuardState(
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

    @property
    def proven(self) -> bool:
        """Whether what was learnt may be acted on."""
        enough = len(self._claimed) >= self.settings.probation
        return enough and min(_z(self._claimed), _z(self._observed)) > self.settings.proof

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

    def judge(self, verdict: Verdict, followed: float) -> None:
        """Learn from a block of trying how good it would have been to follow the learner.

        followed: what the learner expected of the side that was tried, from -1 to 1, before this block taught it.
        """
        if not (math.isfinite(verdict.claimed) and math.isfinite(verdict.observed)):
            return
        self._claimed.append(followed * verdict.claimed)
        self._observed.append(followed * verdict.observed)
        self._tried += 1
        if self._tried >= self.settings.probation and not self.proven:
            self._rest()

    def _end_block(self) -> Verdict:
        sums, mode = self._sums, self.mode
        claimed = observed = math.nan
        if sums.completed and sums.tail_cost > 0:
            claimed = self._cost.better(sums.load(), math.log(sums.tail_cost / sums.completed))
        if sums.observed:
            observed = self._p99.better(sums.load(), float(np.mean(np.log(sums.observed))))
        if math.isfinite(claimed) and mode in (Mode.ACT, Mode.OFF):
            (self._acting if mode is Mode.ACT else self._without).append(claimed)
        self._start_block()
        if self._harms():
            self._rest()
        return Verdict(mode, claimed, observed)

    def _harms(self) -> bool:
        """Whether acting has been worse than not, beyond chance."""
        if min(len(self._acting), len(self._without)) < 5:
            return False
        acting, without = np.array(self._acting), np.array(self._without)
        error = math.sqrt(acting.var(ddof=1) / acting.size + without.var(ddof=1) / without.size)
        return bool(acting.mean() - without.mean() < -self.settings.harm * error)

    def _start_block(self) -> None:
        if not self._plan:
            acting = [Mode.ACT] * 6 if self.proven else []
            self._plan = [Mode.TRY, Mode.TRY, Mode.OFF, *acting]
            self._rng.shuffle(self._plan)
        self.mode = self._plan.pop()
        self._at, self._sums = 0, _Sums()

    def _rest(self) -> None:
        self._left = self.settings.rest * 2**self.tripped
        self.tripped += 1
        self.mode = Mode.REST

    def _forget(self) -> None:
        memory = self.settings.memory
        self._claimed, self._observed = deque[float](maxlen=memory), deque[float](maxlen=memory)
        self._acting, self._without = deque[float](maxlen=memory), deque[float](maxlen=memory)
        self._cost, self._p99 = _Expected(), _Expected()
        self._tried = self._left = 0
        self._plan = []
