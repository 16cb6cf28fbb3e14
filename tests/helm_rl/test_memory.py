"""Free memory: what Linux says is available, else the free pages."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from helm_rl.memory import free_bytes


def test_free_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_AVPHYS_PAGES": 3, "SC_PAGE_SIZE": 4096}.__getitem__)
    monkeypatch.setattr(Path, "read_text", lambda self: "MemTotal: 9 kB\nMemAvailable:    5 kB\n")
    assert free_bytes() == 5 * 1024
    monkeypatch.setattr(Path, "read_text", lambda self: "MemTotal: 9 kB\n")
    assert free_bytes() == 3 * 4096


def test_free_bytes_where_there_is_no_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(self: Path) -> str:
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "read_text", absent)
    monkeypatch.setattr(os, "sysconf", {"SC_AVPHYS_PAGES": 3, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert free_bytes() == 3 * 4096
