"""What an embedding cache asks of the backend that keeps its state and rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cache_engine.backends.device import Event


@dataclass(frozen=True)
class Fetch:
    """Rows on their way from the host tables, not yet in the cache."""

    tables: npt.NDArray[np.int16]  # [m], on the host
    keys: npt.NDArray[np.int64]  # [m]
    rows: Any  # uint8 [>= m, row_bytes], where they land; anything without payload
    event: Event  # done when they have come


class Follower(Protocol):
    """What follows a sample of the keys: an EmbeddingGhost."""

    def feed(self, sample: npt.NDArray[np.uint64], n: int) -> None:
        """Follow a batch of n rows by the hashes that the lookup kernel sampled."""
        ...

    def feed_keys(self, tables: npt.NDArray[np.int16], keys: npt.NDArray[np.int64]) -> None:
        """Follow a batch given its keys."""
        ...


class EmbeddingBackend(Protocol):
    """One cache: index, slots, counters, rows. Hold the pool's lock over each call.

    Arrays of a batch, and those that come back, are the backend's own: NumPy's, or the device's.
    """

    @property
    def state(self) -> Any:
        """The EmbeddingState; None after `close` where it lies on a device."""
        ...

    @property
    def gather(self) -> str:
        """How missed rows come: "host", "zero-copy" or "staging"."""
        ...

    def batch(self, ids: Any, tables: Any, rows: bool) -> tuple[Any, Any, int]:
        """Check a batch; return (tables int16 [n], keys int64 [n], n). `rows`: every id must be a row of its table."""
        ...

    def output(self, n: int, out: Any | None) -> Any | None:
        """Return where the rows go, uint8 [n, row_bytes]: `out`, checked, or a new array; None without payload."""
        ...

    def lookup(self, tables: Any, keys: Any, n: int, out: Any | None) -> tuple[Any, Any, int]:
        """Look up a batch and admit what it misses; return (hit bool [n], slots int32 [n], unique rows fetched)."""
        ...

    def sample_below(self, limit: int) -> None:
        """Have lookups sample keys whose hash is below the limit, for `feed`."""
        ...

    def feed(self, ghost: Follower, tables: Any, keys: Any, n: int) -> None:
        """Let a ghost follow the batch that was just looked up."""
        ...

    def contains(self, tables: npt.NDArray[np.int16], keys: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Tell which keys are cached; nothing is counted or stamped. All on the host."""
        ...

    def fetch(self, tables: npt.NDArray[np.int16], keys: npt.NDArray[np.int64]) -> Fetch:
        """Begin to copy rows in the background, keys distinct, at most one such copy at a time."""
        ...

    def admit(self, fetch: Fetch) -> None:
        """Admit the rows of a fetch as a batch of its own; nothing of it is counted but what it evicts."""
        ...

    def invalidate(self, tables: Any, keys: Any, n: int) -> int:
        """Forget rows; return how many were cached."""
        ...

    def on_host(self, values: Any, what: str) -> npt.NDArray[np.int64]:
        """Return integers [n], of the backend or the host, on the host; errors call them `what`."""
        ...

    def take_counters(self) -> list[int]:
        """Return the counters and start them anew; those at the end after `close`."""
        ...

    def release(self, budget: int, now_ns: int, limit_ns: int) -> int:
        """Give up at most `budget` pages over the goal."""
        ...

    def relocate(self, budget: int, now_ns: int, limit_ns: int) -> int:
        """As `release`, but rows that were hit move to other pages (see the CPU backend's `relocate_pages`)."""
        ...

    def accept(self, budget: int) -> int:
        """Take at most `budget` FREE pages under the goal."""
        ...

    def metadata_bytes(self) -> int:
        """Bytes of the state; 0 after `close` where it lies on a device."""
        ...

    def close(self) -> None:
        """Give memory back, after all copies have ended. Counters stay."""
        ...
