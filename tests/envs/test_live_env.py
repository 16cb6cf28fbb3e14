"""`helm_rl/HelmLive-v0`: what it measures, what it serves, and that it starts, fails and ends cleanly."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import envs
import train.ppo_base
from cache_engine.backends.cpu import kv
from cache_engine.backends.device import kernel_source
from envs.live_env import HelmLiveEnv
from envs.serving.live import TABLES
from envs.serving.live_compute import Taken
from envs.serving.matrix_product import MatrixProduct
from envs.serving.node import NodeSim
from helm_rl import observation
from helm_rl.checkpoint import load_bundle
from helm_rl.control.base import BasePolicy
from helm_rl.errors import UserError
from helm_rl.export import export
from helm_rl.metrics import SHED_FACTOR, WindowStats
from helm_rl.observation import ObservationBuilder
from helm_rl.scenario import Scenario
from helm_rl.workloads.trace import Trace
from tests.cache_engine.backends.fake_cupy import FakeCupy
from tests.cache_engine.backends.local_device import compile_library
from tests.envs.worlds import scenario, trace
from train.ppo_base import Args

ID = "helm_rl/HelmLive-v0"
UP, STAY, DOWN = (np.array([rate], np.float32) for rate in (1.0, 0.0, -1.0))
PAGES = 256
PAGE_TOKENS = 128

Make = Callable[..., HelmLiveEnv]


def live(**changes: Any) -> Scenario:
    """256 pages of 128 tokens or 1,024 rows each; a few requests a second; intervals of .1 s."""
    small = {
        "seconds": 4,
        "warm_s": 0.5,
        "model__kv_heads": 1,
        "model__head_dim": 8,
        "model__row_bytes": 64,
        "model__candidates": 16,
        "hardware__pool_gib": 1 / 64,
        "hardware__page_kib": 64,
        "control__interval_s": 0.1,
        "control__rate_per_s": 0.5,
        "control__migrate_pages_per_s": 2000,
        "load__items": 100_000,
    }
    return scenario(**(small | changes))


def arrivals(every_ms: float, seconds: float, **columns: Any) -> Trace:
    return trace(np.arange(0.5 * every_ms, 1e3 * seconds, every_ms).tolist(), catalogue=100_000, **columns)


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[HelmLiveEnv] = []

    def make_one(scenario: Scenario | None = None, trace: Trace | None = None, **options: Any) -> HelmLiveEnv:
        defaults: dict[str, Any] = {"compute_scale": 0.1, "table_rows": 1 << 15, "warm_s": 0.5, "verify": True}
        env = HelmLiveEnv(live() if scenario is None else scenario, trace, **(defaults | options))
        made.append(env)
        return env

    yield make_one
    for env in made:
        env.close()


def run_batches(env: HelmLiveEnv, instead: Callable[[Sequence[Taken]], object]) -> None:
    """Let the accelerator's thread call `instead` where a batch is computed, its pages leased."""

    def run(batch: Sequence[Taken], stop: threading.Event) -> int:
        instead(batch)
        return 1

    env.node.compute.run = run  # type: ignore[method-assign]


def until(truth: Callable[[], bool], limit_s: float = 10.0) -> None:
    end = time.monotonic() + limit_s
    while not truth():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)


def serving_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("helm-live")]


def test_gymnasiums_check_passes_without_a_warning() -> None:
    """Its comparisons of two runs are left out: what a wall clock measures is never the same twice. That is what the
    registration says (nondeterministic=True), and the check heeds it.
    """
    assert envs.__doc__ is not None
    assert gym.spec(ID).nondeterministic
    options = {"scenario": live(control__interval_s=0.05), "table_rows": 1 << 12, "warm_s": 0.1, "compute_scale": 0}
    made = gym.make(ID, **options)
    assert made.observation_space == gym.spaces.Box(observation.LOW, observation.HIGH, (17,), np.float32)
    assert made.action_space == gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(made.unwrapped, skip_render_check=False)
    made.close()
    made.close()


