"""The control loop that a serving system embeds: counters are read, alpha is decided upon and applied, on time."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from helm_rl.control import burst
from helm_rl.control.burst import BurstSettings, BurstState, look, new_burst_state
from helm_rl.control.protocol import Controller, Resuming, Watching
from helm_rl.errors import UserError
from helm_rl.metrics import WindowStats
from helm_rl.observation import OBSERVATION_NAMES, ObservationBuilder
from helm_rl.runtime.background import Background, Outcome
from helm_rl.runtime.counters import Adapter, Cause, Counters, StaleTelemetry, masked
from helm_rl.runtime.meter import Meter, Reading
from helm_rl.runtime.steering import Steering

TICK_S = 0.01
LEAST_INTERVAL_S, MOST_INTERVAL_S = 0.005, 10.0
_PATIENCE = 0.5  # of an interval, for the answer that a decision is waiting for
_MOST_AGE = 2.0  # intervals, of the newest reading
_STOP_S = 5.0


class Clock(Protocol):
    """What paces the loop; tests put one of their own in its place."""

    def now_ns(self) -> int:
        """Return the time, which never goes back."""
        ...

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Wait until the event is set, at most so long; return whether it is."""
        ...


class MonotonicClock:
    """The system's monotonic clock."""

    def now_ns(self) -> int:
        """Return its time."""
        return time.monotonic_ns()

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Wait on the event itself."""
        return event.wait(max(seconds, 0.0))


@dataclass
class Status:
    """What a loop has done so far. Its own thread alone writes it; whoever else reads it sees single fields whole.

    fallbacks: intervals in which alpha was left as it was, by their causes, and targets out of range that were clipped;
    refused: readings that were not taken, by theirs; missed: intervals in which no decision fell due, for the loop was
    late; unapplied: targets that the server did not take, or that made way for a newer one before it was asked; masked:
    signals that it cannot give, by their names in the observation; window: what was measured since the decision before,
    None where the last interval had nothing sound to decide upon.
    """

    asked: float = math.nan
    applied: float = math.nan
    intervals: int = 0
    missed: int = 0
    decisions: int = 0
    bursts: int = 0
    unapplied: int = 0
    restarts: int = 0
    age_s: float = math.inf
    fallbacks: Counter[Cause] = field(default_factory=Counter)
    refused: Counter[Cause] = field(default_factory=Counter)
    masked: tuple[str, ...] = ()
    window: WindowStats | None = None


@dataclass(frozen=True)
class Step:
    """One interval: what was asked for, NaN where nothing was; why not; and how long observation and decision took.

    detail: more on the cause; unapplied: why a target of an interval before was not taken.
    """

    asked: float
    applied: float
    cause: Cause | None
    decide_s: float
    detail: str = ""
    unapplied: str = ""


class ControlLoop:
    """Drives alpha of one server, on a thread of the caller's choice.

    Every interval it reads the counters, makes the observation of the window since the last decision, lets the
    controller decide, and asks the server for the target. Where the adapter can be read more often (`period_s`) it is,
    and a burst that the controller finds meanwhile is decided upon at once; the next interval starts there.

    Alpha stays as it is, and the cause is counted, whenever there is nothing sound to decide upon: see `Cause`. What
    is asked for lies within the bounds whatever comes. Calls of the adapter never hold the loop up: an answer that has
    not come within half an interval is late, and counts for the next one if it is not too old by then.

    Args:
        adapter: the server.
        steering: the controller, or that with its bounds.
        interval_s: between decisions, .005 to 10 s.
        slo_ms: the latency that requests are to stay under.
        alpha0: what is taken to be applied as long as neither counters nor `apply` have said; None: not known.
        watch: called after each interval; what it raises ends the loop.
        clock: in place of the system's.
        seed: for the controller's `reset`.
    """

    def __init__(
        self,
        adapter: Adapter,
        steering: Steering | Controller,
        interval_s: float,
        *,
        slo_ms: float,
        alpha0: float | None = None,
        watch: Callable[[Step], None] | None = None,
        clock: Clock | None = None,
        seed: int = 0,
    ) -> None:
        if not LEAST_INTERVAL_S <= interval_s <= MOST_INTERVAL_S:
            raise UserError(f"interval_s must be {LEAST_INTERVAL_S:g} to {MOST_INTERVAL_S:g}, not {interval_s!r}")
        if not 0.0 < slo_ms < math.inf:
            raise UserError(f"slo_ms must be a number above 0, not {slo_ms!r}")
        if alpha0 is not None and not 0.0 <= alpha0 <= 1.0:
            raise UserError(f"alpha0 must be within 0 and 1, not {alpha0!r}")
        self.interval_s, self.slo_ms = interval_s, slo_ms
        self.status = Status(applied=math.nan if alpha0 is None else alpha0)
        self._adapter = adapter
        self._interval_ns = round(interval_s * 1e9)
        self._reads = max(1, int(interval_s / max(adapter.period_s, min(TICK_S, interval_s)) + 1e-9))
        self._watch = watch
        self._clock: Clock = MonotonicClock() if clock is None else clock
        self._seed = seed
        self._meter = Meter(slo_ms, interval_s)
        self._builder = ObservationBuilder(slo_ms)
        self._next: Steering | None = None
        self._lock = threading.Lock()
        # Milliseconds since 1970: after a restart of this process they still grow.
        self._revision = time.time_ns() // 1_000_000
        self._steering = self._ready(steering)
        self._past: Counter[str] = Counter()  # fallbacks of controllers that were replaced
        self._detector = self._own_detector()
        self._tick_from: Reading | None = None  # what the detectors have seen
        self._carry = 0.0  # arrivals of a tick that is not over
        self._fresh = False  # a reading was taken since the last decision
        self._trouble: Cause | None = None
        self._detail = self._unapplied = ""
        self._resume = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def replace(self, steering: Steering | Controller) -> None:
        """Let another controller go on from what is applied, from the next decision on; any thread may call it."""
        ready = self._ready(steering)
        with self._lock:
            self._next = ready

    def controller_fallbacks(self) -> dict[str, int]:
        """Return what the controllers themselves have fallen back from, by their own causes, where they count it."""
        with self._lock:  # while one takes over from another its counts would be there twice
            counted = self._past.copy()
            counted.update(_own_fallbacks(self._steering.controller))
        return dict(counted)

    def start(self) -> None:
        """Run on a thread of its own, until `stop`."""
        if self._thread is not None:
            raise RuntimeError("the loop runs already")
        self._stop.clear()
        self._error = None
        self._thread = threading.Thread(target=self._guarded, name="helm-control", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; alpha stays as it is. RuntimeError if it had failed; its error is the cause."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_STOP_S + self.interval_s)
            self._thread = None
        if self._error is not None:
            raise RuntimeError(f"the control loop failed: {self._error!r}") from self._error

    @property
    def running(self) -> bool:
        """Whether the thread of `start` is at work."""
        return self._thread is not None and self._thread.is_alive()

    def __enter__(self) -> ControlLoop:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def run(self, stop: threading.Event) -> None:
        """Control until the event is set."""
        clock, interval_ns, reads = self._clock, self._interval_ns, self._reads
        self._reader: Background[None, Counters] = Background("helm-read", lambda _: self._adapter.read(), clock.now_ns)
        self._applier: Background[tuple[float, int], float] = Background(
            "helm-apply", lambda asked: self._adapter.apply(*asked), clock.now_ns
        )
        try:
            self._listen(_PATIENCE * self.interval_s)  # what the first window begins with
            epoch_ns, step, decided = clock.now_ns(), 0, 0  # steps of 1 / reads of an interval since the epoch
            while True:
                due_ns = epoch_ns + (step + 1) * interval_ns // reads
                if clock.wait(stop, (due_ns - clock.now_ns()) * 1e-9):
                    return
                # What was slept through is not made up for.
                step = max(step + 1, (clock.now_ns() - epoch_ns) * reads // interval_ns)
                due = step // reads - decided
                found = self._listen(_PATIENCE * self.interval_s / (1 if due else reads))
                if due or found:
                    decided += due
                    self.status.missed += max(0, due - 1)
                    self._decide(clock.now_ns())
                if found:
                    self.status.bursts += 1
                    epoch_ns, step, decided = clock.now_ns(), 0, 0
        finally:
            self._reader.close()
            self._applier.close()

    def _guarded(self) -> None:
        try:
            self.run(self._stop)
        except BaseException as error:
            self._error = error

    def _ready(self, steering: Steering | Controller) -> Steering:
        ready = steering if isinstance(steering, Steering) else Steering(steering)
        ready.controller.reset(self._seed)
        return ready

    def _own_detector(self) -> BurstState | None:
        """Return what scores bursts for the observation where the controller does not look for any itself."""
        if isinstance(self._steering.controller, Watching):
            return None
        settings = BurstSettings(tick_s=min(TICK_S, self.interval_s))
        look(new_burst_state(settings), 0.0, math.nan)  # compiled now, and not in the first interval
        return new_burst_state(settings)

    def _listen(self, wait_s: float) -> bool:
        """Take what has been read, ask for more and wait for it; return whether a burst was found."""
        found = False
        while (outcome := self._reader.take()) is not None:
            found |= self._hear(outcome)
        if self._reader.idle:
            self._reader.ask(None)
        outcome = self._reader.take(wait_s)
        return found | (outcome is not None and self._hear(outcome))

    def _hear(self, outcome: Outcome[None, Counters]) -> bool:
        """Take a reading, or count why not; return whether a burst was found in it."""
        cause: Cause | None
        restarts, detail = self._meter.restarts, ""
        try:
            cause = self._meter.take(outcome.result(), outcome.begun_ns)
        except StaleTelemetry as error:
            cause, detail = error.cause, str(error)
        except Exception as error:  # of an adapter of the user's own, or of what it gave: the serving must not feel it
            cause, detail = Cause.ADAPTER, repr(error)
        self._resume |= self._meter.restarts > restarts
        self.status.restarts = self._meter.restarts
        if cause is not None:
            self._trouble, self._detail = cause, detail
            self.status.refused[cause] += 1
            if cause is Cause.BASELINE:
                self._tick_from, self._carry = self._meter.newest, 0.0
            return False
        self._fresh = True
        try:
            return self._tick()
        except Exception as error:  # of a controller of the user's own: the serving must not feel it
            self._fresh, self._trouble, self._detail = False, Cause.DECISION, repr(error)
            return False

    def _tick(self) -> bool:
        """Show the detectors the ticks between the last two readings, their arrivals spread over them evenly."""
        newest = self._meter.newest
        assert newest is not None
        before, controller = self._tick_from, self._steering.controller
        self._tick_from = newest
        if before is None or self._resume:
            return False
        detector = controller.detector if isinstance(controller, Watching) else self._detector
        tick_ns = int(detector.params[burst.TICK_NS]) if detector is not None else round(TICK_S * 1e9)
        ticks = (newest.at_ns - before.at_ns) // tick_ns
        arrivals = self._carry + self._meter.arrivals_since(before)
        self._carry = arrivals % 1.0 if ticks > 0 else arrivals
        if ticks == 0:
            # Not over: what it had counts for the next reading, and so does its time.
            self._tick_from = before._replace(counters=newest.counters)
            return False
        self._tick_from = newest._replace(at_ns=before.at_ns + ticks * tick_ns)
        p99_ms, whole = self._meter.p99_ms(), int(arrivals)
        found = False
        for k in range(ticks):
            now_arrived = whole * (k + 1) // ticks - whole * k // ticks
            if self._detector is not None:
                look(self._detector, float(now_arrived), p99_ms)
            found |= controller.tick(now_arrived, p99_ms, before.at_ns + (k + 1) * tick_ns)
        return found

    def _decide(self, now_ns: int) -> None:
        """Decide and ask for the target, or leave alpha as it is and count why."""
        status = self.status
        status.intervals += 1
        self._heed_applied()
        with self._lock:
            if self._next is not None:
                self._past.update(_own_fallbacks(self._steering.controller))
                self._steering, self._next = self._next, None
                self._detector = self._own_detector()
        newest = self._meter.newest
        status.age_s = math.inf if newest is None else (now_ns - newest.at_ns) * 1e-9
        cause, asked, begun_ns = None, math.nan, time.perf_counter_ns()
        if not self._fresh:
            cause, status.window = self._trouble or Cause.LATE, None
        elif status.age_s > _MOST_AGE * self.interval_s:
            cause, status.window = Cause.STALE, None
        else:
            cause, asked = self._think(now_ns)
        decide_s = (time.perf_counter_ns() - begun_ns) * 1e-9
        if cause is not None:
            status.fallbacks[cause] += 1
        if math.isfinite(asked):
            status.asked = asked
            status.decisions += 1
            reported = None if newest is None else newest.counters.revision
            self._revision = max(self._revision, 0 if reported is None else int(reported)) + 1
            if self._applier.ask((asked, self._revision)):
                status.unapplied += 1
                self._unapplied = "the server is still at the target before"
        if self._watch is not None:
            self._watch(Step(asked, status.applied, cause, decide_s, self._detail, self._unapplied))
        self._fresh, self._trouble, self._detail, self._unapplied = False, None, "", ""

    def _think(self, now_ns: int) -> tuple[Cause | None, float]:
        """Return a target within the bounds, or NaN and why there is none."""
        status, steering, newest = self.status, self._steering, self._meter.newest
        assert newest is not None
        controller, counters = steering.controller, newest.counters
        if counters.alpha is not None:
            status.applied = counters.alpha
        alpha = status.applied
        if not math.isfinite(alpha):
            status.window = None
            return Cause.NO_ALPHA, math.nan
        detector = controller.detector if isinstance(controller, Watching) else self._detector
        score = 0.0
        if detector is not None:
            score = float(detector.sums[burst.PEAK])
            detector.sums[burst.PEAK] = 0.0
        target = status.asked if math.isfinite(status.asked) else alpha
        window = status.window = self._meter.window(alpha, target, score)
        missing = masked(counters)
        status.masked = tuple(name for name, one in zip(OBSERVATION_NAMES, missing, strict=True) if one)
        try:
            if self._resume and isinstance(controller, Resuming):
                controller.resume(alpha)
            self._resume = False
            controller.feedback(window)
            observation = self._builder.update(window)
            observation[missing] = 0.0 if steering.neutral is None else steering.neutral[missing]
            asked = float(controller.decide(observation, alpha, now_ns))
        except Exception as error:  # of a controller of the user's own: the serving must not feel it
            self._detail = repr(error)
            return Cause.DECISION, math.nan
        if not math.isfinite(asked):
            return Cause.DECISION, math.nan
        within = min(max(asked, steering.alpha_min), steering.alpha_max)
        return (Cause.OUT_OF_RANGE if abs(within - asked) > 1e-9 else None), within

    def _heed_applied(self) -> None:
        """Take what the server has said to the targets before."""
        while (outcome := self._applier.take()) is not None:
            try:
                applied = float(outcome.result())
                if not 0.0 <= applied <= 1.0:  # NaN is not
                    raise ValueError(f"applied {applied!r}")
            except Exception as error:
                self.status.unapplied += 1
                self._unapplied = str(error)
            else:
                self.status.applied = applied


def _own_fallbacks(controller: Controller) -> dict[str, int]:
    counted = getattr(controller, "fallbacks", None)
    if not callable(counted):
        return {}
    try:
        return {str(cause): int(number) for cause, number in counted().items()}
    except Exception:  # of a controller of the user's own: what it counts is its own affair
        return {}
