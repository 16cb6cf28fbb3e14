"""What a live node computes: an HSTU, or for other architectures a matrix product that stands in for them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from cache_engine import HbmPool, KvLease
from envs.serving import payload
from envs.serving.matrix_product import MatrixProduct
from helm_rl.errors import UserError
from helm_rl.profiles.hardware import HardwareProfile
from helm_rl.profiles.model import ModelProfile

if TYPE_CHECKING:
    from helm_rl.models.hstu import Block, Request

EPOCH = 0  # a history whose start slides away is taken to keep it, as in the simulator


@dataclass(slots=True)
class Taken:
    """A request whose rows have come and whose pages are leased, until its batch has ended."""

    number: int  # in the trace
    user: int
    prefix: int  # tokens found
    history: int
    pages: npt.NDArray[np.int32]  # of the history; fewer than it needs where the KV cache has no room for it
    lease: KvLease | None
    rows: Any  # uint8 [n, row_bytes]: of the tokens after the prefix, then of the candidates
    fetched: int  # of them, those that crossed the link
    network: Request | None = None
    scores: Any = None  # of the candidates, once computed


@dataclass(frozen=True)
class Checked:
    """What was compared of a request, and what of it was wrong."""

    pages: int = 0
    wrong_bytes: int = 0
    scores: int = 0
    wrong_scores: int = 0


class Compute(Protocol):
    """Serves the requests of a live node once their rows are there."""

    def start(self, pool: HbmPool) -> None:
        """Take up a new pool."""
        ...

    def session(self) -> contextlib.AbstractContextManager[object]:
        """Enter this on a thread before its first `run`, `warm` or `check`."""
        ...

    def take(self, one: Taken) -> None:
        """Prepare a request; called in order, on the thread of the link."""
        ...

    def run(self, batch: Sequence[Taken], stop: threading.Event) -> int:
        """Compute a batch; return the ns that it took, without what waited for the processor to be given work."""
        ...

    def warm(self, batch: Sequence[Taken]) -> None:
        """Do of a batch what later ones rely on."""
        ...

    def check(self, one: Taken, rows: npt.NDArray[np.uint8]) -> Checked:
        """Compare what a request used or gave; `rows`: of all its tokens and candidates, as the tables have them."""
        ...

    def close(self) -> None:
        """Let go of the pool."""
        ...


def new_compute(
    model: ModelProfile, hardware: HardwareProfile, backend: str, compute_scale: float, most_tokens: int
) -> Compute:
    """Return the network of an hstu, or what stands in for a decoder."""
    if model.architecture == "hstu":
        return Network(model, backend, most_tokens)
    return StandIn(model, hardware, backend, compute_scale)


class StandIn:
    """A matrix product that takes the time of the profile; KV pages are filled with bytes that tell whose they are."""

    def __init__(self, model: ModelProfile, hardware: HardwareProfile, backend: str, scale: float) -> None:
        self.product = MatrixProduct(backend)
        self._model = model
        # As in the simulator: fixed per batch, per FLOP.
        self._batch_s = scale * hardware.batch_ms * 1e-3
        self._flop_s = scale / hardware.flop_per_s

    def start(self, pool: HbmPool) -> None:
        """See `Compute`."""
        self._pool: HbmPool | None = pool
        self._page = pool.host_memory(pool.page_bytes)
        self._checked = pool.host_memory(pool.page_bytes)

    def session(self) -> contextlib.AbstractContextManager[object]:
        """Nothing to prepare."""
        return contextlib.nullcontext()

    def take(self, one: Taken) -> None:
        """Write the pages of what was not found, now: the next request may be the same user's."""
        assert self._pool is not None
        page_tokens = self._pool.page_bytes // self._model.kv_bytes_per_token
        for index in range(one.prefix // page_tokens, one.pages.size):
            payload.fill_page(self._page, one.user, EPOCH, index)
            self._pool.write_page(int(one.pages[index]), self._page)

    def run(self, batch: Sequence[Taken], stop: threading.Event) -> int:
        """See `Compute`."""
        begun = time.perf_counter_ns()
        self.product.run(self._batch_s + self._flop_s * sum(self._flop(one) for one in batch), stop)
        return time.perf_counter_ns() - begun

    def warm(self, batch: Sequence[Taken]) -> None:
        """Nothing: the pages are there."""

    def check(self, one: Taken, rows: npt.NDArray[np.uint8]) -> Checked:
        """Compare every byte of the pages."""
        assert self._pool is not None
        wrong = 0
        for index, page in enumerate(one.pages):
            self._pool.read_page(int(page), self._checked)
            wrong += payload.wrong_page_bytes(self._checked, one.user, EPOCH, index)
        return Checked(pages=one.pages.size, wrong_bytes=wrong)

    def close(self) -> None:
        """See `Compute`."""
        self._pool = None

    def _flop(self, one: Taken) -> float:
        model = self._model
        tokens = one.history - one.prefix
        pairs = tokens * (one.prefix + 0.5 * tokens) + model.candidates * one.history
        return model.flops_per_token * (tokens + model.candidates) + model.flops_per_pair * pairs


class Network:
    """An HSTU with random weights on the pages of the KV cache, in float32 or bf16; on the CPU it has one thread.

    On a GPU it runs on torch's current stream, while the pool has another: rows have come before a request is taken,
    and `run` returns when all of the batch is done, so that whoever gets a page next finds it idle.

    Raises:
        UserError: rows that are no whole number of values.
    """

    def __init__(self, model: ModelProfile, backend: str, most_tokens: int, seed: int = 0) -> None:
        import torch

        from helm_rl.models.hstu import Hstu, HstuShape

        if model.row_bytes % model.value_bytes:
            raise UserError(
                f"model.row_bytes = {model.row_bytes} must be a multiple of model.value_bytes = {model.value_bytes}: "
                "the hstu computes with what is in the rows"
            )
        self._torch = torch
        self._cuda = backend == "cuda"
        if self._cuda and not torch.cuda.is_available():
            raise UserError("backend 'cuda' needs a PyTorch that finds a GPU, and this one finds none")
        self.dtype = torch.bfloat16 if model.value_bytes == 2 else torch.float32
        shape = HstuShape(
            layers=model.layers,
            d_model=model.d_model,
            heads=model.heads,
            head_dim=model.head_dim,
            features=model.features_per_token,
            row_values=model.row_bytes // model.value_bytes,
            most_tokens=most_tokens,
        )
        self.hstu = Hstu(shape, seed).to(device=backend, dtype=self.dtype)
        self._candidates = model.candidates
        self._tolerance = 1e-4 if model.value_bytes == 4 else 0.1
        self._pages: list[Block] = []

    def start(self, pool: HbmPool) -> None:
        """See `Compute`."""
        from helm_rl.models.hstu import page_blocks

        self._pages = page_blocks(pool, self.hstu.shape, self.dtype)

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Without gradients; on one thread, for several spin while they wait, and the link needs a core, too."""
        torch = self._torch
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with torch.inference_mode():
                yield
        finally:
            torch.set_num_threads(threads)

    def take(self, one: Taken) -> None:
        """See `Compute`."""
        one.network = self.hstu.request(self._pages, one.pages.tolist(), one.prefix, one.history, self._candidates)

    def run(self, batch: Sequence[Taken], stop: threading.Event) -> int:
        """See `Compute`; on a GPU the time is that between two events of its stream."""
        begun, first = time.perf_counter_ns(), self._event()
        values = [self._values(one.rows) for one in batch]
        requests = [one.network for one in batch if one.network is not None]
        scores = self.hstu(values[0] if len(batch) == 1 else self._torch.cat(values), requests)
        for k, one in enumerate(batch):
            one.scores = scores[k * self._candidates : (k + 1) * self._candidates]
        if not self._cuda:
            return time.perf_counter_ns() - begun
        last = self._event()
        last.synchronize()
        return round(first.elapsed_time(last) * 1e6)

    def wait(self) -> None:
        """Wait until all that was asked of a GPU is done."""
        if self._cuda:
            self._torch.cuda.current_stream().synchronize()

    def warm(self, batch: Sequence[Taken]) -> None:
        """Compute it: later requests find its keys and values."""
        self.run(batch, threading.Event())

    def check(self, one: Taken, rows: npt.NDArray[np.uint8]) -> Checked:
        """Score the request once more, from the tables and without any cache."""
        from helm_rl.models.hstu import Request

        values = self._values(self._torch.from_numpy(rows).to(self.hstu.position.device))
        blocks = self.hstu.new_blocks(1, one.history)
        expected = self.hstu(values, [Request(0, one.history, self._candidates, blocks)])
        # Not "more than": NaN is wrong, too.
        right = int(((one.scores - expected).abs() <= self._tolerance).sum())
        return Checked(scores=self._candidates, wrong_scores=self._candidates - right)

    def close(self) -> None:
        """See `Compute`; the views would keep the pool's memory."""
        self._pages = []

    def _values(self, rows: Any) -> Any:
        torch = self._torch
        # On the host from_dlpack does the same in three times as long.
        tensor = torch.from_numpy(rows) if isinstance(rows, np.ndarray) else torch.from_dlpack(rows)
        return self.hstu.pool(tensor.view(self.dtype))

    def _event(self) -> Any:
        if not self._cuda:
            return None
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event
