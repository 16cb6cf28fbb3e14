"""The hooks over HTTP: who asks slowly is hung up on, and holds up nobody else."""

from __future__ import annotations

import contextlib
import socket
import time
import urllib.request

import pytest

from helm_rl.runtime import server
from helm_rl.runtime.adapters.scripted import ScriptedAdapter
from helm_rl.runtime.counters import Counters
from helm_rl.runtime.server import HookServer


def test_who_asks_a_byte_at_a_time_is_hung_up_on_and_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MOST_REQUEST_S", 1.0)  # the limit between two bytes, 5 s, never ends this one
    hooks = HookServer(ScriptedAdapter([Counters(arrivals=1.0, alpha=0.5)]))
    host, port = hooks.url.removeprefix("http://").split(":")
    with contextlib.closing(hooks), contextlib.ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection((host, int(port)), 5.0)) for _ in range(8)]
        with urllib.request.urlopen(f"{hooks.url}/metrics", timeout=5.0) as answer:
            assert b"alpha" in answer.read()
        left, until = set(slow), time.monotonic() + 30.0
        while left:
            assert time.monotonic() < until, "a slow client is waited for without end"
            for each in list(left):
                try:
                    each.sendall(b"x")
                except OSError:
                    left.remove(each)
            time.sleep(0.1)
