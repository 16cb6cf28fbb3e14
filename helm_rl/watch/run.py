"""The view of a training run: TensorBoard's events and the last checkpoint in its folder."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections import deque
from pathlib import Path

from helm_rl.checkpoint import STATE_FILE, TrainingSection, TrainingState, read_document
from helm_rl.errors import UserError
from helm_rl.metrics import mean_regret
from helm_rl.watch.event_file import EventFile, Scalar
from helm_rl.watch.frame import HISTORY, Events, Frame, Row, clock, count, duration, number, safe, share

_EVENTS = "events.out.tfevents.*"
_MOST_SCALARS = 20_000  # of one look: a second's work
_MOST_TAGS = 256
_MOST_FILES = 1_000
_MOST_SCENARIOS = 12  # rows
_QUIET_S = 300.0  # without a new value a run that is not over may have ended
_REGRET = "validation/p99_regret/"
_MEAN_REGRET = "validation/mean_p99_regret"
_LOSSES = {
    "value loss": "losses/value_loss",
    "policy loss": "losses/policy_loss",
    "entropy": "losses/entropy",
    "KL divergence": "losses/approx_kl",
    "clipped": "losses/clipfrac",
    "explained variance": "losses/explained_variance",
}


class RunSource:
    """Follows one run, or the newest in a folder of runs; either may not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._run: _Run | None = None

    def look(self) -> Frame:
        """Read what is new."""
        try:
            folder = _newest(self._path)
        except OSError as error:
            return Frame(f"run {self._path}", f"cannot be read: {error.strerror}", warn=True)
        if folder is None:
            there = self._path.is_dir()
            state = "no run has begun in this folder" if there else "no such folder yet"
            return Frame(f"run {self._path}", state, warn=True)
        if self._run is None or self._run.folder != folder:
            self._run = _Run(folder)
        return self._run.look()


def _newest(path: Path) -> Path | None:
    """Return the folder itself if a run is in it, else that run in it, or in a population in it, written to last."""
    if _is_run(path):
        return path
    return max(_runs_in(path, 2), key=_written, default=None)


def _runs_in(path: Path, depth: int) -> list[Path]:
    """Return the runs in a folder, so many levels deep; a folder in it that cannot be read holds none."""
    found: list[Path] = []
    for each in _folders(path):
        with contextlib.suppress(OSError):
            if _is_run(each):
                found.append(each)
            elif depth > 1:
                found += _runs_in(each, depth - 1)
    return found


def _folders(path: Path) -> list[Path]:
    return [each for each in path.iterdir() if each.is_dir()] if path.is_dir() else []


def _in_order(path: Path) -> list[int]:
    """Return the numbers in an event file's name: second, process, and how manieth of it, of which 10 follows 9."""
    return [int(digits) for digits in re.findall(r"[0-9]+", path.name)]


def _is_run(path: Path) -> bool:
    return path.is_dir() and ((path / STATE_FILE).is_file() or any(path.glob(_EVENTS)))


def _written(path: Path) -> float:
    times = []
    for file in (path / STATE_FILE, *path.glob(_EVENTS)):
        try:
            times.append(file.stat().st_mtime)
        except OSError:  # it has gone
            continue
    return max(times, default=0.0)


