"""Signals as something to wait for, so that none of them does anything between two steps of the main thread."""

from __future__ import annotations

import contextlib
import signal
import socket
from typing import Any

_SIGNALS = (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)


class Signals:
    """Notes the signals that come while it is entered, whichever thread the system hands them to.

    Threads that NumPy's libraries have made block none. A handler that did more than this would do it between any two
    steps of the main thread.
    """

    def __init__(self) -> None:
        self._came: set[int] = set()

    def __enter__(self) -> Signals:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._before: dict[signal.Signals, Any] = {
            number: signal.signal(number, lambda one, _: self._came.add(one)) for number in _SIGNALS
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        self._reader.close()
        self._writer.close()

    def ignore(self) -> None:
        """Let those that come from now on do nothing, after the exit too."""
        self._before = dict.fromkeys(_SIGNALS, signal.SIG_IGN)

    def wait(self, seconds: float) -> set[int]:
        """Return the numbers of those that have come since the last call, once one does; none after so many seconds."""
        self._reader.settimeout(seconds)
        with contextlib.suppress(TimeoutError):
            self._reader.recv(1 << 16)  # a byte each, which only wake: when there is no room for more they are lost
        came, self._came = self._came, set()
        return came
