"""`helm_rl/HelmNode-v0`: what Gymnasium and Stable-Baselines3 ask of an environment, and what this one promises."""

from __future__ import annotations

import math
import subprocess
import sys
import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check

import envs
from envs.node_env import HelmNodeEnv
from envs.serving.node import NodeSim
from envs.training_traces import TrainingTraces, reward
from helm_rl import observation
from helm_rl.control.burst import BurstSettings, new_burst_state
from helm_rl.errors import UserError
from helm_rl.observation import ObservationBuilder
from helm_rl.scenario import Scenario, load_scenario
from helm_rl.workloads.generate import generate
from helm_rl.workloads.trace import Trace
from tests.envs.worlds import QUICK, scenario, trace

ID = "helm_rl/HelmNode-v0"
SECOND = 1_000_000_000
UP, STAY, DOWN = (np.array([rate], np.float32) for rate in (1.0, 0.0, -1.0))


@pytest.fixture(scope="module")
def load() -> tuple[Scenario, Trace]:
    small = scenario(**QUICK)
    return small, generate(small)


@pytest.fixture
def env(load: tuple[Scenario, Trace]) -> HelmNodeEnv:
    return HelmNodeEnv(*load, episode_s=5)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("env_id", [ID, f"envs:{ID}"])
def test_gymnasiums_check_passes_without_a_warning(load: tuple[Scenario, Trace], env_id: str) -> None:
    made = gym.make(env_id, scenario=load[0], trace=load[1], episode_s=3)
    gymnasium_check(made.unwrapped, skip_render_check=False)
    made.close()


