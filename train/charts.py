"""What TensorBoard is shown of a training beside its scalars: hyperparameters, and pictures of held-out arrivals."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from eval.segments import Run
    from train.validation import Held

MOST_PANELS = 8
"""Sets of arrivals that a picture has room for."""
ALPHA, P99 = "#d55e00", "#0072b2"


@contextlib.contextmanager
def event_log(run: Path, purge_step: int | None) -> Iterator[SummaryWriter]:
    """Yield the writer of a run's event file, which ends with the block.

    purge_step: what a log before this one has from this step on no longer holds.

    Raises:
        OSError: The file cannot be written. A thread of TensorBoard's finds that out; its own traceback is kept back.
    """
    failed: list[OSError] = []
    print_traceback = threading.excepthook

    def note(raised: threading.ExceptHookArgs) -> None:
        if isinstance(raised.exc_value, OSError) and type(raised.thread).__module__.startswith("tensorboard."):
            failed.append(_named(raised.exc_value, run))
        else:
            print_traceback(raised)

    # Readers take a run's files in the order of their names, which begin with the second of their making.
    while any(run.glob(f"events.out.tfevents.{int(time.time()):010d}.*")):
        time.sleep(0.05)
    threading.excepthook = note
    try:
        try:
            writer = SummaryWriter(str(run), purge_step=purge_step)
        except OSError as error:
            raise _named(error, run) from None
        events = writer._get_file_writer().event_writer
        try:
            yield writer
        finally:
            events.close()  # waits for the thread, which the writer's own does not where that has failed
        if failed:
            raise failed[0]
    finally:
        threading.excepthook = print_traceback


def _named(error: OSError, run: Path) -> OSError:
    if error.filename is None:  # a full disk names no file
        error.filename = str(max(run.glob("events.out.tfevents.*"), default=run))
    return error


class Hyperparameters:
    """A run's row on TensorBoard's HParams page: its arguments, and the charts that it is judged by.

    SummaryWriter.add_hparams would make a folder of its own for them, a second run in every list.

    writer: of the run's folder; arguments: by name; charts: tags of scalars that the run logs.
    """

    def __init__(self, writer: SummaryWriter, arguments: Mapping[str, object], charts: tuple[str, ...]) -> None:
        self._writer = writer
        self._arguments = dict(arguments)
        plain = {name: _plain(value) for name, value in arguments.items()}
        self._experiment, self._start, self._end = hparams(plain, dict.fromkeys(charts, 0.0))

    def begin(self, step: int) -> None:
        """Write the arguments, as a table of text and for the HParams page, at `step`."""
        rows = "\n".join(f"|{name}|{value}|" for name, value in self._arguments.items())
        self._writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}", step)
        for summary in (self._experiment, self._start):
            self._writer._get_file_writer().add_summary(summary, step)

    def end(self, step: int) -> None:
        """Say that the run came to its end, after so many steps."""
        self._writer._get_file_writer().add_summary(self._end, step)


def _plain(value: object) -> bool | int | float | str:
    """Return what the HParams page can sort by."""
    if isinstance(value, bool | int | float):
        return value
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def look_figure(held: list[Held], runs: Mapping[str, Run]) -> Figure:
    """Draw alpha, and the P99 of every 10 s in units of the SLO, over the time of each set of held-out arrivals.

    runs: by the names of the sets, of which the first MOST_PANELS are drawn.
    """
    from matplotlib.figure import Figure

    drawn = held[:MOST_PANELS]
    figure = Figure(figsize=(8.0, 2.1 * len(drawn) + 0.4), layout="constrained")
    for panel, each in zip(figure.subplots(len(drawn), squeeze=False)[:, 0], drawn, strict=True):
        run, slo_ms = runs[each.name], each.scenario.slo_ms
        panel.step(run.time_s, run.alpha, where="post", color=ALPHA)
        panel.set(ylim=(0.0, 1.0), title=f"{each.name}: P99 {run.p99_ms:.1f} ms, SLO {slo_ms:g} ms")
        panel.set_ylabel("alpha", color=ALPHA)
        tail = panel.twinx()
        tail.plot(run.window_s, run.window_p99_ms / slo_ms, color=P99, linestyle="--")
        tail.axhline(1.0, color=P99, linewidth=0.6, linestyle=":")
        tail.set_yscale("log")
        tail.set_ylabel("P99 of 10 s / SLO", color=P99)
    panel.set_xlabel("s")
    return figure


def episode_steps(global_step: int, num_envs: int, env: Any) -> int:
    """Return the step at which the chart of an episode has its point, that ended in environment `env`.

    The environments' steps are counted one after the other, so that of several episodes that end in one round each has
    a step of its own: TensorBoard and Weights and Biases keep one value for a step.
    """
    return global_step - num_envs + int(env) + 1
