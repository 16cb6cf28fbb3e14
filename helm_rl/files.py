"""Files are written aside and renamed, so that a reader or a crash never meets half of one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from helm_rl.errors import UserError


def refuse_existing(path: Path, overwrite: bool = False) -> None:
    """Raise UserError if `path` exists and may not be replaced, or its parent folder does not or may not be written to.

    A symbolic link to nothing exists; with `overwrite` the link is replaced, as is one to a file or folder.
    """
    if os.path.lexists(path) and not overwrite:
        raise UserError(f"{path} exists already; name another output, or pass --overwrite to replace it")
    if path.exists() and not path.is_file() and not path.is_dir():  # renaming would put a file in the place of a device
        raise UserError(f"{path} is a device or pipe, which cannot be replaced; name a file")
    if not path.parent.is_dir():
        raise UserError(f"{path}: the folder {path.parent} does not exist; make it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):  # now, and not after the work
        raise UserError(f"{path}: the folder {path.parent} cannot be written to; name another output")


def check_outputs(overwrite: bool, inputs: Iterable[str | Path | None] = (), **outputs: Path | None) -> None:
    """Raise UserError unless each of the outputs, by the names of their options, can be written as a file of its own.

    An output called `plot` must be a picture. What is an input, or lies in a folder that is one, is never replaced;
    names that are no files, such as those of shipped scenarios, may be among the inputs.
    """
    given = {f"--{name}": path for name, path in outputs.items() if path is not None}
    for path in given.values():
        refuse_existing(path, overwrite)
        if path.is_dir():
            raise UserError(f"{path} is a folder; name a file")
    read = [Path(path).resolve() for path in inputs if path is not None and os.path.exists(path)]
    for option, path in given.items():
        if any(path.resolve() == one or one in path.resolve().parents for one in read):
            raise UserError(f"{option} {path} is what is read, or lies in it; name another file")
    if len({path.resolve() for path in given.values()}) < len(given):
        raise UserError(f"{' and '.join(given)} name the same file, {path}")
    picture = given.get("--plot")
    if picture is not None and picture.suffix.lower() not in (".png", ".svg"):
        raise UserError(f"--plot must end in .png or .svg, got {picture}")


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the process as an exit does, so that what lies aside is removed."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:  # nohup's stays
                before[number] = signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _aside(path: Path) -> Path:
    """Return a name beside `path` that nothing has.

    Known before there is such a file, it is deleted whenever a signal comes; one that `tempfile` makes may stay.
    """
    return path.parent / f".{path.name}.{secrets.token_urlsafe(6)}.tmp"


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; rename it to `path` on success, delete it on any failure or signal."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with ended_by_signals():
        aside = _aside(path)
        try:
            os.close(os.open(aside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            yield aside
            _sync(aside)
            os.chmod(aside, 0o666 & ~_umask())
            os.replace(aside, path)
        except OSError as error:
            _name(error, path)
            raise
        finally:
            aside.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; on success it takes the place of `path`, else it is deleted.

    A folder that stood at `path` is moved aside first and removed last, so one whole version is always there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with ended_by_signals():
        aside = _aside(path)
        old = aside.with_suffix(".old")
        try:
            os.mkdir(aside, 0o700)
            yield aside
            os.chmod(aside, 0o777 & ~_umask())
            for file in aside.rglob("*"):
                if file.is_file():
                    _sync(file)
            if os.path.lexists(path):
                os.replace(path, old)
            try:
                os.replace(aside, path)
            except BaseException:
                if os.path.lexists(old):
                    os.replace(old, path)
                raise
        except OSError as error:
            _name(error, path)
            raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)
            if old.is_symlink():
                old.unlink()
            elif path.exists():
                shutil.rmtree(old, ignore_errors=True)


_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF}
"""What network file systems without locks, or without those of folders, say."""
_LOCK_LOOK_S = 0.2


@contextlib.contextmanager
def kept_to_one(folder: Path, wait_s: float = 0.0) -> Iterator[None]:
    """Keep a folder to this process among all that ask so, where its file system has locks.

    The system ends that with the process, however it dies. wait_s: how long to wait for another one's end.

    Raises:
        UserError: Another process has it, and has not let it go in time.
    """
    until_s = time.monotonic() + wait_s
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until_s:
                    raise UserError(f"{folder} is being written to by another process; wait for its end") from None
                time.sleep(_LOCK_LOOK_S)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                break
        yield
    finally:
        os.close(held)


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8 in one step: the old content or the whole new one, never a part."""
    with atomic_file(path) as aside:
        aside.write_text(text, encoding="utf-8")


def _name(error: OSError, path: Path) -> None:
    """Say what was being written, where the system does not: a full disk names no file."""
    if error.errno is not None and error.filename is None:
        error.filename = str(path)


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
