"""One HBM pool: pages that named members own, and the moving of pages from one to another."""

from __future__ import annotations

import enum
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cache_engine.backends.cpu import pool as kernels
from cache_engine.backends.device import CHUNK_BYTES, CupyDevice, Device
from cache_engine.integers import int64, integer


class TargetStatus(enum.Enum):
    """What became of a target; see `HbmPool.set_target`."""

    APPLIED = "applied"  # every member already has what the target asks
    DEFERRED = "deferred"  # recorded; `migrate` will get there, as budget and leases allow
    STALE = "stale"  # older than the one recorded, or not a number: ignored
    HELD = "held"  # differs from the one recorded by less than the hysteresis: that one stands


@dataclass(frozen=True)
class Migration:
    """What one `migrate` did, in pages."""

    freed: int  # taken from members over their goal
    granted: int  # given to members under theirs
    backlog: int  # still to move
    pinned: int  # draining: they wait for leases to end
    aborted: int  # draining no longer: their leases took too long, or the goal rose


@dataclass(frozen=True)
class PoolStats:
    """Targets by what became of them, and pages that moved, since the last reading."""

    applied: int
    deferred: int
    held: int
    stale: int
    granted: int  # pages given to members
    taken: int  # pages taken from members
    aborted: int  # pages whose draining was given up


class Member(Protocol):
    """A cache that owns pages of the pool."""

    def release(self, budget: int, now_ns: int, limit_ns: int, relocate: bool | None) -> int:
        """Give up at most `budget` pages over the goal; return how many. `relocate`: see `HbmPool.migrate`."""
        ...

    def accept(self, budget: int) -> int:
        """Take at most `budget` FREE pages under the goal; return how many."""
        ...


class PoolClosedError(RuntimeError):
    """The pool was closed: its memory is gone."""


