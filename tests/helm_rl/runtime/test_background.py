"""Calls on a thread of their own: nobody waits longer than he wants, and the newest question is the next."""

from __future__ import annotations

import threading
import time

from helm_rl.runtime.background import Background


def test_answers_and_errors_come_back_with_what_was_asked_and_when() -> None:
    calls: Background[int, float] = Background("test", lambda n: 1 / n, lambda: 7)
    calls.ask(4)
    outcome = calls.take(5.0)
    assert outcome is not None
    assert (outcome.asked, outcome.answer, outcome.error, outcome.begun_ns) == (4, 0.25, None, 7)
    calls.ask(0)
    outcome = calls.take(5.0)
    assert outcome is not None
    assert outcome.answer is None
    assert isinstance(outcome.error, ZeroDivisionError)
    calls.close()


def test_a_call_that_hangs_holds_nobody_up_and_of_later_questions_the_newest_is_asked() -> None:
    go = threading.Event()
    asked: list[int] = []

    def hang(n: int) -> int:
        asked.append(n)
        go.wait(10)
        return n

    calls: Background[int, int] = Background("test", hang, time.monotonic_ns)
    calls.ask(1)
    begun = time.monotonic()
    assert calls.take(0.05) is None
    assert time.monotonic() - begun < 2
    assert not calls.idle
    for n in (2, 3, 4):
        calls.ask(n)
    go.set()
    answers = [calls.take(5.0), calls.take(5.0), calls.take(0.0)]
    assert [one.answer if one else None for one in answers] == [1, 4, None]
    assert asked == [1, 4]
    calls.close()


def test_close_does_not_wait_for_ever() -> None:
    go = threading.Event()
    calls: Background[None, bool] = Background("test-close", lambda _: go.wait(10), time.monotonic_ns)
    calls.ask(None)
    begun = time.monotonic()
    calls.close(0.05)
    assert time.monotonic() - begun < 2
    go.set()
