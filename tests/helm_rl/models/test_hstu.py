"""The HSTU: its equations, jagged batches, and that no cache of keys and values changes a score."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from torch import Tensor
from torch.nn import functional

from cache_engine import EmbeddingCache, HbmPool, KvCache, KvLease
from helm_rl.models.hstu import Hstu, HstuShape, Request, page_blocks

SHAPE = HstuShape(layers=3, d_model=16, heads=2, head_dim=8, features=2, row_values=6, most_tokens=64)
TOLERANCE = 1e-5


@pytest.fixture
def network() -> Hstu:
    return Hstu(SHAPE, seed=3)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """On one thread: several wait for each other longer than these products take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


def dense(network: Hstu, history: Tensor, candidate: Tensor) -> float:
    """The paper's equations in float64, one candidate at the end of its history, all keys in one masked matrix."""
    shape, t = network.shape, len(history) + 1
    weights = {name: value.double() for name, value in network.state_dict().items()}

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(name: str, x: Tensor) -> Tensor:
        spread = ((x - x.mean(1, keepdim=True)) ** 2).mean(1, keepdim=True)
        return (x - x.mean(1, keepdim=True)) / (spread + 1e-5).sqrt() * weights[f"{name}.weight"] + weights[
            f"{name}.bias"
        ]

    x = linear("project", torch.cat([history, candidate[None]]).double()) + weights["position"][:t]
    causal = torch.ones(t, t, dtype=torch.float64).tril()
    for k in range(shape.layers):
        u, v, q, keys = functional.silu(linear(f"layers.{k}.f1", norm(f"layers.{k}.norm_in", x))).chunk(4, dim=1)
        gathered = []
        for head in range(shape.heads):
            at = slice(head * shape.head_dim, (head + 1) * shape.head_dim)
            a = functional.silu(q[:, at] @ keys[:, at].T) * causal / causal.sum(1, keepdim=True)
            gathered.append(a @ v[:, at])
        x = x + linear(f"layers.{k}.f2", norm(f"layers.{k}.norm_out", torch.cat(gathered, dim=1)) * u)
    return float(linear("score", norm("norm", x))[-1, 0])


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tokens", [0, 1, 4, 5, 23])
def test_scores_are_those_of_the_equations(network: Hstu, tokens: int) -> None:
    """Divided by the keys that are seen, that is; the candidate sees history and itself, and no other candidate."""
    history, candidates = random(tokens, 6), random(3, 6, seed=1)
    request = Request(0, tokens, 3, network.new_blocks(-(-tokens // 4), 4))
    scores = network(torch.cat([history, candidates]), [request])
    expected = [dense(network, history, candidate) for candidate in candidates]
    assert scores.tolist() == pytest.approx(expected, abs=TOLERANCE)
    assert np.ptp(expected) > 0.01


def test_a_jagged_batch_gives_what_each_request_gives_alone(network: Hstu) -> None:
    lengths = [(7, 2), (0, 3), (12, 0), (4, 1)]
    values = [random(tokens + candidates, 6, seed=k) for k, (tokens, candidates) in enumerate(lengths)]

    def request(tokens: int, candidates: int) -> Request:
        return Request(0, tokens, candidates, network.new_blocks(3, 4))

    batch = network(torch.cat(values), [request(*one) for one in lengths])
    alone = [network(x, [request(*one)]) for x, one in zip(values, lengths, strict=True)]
    assert batch.shape == (6,)
    assert torch.allclose(batch, torch.cat(alone), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("size", [1, 3, 8, 100])
@pytest.mark.parametrize("cuts", [[5], [1, 2, 3, 20], [7, 7, 16], [16, 20, 21]])
def test_a_history_computed_in_pieces_scores_as_in_one(network: Hstu, size: int, cuts: list[int]) -> None:
    history, candidates = random(24, 6), random(4, 6, seed=1)
    blocks = network.new_blocks(-(-24 // size), size)
    done = 0
    for cut in [*cuts, 24]:
        values = torch.cat([history[done:cut], candidates])
        whole = Request(0, cut, 4, network.new_blocks(-(-cut // size), size))
        expected = network(torch.cat([history[:cut], candidates]), [whole])
        scores = network(values, [Request(done, cut, 4, blocks)])
        assert torch.allclose(scores, expected, atol=TOLERANCE, rtol=0)
        done = cut


def test_requests_of_one_user_in_one_batch_share_what_the_first_computes(network: Hstu) -> None:
    history, candidates = random(11, 6), random(2, 6, seed=1)
    blocks = network.new_blocks(3, 4)
    values = torch.cat([history[:6], candidates, history[6:], candidates])
    scores = network(values, [Request(0, 6, 2, blocks), Request(6, 11, 2, blocks)])
    assert scores.tolist() == pytest.approx(
        [dense(network, history[:n], candidate) for n in (6, 11) for candidate in candidates], abs=TOLERANCE
    )


def test_equal_seeds_give_equal_weights_and_leave_torchs_generator_alone() -> None:
    before = torch.get_rng_state()
    one, two, other = Hstu(SHAPE, seed=3), Hstu(SHAPE, seed=3), Hstu(SHAPE, seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.position, other.position)


def test_pages_are_used_where_they_lie(network: Hstu) -> None:
    """A page of 1 KiB is a block of two tokens of 384 B each, and the rest of it is left alone."""
    pool = HbmPool(4, 1024)
    kv = KvCache(pool, token_bytes=SHAPE.kv_bytes(torch.float32))
    assert kv.token_bytes == 384
    pages = page_blocks(pool, SHAPE, torch.float32)
    assert len(pages) == 4
    for page, block in enumerate(pages):
        views = [one for layer in block for one in layer]
        addresses = sorted(view.data_ptr() - pool.page(page).ctypes.data for view in views)
        assert addresses == [k * 128 for k in range(6)]  # 2 heads x 2 tokens x 8 x 4 B
    pool.storage[:] = 0xAA
    network(random(5, 6), [network.request(pages, [2, 0], 0, 3, 2)])
    assert (pool.page(1) == 0xAA).all()
    assert (pool.page(2)[768:] == 0xAA).all()
    assert (pool.page(2)[:768] != 0xAA).mean() > 0.9
    kept = network.new_blocks(1, 3)
    network(random(5, 6), [Request(0, 3, 2, kept)])
    for layer in range(3):
        for view, page in zip(kept[0][layer], pages[2][layer], strict=True):
            whole = view[:, :, :2] if view.shape[1] == 8 else view[:, :2]
            assert torch.allclose(whole, page, atol=1e-6)


def test_what_the_pages_have_no_room_for_is_computed_and_not_kept(network: Hstu) -> None:
    pages = network.new_blocks(4, 4)
    history, candidates = random(11, 6), random(2, 6, seed=1)
    network(torch.cat([history[:6], candidates]), [network.request(pages, [3, 1], 0, 6, 2)])
    scores = network(torch.cat([history[6:], candidates]), [network.request(pages, [3, 1], 6, 11, 2)])
    expected = [dense(network, history, candidate) for candidate in candidates]
    assert scores.tolist() == pytest.approx(expected, abs=TOLERANCE)
    assert not pages[0][0][0].any()
    assert not pages[2][0][0].any()


# Any order of requests, evictions, resizes and epochs

PAGES, PAGE_TOKENS, ROW_BYTES, ROWS, CANDIDATES, MOST_TOKENS = 14, 4, 32, 150, 3, 26
SERVED = HstuShape(layers=2, d_model=16, heads=2, head_dim=8, features=2, row_values=8, most_tokens=MOST_TOKENS)
TOKEN_BYTES = SERVED.kv_bytes(torch.float32)
EXAMPLES, STEPS = 120, 40


class Served(RuleBasedStateMachine):
    """Requests are scored from the engine, and each again from scratch: plain tensors, rows out of the table.

    device: the pool's where it is on a GPU, or what stands in for one; place: where the network is.
    """

    device: ClassVar[Any] = None
    place: ClassVar[str] = "cpu"
    counts: ClassVar[Counter[str]] = Counter()

    @initialize(policy=st.sampled_from(["lru", "sieve"]), host_pages=st.sampled_from([0, 0, 6]))
    def start(self, policy: str, host_pages: int) -> None:
        self.table = np.random.default_rng(0).normal(size=(ROWS, 8)).astype(np.float32)
        backend = "cpu" if self.device is None else "cuda"
        self.pool = HbmPool(PAGES, PAGE_TOKENS * TOKEN_BYTES, backend=backend, device=self.device)
        self.emb = EmbeddingCache(self.pool, row_bytes=ROW_BYTES, tables=[self.table], policy=policy)
        self.kv = KvCache(self.pool, token_bytes=TOKEN_BYTES, host_pages=host_pages)
        self.revision = 0
        self.pool.set_target(0.3, 0)
        self.pool.migrate(PAGES)
        self.pages = page_blocks(self.pool, SERVED, torch.float32)
        self.network = Hstu(SERVED, seed=0).to(self.place)
        self.version = self.batches = 0
        self.history: dict[int, list[int]] = {}  # items
        self.slides: Counter[int] = Counter()
        self.leases: list[KvLease] = []

    def epoch(self, user: int) -> int:
        """A slide of the window starts a new one, and so does a new version of the model."""
        return self.version * 1000 + self.slides[user]

    @rule(users=st.lists(st.integers(0, 4), min_size=1, max_size=3), seed=st.integers(0, 10**6))
    def serve(self, users: list[int], seed: int) -> None:
        """A batch; each user's history has grown by some items since his last request."""
        rng = np.random.default_rng(seed)
        batch = []
        for user in users:
            history = self.history.setdefault(user, [])
            new = int(rng.integers(1, 8 if history else 16))
            history += rng.integers(0, ROWS, new).tolist()
            if len(history) > MOST_TOKENS:
                del history[:10]
                self.slides[user] += 1
                self.counts["slid"] += 1
            batch.append(self.look_up(user, list(history), new, rng.integers(0, ROWS, CANDIDATES).tolist()))
        requests, rows, leases, expected = zip(*batch, strict=True)
        scores = self.network(torch.cat(rows), requests)
        for lease in leases:
            if lease is not None:
                lease.release()
        assert torch.allclose(scores, torch.cat(expected), atol=TOLERANCE, rtol=0)
        assert scores.std() > 0.01
        self.batches += 1

    def look_up(
        self, user: int, history: list[int], new: int, candidates: list[int]
    ) -> tuple[Request, Tensor, KvLease | None, Tensor]:
        tokens = len(history)
        epoch = self.epoch(user)
        if self.kv.host_pages:
            self.counts["onboarded"] += self.kv.onboardable(user, tokens - new, epoch)
            self.kv.onboard(user, tokens - new, epoch)
        prefix = self.kv.lookup(user, max(0, tokens - new), epoch)
        kept = self.kv.extend(user, tokens, epoch)
        lease = self.kv.lease(user)
        request = self.network.request(self.pages, self.kv.pages(user).tolist(), prefix, tokens, CANDIDATES)
        found = self.emb.lookup(self.rows([*history[prefix:], *candidates]))
        rows = self.network.pool(torch.from_dlpack(found.rows).view(torch.float32))
        self.counts.update(hits=prefix, cut=0 < prefix < tokens - new, refused=not kept)
        return request, rows, lease, self.from_scratch([*history, *candidates])

    def from_scratch(self, items: Sequence[int]) -> Tensor:
        tokens = len(items) - CANDIDATES
        rows = self.network.pool(torch.from_numpy(self.table[self.rows(items)]).to(self.place))
        return self.network(rows, [Request(0, tokens, CANDIDATES, self.network.new_blocks(1, tokens))])

    def rows(self, items: Sequence[int]) -> Any:
        """The two embedding rows of each item."""
        first = np.array(items, np.int64)
        return np.stack([first, (first * 7 + 1) % ROWS], axis=1).ravel()

    @rule(alpha=st.floats(0, 1), budget=st.integers(0, PAGES))
    def resize(self, alpha: float, budget: int) -> None:
        self.revision += 1
        self.pool.set_target(alpha, self.revision)
        self.counts["moved"] += self.pool.migrate(budget).granted

    @rule(budget=st.integers(0, 4))
    def migrate(self, budget: int) -> None:
        self.counts["moved"] += self.pool.migrate(budget).granted

    @precondition(lambda self: self.batches % 6 == 5)  # else hardly anything would be cached
    @rule()
    def update_model(self) -> None:
        self.version += 1
        self.network = Hstu(SERVED, seed=self.version).to(self.place)

    @rule(user=st.integers(0, 4))
    def hold(self, user: int) -> None:
        """Another request of the user is under way: his pages stay."""
        lease = self.kv.lease(user)
        if lease is not None:
            self.leases.append(lease)

    @rule()
    def let_go(self) -> None:
        while self.leases:
            self.leases.pop().release()

    @precondition(lambda self: self.batches % 6 == 5)  # else hardly anything would be cached
    @rule(user=st.integers(0, 4))
    def drop(self, user: int) -> None:
        self.kv.drop(user)

    def teardown(self) -> None:
        if hasattr(self, "leases"):
            self.let_go()
            self.counts["evicted"] += self.kv.stats().evicted
            self.pool.close()


def test_no_cache_changes_a_score() -> None:
    """Through evictions, resizes, appends, slides, new versions, refusals, a host tier, one user twice in a batch."""
    Served.counts.clear()
    run_state_machine_as_test(
        Served,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
            database=None,
        ),
    )
    found = Served.counts
    assert min(found[name] for name in ("hits", "cut", "refused", "slid", "moved", "evicted", "onboarded")) > 20, found
