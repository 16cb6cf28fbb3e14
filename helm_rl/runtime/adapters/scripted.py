"""An adapter that says what it was told to, for tests of a loop, a controller or a mapping of signals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from helm_rl.runtime.counters import Counters, StaleTelemetry

Line = Counters | Exception | Callable[[], Counters]


class ScriptedAdapter:
    """Gives one line of a script at each read: counters, an exception to raise, or a function that gives either.

    At the script's end it has nothing to say. `applied` holds the targets, (alpha, revision), in their order; each is
    applied at once.
    """

    def __init__(self, script: Iterable[Line], period_s: float = math.inf) -> None:
        self.period_s = period_s
        self.applied: list[tuple[float, int]] = []
        self._script = iter(script)

    def read(self) -> Counters:
        """Return or raise the next line."""
        line = next(self._script, None)
        if line is None:
            raise StaleTelemetry("the script has ended")
        if isinstance(line, Exception):
            raise line
        return line() if callable(line) else line

    def apply(self, alpha: float, revision: int) -> float:
        """Note the target."""
        self.applied.append((alpha, revision))
        return alpha