class HbmPool:
    """One allocation of `pages * page_bytes`, shared by named members.

    A page is FREE, owned by one member, or draining from it. Moving memory is a change of owner: `set_target` records
    what each member should have, `migrate` moves at most a budget of pages towards it. Data never go with a page; what
    shall survive is copied off it first (embedding rows that were hit, see `migrate`; KV pages to a host tier).

    Args:
        pages: number of pages, at least one per member.
        page_bytes: bytes of a page, a multiple of 64.
        members: names in order; `alpha` is the share of the first one.
        min_pages: floor of every member's goal.
        payload: True keeps real bytes; False runs the same code on metadata alone.
        drain_limit_s: a page that waits longer for its leases goes back to its owner.
        hysteresis_pages: a target that differs from the recorded one by fewer pages, for every member, moves nothing.
            Small steps add up: they are compared with the recorded target, not with one another. 0: each target counts.
        backend: "cpu", or "cuda" to keep the bytes and the embedding cache's metadata on a GPU, through CuPy.
        device: where backend "cuda" lives; by default CuPy's current device, in order with its current stream.

    Raises:
        CudaUnavailableError: backend "cuda" without CuPy or a GPU.

    Thread safety: all operations of the pool and its members take one lock, `lock`; hold it (it is re-entrant) to make
    several of them one. After `close`, only counters, shares and the end of leases still work.
    """

    def __init__(
        self,
        pages: int,
        page_bytes: int,
        members: Sequence[str] = ("emb", "kv"),
        *,
        min_pages: int = 1,
        payload: bool = True,
        drain_limit_s: float = 10.0,
        hysteresis_pages: int = 0,
        backend: str = "cpu",
        device: Device | None = None,
    ) -> None:
        if isinstance(members, str) or not all(isinstance(name, str) for name in members):
            raise TypeError(f"members must be a sequence of names, got {members!r}")
        if not 1 <= len(members) < 2**15 or len(set(members)) != len(members):
            raise ValueError(f"members must be distinct names, at most {2**15 - 1}, got {list(members)[:10]}")
        pages, page_bytes = integer("pages", pages), integer("page_bytes", page_bytes)
        min_pages = integer("min_pages", min_pages)
        if min_pages < 0:
            raise ValueError(f"min_pages must be at least 0, got {min_pages}")
        if pages < max(1, min_pages) * len(members):
            raise ValueError(
                f"pages must be at least {max(1, min_pages)} for each of the {len(members)} members, got {pages}"
            )
        if pages >= 2**31:
            raise ValueError(f"pages must be below 2**31, got {pages}")
        if not 0 <= _real("drain_limit_s", drain_limit_s) <= 1e9:
            raise ValueError(f"drain_limit_s must be in [0, 1e9], got {drain_limit_s}")
        if not 0 <= integer("hysteresis_pages", hysteresis_pages) <= pages:
            raise ValueError(f"hysteresis_pages must be in [0, {pages}], got {hysteresis_pages}")
        if page_bytes < 64 or page_bytes % 64:
            raise ValueError(f"page_bytes must be a positive multiple of 64, got {page_bytes}")
        if backend not in ("cpu", "cuda"):
            raise ValueError(f"backend must be 'cpu' or 'cuda', got {backend!r}")
        if backend == "cpu" and device is not None:
            raise ValueError("a device is for backend 'cuda' alone")
        if device is not None and not hasattr(device, "launch"):
            raise TypeError(f"device must be a Device, such as CupyDevice(), got {device!r}")
        self.backend = backend
        self.device = CupyDevice() if backend == "cuda" and device is None else device
        self.pages = pages
        self.page_bytes = page_bytes
        self.members = tuple(members)
        self.min_pages = min_pages
        self.drain_limit_ns = int(drain_limit_s * 1e9)
        self.hysteresis_pages = hysteresis_pages
        self.state = kernels.new_pool_state(pages, len(members))
        # uint8 [pages * page_bytes], of NumPy or of the device; None without payload.
        self.storage: Any = None
        if payload and self.device is None:
            self.storage = np.zeros(pages * page_bytes, np.uint8)
        elif payload and self.device is not None:
            self.storage = self.device.allocate(pages * page_bytes)
        self._copies = self.device.fork() if self.device is not None else None
        self.lock = threading.RLock()
        self.payload = payload
        self._at_close: list[Callable[[], None]] = []
        self._caches: list[Member | None] = [None] * len(members)
        self._most = [pages] * len(members)
        self._revision: int | None = None
        self._outcomes = dict.fromkeys(TargetStatus, 0)
        self._moved = np.zeros(3, np.int64)  # pages granted, taken, aborted until the last reading of `stats`
        self._lost: deque[Callable[[], None]] = deque()
        self._closed = False
        self.busy = False  # an operation is under way that no other may come into, not even of its own thread

    def member(self, name: str) -> int:
        """Return the number of the member `name`; ValueError if there is none."""
        if name not in self.members:
            raise ValueError(f"the pool has no member {name!r}; it has {', '.join(self.members)}")
        return self.members.index(name)

    def attach(self, name: str, cache: Member, max_pages: int | None = None) -> None:
        """Make `cache` the member `name`, which can own at most `max_pages` pages. Caches call this themselves."""
        member = self.member(name)
        with self.lock:
            self.check_open()
            if self._caches[member] is not None:
                raise ValueError(f"member {name!r} is attached already")
            most = self.pages if max_pages is None else max_pages
            asked = max(self.min_pages, int(self.state.goal[member]))
            if most < asked:
                raise ValueError(
                    f"member {name!r} can own at most {most} pages, but min_pages or the goal asks for {asked}"
                )
            self._caches[member] = cache
            self._most[member] = most

    def at_close(self, action: Callable[[], None]) -> None:
        """Let `close` call `action`. Caches call this themselves."""
        self._at_close.append(action)

    def close(self) -> None:
        """Give the memory back; any later use raises PoolClosedError. Closing twice is harmless.

        On a device it is given back when the last view of it that the caller holds goes, too.
        """
        with self.lock:
            self._closed = True
            self._end_lost()
            while self._at_close:
                self._at_close.pop()()
            self.storage = None

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def check_open(self) -> None:
        """Raise PoolClosedError after `close`. Each operation begins with it, under the lock.

        RuntimeError inside another one of the same thread, which the re-entrant lock does not keep out.
        """
        if self.busy:
            raise RuntimeError("a finaliser or signal handler called the pool in the middle of an operation")
        if self._lost:
            self._end_lost()
        if self._closed:
            raise PoolClosedError("the pool was closed")

    def end_later(self, end: Callable[[], None]) -> None:
        """Let the next operation, or `close`, call `end`, which ends a lease that nobody can reach any more.

        A lease is collected at any point of any thread, even inside an operation of the same one, which the re-entrant
        lock would not keep out: this takes no lock and touches nothing that an operation reads.
        """
        self._lost.append(end)

    def _end_lost(self) -> None:
        while self._lost:
            self._lost.popleft()()

    def set_target(self, alpha: float, revision: int) -> TargetStatus:
        """Ask for `alpha` of the pool for the first of two members, the rest for the second; see `set_goals`.

        No alpha is an error: one that is not finite is STALE, others go as far as the members' least and most pages.
        """
        if len(self.members) != 2:
            raise ValueError(f"set_target needs two members, the pool has {len(self.members)}: use set_goals")
        with self.lock:
            self.check_open()
            try:
                finite = math.isfinite(_real("alpha", alpha))
            except OverflowError:  # of an integer that no float can hold
                finite = False
            if not finite:
                return self._count(TargetStatus.STALE)
            first = round(min(max(alpha, 0.0), 1.0) * self.pages)
            first = min(max(first, self.min_pages), self.pages - self.min_pages, self._most[0])
            second = min(self.pages - first, self._most[1])
            return self.set_goals({self.members[0]: first, self.members[1]: second}, revision)

    def set_goals(self, goals: Mapping[str, int], revision: int) -> TargetStatus:
        """Record how many pages each member should have; nothing moves before `migrate`.

        Args:
            goals: pages per member, every member named, from `min_pages` to what the member can own each, their sum at
                most the pool.
            revision: the sender's number of this target. An older one than the recorded is STALE; the same one again is
                the same target and changes nothing.

        Raises:
            TypeError, ValueError: goals that this pool cannot meet; the recorded ones stand.
        """
        revision = integer("revision", revision)
        with self.lock:
            self.check_open()
            if set(goals) != set(self.members):
                raise ValueError(f"goals must name {', '.join(self.members)}, got {', '.join(map(str, goals))}")
            wanted = [integer(f"the goal of {name!r}", goals[name]) for name in self.members]
            for name, n, most in zip(self.members, wanted, self._most, strict=True):
                if not self.min_pages <= n <= most:
                    raise ValueError(f"the goal of {name!r} must be in [{self.min_pages}, {most}] pages, got {n}")
            if sum(wanted) > self.pages:
                raise ValueError(f"goals must be at most {self.pages} pages together, got {sum(wanted)}")
            if self._revision is not None and revision < self._revision:
                return self._count(TargetStatus.STALE)
            if self._revision is None or revision > self._revision:
                first = self._revision is None
                self._revision = revision
                if not first and 0 < np.abs(self.state.goal - wanted).max() < self.hysteresis_pages:
                    return self._count(TargetStatus.HELD)
                self.state.goal[:] = wanted
            reached = np.array_equal(self.state.goal, self.state.owned) and not self.state.n_draining.any()
            return self._count(TargetStatus.APPLIED if reached else TargetStatus.DEFERRED)

    def _count(self, status: TargetStatus) -> TargetStatus:
        self._outcomes[status] += 1
        return status

    def stats(self) -> PoolStats:
        """Return the counters since the last call and start them anew."""
        with self.lock:
            state = self.state
            moved = np.array([state.granted.sum(), state.taken.sum(), state.aborted.sum()])
            granted, taken, aborted = (moved - self._moved).tolist()
            self._moved = moved
            outcomes = {status.value: n for status, n in self._outcomes.items()}
            self._outcomes = dict.fromkeys(TargetStatus, 0)
            return PoolStats(**outcomes, granted=granted, taken=taken, aborted=aborted)

    def migrate(self, budget: int, now_ns: int | None = None, *, relocate: bool | None = None) -> Migration:
        """Move at most `budget` pages towards the recorded goals.

        Args:
            budget: most pages taken from their owners, and most given, by this call.
            now_ns: the caller's clock, for the time limit of draining; the monotonic clock by default.
            relocate: an embedding cache moves a page's rows that were hit to slots of colder rows on other pages,
                inside the device, and evicts those instead: hits fall less, each page takes longer. None: under policy
                SIEVE alone, which learns over millions of requests and has much to lose; under LRU what was evicted
                comes back by itself.
        """
        budget = min(integer("budget", budget), self.pages)
        if budget < 0:
            raise ValueError(f"budget must be at least 0 pages, got {budget}")
        if not (relocate is None or isinstance(relocate, bool)):
            raise TypeError(f"relocate must be True, False or None, got {relocate!r}")
        with self.lock:
            self.check_open()
            now = time.monotonic_ns() if now_ns is None else int64("now_ns", now_ns)
            # Lists, for NumPy takes longer over two numbers than the pages take to move.
            state = self.state
            aborted = sum(state.aborted.tolist())
            freed = 0
            for cache, owned, goal, draining in zip(
                self._caches, state.owned.tolist(), state.goal.tolist(), state.n_draining.tolist(), strict=True
            ):
                if cache is not None and (owned > goal or draining):
                    freed += cache.release(budget - freed, now, self.drain_limit_ns, relocate)
            granted = 0
            for cache, owned, goal in zip(self._caches, state.owned.tolist(), state.goal.tolist(), strict=True):
                if cache is not None and owned < goal:
                    granted += cache.accept(budget - granted)
            return Migration(
                freed=freed,
                granted=granted,
                backlog=self.backlog,
                pinned=sum(state.n_draining.tolist()),
                aborted=sum(state.aborted.tolist()) - aborted,
            )

    @property
    def revision(self) -> int | None:
        """The number of the recorded target, which the next one's must be above; None before there was one."""
        return self._revision

    @property
    def backlog(self) -> int:
        """Pages still to move before every member has its goal."""
        with self.lock:
            missing = [
                goal - owned for goal, owned in zip(self.state.goal.tolist(), self.state.owned.tolist(), strict=True)
            ]
            return max(sum(n for n in missing if n > 0), -sum(n for n in missing if n < 0))

    @property
    def alpha(self) -> float:
        """Share of the pool that the first member owns now."""
        return float(self.state.owned[0] / self.pages)

    def owned(self, name: str) -> int:
        """Pages that the member owns now, draining ones included."""
        return int(self.state.owned[self.member(name)])

    @property
    def free(self) -> int:
        """Pages that nobody owns."""
        return int(self.state.scalars[kernels.FREE_COUNT])

    def page(self, page: int) -> Any:
        """Return the bytes of one page, uint8 [page_bytes], without a copy; valid until its generation changes.

        A NumPy array, on backend "cuda" one of the device; torch and others view either through DLPack.
        """
        page = integer("page", page)  # Python's: an int32 would overflow below
        if not 0 <= page < self.pages:
            raise ValueError(f"page must be in [0, {self.pages}), got {page}")
        with self.lock:
            self.check_open()
            if self.storage is None:
                raise ValueError("the pool was made with payload=False: it keeps no bytes")
            start = page * self.page_bytes
            return self.storage[start : start + self.page_bytes]

    def read_page(self, page: int, out: npt.NDArray[np.uint8]) -> None:
        """Copy one page's bytes into `out`, host memory: uint8 [page_bytes], C-contiguous and writeable.

        The copy begins after all that the pool's stream was given so far, and has a stream of its own, on which it
        goes in pieces of at most CHUNK_BYTES: a fetch of rows waits for one of them at most. The pool's lock is held
        until the bytes are there, so nobody can have the page meanwhile.
        """
        self._check_host(out, "out")
        if not out.flags.writeable:
            raise ValueError("out must be writeable")
        with self.lock:
            for piece, host in self._pieces(self.page(page), out):
                if self._copies is None:
                    host[:] = piece
                else:
                    self._copies.read_into(piece, host)

    def write_page(self, page: int, data: npt.NDArray[np.uint8]) -> None:
        """Copy `data`, host memory as of `read_page`, into one page; in the same way."""
        self._check_host(data, "data")
        with self.lock:
            for piece, host in self._pieces(self.page(page), data):
                if self._copies is None:
                    piece[:] = host
                else:
                    self._copies.write(piece, host)
                    self._copies.record().wait()

    def host_memory(self, size: int) -> npt.NDArray[np.uint8]:
        """Return new host memory of `size` zero bytes from which and to which pages are copied fastest."""
        return np.zeros(size, np.uint8) if self.device is None else self.device.pinned(size)

    def _pieces(self, page: Any, host: npt.NDArray[np.uint8]) -> list[tuple[Any, npt.NDArray[np.uint8]]]:
        if self.device is None or self._copies is None:
            return [(page, host)]
        self._copies.after(self.device.record())
        starts = range(0, self.page_bytes, CHUNK_BYTES)
        return [(page[at : at + CHUNK_BYTES], host[at : at + CHUNK_BYTES]) for at in starts]

    def _check_host(self, array: npt.NDArray[np.uint8], what: str) -> None:
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{what} must be a NumPy array, got {type(array).__name__}")
        if array.shape != (self.page_bytes,) or array.dtype != np.uint8 or not array.flags.c_contiguous:
            raise ValueError(
                f"{what} must be C-contiguous uint8 [{self.page_bytes}], got {array.dtype} {list(array.shape)}"
            )

    def metadata_bytes(self) -> int:
        """Bytes of the pool's own metadata."""
        return sum(array.nbytes for array in self.state)


def _real(what: str, value: float) -> float:
    """Return `value`; TypeError that names it if it is no real number."""
    try:
        math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        pass
    except TypeError:
        raise TypeError(f"{what} must be a number, got {value!r}") from None
    return value
