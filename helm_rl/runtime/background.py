"""Calls that may take any time, made on a thread of their own, so that whoever asks for them never waits too long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

Asked = TypeVar("Asked")
Answered = TypeVar("Answered")


@dataclass(frozen=True)
class Outcome(Generic[Asked, Answered]):
    """What came of a call: `answer`, or else `error`. begun_ns: when it was made, by the clock given."""

    asked: Asked
    begun_ns: int
    answer: Answered | None = None
    error: BaseException | None = None

    def result(self) -> Answered:
        """Return the answer, or raise the error; of one that would end a thread a RuntimeError is made."""
        if isinstance(self.error, Exception):
            raise self.error
        if self.error is not None:
            raise RuntimeError(repr(self.error)) from self.error
        return cast(Answered, self.answer)


class Background(Generic[Asked, Answered]):
    """Makes one call at a time; of what is asked for meanwhile, the newest is next.

    Args:
        name: of the thread.
        call: what is called.
        now_ns: the clock.
    """

    def __init__(self, name: str, call: Callable[[Asked], Answered], now_ns: Callable[[], int]) -> None:
        self._call = call
        self._now_ns = now_ns
        self._changed = threading.Condition()
        self._next: list[Asked] = []
        self._done: list[Outcome[Asked, Answered]] = []
        self._busy = self._closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def ask(self, asked: Asked) -> bool:
        """Let the call be made as soon as the one under way is over; return whether another had to make way for it."""
        with self._changed:
            instead = bool(self._next)
            self._next = [asked]
            self._changed.notify_all()
            return instead

    @property
    def idle(self) -> bool:
        """Whether no call is under way or asked for."""
        with self._changed:
            return not (self._busy or self._next)

    def take(self, wait_s: float = 0.0) -> Outcome[Asked, Answered] | None:
        """Return the oldest outcome that was not taken yet; None if there is none within `wait_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._done, wait_s)
            return self._done.pop(0) if self._done else None

    def close(self, wait_s: float = 1.0) -> None:
        """Make no more calls, and wait for the one under way, but not longer than `wait_s`."""
        with self._changed:
            self._closed = True
            self._next = []
            self._changed.notify_all()
        self._thread.join(wait_s)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next or self._closed)
                if self._closed:
                    return
                asked = self._next.pop()
                self._busy = True
            begun_ns = self._now_ns()
            try:
                outcome = Outcome(asked, begun_ns, answer=self._call(asked))
            except BaseException as error:  # nobody would notice that this thread has ended
                outcome = Outcome(asked, begun_ns, error=error)
            with self._changed:
                self._done.append(outcome)
                self._busy = False
                self._changed.notify_all()