def test_the_observation_is_the_builders_on_the_same_windows_which_are_those_of_the_trace(make: Make) -> None:
    env = make(seed=3)
    obs, info = env.reset(seed=1, options={"alpha": 0.4, "start": 10})
    builder = ObservationBuilder(env.scenario.slo_ms)
    windows: list[WindowStats] = [info["window"]]
    assert np.array_equal(obs, builder.update(info["window"]))
    for action in (UP, UP, STAY, DOWN, UP, STAY):
        obs, earned, terminated, truncated, info = env.step(action)
        assert (terminated, truncated, type(earned)) == (False, False, float)
        assert set(info) == {"alpha", "target", "p99_ms", "window"}
        assert np.array_equal(obs, builder.update(info["window"]))
        windows.append(info["window"])
    until(lambda: env.totals.requests >= sum(w.arrivals for w in windows))  # what still waits

    assert windows[0].start_ns == 900_000_000
    assert all(a.end_ns == b.start_ns for a, b in pairwise(windows))
    assert 0.1 <= (windows[-1].end_ns - windows[0].start_ns) * 1e-9 / 7 < 0.3
    served = env.node.trace
    first, last = np.searchsorted(served.arrival_ns, [windows[0].start_ns, windows[-1].end_ns])
    assert [sum(w.arrivals for w in windows)] == [last - first]
    assert sum(w.returning for w in windows) == env.node._returning[first:last].sum()
    # All that arrived was served, waits, or is in flight.
    in_flight = sum(w.arrivals - w.completed for w in windows) - windows[-1].queue
    assert 0 <= in_flight <= env.scenario.hardware.max_batch
    tokens = served.history_tokens[first:last].cumsum()
    assert sum(w.history_tokens for w in windows) in tokens
    assert 0 < sum(w.history_tokens_hit for w in windows) < tokens[-1]
    assert 0 < sum(w.rows_hit for w in windows) <= sum(w.rows for w in windows)
    assert windows[-1].alpha == pytest.approx(0.5, abs=1 / PAGES)
    assert 0 < sum(w.link_busy_ns for w in windows) < windows[-1].end_ns - windows[0].start_ns
    assert 0 < sum(w.compute_busy_ns for w in windows) < windows[-1].end_ns - windows[0].start_ns


def test_latency_runs_from_the_scheduled_arrival_while_the_server_stalls(make: Make) -> None:
    """A stall of .5 s in requests every 20 ms: from send times all would look fast."""
    env = make(live(hardware__max_batch=4), arrivals(20, 1.5))
    env.reset(options={"start": 0, "alpha": 0.5})
    stall: list[int] = []

    def stall_once(batch: Sequence[Taken]) -> None:
        if not stall:
            stall.append(env.node.clock_ns())
            time.sleep(0.5)
            stall.append(env.node.clock_ns())

    run_batches(env, stall_once)
    for _ in range(9):
        *_, info = env.step(STAY)
    due = env.node.trace.arrival_ns
    waiting = (due > stall[0]) & (due < stall[1])
    assert waiting.sum() >= 20
    behind_ms = env.node.latency_ms[waiting] - (stall[1] - due[waiting]) * 1e-6
    assert (behind_ms >= -0.01).all()
    assert np.median(behind_ms) < 400
    assert info["p99_ms"] > 480


def test_a_full_queue_sheds_what_arrives_and_counts_it_at_a_hundred_times_the_slo(make: Make) -> None:
    env = make(live(hardware__queue_bound=3, hardware__max_batch=1), arrivals(10, 1.0))
    env.reset(options={"start": 0, "alpha": 0.5})
    go = threading.Event()
    run_batches(env, lambda batch: go.wait(10))
    windows = [env.step(STAY)[-1]["window"] for _ in range(3)]
    # One is being served, three wait, the others were refused as they came, whoever looked when.
    arrived = sum(w.arrivals for w in windows)
    assert arrived >= 29
    assert windows[-1].queue == 3
    assert sum(w.shed for w in windows) == env.totals.shed == arrived - 4
    latency_ms = env.node.latency_ms[:arrived]
    assert np.isnan(latency_ms).sum() == 4
    assert (latency_ms == SHED_FACTOR * env.scenario.slo_ms).sum() == arrived - 4
    go.set()


def test_a_resize_moves_pages_while_leases_are_held_but_none_of_those(make: Make) -> None:
    """User 0 has 24 pages in use, others the rest; the KV cache shrinks from 230 pages to 26 under his request."""
    n = 90
    users = [k + 1 for k in range(n)]
    load = trace([1.0 * k for k in range(n)] + [150.0, 3000.0], [*users, 0, 0], [300] * n + [24 * PAGE_TOKENS] * 2)
    env = make(live(control__rate_per_s=100, hardware__max_batch=1), load)
    env.reset(options={"start": 0, "alpha": 0.1})
    pool, kv = env.node.pool, env.node._kv
    seen: dict[str, Any] = {}

    def hold(batch: Sequence[Taken]) -> None:
        pages = kv.pages(0)
        if batch[0].user != 0 or seen:
            return
        seen["before"] = pool.owned("kv")  # from here on the main thread asks for less
        until(lambda: pool.owned("kv") == 26)
        seen["after"] = pool.owned("kv")
        seen["same"] = np.array_equal(kv.pages(0), pages)
        seen["owners"] = set(pool.state.owner[pages].tolist())
        seen["others"] = sum(kv.pages(user).size for user in users)

    run_batches(env, hold)
    while "before" not in seen:
        env.step(STAY)
    env.step(UP)
    until(lambda: env.totals.pages_verified >= 3 * n + 24)
    assert seen == {"before": 230, "after": 26, "same": True, "owners": {pool.member("kv")}, "others": 2}
    assert env.totals.pages_moved >= 204
    assert env.totals.wrong_bytes == 0


