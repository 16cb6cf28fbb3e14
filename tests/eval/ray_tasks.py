"""What tests let workers of Ray do; it imports little, for every process of such a test imports it."""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from helm_rl.errors import UserError

if TYPE_CHECKING:
    from eval.results import Row


def tell(number: int) -> Row:
    """Say where this runs."""
    return {
        "key": str(number),
        "value": number * 0.1,
        "folder": os.getcwd(),
        "argv": sys.argv,
        "threads": [os.environ[name] for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")],
    }


def trace(number: int, seconds: float, log: Path) -> Row:
    """Take some time, and write down when it begins, and where, and when it ends."""
    for event in ("begins", "ends"):
        with open(log, "a") as file:
            file.write(f"{number} {event} {os.getpid()}\n")
        if event == "begins":
            time.sleep(seconds)
    return {"key": str(number)}


def refuse(number: int) -> Row:
    raise UserError(f"{number} is refused")


def overfill(number: int) -> Row:
    raise OSError(errno.ENOSPC, "No space left on device", f"{number}.json")


def fail(number: int) -> Row:
    raise ZeroDivisionError(f"{number} cannot be")


def die(number: int) -> Row:
    os._exit(1)
