"""Where measurements run: what is said when they are stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.executor import Executor, working


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
@pytest.mark.parametrize("kept", [True, False])
def test_who_stops_or_has_no_space_left_is_told_where_the_results_are(
    kept: bool, error: BaseException | type[BaseException], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((KeyboardInterrupt, OSError)), working(Executor("local", 1), tmp_path if kept else None):
        raise error
    said = f"stopped: what was measured is kept in {tmp_path}; the same command goes on\n"
    assert capsys.readouterr().err.endswith(said) == kept


def test_an_error_is_no_stop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), working(Executor("local", 1), tmp_path):
        raise ZeroDivisionError
    assert "stopped" not in capsys.readouterr().err