class _Run:
    """What is known of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[Path, EventFile] = {}
        self._values: dict[str, deque[Scalar]] = {}
        self._newest: Scalar | None = None
        self._training: TrainingSection | None = None
        self._state_of: tuple[int, int] | None = None
        self._state_wrong = ""
        self._events = Events()
        self._best = math.inf
        self._damaged: set[Path] = set()

    def look(self) -> Frame:
        whole = self._read_events()
        self._read_state()
        state, warn = self._state() if whole else ("reads what has been written so far", False)
        title = f"run {self.folder}"
        return Frame(title, state, warn, tuple(self._rows()), self._events.all(), whole, behind=not whole)

    # -- reading

    def _read_events(self) -> bool:
        """Read on in all files; return whether there was nothing left to read."""
        for path in sorted(self.folder.glob(_EVENTS), key=_in_order)[:_MOST_FILES]:
            self._files.setdefault(path, EventFile(path))
        left = _MOST_SCALARS
        for path, file in self._files.items():
            for scalar in file.read(left):
                left -= 1
                self._take(scalar)
            if file.damaged is not None and path not in self._damaged:
                self._damaged.add(path)
                self._events.add(f"{path.name} is damaged at byte {file.damaged}: no more of it is read", warn=True)
            if file.behind:
                return False
        return True

    def _take(self, scalar: Scalar) -> None:
        known = self._values.get(scalar.tag)
        if known is None:
            if len(self._values) >= _MOST_TAGS:
                return
            known = self._values[scalar.tag] = deque(maxlen=HISTORY)
        episodes = scalar.tag.startswith("charts/episodic_")  # several may end with one step
        while known and (known[-1].step > scalar.step or (known[-1].step == scalar.step and not episodes)):
            known.pop()  # a resumed run does again what was after its checkpoint
        known.append(scalar)
        self._newest = scalar
        if scalar.tag == _MEAN_REGRET:
            best = scalar.value < self._best
            self._best = min(self._best, scalar.value) if math.isfinite(scalar.value) else self._best
            self._events.add(
                f"validation after {scalar.step:,} steps: P99 regret {share(scalar.value)}"
                + (", the best so far" if best else ""),
                scalar.time_s,
            )

    def _read_state(self) -> None:
        file = self.folder / STATE_FILE
        try:
            at = file.stat()
        except OSError:
            return
        if self._state_of == (at.st_mtime_ns, at.st_ino):
            return
        try:
            training = read_document(TrainingState, file).training
        except (UserError, OSError) as error:
            if str(error) != self._state_wrong:
                self._state_wrong = str(error)
                self._events.add(f"checkpoint: {error}", warn=True)
            return
        self._state_of, self._state_wrong = (at.st_mtime_ns, at.st_ino), ""
        if self._training is None or training.iterations != self._training.iterations:
            self._events.add(f"checkpoint after {training.iterations:,} iterations", at.st_mtime)
        self._training = training

    # -- showing

    def _last(self, tag: str) -> Scalar | None:
        values = self._values.get(tag)
        return values[-1] if values else None

    def _steps(self) -> tuple[int, int | None]:
        """Return the steps done, and those in all where the checkpoint tells them."""
        rate = self._last("charts/learning_rate")
        done = 0 if rate is None else rate.step
        total = None
        if self._training is not None:
            done = max(done, self._training.steps)
            size = [self._training.arguments.get(name) for name in ("total_timesteps", "num_envs", "num_steps")]
            if all(type(each) is int and 0 < each < 2**53 for each in size):
                wanted, envs, steps = (int(str(each)) for each in size)
                total = wanted // (envs * steps) * envs * steps  # whole iterations
        return done, total

    def _state(self) -> tuple[str, bool]:
        done, total = self._steps()
        training = self._training
        if training is not None and training.stopped is not None:
            return f"stopped early: {training.stopped}", False
        # The last checkpoint is written last of all.
        if training is not None and total is not None and training.steps >= total:
            return "finished", False
        if done == 0:
            return "has not trained yet: it prepares, or looks for the best schedules to be held against", False
        since_s = math.inf if self._newest is None else time.time() - self._newest.time_s
        if since_s > _QUIET_S:
            return f"nothing new for {duration(since_s)}: it may have ended", True
        return "trains", False

    def _rows(self) -> list[Row]:
        done, total = self._steps()
        speed = self._last("charts/SPS")
        of_all = f" of {count(total)} ({100 * done / total:.0f} %)" if total else ""
        rows = [Row("steps", count(done) + of_all, brief=True)]
        if speed is not None:
            left = ""
            if total and 0 < done < total and speed.value >= 1:
                left = f", {duration((total - done) / speed.value)} left"
            rows.append(Row("steps/s", count(speed.value) + left, self._curve("charts/SPS")))
        rows.append(self._row("episodic return", "charts/episodic_return", brief=True))
        regret = self._last(_MEAN_REGRET)
        if regret is not None:
            best = f", best {share(self._best)}" if math.isfinite(self._best) else ""
            rows.append(Row("P99 regret", share(regret.value) + best, self._curve(_MEAN_REGRET), brief=True))
        regrets = sorted(tag for tag in self._values if tag.startswith(_REGRET))
        if len(regrets) > 1:
            for tag in regrets[:_MOST_SCENARIOS]:
                rows.append(Row(f"  on {_name(tag)}", share(self._values[tag][-1].value), self._curve(tag)))
        rows += [self._row(name, tag, brief=name == "value loss") for name, tag in _LOSSES.items()]
        rows.append(self._row("learning rate", "charts/learning_rate"))
        if self._training is not None:
            rows.append(Row("checkpoint", f"after {self._training.iterations:,} iterations, {self._regrets_known()}"))
        if self._newest is not None:
            rows.append(Row("last value", f"at {clock(self._newest.time_s)}"))
        return rows

    def _regrets_known(self) -> str:
        assert self._training is not None
        found = self._training.validation
        if found.best is None:
            return "no validation yet" if found.reference_ms else "its policy is the last one, without validation"
        mean = mean_regret(found.regrets[found.best].values())
        return f"its policy is that of iteration {found.best:,}, P99 regret {share(mean)}"

    def _row(self, name: str, tag: str, brief: bool = False) -> Row:
        last = self._last(tag)
        return Row(name, number(None if last is None else last.value), self._curve(tag), brief=brief)

    def _curve(self, tag: str) -> tuple[float, ...]:
        return tuple(scalar.value for scalar in self._values.get(tag, ()))


def _name(tag: str) -> str:
    return safe(tag.removeprefix(_REGRET))[:24]