def test_every_row_served_is_checked_against_its_table(make: Make) -> None:
    env = make()
    env.reset(seed=1)
    for _ in range(3):
        env.step(UP)
    assert env.totals.rows_verified > 1000
    assert env.totals.wrong_bytes == 0

    env.node.tables[0][0, 5] ^= 1  # one byte, of the most popular row
    env.reset(seed=1)
    env.step(UP)
    assert 0 < env.totals.wrong_bytes < 0.2 * env.totals.rows_verified

    env.node.tables[0][0, 5] ^= 1
    tables = env.node.tables
    for table in tables:
        table[:, 63] ^= 0x80
    env.reset(seed=1)
    env.step(UP)
    env.close()  # nothing is in flight
    assert env.totals.wrong_bytes == env.totals.rows_verified > 1000
    assert len({bytes(row) for row in tables[0][:50]}) == 50


def test_every_kv_page_served_is_checked(make: Make) -> None:
    """One user, whose first page is damaged behind the cache's back: found at each of his requests from then on.

    His second is not full, and is written anew with each new token.
    """
    env = make(trace=arrivals(20, 1.5, user=[7] * 75, history=200, new=1))
    env.reset(options={"start": 0, "alpha": 0.5})
    env.step(STAY)
    assert env.totals.wrong_bytes == 0
    pool = env.node.pool
    with pool.lock:
        first = int(env.node._kv.pages(7)[0])
        pool.page(first)[-3:] ^= 0xFF
    before = env.totals
    for _ in range(3):
        env.step(STAY)
    env.node._shut_down()
    after = env.totals
    pages = after.pages_verified - before.pages_verified
    assert pages >= 2 * 5
    # The damage may have come between the two pages of a check.
    assert 3 * (pages // 2) - (after.wrong_bytes - before.wrong_bytes) in (0, 3)


def test_the_kv_cache_finds_and_evicts_what_the_simulators_does(make: Make) -> None:
    """The same requests at the same split, nothing resized: token for token the same."""
    small = live(hardware__max_batch=1)
    rng = np.random.default_rng(1)
    users, history = rng.integers(0, 8, 60), rng.integers(1, 900, 60)
    load = trace(np.arange(60) * 10.0, users.tolist(), history.tolist(), np.minimum(history, 40).tolist())
    env = make(small, load, warm_s=0)
    env.reset(options={"start": 0, "alpha": 0.9})
    until(lambda: env.totals.requests == 60)
    found = env.node._kv.stats()
    simulated = NodeSim(small, load, alpha=0.9)
    simulated.run(10**9)
    names = (kv.REQUESTED, kv.HITS, kv.EXTENDED, kv.EVICTED)
    expected = [int(simulated.state.kv.counters[name]) for name in names]
    assert [found.requested, found.hits, found.extended, found.evicted] == expected
    assert min(expected) > 20


def test_the_margins_are_those_of_the_simulator(make: Make) -> None:
    """From other ghosts, over other samples: what 1 % more of the pool would save on the same requests agrees."""
    small = live(hardware__link_gb_s=0.05)
    rng = np.random.default_rng(1)
    users, history = rng.integers(0, 100, 240), rng.integers(100, 900, 240)
    columns: dict[str, Any] = {"catalogue": 1 << 20, "zipf_items": 0.8}
    load = trace(np.arange(240) * 5.0, users.tolist(), history.tolist(), np.minimum(history, 40).tolist(), **columns)
    env = make(small, load, warm_s=0, table_rows=1 << 18, compute_scale=1, verify=False)
    env.reset(options={"start": 0, "alpha": 0.3})
    simulated = NodeSim(small, load, alpha=0.3)
    until(lambda: env.totals.requests == 240, 60)  # some machines are slow
    window = env.node.run(env.node.clock_ns())
    model = simulated.run(window.end_ns)
    assert window.emb_margin_ms == pytest.approx(model.emb_margin_ms, rel=0.4)
    assert window.kv_margin_ms == pytest.approx(model.kv_margin_ms, rel=0.5)
    assert min(model.emb_margin_ms, model.kv_margin_ms) > 1e-3


def test_requests_arrive_faster_at_a_higher_speed(make: Make) -> None:
    env = make(trace=arrivals(20, 4.0), speed=4.0)
    assert env.intervals == 9
    env.reset(options={"start": 0, "alpha": 0.5})
    window = env.step(STAY)[-1]["window"]
    assert 18 <= window.arrivals * 0.1 / ((window.end_ns - window.start_ns) * 1e-9) <= 22


def test_an_episode_ends_by_the_clock_even_if_the_caller_is_late(make: Make) -> None:
    env = make(episode_s=0.6)
    _, info = env.reset(seed=1)
    start = last = info["window"].end_ns
    steps, truncated = 0, False
    while not truncated:
        assert last - start < 600_000_000
        if steps == 1:
            time.sleep(0.25)
        _, _, terminated, truncated, info = env.step(UP)
        assert not terminated
        assert info["window"].start_ns == last
        last = info["window"].end_ns
        steps += 1
    assert steps <= 4  # of six intervals, two or more passed during the pause
    assert last - start > 550_000_000
    with pytest.raises(gym.error.ResetNeeded, match="the episode has ended"):
        env.step(UP)


def test_it_resets_again_beside_another_and_ends_with_its_threads(make: Make) -> None:
    assert serving_threads() == []
    one, two = make(), make(verify=False)
    with pytest.raises(gym.error.ResetNeeded):
        one.step(UP)
    for _ in range(2):
        one.reset(seed=1)
        two.reset(seed=2)
        assert len(serving_threads()) == 6
        for action in (UP, DOWN):
            assert one.step(action)[-1]["window"].end_ns > 0
            two.step(action)
    assert one.totals.wrong_bytes == 0 < one.totals.rows_verified
    assert two.totals.rows_verified == 0
    pool = one.node.pool
    one.close()
    one.close()
    assert pool.storage is None
    assert len(serving_threads()) == 3
    for use in (one.reset, lambda: one.step(UP)):
        with pytest.raises(gym.error.ClosedEnvironmentError, match="was closed"):
            use()
    two.step(UP)
    two.close()
    assert serving_threads() == []


def test_one_that_is_dropped_ends_its_threads() -> None:
    env = HelmLiveEnv(live(), table_rows=1 << 12, warm_s=0)
    env.reset(seed=1)
    del env
    gc.collect()
    assert serving_threads() == []


def test_an_error_while_serving_is_raised_by_step_and_a_reset_starts_anew(make: Make) -> None:
    env = make(trace=arrivals(10, 2.0))
    env.reset(options={"start": 0, "alpha": 0.5})
    run = env.node.compute.run

    def fail(batch: Sequence[Taken]) -> None:
        raise OSError("the table is gone")

    def step_thrice() -> None:
        for _ in range(3):
            env.step(UP)

    run_batches(env, fail)
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="the table is gone") as caught:
        step_thrice()
    assert isinstance(caught.value.__cause__, OSError)
    assert time.monotonic() - begun < 2
    with pytest.raises(RuntimeError, match="the table is gone"):
        env.step(UP)
    env.node.compute.run = run  # type: ignore[method-assign]
    env.reset(options={"start": 0, "alpha": 0.5})
    assert env.step(UP)[-1]["window"].completed > 0


