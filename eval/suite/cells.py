"""The cells of a suite: what serves, which load, and the arrivals of each draw: real ones where a log is given."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from eval.comparison import SEEDS_FROM
from eval.suite.calibrate import pattern
from eval.suite.families import FAMILIES, PATTERNS, scenario_of
from helm_rl.errors import UserError
from helm_rl.scenario import Scenario, at_load, scenario_hash
from helm_rl.workloads.trace import Trace

RECORDED = "recorded"
"""The family of real arrivals."""
NODE = "decoder"
"""The family whose node serves them."""
LOGS = {
    "azure": "azure",
    "mooncake": "mooncake",
    "ragpulse": "ragpulse",
    "twitter": "twitter",
    "libcachesim-csv": "twitter",  # in which Twitter's are shipped with it
}
"""Format of a log, as its content tells -> the pattern that it makes."""
HOT_SHARE = 0.5
"""Of the requests at recorded arrivals, that users who stay make."""
SECONDS = 600.0


@dataclass(frozen=True)
class Cell:
    """One load on one node.

    log: whose arrivals take the place of the scenario's own, None: none does; log_sha256: of its bytes (hex).
    """

    family: str
    pattern: str
    scenario: Scenario
    log: Path | None = None
    log_sha256: str = ""

    @property
    def name(self) -> str:
        """What figures of it are called."""
        return f"{self.family}.{self.pattern}"

    @property
    def title(self) -> str:
        """Its pattern, or whose log it is, as people write it."""
        return "RAGPulse" if self.pattern == "ragpulse" else self.pattern.capitalize()

    @property
    def identity(self) -> str:
        """A hash (hex) of what its arrivals and their service depend on, but for the draw."""
        return hashlib.sha256(f"{scenario_hash(self.scenario)} {self.log_sha256}".encode()).hexdigest()

    def load(self, seed: int, multiple: float = 1.0) -> tuple[Scenario, Trace]:
        """Return what serves a multiple of the load, and the arrivals that a seed draws for it."""
        scenario = self.scenario if multiple == 1.0 else at_load(self.scenario, multiple)
        return scenario, _drawn(scenario, self.log, self.log_sha256, seed)

    def draw(self, number: int) -> Trace:
        """Return the arrivals of an evaluated draw, by its number."""
        return self.load(SEEDS_FROM + number)[1]


def cells(families: tuple[str, ...]) -> list[Cell]:
    """Return the cells of shipped families; UserError for an unknown one."""
    for family in families:
        if family not in FAMILIES:
            raise UserError(f"--families: {family!r} is unknown; known: {', '.join(FAMILIES)}")
    if len(set(families)) < len(families):
        raise UserError(f"--families names one twice: {' '.join(families)}")
    return [Cell(family, name, scenario_of(family, name)) for family in families for name in PATTERNS]


def recorded_cells(folder: Path) -> list[Cell]:
    """Return a cell for each log in a folder, and those below it, of a service whose arrivals are known.

    Its load is not near any limit yet. UserError where there is none, or two of one service.
    """
    from helm_rl.workloads.readers import detect_format

    if not folder.is_dir():
        raise UserError(f"--traces {folder}: no such folder; name one with logs of arrivals, such as Azure's")
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        try:
            name = LOGS.get(detect_format(path))
        except UserError:
            continue  # a description, a picture: no log
        if name in found:
            raise UserError(f"--traces {folder}: {found[name]} and {path} are both logs of {name}; leave one there")
        if name is not None:
            found[name] = path
    if not found:
        raise UserError(f"--traces {folder}: holds no log of Azure, Mooncake, RAGPulse or Twitter")
    steady = scenario_of(NODE, "steady")
    mix = pattern(steady, steady.load.rate, HOT_SHARE, SECONDS)
    return [
        Cell(RECORDED, name, mix.model_copy(update={"name": f"{RECORDED}-{name}"}), path, _sha256(path))
        for name, path in sorted(found.items())
    ]


def on_arrivals(content: Trace, log_ns: npt.NDArray[np.int64]) -> Trace:
    """Let the k-th request of a trace come at the k-th arrival of a log.

    The log's times are repeated as often as it takes, one lap after the other, and compressed to the trace's length.
    log_ns: int64[n], ascending, n >= 2.
    """
    laps = math.ceil(len(content) / log_ns.size)
    since = (log_ns - log_ns[0]).astype(np.float64)
    lap = since[-1] * log_ns.size / (log_ns.size - 1)  # with the mean pause behind its last arrival
    times = (since[None, :] + lap * np.arange(laps)[:, None]).ravel()[: len(content)]
    start_ns, end_ns = content.meta.phases[0].start_ns, content.end_ns
    speed = (times[-1] + lap / log_ns.size) / (end_ns - start_ns)
    step = f"at the arrivals of a log, {laps} laps of it, its times divided by {speed:.4g}"
    meta = content.meta.model_copy(update={"steps": (*content.meta.steps, step)})
    return replace(content, arrival_ns=start_ns + np.floor(times / speed).astype(np.int64), meta=meta)


@lru_cache(maxsize=1)
def _drawn(scenario: Scenario, log: Path | None, log_sha256: str, seed: int) -> Trace:
    """Draw arrivals; the last are kept, for controllers meet the same ones one after the other."""
    from helm_rl.workloads.generate import generate

    content = generate(scenario, seed=seed)
    return content if log is None else on_arrivals(content, _arrivals(log, log_sha256))


@lru_cache(maxsize=1)
def _arrivals(log: Path, sha256: str) -> npt.NDArray[np.int64]:
    """Return a log's arrivals, those that were recorded in coarse steps spread over them.

    Raises:
        UserError: Where this runs the log is missing, or another one.
    """
    from helm_rl.workloads.readers import read_trace

    if not log.is_file() or _sha256(log) != sha256:
        raise UserError(f"{log}: is not the log here that the suite was planned with")
    found = read_trace(log, spread=True).arrival_ns
    if found.size < 2 or found[-1] == found[0]:
        raise UserError(f"{log}: its requests all come at once; a log of arrivals has at least two times")
    return found


@lru_cache(maxsize=8)
def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