def test_stable_baselines3s_check_passes_without_a_warning(load: tuple[Scenario, Trace]) -> None:
    checker = pytest.importorskip("stable_baselines3.common.env_checker", reason="stable-baselines3 is not installed")
    made = gym.make(ID, scenario=load[0], trace=load[1], episode_s=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checker.check_env(made, warn=True)


def test_gymnasiums_wrappers_find_nothing_to_warn_about(load: tuple[Scenario, Trace]) -> None:
    """`gym.make` adds a passive checker, which warns at the first reset and step."""
    made = gym.make(ID, scenario=load[0], trace=load[1], episode_s=3, paired=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.reset(seed=3)
        for _ in range(6):
            made.step(made.action_space.sample())
        with pytest.raises(UserWarning, match="heard"):
            gym.logger.warn("heard")


def test_a_new_process_can_make_it_by_module_and_id() -> None:
    code = (
        "import gymnasium, sys; assert 'envs' not in sys.modules; "
        f"env = gymnasium.make('envs:{ID}', scenario='steady'); print(env.unwrapped.scenario.name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "steady"
    assert ID in gym.registry
    assert envs.__doc__ is not None


def test_spaces(env: HelmNodeEnv) -> None:
    assert env.observation_space == gym.spaces.Box(observation.LOW, observation.HIGH, (17,), np.float32)
    assert env.action_space == gym.spaces.Box(-1.0, 1.0, (1,), np.float32)


def test_step_gives_pythons_own_types_and_arrays_of_its_own(env: HelmNodeEnv) -> None:
    """No NumPy scalars, and no buffer that a later step overwrites."""
    observations = [env.reset(seed=1)[0]]
    copies = [observations[0].copy()]
    for _ in range(10):
        obs, earned, terminated, truncated, info = env.step(UP)
        assert type(earned) is float
        assert type(terminated) is bool
        assert type(truncated) is bool
        assert obs.dtype == np.float32
        assert set(info) == {"alpha", "target", "p99_ms", "window"}
        assert type(info["alpha"]) is type(info["target"]) is type(info["p99_ms"]) is float
        observations.append(obs)
        copies.append(obs.copy())
    assert all(np.array_equal(a, b) for a, b in zip(observations, copies, strict=True))
    assert not any(np.shares_memory(a, b) for i, a in enumerate(observations) for b in observations[:i])
    assert not np.array_equal(observations[1], observations[5])


def rollout(env: HelmNodeEnv, seed: int, steps: int = 10) -> list[Any]:
    actions = np.random.default_rng(seed).uniform(-1, 1, (steps, 1)).astype(np.float32)
    obs, info = env.reset(seed=seed)
    result = [obs.tolist(), info["window"]]
    for action in actions:
        obs, earned, _, truncated, info = env.step(action)
        result += [obs.tolist(), earned, truncated, info["window"]]
    return result


def test_same_seed_same_bits(load: tuple[Scenario, Trace]) -> None:
    one, two = (HelmNodeEnv(*load, episode_s=5) for _ in range(2))
    first = rollout(one, 7)
    assert rollout(one, 7) == first  # the environment used before
    assert rollout(two, 7) == first  # and another
    assert rollout(two, 8) != first
    generated = [HelmNodeEnv(scenario(seconds=8, **QUICK), episode_s=3, seed=2) for _ in range(2)]
    assert rollout(generated[0], 7, 6) == rollout(generated[1], 7, 6)
    assert rollout(HelmNodeEnv(scenario(seconds=8, **QUICK), episode_s=3, seed=3), 7, 6) != rollout(generated[0], 7, 6)


def test_without_a_seed_episodes_differ_but_follow_from_the_first_seed(env: HelmNodeEnv) -> None:
    starts = []
    for _ in range(2):
        env.reset(seed=5)
        starts.append([env.reset()[1]["window"].end_ns for _ in range(5)])
    assert starts[0] == starts[1]
    assert len(set(starts[0])) > 1


@pytest.mark.parametrize("episode_s", [0.5, 1.7, 5.0])
def test_episodes_are_truncated_and_never_terminated(load: tuple[Scenario, Trace], episode_s: float) -> None:
    env = HelmNodeEnv(*load, episode_s=episode_s, paired=False)
    for _ in range(3):
        env.reset(seed=0)
        ends = [env.step(UP)[2:4] for _ in range(round(episode_s / 0.5))]
        assert ends == [(False, False)] * (len(ends) - 1) + [(False, True)]
        with pytest.raises(gym.error.ResetNeeded, match="the episode has ended"):
            env.step(UP)


def test_the_longest_episode_is_the_trace(load: tuple[Scenario, Trace]) -> None:
    env = HelmNodeEnv(*load, paired=False)
    env.reset(seed=0)
    intervals = int(load[1].arrival_ns[-1] // (SECOND // 2))
    assert [env.step(STAY)[3] for _ in range(intervals)] == [False] * (intervals - 1) + [True]


def test_step_before_reset_is_refused(env: HelmNodeEnv) -> None:
    with pytest.raises(gym.error.ResetNeeded, match="call reset before step"):
        env.step(UP)


def test_a_reset_that_is_refused_leaves_nothing_to_step(load: tuple[Scenario, Trace]) -> None:
    env = HelmNodeEnv(*load, paired=False)
    env.reset(seed=0)
    with pytest.raises(UserError, match="option start"):
        env.reset(options={"start": 10**9})
    with pytest.raises(gym.error.ResetNeeded, match="call reset before step"):
        env.step(UP)


def test_the_action_is_a_rate_of_change_of_the_target(load: tuple[Scenario, Trace]) -> None:
    """.06 a second over half a second is .03 a step."""
    env = HelmNodeEnv(*load, episode_s=15)
    env.reset(seed=0, options={"alpha": 0.5, "start": 0})
    targets = [env.step(action)[4]["target"] for action in (UP, UP, STAY, DOWN, DOWN, DOWN)]
    assert targets == pytest.approx([0.53, 0.56, 0.56, 0.53, 0.5, 0.47])
    assert env.step(np.array([0.5], np.float32))[4]["target"] == pytest.approx(0.485)
    # Beyond the space it is clipped, and the target stays within the scenario's bounds.
    assert env.step(np.array([50.0], np.float32))[4]["target"] == pytest.approx(0.515)
    for _ in range(16):
        info = env.step(UP)[4]
    assert info["target"] == 0.9
    assert info["alpha"] == pytest.approx(0.9, abs=1 / 256)


@pytest.mark.parametrize("action", [math.nan, math.inf])
def test_an_action_that_is_not_a_number_is_refused(env: HelmNodeEnv, action: float) -> None:
    env.reset(seed=0)
    with pytest.raises(ValueError, match="the action must be a number"):
        env.step(np.array([action], np.float32))
    with pytest.raises(ValueError, match="reshape"):
        env.step(np.zeros(2, np.float32))
    assert env.step(STAY)[3] is False


def test_an_episode_is_a_stretch_of_the_trace(load: tuple[Scenario, Trace]) -> None:
    """The same as a node run by hand: 30 s of warm-up, as far as the trace has them, then steps."""
    small, made = load
    env = HelmNodeEnv(small, made, episode_s=4, paired=False)
    obs, info = env.reset(seed=0, options={"start": 10, "alpha": 0.3})
    start = 5 * SECOND
    node = NodeSim(small, made, 0.3, start_ns=int(made.arrival_ns[0]))
    builder, detector = ObservationBuilder(small.slo_ms), new_burst_state(BurstSettings())
    # Whole seconds back from where the last second begins, which is served in intervals.
    ends = [end for end in range(-20 * SECOND, start - SECOND + 1, SECOND) if end > node.now_ns]
    for end in [*ends, start - SECOND // 2, start]:
        window = node.run(end, detector)
        expected = builder.update(window)
    assert np.array_equal(obs, expected)
    assert info["window"] == window
    for k, action in enumerate((UP, DOWN, DOWN, UP)):
        before = node.alpha
        node.set_target(node.target + float(action[0]) * 0.03)
        window = node.run(start + (k + 1) * SECOND // 2, detector)
        obs, earned, _, _, info = env.step(action)
        assert np.array_equal(obs, builder.update(window))
        assert info["window"] == window
        assert earned == reward(window, small, window.alpha - before)


def test_reward_is_paired_with_a_static_half(load: tuple[Scenario, Trace]) -> None:
    small, made = load
    shared = TrainingTraces(small, [made])
    paired, plain = (HelmNodeEnv(traces=shared, episode_s=4, paired=pair) for pair in (True, False))
    for each in (paired, plain):
        each.reset(seed=0, options={"start": 6, "alpha": 0.2})
    reference = shared.reference(0)
    for k in range(8):
        difference = plain.step(STAY)[1] - paired.step(STAY)[1]
        assert difference == pytest.approx(reference[6 + k])
    # .5 against itself earns nothing, once what the warm-up left has been forgotten.
    paired.reset(seed=0, options={"start": 20, "alpha": 0.5})
    assert [paired.step(STAY)[1] for _ in range(8)] == pytest.approx([0.0] * 8, abs=1e-9)


def test_default_scenario_and_arguments() -> None:
    env = HelmNodeEnv()
    assert env.scenario == load_scenario("burst")
    with pytest.raises(UserError, match="render_mode must be None, got 'human'"):
        HelmNodeEnv(render_mode="human")
    with pytest.raises(UserError, match="neither a shipped scenario"):
        HelmNodeEnv("bursty")
    with pytest.raises(UserError, match="this node is always up"):
        HelmNodeEnv(scenario(event=[{"at_s": 1.0, "node": 0, "action": "lose"}]))


@pytest.mark.parametrize("episode_s", [0.0, 0.49, -1.0, math.nan, math.inf])
def test_an_episode_shorter_than_an_interval_is_refused(load: tuple[Scenario, Trace], episode_s: float) -> None:
    with pytest.raises(UserError, match=r"episode_s must be at least one interval \(0\.5 s\)"):
        HelmNodeEnv(*load, episode_s=episode_s)


def test_an_interval_longer_than_the_trace_is_refused() -> None:
    env = HelmNodeEnv(scenario(control__interval_s=10), trace([0.0, 1000.0]))
    with pytest.raises(UserError, match=r"trace made has less than one interval \(10 s\) after its warm-up"):
        env.reset(seed=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alfa": 0.5}, r"unknown reset options \['alfa'\]; known: trace, start, alpha"),
        ({"trace": 1}, r"option trace must be in \[0, 1\), got 1"),
        ({"trace": -1}, "option trace must be in"),
        ({"start": 10_000}, "option start must be in"),
        ({"start": -1}, "option start must be in"),
        ({"alpha": 0.95}, r"option alpha must be in \[0\.1, 0\.9\], got 0\.95"),
        ({"alpha": math.nan}, "option alpha must be in"),
    ],
)
def test_reset_options_that_cannot_be_are_refused(env: HelmNodeEnv, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        env.reset(seed=0, options=options)


def test_short_intervals_cover_a_second() -> None:
    """At 5 ms an observation still covers the last second."""
    short = scenario(seconds=3, warm_s=2, control__interval_s=0.005, control__tick_s=0.005, **QUICK)
    made = generate(short)
    env = HelmNodeEnv(short, made, episode_s=1, paired=False)
    env.reset(seed=0, options={"start": 0, "alpha": 0.5})
    for _ in range(150):
        obs = env.step(STAY)[0]
    now = 150 * SECOND // 200
    inside = (made.arrival_ns >= now - SECOND) & (made.arrival_ns < now)
    node = NodeSim(short, made, 0.5)
    node.run(now - SECOND)
    window = node.run(now)
    assert window.arrivals == np.count_nonzero(inside)
    named = dict(zip(observation.OBSERVATION_NAMES, obs.tolist(), strict=True))
    assert named["hot_user_ratio"] == pytest.approx(window.returning / window.arrivals)
    assert named["kv_hit_rate"] == pytest.approx(window.history_tokens_hit / window.history_tokens)
    assert named["link_util"] == pytest.approx(window.link_busy_ns / SECOND, rel=1e-4)


def test_telemetry_that_is_lost_repeats_the_last_observation(load: tuple[Scenario, Trace]) -> None:
    """What is lost follows from the reset's seed; the reward is that of what really happened."""
    small, made = load
    lossy = small.model_copy(update={"telemetry": scenario(telemetry__loss=0.5).telemetry})
    runs = []
    for each, seed in ((small, 1), (lossy, 1), (lossy, 1), (lossy, 2)):
        env = HelmNodeEnv(each, made, episode_s=10, paired=False)
        env.reset(seed=seed, options={"start": 2, "alpha": 0.5})
        runs.append([env.step(UP) for _ in range(20)])
    whole, one, same, other = ([step[0].tolist() for step in run] for run in runs)
    assert one == same != other
    fresh = [k for k in range(1, 20) if one[k] != one[k - 1]]
    assert 4 <= len(fresh) <= 15
    assert all(len({tuple(row) for row in rows}) == 20 for rows in (whole,))
    assert [step[1] for step in runs[0]] == [step[1] for step in runs[1]]


def test_telemetry_that_has_not_arrived_is_zeros(load: tuple[Scenario, Trace]) -> None:
    small, made = load
    late = small.model_copy(update={"telemetry": scenario(telemetry__delay_s=8.0).telemetry})
    env = HelmNodeEnv(late, made, episode_s=10, paired=False)
    obs, _ = env.reset(seed=1, options={"start": 0, "alpha": 0.5})  # 4 s of warm-up
    assert not obs.any()
    rows = [env.step(STAY)[0] for _ in range(10)]
    assert not rows[5].any()
    assert rows[9].any()
