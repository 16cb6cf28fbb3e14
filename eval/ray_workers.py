"""Long measurements on the nodes of a Ray cluster, or on a Ray of this machine's own."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from rich.progress import Progress

from eval.fingerprint import difference, fingerprint
from eval.processes import Task, Workers, progress_bars
from eval.results import Row
from helm_rl.errors import UserError, printable

MOST_LOSSES = 3
"""Workers that one task may lose before it is taken for what kills them."""
STORE_BYTES = 80 * 2**20
"""Of an own Ray's object store, in which nothing lies: results come back inside its messages. Ray wants 75 MB."""
CANCEL_S = 10.0
"""How long an interrupted task may take to store what it has."""
CONNECT_S = 5.0

ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0"}
OWN_ENVIRONMENT = {
    # Ray takes another address of the machine for the one that it is given, unless it is told that it stays alone.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_enable_metrics_collection": "0",
    "RAY_worker_niceness": "0",  # as processes have it, and not 15
    "AUTOSCALER_METRIC_PORT": "0",
}
"""Of a Ray of one's own, besides: on the loopback interface alone, and only for who knows a token of its own."""


def check_address(address: str) -> None:
    """Raise UserError unless something listens at the address of a cluster."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 2**16:
        raise UserError(
            f"--address {address}: must be HOST:PORT as `ray start` says it, or auto, on a node of that cluster"
        )
    try:
        with socket.create_connection((host, int(port)), CONNECT_S):
            pass
    except (OSError, UnicodeError) as error:  # UnicodeError: of a host's name that is none
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--address {address}: no Ray cluster answers there: {reason}") from None


@contextlib.contextmanager
def ray_workers(jobs: int, address: str | None) -> Iterator[Workers]:
    """Yield a cluster's cores, or `jobs` of this machine's; whatever ends the block early ends the tasks, too.

    Raises:
        UserError: There is no such cluster, or it does not take this process in.
    """
    with _environment(ENVIRONMENT if address else {**ENVIRONMENT, **OWN_ENVIRONMENT}, own=address is None):
        import ray

        with (
            tempfile.TemporaryDirectory(
                prefix=f"helm-ray-{os.getpid()}-", dir="/tmp", ignore_cleanup_errors=True
            ) as folder,
            progress_bars() as progress,
            open(os.devnull, "w") as nothing,
            contextlib.redirect_stdout(nothing),  # Ray says there what became of nodes, in pages
        ):
            try:
                if address is None:
                    ray.init(
                        "local",
                        num_cpus=jobs,
                        object_store_memory=STORE_BYTES,
                        include_dashboard=False,
                        log_to_driver=False,
                        logging_level="CRITICAL",
                        _temp_dir=folder,  # not below TMPDIR: names of sockets have 107 bytes
                    )
                else:
                    ray.init(address, log_to_driver=False, logging_level="CRITICAL")
            except Exception as error:  # Ray raises whatever it likes, plain Exception among it
                where = "--executor ray" if address is None else f"--address {address}"
                raise UserError(f"{where}: Ray did not start: {_first_line(error)}") from None
            workers = RayWorkers(progress)
            try:
                yield workers
            finally:
                try:
                    workers.cancel()
                finally:
                    ray.shutdown()


class Call(NamedTuple):
    """A task as it travels, and how often its worker was lost."""

    task: Task
    packed: bytes
    losses: int = 0


class RayWorkers(Workers):
    """Workers of Ray, one core each.

    A task whose worker or node is lost is started again. Ray itself repeats nothing: it would also repeat what has
    ended, where a node took the result along.
    """

    def __init__(self, progress: Progress) -> None:
        super().__init__(progress)
        import ray

        self._ray = ray
        self._remote = ray.remote(num_cpus=1, max_retries=0)(_worker())
        self._calls: dict[Any, Call] = {}

    def results(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Row]]:
        """Start the tasks in their order; yield each with its result as it comes.

        Raises:
            UserError: A task raised it, a node has another helm-rl, or a task lost MOST_LOSSES workers.
            OSError: A task raised it: the machine that it ran on refused something.
        """
        from ray import cloudpickle

        for task in tasks:
            self._start(Call(task, cloudpickle.dumps((task.function, task.arguments))))
        lost = self._ray.exceptions
        while self._calls:
            (done,), _ = self._ray.wait(list(self._calls))
            call = self._calls.pop(done)
            try:
                kind, node, answer = self._ray.get(done)
            except (lost.WorkerCrashedError, lost.NodeDiedError, lost.OutOfMemoryError, lost.ObjectLostError) as error:
                self._again(call, error)
                continue
            except lost.RayTaskError:  # raised by the task
                raise
            except lost.RayError as error:
                raise UserError(f"Ray: {_first_line(error)}") from None
            match kind:
                case "row":
                    yield call.task, json.loads(zlib.decompress(answer))
                case "error":
                    raise UserError(answer)
                case "refused":
                    number, reason, path = answer
                    raise OSError(number, f"{reason} (on node {node})", path)
                case _:
                    raise UserError(f"node {node} {answer}; every node must have what this one has")

    def cancel(self) -> None:
        """Interrupt what runs, as Ctrl-C would, drop what does not yet, and wait a little for what stores something."""
        running = list(self._calls)
        self._calls.clear()
        if running:
            for each in running:
                self._ray.cancel(each)
            self._ray.wait(running, num_returns=len(running), timeout=CANCEL_S)

    def _start(self, call: Call) -> None:
        self._calls[self._remote.remote(call.packed, fingerprint(), sys.argv, os.getcwd())] = call

    def _again(self, call: Call, error: Exception) -> None:
        losses = call.losses + 1
        if losses == MOST_LOSSES:
            raise UserError(
                f"the same task lost its worker {losses} times, the last time so: {_first_line(error)}; what is stored "
                "is kept, and the same command goes on with the rest"
            )
        self.progress.console.print(f"a worker was lost, and its task is started again: {_first_line(error)}")
        self._start(call._replace(losses=losses))


def _worker() -> Callable[[bytes, dict[str, str], list[str], str], tuple[str, str, Any]]:
    """Return what a worker calls; it travels by value, so that it can say so where there is no helm-rl."""

    def perform(packed: bytes, expected: dict[str, str], argv: list[str], folder: str) -> tuple[str, str, Any]:
        import os
        import platform
        import sys

        node = platform.node()
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
            os.environ[name] = "1"
        if os.path.isdir(folder):  # paths are as the user gave them, and a controller of one's own is looked for there
            os.chdir(folder)
        sys.argv = argv  # results say by which command they came to be
        try:
            from eval.ray_workers import answer
        except ImportError as error:
            return "differs", node, f"has no helm-rl, or another one ({error})"
        return answer(packed, expected, node)

    return perform


def answer(packed: bytes, expected: dict[str, str], node: str) -> tuple[str, str, Any]:
    """Call what was packed where nothing differs; return ("row", node, zlib of JSON) or what went wrong, and where."""
    unlike = difference(expected, fingerprint())
    if unlike is not None:
        return "differs", node, f"has {unlike}"
    from ray import cloudpickle

    function, arguments = cloudpickle.loads(packed)
    try:
        row = function(*arguments)
    except UserError as error:
        return "error", node, f"on node {node}: {error}"
    except OSError as error:
        if error.errno is None:
            raise
        return "refused", node, (error.errno, error.strerror, error.filename)
    return "row", node, zlib.compress(json.dumps(row, allow_nan=False).encode())


@contextlib.contextmanager
def _environment(wanted: dict[str, str], own: bool) -> Iterator[None]:
    """Set variables that Ray and its processes read, for as long as the block takes; own: with a new token, too."""
    if own:
        wanted = {**wanted, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    before = {name: os.environ.get(name) for name in wanted}
    for name, value in wanted.items():
        os.environ[name] = value
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                del os.environ[name]
            else:
                os.environ[name] = old


def _first_line(error: Exception) -> str:
    return printable(next(iter(str(error).strip().splitlines()), type(error).__name__))[:300]