def test_ctrl_c_ends_a_step_at_once(make: Make) -> None:
    env = make(live(control__interval_s=3), arrivals(50, 8.0))
    env.node.reset(0.5, 0)  # without waiting for an interval
    env._steps_left, env._end_ns = 2, 0
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    begun = time.monotonic()
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        env.step(UP)
    assert time.monotonic() - begun < 2
    env.close()
    assert serving_threads() == []


def test_close_from_elsewhere_ends_a_step(make: Make) -> None:
    env = make(live(control__interval_s=3), arrivals(50, 8.0))
    env.node.reset(0.5, 0)
    env._steps_left, env._end_ns = 2, 0
    threading.Timer(0.2, env.close).start()
    with pytest.raises(RuntimeError, match="was closed while"):
        env.step(UP)


def test_a_policy_trained_on_helm_node_runs_here_unchanged(make: Make, tmp_path: Path) -> None:
    toml = tmp_path / "live.toml"
    sections = live().model_dump(
        exclude_none=True, exclude={"load": {"phase", "rate_end", "day", "history_quantiles"}, "hardware": {"group"}}
    )
    flat = [f"{k} = {v!r}".replace("'", '"') for k, v in sections.items() if not isinstance(v, (dict, tuple))]
    for name, fields in sections.items():
        if isinstance(fields, dict):
            flat += [f"[{name}]", *(f"{k} = {v!r}".replace("'", '"') for k, v in fields.items())]
    toml.write_text("\n".join(flat))
    run = train.ppo_base.train(
        Args(scenario=(str(toml),), runs=tmp_path / "runs", num_envs=1, num_steps=16, num_minibatches=1,
             update_epochs=1, total_timesteps=16, validate_every=0)
    )  # fmt: skip
    export(run, tmp_path / "bundle")

    env = make(toml)  # type: ignore[arg-type]
    policy, twin = BasePolicy.load(tmp_path / "bundle"), BasePolicy.load(tmp_path / "bundle")
    obs, info = env.reset(options={"start": 3, "alpha": 0.5})
    assert load_bundle(tmp_path / "bundle").config.environment.env_id == "helm_rl/HelmNode-v0"
    twin.resume(info["target"])
    for _ in range(5):
        wanted = twin.decide(obs, info["alpha"], 0)
        obs, _, _, _, info = env.step(policy.action(obs))
        assert info["target"] == pytest.approx(wanted, abs=1e-12)
    assert env.totals.wrong_bytes == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "gpu"}, "backend must be one of cpu, cuda, got 'gpu'"),
        ({"speed": 0}, r"speed must be in \[1e-6, 1e6\], got 0"),
        ({"speed": float("nan")}, r"speed must be in \[1e-6, 1e6\], got nan"),
        ({"compute_scale": -1}, "compute_scale must be at least 0"),
        ({"table_rows": 0}, "table_rows must lie in 1 to"),
        ({"warm_s": float("inf")}, r"warm_s must be in \[0, 1e6\] seconds, got inf"),
        ({"episode_s": 0.01}, "episode_s must be at least one interval"),
        ({"render_mode": "human"}, "render_mode must be None"),
        ({"trace": trace([1.0])}, "has less than one interval"),
        ({"scenario": live(hardware__pool_gib=9000, hardware__page_kib=2048)}, "GiB of memory for pool and tables"),
    ],
)
def test_wrong_arguments_are_told_in_one_sentence(options: dict[str, Any], message: str, make: Make) -> None:
    with pytest.raises(UserError, match=message):
        make(**options)


