"""A Ray cluster of several nodes on this machine, each by `ray start`; whatever happens, nothing of it is left."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).resolve().parents[2]
START_S = 120.0


def quiet_environment(**also: str) -> dict[str, str]:
    """Return what processes of a test get: our packages, no statistics, no port that a second one would want, too."""
    return {
        **os.environ,
        "RAY_USAGE_STATS_ENABLED": "0",
        "AUTOSCALER_METRIC_PORT": "0",
        "RAY_worker_niceness": "0",
        "PYTHONPATH": str(ROOT),
        **also,
    }


def session(leader: int) -> list[int]:
    """Return the processes of a session; Ray's have process groups of their own, and change their names."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, of = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue  # it has gone
        if int(of) == leader and state != "Z":
            found.append(int(path.parent.name))
    return found


def end_session(leader: int) -> None:
    """Kill all processes of a session."""
    while found := session(leader):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def wait_for(reached: Callable[[], object], what: str, limit_s: float = START_S) -> None:
    until = time.monotonic() + limit_s
    while not reached():
        assert time.monotonic() < until, f"not within {limit_s:g} s: {what}"
        time.sleep(0.05)


def _end_with_the_parent() -> None:
    """Let this process, which ends a node in order when it is told to, be told when the tests are killed."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Nodes:
    """Nodes of one core each, on loopback addresses of their own; a context manager. also: what they have in common."""

    def __init__(self, **also: str) -> None:
        # Not pytest's folder: names of sockets have 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="helm-test-", dir="/tmp"))
        self.environment = quiet_environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32), **also)
        self.address = ""
        self._nodes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for node in self._nodes:
            end_session(node.pid)
            node.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def started(self) -> list[int]:
        """Leaders of the nodes' sessions, those of killed ones included."""
        return [node.pid for node in self._nodes]

    @property
    def up(self) -> int:
        """How many nodes run."""
        return sum(node.poll() is None for node in self._nodes)

    def add(self) -> int:
        """Start a node, wait until it is one, and return its number."""
        number = len(self._nodes)
        host = f"127.0.0.{number + 2}"
        with socket.socket() as free:
            free.bind((host, 0))
            client_port = free.getsockname()[1]
        head = ["--head", "--port=0", "--include-dashboard=false", f"--ray-client-server-port={client_port}"]
        command = [
            str(Path(sys.executable).parent / "ray"),
            "start",
            *([f"--address={self.address}"] if self.address else [*head, f"--temp-dir={self.folder}"]),
            f"--node-ip-address={host}",
            "--num-cpus=1",
            "--object-store-memory=80000000",
            "--min-worker-port=0",
            "--max-worker-port=0",
            "--dashboard-agent-listen-port=0",
            "--disable-usage-stats",
            "--block",
        ]
        log = self.folder / f"{host}.log"
        with open(log, "w") as output:
            process = subprocess.Popen(
                command,
                env=self.environment,
                stdout=output,
                stderr=output,
                cwd=ROOT,
                start_new_session=True,
                preexec_fn=_end_with_the_parent,
            )

        self._nodes.append(process)

        def up() -> bool:
            assert process.poll() is None, log.read_text()
            return "Ray runtime started" in log.read_text()

        wait_for(up, f"a node\n{log.read_text()}")
        if not self.address:
            self.address = (self.folder / "ray_current_cluster").read_text().strip()
        return number

    def kill(self, number: int) -> None:
        """Kill a node as a power cut would: all of it at once, its workers included."""
        end_session(self._nodes[number].pid)
