from __future__ import annotations

import os

import pytest

from eval.processes import Task, working_processes
from eval.results import Row
from helm_rl.errors import UserError


def dies() -> Row:
    os._exit(7)


def test_a_process_that_is_ended_from_outside_is_a_sentence() -> None:
    with (
        pytest.raises(UserError, match=r"was ended by something else, .* the same command goes on"),
        working_processes(1) as workers,
    ):
        list(workers.results([Task(dies, (), 1.0)]))