def test_a_missing_gpu_is_told_in_one_sentence(make: Make) -> None:
    try:
        import cupy

        if cupy.cuda.is_available():
            pytest.skip("there is a GPU")
    except ImportError:
        pass
    with pytest.raises(UserError, match="backend 'cuda' needs"):
        make(backend="cuda")


@pytest.mark.parametrize(
    ("options", "message"),
    [({"alpha": 0.95}, "option alpha"), ({"start": 10_000}, "option start"), ({"trace": 0}, "unknown reset options")],
)
def test_wrong_reset_options_leave_nothing_to_step(options: dict[str, Any], message: str, make: Make) -> None:
    env = make(table_rows=64)
    with pytest.raises(UserError, match=message):
        env.reset(options=options)
    with pytest.raises(gym.error.ResetNeeded):
        env.step(UP)


def test_rows_past_the_tables_share_the_places_of_others(make: Make) -> None:
    env = make(live(), table_rows=64)  # 256 rows for 100,000 of the law
    env.reset(seed=1)
    env.step(UP)
    assert env.totals.wrong_bytes == 0 < env.totals.rows_verified
    assert [table.shape for table in env.node.tables] == [(64, 64)] * TABLES


def test_backend_cuda_serves_right_bytes_on_the_host(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The CUDA kernels compiled for the host, behind what stands in for CuPy: the wiring, not the speed."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ (Debian: apt-get install g++)")
    source = tmp_path / "all.cu"
    source.write_text(kernel_source())
    compile_library(compiler, source, tmp_path / "kernels.so")
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy(tmp_path / "kernels.so", source))
    monkeypatch.setattr("envs.serving.live_compute.MatrixProduct", lambda backend: MatrixProduct("cpu"))
    small = live(hardware__pool_gib=1 / 4096, hardware__page_kib=4)  # 64 pages of 8 tokens or 64 rows each
    env = make(small, arrivals(50, 3.0, user=[0, 1, 2] * 20, history=20), backend="cuda", table_rows=256)
    env.reset(options={"start": 5, "alpha": 0.5})
    moved = sum(env.step(action)[-1]["window"].moved_pages for action in (UP, UP, DOWN))
    until(lambda: env.totals.pages_verified > 20)
    assert env.node.pool.backend == "cuda"
    assert moved >= 3
    assert env.totals.rows_verified > 7 * 16 * 4
    assert env.totals.wrong_bytes == 0
