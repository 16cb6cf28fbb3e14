"""PPO for the base policy, in one file: from the arguments to the checkpoint, top to bottom.

    helm-rl train base --scenario burst trend steady --variations 5
    helm-rl train base --resume runs/<run>
    tensorboard --logdir runs

The algorithm is PPO with a clipped objective and generalised advantages (Schulman et al. 2016, 2017). What
differs from common implementations, and why:

- Truncated episodes bootstrap with the value of their final observation; terminated ones do not.
- Vector environments reset within the step that ends an episode, so no reset step is ever taken for a
  transition.
- The observation's normaliser is in the network. Values are learned in units of the returns' spread.
- The stored action is the one drawn, which its log-probability belongs to; the environments get it clipped.
- Many scenarios train one policy: environment i serves scenario i. Each discounts by its own interval.
- Every `--validate-every` iterations the policy, without noise, serves arrivals that it is not trained on. What is kept
  in the end is the policy of the least mean P99 regret there, and training stops when that no longer falls.
- Every `--checkpoint-every` iterations all environments are reset with seeds that follow from (seed,
  iteration). A checkpoint holds the actions since then, and resuming replays them: a resumed run equals one
  that was never stopped, bit for bit, although no simulator can be saved. Environments must be deterministic in
  (seed, actions).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
import tyro
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from torch.utils.tensorboard import SummaryWriter

from helm_rl import __version__, tracking
from helm_rl.checkpoint import (
    STATE_FILE,
    BoundsSection,
    EnvironmentSection,
    ObservationSection,
    SourceSection,
    Tensors,
    TrainingSection,
    TrainingState,
    ValidationSection,
    load_bundle,
    load_training_state,
    save_training_state,
)
from helm_rl.cli import given_options
from helm_rl.control.policy_net import ActorCritic
from helm_rl.errors import UserError
from helm_rl.figures import command
from helm_rl.files import kept_to_one
from helm_rl.metrics import mean_regret
from helm_rl.shipped import bundle_path
from train.acting import Acting
from train.charts import Hyperparameters, episode_steps, event_log, look_figure
from train.minibatch import Batch, Gradient, OnePiece, Steps
from train.state import Loop, capture, network_section, policy_of, restore

if TYPE_CHECKING:
    from helm_rl.scenario import Load, Scenario
    from helm_rl.workloads.trace import Trace
    from train.validation import Validation

NODE_ENV = "helm_rl/HelmNode-v0"
DISCOUNT_S = 60.0
"""Horizon of the discount: gamma = exp(-interval / DISCOUNT_S)."""
MOST_BATCH = 1 << 24
"""Steps of one iteration, over all environments."""
PAPER_SIGNALS = 7
"""Features at the head of the observation that the paper's policy reads."""


@dataclass
class Args:
    """Train the base policy with PPO. Ctrl-C saves; --resume continues."""

    exp_name: str = "ppo_base"
    """Name of the experiment, a part of the run's name."""
    seed: int = 1
    """Seed of everything that is drawn: weights, actions, minibatches, environments."""
    runs: Path = Path("runs")
    """Folder in which the run's own folder is made."""
    resume: Path | None = None
    """Run folder to continue from its last checkpoint, with the arguments that it was started with."""
    track: bool = False
    """Also log to Weights and Biases, in the end the bundle as an artefact, too (needs the extra 'track';
    WANDB_MODE=offline needs no network)."""
    wandb_project_name: str = tracking.PROJECT
    """Project at Weights and Biases."""
    wandb_entity: str | None = None
    """Team at Weights and Biases; your own account if not given."""

    scenario: tuple[str, ...] = ("burst", "trend", "steady")
    """Scenarios to train on: shipped ones (the README lists them) or paths of TOML files."""
    variations: int = 0
    """Scenarios besides, drawn around these in turn: other load, skew, histories, hardware, link and interval."""
    load: Literal["limit", "moderate"] = "limit"
    """The scenarios' rates as they stand (near what a node bears), or moderate: 70 % of each."""
    trace: tuple[Path, ...] = ()
    """Traces (.parquet) to train on, served as the one scenario says; without any they are generated."""
    paired: bool = True
    """Take from each reward what a static split of .5 earned on the same arrivals; not with --no-paired."""
    signals: Literal["all", "seven"] = "all"
    """What the policy reads of the observation: all, or only the first seven, as the paper's does."""
    env_id: str = NODE_ENV
    """Gymnasium id of another environment with Box spaces, instead of scenarios; 'module:id' imports the module."""
    start: Path | None = None
    """Bundle whose policy is the start, such as one that imitates the reference; fresh weights without it."""
    critic_first: int = 5
    """With --start: iterations at the beginning in which only the value network learns."""
    total_timesteps: int = 61_440
    """Steps in all, over all environments, in whole iterations; may be raised with --resume."""
    num_envs: int = 8
    """Environments that run side by side."""
    num_steps: int = 128
    """Steps of each environment per iteration."""
    checkpoint_every: int = 10
    """Iterations between checkpoints, where all environments also start afresh; should span an episode."""
    validate_every: int = 5
    """Iterations between looks at held-out arrivals of each scenario, and one at the end; 0: none, and the last policy
    is kept. Not with --trace."""
    validation_draws: int = 1
    """Sets of held-out arrivals of each scenario."""
    patience: int = 0
    """Stop when so many looks in a row have not lowered the mean regret; 0: train to the end."""

    learning_rate: float = 1e-3
    """Step size of the Adam optimiser."""
    anneal_lr: bool = True
    """Lower the learning rate linearly to zero over the training; not with --no-anneal-lr."""
    gamma: float | None = None
    """Discount per step; if not given, exp(-interval / 60 s) of each scenario's interval, and .99 elsewhere."""
    gae_lambda: float = 0.95
    """Lambda of the generalised advantages: smaller is less noisy and more biased."""
    num_minibatches: int = 4
    """Minibatches per epoch; must divide num_envs * num_steps."""
    update_epochs: int = 8
    """Passes over the data of one iteration."""
    norm_adv: bool = True
    """Bring the advantages of a minibatch to mean 0 and deviation 1; not with --no-norm-adv."""
    clip_coef: float = 0.2
    """How far the probability ratio may move before the gradient stops."""
    ent_coef: float = 0.0
    """Weight of the entropy bonus: larger explores longer."""
    vf_coef: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 0.5
    """Bound on the norm of the gradient."""
    target_kl: float | None = None
    """Stop the passes of an iteration when the approximate KL divergence exceeds this."""

    eval_episodes: int = 0
    """Episodes of the final policy, without noise, after the training; 0 for none."""
    eval_max_steps: int = 100_000
    """Most environment steps that this evaluation may take, over all environments."""
    torch_threads: int = 1
    """Threads of torch; one is fastest for networks this small."""


MAY_CHANGE = {
    "resume",
    "total_timesteps",
    "patience",
    "track",
    "wandb_project_name",
    "wandb_entity",
    "eval_episodes",
    "eval_max_steps",
}
"""Arguments that may differ when a run is resumed."""


def check_args(args: Args) -> None:
    """Raise UserError naming the first argument that is out of range."""
    at_least = {
        "seed": 0,
        "num_envs": 1,
        "num_steps": 1,
        "checkpoint_every": 1,
        "num_minibatches": 1,
        "update_epochs": 1,
        "eval_episodes": 0,
        "eval_max_steps": 1,
        "torch_threads": 1,
        "variations": 0,
        "critic_first": 0,
        "validate_every": 0,
        "validation_draws": 1,
        "patience": 0,
    }
    for name, least in at_least.items():
        if getattr(args, name) < least:
            raise UserError(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(args, name)}")
    ranges: dict[str, tuple[float | None, float, float]] = {
        "learning_rate": (args.learning_rate, 1e-12, 1.0),
        "gae_lambda": (args.gae_lambda, 0.0, 1.0),
        "clip_coef": (args.clip_coef, 1e-6, 10.0),
        "ent_coef": (args.ent_coef, 0.0, 10.0),
        "vf_coef": (args.vf_coef, 0.0, 1e3),
        "max_grad_norm": (args.max_grad_norm, 1e-6, 1e6),
        "target_kl": (args.target_kl, 1e-9, 1e3),
    }
    for name, (value, low, high) in ranges.items():
        if value is not None and not low <= value <= high:  # NaN fails too
            raise UserError(f"--{name.replace('_', '-')} must be from {low:g} to {high:g}, not {value}")
    if args.gamma is not None and not 0.0 <= args.gamma < 1.0:
        raise UserError(f"--gamma must be at least 0 and below 1, not {args.gamma}")
    if args.seed >= 2**32:
        raise UserError(f"--seed must be below 2^32, not {args.seed}")
    batch_size = args.num_envs * args.num_steps
    if batch_size > MOST_BATCH:
        raise UserError(
            f"num_envs * num_steps must be at most {MOST_BATCH:,}, not {batch_size:,}: it is held in memory"
        )
    if batch_size % args.num_minibatches:
        raise UserError(
            f"--num-minibatches must divide num_envs * num_steps = {batch_size}, which {args.num_minibatches} does not"
        )
    if batch_size // args.num_minibatches < 2:
        raise UserError(
            f"--num-minibatches {args.num_minibatches} makes minibatches of one sample out of {batch_size}, "
            f"whose advantages have no deviation; it may be at most {batch_size // 2}"
        )
    if args.total_timesteps < batch_size:
        raise UserError(
            f"--total-timesteps {args.total_timesteps} is less than one batch (num_envs * num_steps = "
            f"{batch_size}), so nothing would be trained"
        )
    if not re.fullmatch(r"[A-Za-z0-9._-]+", args.exp_name):
        raise UserError(f"--exp-name must be letters, digits, dots, dashes and underscores, not {args.exp_name!r}")
    if args.track:
        tracking.check_installed()
    if args.env_id != NODE_ENV:
        for name in ("trace", "variations", "signals", "start"):
            if getattr(args, name) != getattr(Args, name):
                raise UserError(f"--{name} goes with the scenarios' environment, not with --env-id")
    if not args.scenario:
        raise UserError("--scenario needs at least one scenario")
    if len(set(args.scenario)) < len(args.scenario):
        raise UserError(f"--scenario names one twice: {' '.join(args.scenario)}")
    if args.trace and len(args.scenario) + args.variations > 1:
        raise UserError(
            f"--trace is served as one scenario says, not as {len(args.scenario)} and {args.variations} variations; "
            "give one --scenario, and no --variations"
        )
    served = len(args.scenario) + args.variations
    if args.env_id == NODE_ENV and args.num_envs < served:
        raise UserError(
            f"--num-envs {args.num_envs}: each scenario and each variation, {served} in all, needs an environment of "
            "its own"
        )


# -- environments ---------------------------------------------------------------------------------------------


class Detach(gym.Wrapper[Any, Any, Any, Any]):
    """Hand out observations of one's own and plain numbers.

    An environment may fill one buffer at every step; the vector environment keeps a reference as `final_obs`
    and resets at once, which would put the first observation of the new episode in the place of the last of the
    old.
    """

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Step, and copy."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        return np.array(obs), float(np.asarray(reward).item()), bool(terminated), bool(truncated), info

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset, and copy."""
        obs, info = self.env.reset(seed=seed, options=options)
        return np.array(obs), info


def load_scenarios(given: Sequence[str], load: Load) -> list[Scenario]:
    """Read scenarios; UserError where one policy cannot serve them all."""
    from helm_rl.scenario import load_scenario

    scenarios = [load_scenario(name, load) for name in given]
    names = [scenario.name for scenario in scenarios]
    if len(set(names)) < len(names):
        raise UserError(f"--scenario: two of them have one name: {', '.join(names)}")
    first = scenarios[0]
    for scenario in scenarios:
        for name in ("alpha_min", "alpha_max", "rate_per_s"):
            one, other = getattr(first.control, name), getattr(scenario.control, name)
            if one != other:
                raise UserError(
                    f"scenario {scenario.name} has control.{name} = {other:g}, and scenario {first.name} {one:g}; what "
                    "an action means must be the same in all that one policy is trained on"
                )
    return scenarios


def scenario_facts(
    scenarios: Sequence[Scenario], paths: Sequence[Path] = (), traces: Sequence[Trace] = ()
) -> dict[str, Any]:
    """Return the fields of an `EnvironmentSection` that say what is served, and what an action means there."""
    from helm_rl.observation import OBSERVATION_NAMES, SCHEMA_VERSION, schema_hash
    from helm_rl.scenario import scenario_hash

    control = scenarios[0].control
    return {
        "observation": ObservationSection(
            schema_version=SCHEMA_VERSION, schema_hash=schema_hash(), names=tuple(OBSERVATION_NAMES)
        ),
        "bounds": BoundsSection(
            alpha_min=control.alpha_min,
            alpha_max=control.alpha_max,
            rate_per_s=control.rate_per_s,
            interval_s=tuple(sorted({each.control.interval_s for each in scenarios})),
        ),
        "scenarios": tuple(SourceSection(name=each.name, sha256=scenario_hash(each)) for each in scenarios),
        "traces": tuple(
            SourceSection(name=str(path), sha256=trace.hash()) for path, trace in zip(paths, traces, strict=True)
        ),
    }


def make_envs(args: Args, threads: int | None = None) -> tuple[VectorEnv[Any, Any, Any], EnvironmentSection]:
    """Make the vector environment, which steps on so many threads (default: as there are cores), and say what it is.

    Any other vector environment may take its place if it resets in the same step, gives `final_obs` and
    `_final_obs` in its infos where an episode ends, and is a deterministic function of the reset's seed and the
    actions.

    Raises:
        UserError: The scenario, the trace or the environment id is wrong, or a space is not a one-dimensional
            Box.
    """
    facts: dict[str, Any] = {}
    envs: VectorEnv[Any, Any, Any]
    if args.env_id == NODE_ENV:
        # Imported here: the simulator compiles kernels, and other environments need none of it.
        from envs.vector import NodeVectorEnv
        from helm_rl.workloads.trace import Trace
        from train.variations import variations

        named = load_scenarios(args.scenario, args.load)
        scenarios = named + variations(named, args.variations, args.seed)
        traces = [Trace.load(path) for path in args.trace]
        envs = NodeVectorEnv(
            args.num_envs,
            scenarios,
            seed=args.seed,
            traces=[traces] if traces else None,
            paired=args.paired,
            threads=threads,
            only_ends=True,
        )
        facts = scenario_facts(scenarios, args.trace, traces)
    else:
        try:
            envs = SyncVectorEnv(
                [lambda: Detach(gym.make(args.env_id, disable_env_checker=True))] * args.num_envs,
                autoreset_mode=AutoresetMode.SAME_STEP,
            )
        except (gym.error.Error, ModuleNotFoundError) as error:
            raise UserError(f"--env-id {args.env_id}: {error}") from None

    for name in ("observation", "action"):
        space = getattr(envs, f"single_{name}_space")
        if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1 or space.dtype.kind != "f":
            envs.close()
            raise UserError(
                f"--env-id {args.env_id}: the {name} space must be a one-dimensional Box of floats, not {space}"
            )
    if envs.metadata.get("autoreset_mode") is not AutoresetMode.SAME_STEP:
        envs.close()
        raise UserError(
            f"--env-id {args.env_id}: the vector environment must reset within the step that ends an episode"
        )
    section = EnvironmentSection(
        env_id=args.env_id,
        observation_size=envs.single_observation_space.shape[0],  # type: ignore[index]
        action_size=envs.single_action_space.shape[0],  # type: ignore[index]
        **facts,
    )
    return envs, section


def reset_seed(seed: int, iteration: int) -> int:
    """Seed of the environments' reset before this iteration: far apart for neighbours in either argument."""
    return int(np.random.SeedSequence([seed, iteration]).generate_state(1)[0])


# -- parts of the algorithm -----------------------------------------------------------------------------------


def advantages(
    rewards: npt.NDArray[np.float64],
    values: npt.NDArray[np.float64],
    next_value: npt.NDArray[np.float64],
    ends: npt.NDArray[np.bool_],
    gamma: npt.NDArray[np.float64],
    gae_lambda: float,
) -> npt.NDArray[np.float64]:
    """Generalised advantage estimates (Schulman et al. 2016), shape (steps, envs).

    Args:
        rewards: (steps, envs); where an episode was truncated, gamma * V(final observation) is already in it.
        values: (steps, envs), of the observations that were acted on.
        next_value: (envs,), of the observation after the last step.
        ends: (steps, envs), whether the episode ended with this step, terminated or truncated.
        gamma: (envs,), discount per step.
        gae_lambda: Decay of the trace.
    """
    result = np.empty_like(rewards)
    last = np.zeros_like(next_value)
    following = next_value
    for t in range(len(rewards) - 1, -1, -1):
        going_on = gamma * ~ends[t]
        last = rewards[t] + going_on * following - values[t] + going_on * gae_lambda * last
        result[t] = last
        following = values[t]
    return result


def evaluate(
    net: ActorCritic, envs: VectorEnv[Any, Any, Any], episodes: int, max_steps: int, seed: int
) -> npt.NDArray[np.float64]:
    """Run the policy without noise and with its statistics frozen; return the episodes' returns, shape (episodes,).

    Each environment contributes a fixed number of its first episodes: taking whatever ends first would favour
    short ones.

    Raises:
        UserError: The episodes were not over after `max_steps` steps, counted over all environments.
    """
    mode, low, high = net.training, envs.single_action_space.low, envs.single_action_space.high  # type: ignore[attr-defined]
    net.eval()
    try:
        quota = [episodes // envs.num_envs + (i < episodes % envs.num_envs) for i in range(envs.num_envs)]
        returns: list[list[float]] = [[] for _ in quota]
        total = np.zeros(envs.num_envs)
        obs, _ = envs.reset(seed=seed)
        steps = 0
        while any(len(done) < wanted for done, wanted in zip(returns, quota, strict=True)):
            if steps + envs.num_envs > max_steps:
                over = sum(min(len(done), wanted) for done, wanted in zip(returns, quota, strict=True))
                raise UserError(
                    f"the evaluation took {steps} steps, and only {over} of {episodes} episodes are over; "
                    f"raise --eval-max-steps (now {max_steps}), or ask for fewer --eval-episodes"
                )
            with torch.no_grad():
                action = net(torch.as_tensor(obs)).numpy()
            obs, reward, terminated, truncated, _ = envs.step(np.clip(action, low, high))
            steps += envs.num_envs
            total += reward
            for i in np.flatnonzero(terminated | truncated):
                returns[i].append(float(total[i]))
                total[i] = 0.0
        return np.array([value for done, wanted in zip(returns, quota, strict=True) for value in done[:wanted]])
    finally:
        net.train(mode)


def discounts(args: Args, envs: VectorEnv[Any, Any, Any]) -> npt.NDArray[np.float64]:
    """Return the discount per step of each environment, float64 (num_envs,)."""
    if args.gamma is not None:
        return np.full(args.num_envs, args.gamma)
    if args.env_id != NODE_ENV:
        return np.full(args.num_envs, 0.99)
    return np.exp(-np.asarray(envs.interval_s) / DISCOUNT_S)  # type: ignore[attr-defined]


def start_from(net: ActorCritic, path: Path) -> list[str]:
    """Put a bundle's policy and normaliser into a network; return the commands that made it.

    Raises:
        UserError: The bundle has another architecture, or is none.
    """
    bundle = load_bundle(bundle_path(path))
    expected = policy_of(net)
    for name, array in bundle.tensors.items():
        if name not in expected or expected[name].shape != array.shape:
            raise UserError(f"--start {path}: its tensor '{name}' is none of the network that is trained")
    net.load_state_dict({name: torch.from_numpy(array) for name, array in bundle.tensors.items()}, strict=False)
    return bundle.config.training.commands


def has_validation(args: Args) -> bool:
    """Return whether the training looks at held-out arrivals."""
    return args.env_id == NODE_ENV and args.validate_every > 0 and not args.trace


def prepare_validation(
    args: Args, stack: contextlib.ExitStack, known_ms: Mapping[str, float], threads: int | None = None
) -> Validation:
    """Draw the held-out arrivals, and find the best schedule on each of which it is not known already."""
    # Imported here: the simulator compiles kernels.
    from eval.sweep import Work, working
    from train.validation import Validation, find_references, hold_out

    jobs = threads or len(os.sched_getaffinity(0))
    held = hold_out(load_scenarios(args.scenario, args.load), args.validation_draws)
    reference_ms = dict(known_ms)
    missing = [each for each in held if each.name not in reference_ms]
    if missing:
        with working(jobs) as work:
            reference_ms |= find_references(missing, work)
    work = Work(jobs)
    stack.callback(work.close)
    return Validation(held, reference_ms, work)


def with_look(found: ValidationSection, iteration: int, regrets: dict[str, float]) -> ValidationSection:
    """Return what is known after one more look; the best is the first one of the least mean regret."""
    before = found.best
    better = before is None or mean_regret(regrets.values()) < mean_regret(found.regrets[before].values())
    return found.model_copy(
        update={"regrets": found.regrets | {iteration: regrets}, "best": iteration if better else before}
    )


def looks_without_gain(found: ValidationSection) -> int:
    """Return how many looks there have been since the best one."""
    return 0 if found.best is None else sum(iteration > found.best for iteration in found.regrets)


def why_complete(args: Args, training: TrainingSection) -> str | None:
    """Say why a run that stands so has come to its end under its arguments, and what would lengthen it, or None."""
    if 0 < args.patience <= looks_without_gain(training.validation):
        return f"({training.stopped}); a larger --patience goes on with it"
    if training.iterations >= args.total_timesteps // (args.num_envs * args.num_steps):
        return f"({training.steps} of {args.total_timesteps} steps); give a larger --total-timesteps to go on"
    return None


def plain_arguments(args: object) -> dict[str, Any]:
    """Return the arguments as JSON can hold them."""

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return [plain(each) for each in value]
        return str(value) if isinstance(value, Path) else value

    return {name: plain(value) for name, value in vars(args).items()}


def run_name(env_id: str, exp_name: str, seed: int | str) -> str:
    """Return what a run is called, but for when it began."""
    env = env_id.rpartition(":")[2].rpartition("/")[2]
    return f"{env}__{exp_name}__{seed}"


def make_run_folder(runs: Path, env_id: str, exp_name: str, seed: int | str) -> Path:
    """Make and return a new folder `env__exp__seed__time`; runs started within one second get a suffix each."""
    name = f"{run_name(env_id, exp_name, seed)}__{int(time.time())}"
    try:
        runs.mkdir(parents=True, exist_ok=True)
        for i in range(1, 10_000):
            run = runs / (name if i == 1 else f"{name}_{i}")
            with contextlib.suppress(FileExistsError):
                run.mkdir()  # exclusive: of two that try, one succeeds
                return run
    except OSError as error:
        raise UserError(f"--runs {runs}: cannot make a folder there: {error.strerror}") from None
    raise UserError(f"--runs {runs}: 9,999 runs named {name} exist already")


def drop_unborn(run: Path) -> None:
    """Remove the folder of a new run that ended before its first checkpoint: nothing in it could be gone on with."""
    if not (run / STATE_FILE).exists():
        shutil.rmtree(run, ignore_errors=True)


def changes_of(args: Args, given: Collection[str] | None = None) -> dict[str, Any]:
    """Return what `args` asks for besides `resume`.

    given: names of the arguments that were given, as only a command line can tell of those given with their defaults;
    without it they are those that differ from their defaults.
    """
    fields = {field.name: field.default for field in dataclasses.fields(Args) if field.name != "resume"}
    asked = {name for name, default in fields.items() if getattr(args, name) != default} if given is None else given
    return {name: getattr(args, name) for name in fields if name in asked}


def check_changes(before: Args, changes: Mapping[str, Any]) -> None:
    """Raise UserError where a resumed run, which has the arguments `before`, must not have these."""
    for name, value in changes.items():
        old = getattr(before, name)
        if name == "total_timesteps" and value < old:
            raise UserError(f"--total-timesteps {value}: a resumed run cannot become shorter than it was, {old}")
        if name not in MAY_CHANGE and value != old:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} {value}: a resumed run keeps --{flag} {old}; start a new run to change it")


def resumed_args(args: Args, saved: dict[str, Any], run: Path, given: Collection[str] | None = None) -> Args:
    """Return the arguments that a run was started with, and of `args` only what was given (`changes_of`).

    Raises:
        UserError: The saved arguments are not ours, or `args` asks for another value of one that is fixed.
    """
    fields = {field.name for field in dataclasses.fields(Args)}
    if set(saved) != fields:
        odd = ", ".join(sorted(set(saved) ^ fields))
        raise UserError(f"{run}: the saved arguments are those of another version of helm-rl; they differ in: {odd}")
    try:
        before = TypeAdapter(Args).validate_python(saved)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UserError(f"{run}: the saved argument {first['loc'][0]} is wrong: {first['msg']}") from None
    changes = changes_of(args, given)
    check_changes(before, changes)
    return dataclasses.replace(before, **changes, resume=args.resume)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Put Ctrl-C off until the block is done: what is being written is short and worth finishing."""
    if threading.current_thread() is not threading.main_thread():  # signals come to the main thread alone
        yield
        return
    pressed = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def log_bundle(wandb_run: Any, run: Path, exp_name: str) -> None:
    """Log the run's policy to Weights and Biases, as the bundle that `helm-rl export` would make of it."""
    from helm_rl.export import export

    with tempfile.TemporaryDirectory(prefix="helm-rl-") as folder:
        export(run, Path(folder) / "bundle")
        tracking.log_bundle(wandb_run, load_bundle(Path(folder) / "bundle"), f"{exp_name}-bundle")


# -- the training ---------------------------------------------------------------------------------------------


def train(
    args: Args,
    folder: Path | None = None,
    threads: int | None = None,
    reference_ms: Mapping[str, float] | None = None,
    wait_s: float = 0.0,
    given: Collection[str] | None = None,
) -> Path:
    """Train, and return the run's folder, which holds the last checkpoint and the TensorBoard log.

    folder: of a new run, instead of one in args.runs; it must not exist. threads: of the simulator (default: as there
    are cores). reference_ms: P99 of the best schedule on held-out arrivals, as far as it is known already. wait_s: how
    long to wait for another process that trains the run to resume. given: which arguments are to hold for it, as
    `changes_of` has it.

    Raises:
        UserError: An argument is wrong, another process trains the run, or training became impossible (a reward or a
            loss that is not finite); the last good checkpoint is then in the run's folder.
        KeyboardInterrupt: After Ctrl-C, once the last finished iteration is saved.
    """
    console = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)
    saved: tuple[TrainingState, Tensors] | None = None
    with contextlib.ExitStack() as stack:
        if args.resume is not None:
            if args.resume.is_dir():
                stack.enter_context(kept_to_one(args.resume, wait_s))
            saved = load_training_state(args.resume)
            args = resumed_args(args, saved[0].training.arguments, args.resume, given)
        check_args(args)
        envs, environment = make_envs(args, threads)
        stack.callback(envs.close)
        if saved is not None and saved[0].environment != environment:
            changed = [name for name, value in environment if getattr(saved[0].environment, name) != value]
            raise UserError(
                f"{args.resume}: the environment is no longer the one trained on; changed: {', '.join(changed)}"
            )
        if args.start is not None and saved is None:  # now, and not after the search for the best schedules
            start_from(ActorCritic(environment.observation_size, environment.action_size), args.start)
        # Before there is a folder: environments that cannot even start leave no run behind
        start = None
        if saved is None:
            doing = "starting the environments: the first time this compiles, for minutes"
            with console.status(doing) if console.is_terminal else contextlib.nullcontext():
                start, _ = envs.reset(seed=reset_seed(args.seed, 0))
            check_finite(f"{args.env_id}, reset", kept="", observation=np.asarray(start, dtype=np.float64))

        # Logging: TensorBoard always, Weights and Biases on request
        run = args.resume or folder
        if run is None:
            run = make_run_folder(args.runs, args.env_id, args.exp_name, args.seed)
        elif saved is None:
            run.mkdir()
        if saved is None:
            stack.enter_context(kept_to_one(run))
            stack.callback(drop_unborn, run)
        wandb_id = None if saved is None else saved[0].wandb_id
        if args.track:
            # It listens to the SummaryWriter, and so must come before it
            wandb_run = tracking.start(
                project=args.wandb_project_name,
                entity=args.wandb_entity,
                run_id=wandb_id,
                name=run.name,
                config=plain_arguments(args),
                tensorboard=True,
            )
            wandb_id = wandb_run.id
            stack.callback(wandb_run.finish)
        # A resumed log drops what was logged after the checkpoint: it will come again
        purge_step = None if saved is None else saved[0].training.steps + 1
        writer = stack.enter_context(event_log(run, purge_step))
        validated = has_validation(args)
        judged_by = ("validation/best_mean_p99_regret",) if validated else ()
        hyperparameters = Hyperparameters(writer, vars(args), (*judged_by, "charts/episodic_return"))
        hyperparameters.begin(0 if saved is None else saved[0].training.steps + 1)

        validation = None
        if validated:
            known_ms = (reference_ms or {}) if saved is None else saved[0].training.validation.reference_ms
            validation = prepare_validation(args, stack, known_ms, threads)
        net = learn(args, envs, environment, run, writer, console, saved, start, wandb_id, validation)
        steps = load_training_state(run)[0].training.steps
        if args.eval_episodes:
            fresh, _ = make_envs(args, threads)
            stack.callback(fresh.close)
            result = evaluate(net, fresh, args.eval_episodes, args.eval_max_steps, reset_seed(args.seed, 2**32 - 1))
            writer.add_scalar("charts/eval_return", result.mean(), steps)
            console.print(f"evaluation: mean return {result.mean():.6g} over {len(result)} episodes")
        hyperparameters.end(steps)
        if args.track and environment.bounds is not None:
            log_bundle(wandb_run, run, args.exp_name)
    return run


def learn(
    args: Args,
    envs: VectorEnv[Any, Any, Any],
    environment: EnvironmentSection,
    run: Path,
    writer: SummaryWriter,
    console: Console,
    saved: tuple[TrainingState, Tensors] | None,
    start: npt.NDArray[Any] | None,
    wandb_id: str | None,
    validation: Validation | None = None,
) -> ActorCritic:
    """Do all iterations, from a saved state or from the environments' first observations `start`.

    Leaves checkpoints in `run`.
    """
    gamma = discounts(args, envs)
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    num_iterations = args.total_timesteps // batch_size

    # Seeding: one generator for weights, actions and minibatches, so that nothing else can disturb it
    torch.set_num_threads(args.torch_threads)
    generator = torch.Generator().manual_seed(args.seed)
    obs_size, action_size = environment.observation_size, environment.action_size
    net = ActorCritic(obs_size, action_size, generator=generator)
    commands = [command()]
    if args.start is not None and saved is None:
        commands = start_from(net, args.start) + commands
    read = torch.ones(obs_size)  # features that the policy reads; what it does not read has no weight and gets none
    if args.signals == "seven":
        read[PAPER_SIGNALS:] = 0.0
        with torch.no_grad():
            for first in (net.actor[0], net.critic[0]):
                first.weight *= read  # type: ignore[operator]
    one_piece = OnePiece(net)
    optimiser = torch.optim.Adam(net.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    gradient = Gradient(net, args.norm_adv, args.clip_coef, args.ent_coef, args.vf_coef)
    steps = Steps(one_piece, optimiser, args.max_grad_norm)

    # Storage: observations as they were normalised when acted on; the same memory by step and as one batch
    steps_by_envs = (args.num_steps, args.num_envs)
    action_space = envs.single_action_space
    assert isinstance(action_space, gym.spaces.Box)
    acting = Acting(net, read, action_space, *steps_by_envs)
    b_obs, b_means, b_actions = (each.flatten(0, 1) for each in (acting.obs, acting.means, acting.actions))
    rewards = np.zeros(steps_by_envs)
    terminated, truncated = np.zeros((2, *steps_by_envs), dtype=bool)
    between = min(args.checkpoint_every, num_iterations) * args.num_steps
    action_log = np.empty((between, args.num_envs, action_size), action_space.dtype)
    logged = 0  # steps in the action log: those since the last seeded reset

    # Where we stand: at the beginning, or where the checkpoint says
    iteration, episodes, seconds = 0, 0, 0.0
    statistics: dict[str, float | None] = {}
    found = ValidationSection(reference_ms={} if validation is None else validation.reference_ms)
    best: Tensors = {}
    stopped: str | None = None
    obs = np.zeros((args.num_envs, obs_size)) if start is None else start
    episode_return = np.zeros(args.num_envs)
    episode_length = np.zeros(args.num_envs, dtype=np.int64)
    recent: deque[tuple[float, float]] = deque(maxlen=20)  # return and length of the last episodes
    if saved is not None:
        before = saved[0].training
        loop, best = restore(str(run), saved[1], net, optimiser, generator)
        iteration, episodes, seconds = before.iterations, before.episodes, before.seconds
        statistics, commands, found = before.statistics, before.commands + commands, before.validation
        if (why := why_complete(args, before)) is not None:
            raise UserError(f"{run}: the run is complete {why}")
        recent.extend((float(r), float(n)) for r, n in loop.recent)
        done = iteration % args.checkpoint_every  # iterations since the last seeded reset
        if done:
            if loop.actions.shape != action_log[: done * args.num_steps].shape:
                raise UserError(f"{run}: tensor 'loop.actions' has the wrong shape {list(loop.actions.shape)}")
            obs = replay(envs, reset_seed(args.seed, iteration - done), loop, console)
            logged = len(loop.actions)
            action_log[:logged] = loop.actions
            episode_return, episode_length = loop.episode_return, loop.episode_length
    started, start_iteration, episodes_at_reset = time.perf_counter(), iteration, episodes
    snapshot: tuple[Tensors, TrainingSection] | None = None  # the state after the last finished iteration
    saved_iterations = None if saved is None else iteration
    warned = False

    def take_snapshot() -> tuple[Tensors, TrainingSection]:
        section = TrainingSection(
            arguments=plain_arguments(args) | {"resume": None},
            commands=commands,
            seed=args.seed,
            iterations=iteration,
            steps=iteration * batch_size,
            episodes=episodes,
            seconds=seconds + time.perf_counter() - started,
            statistics=statistics,
            validation=found,
            stopped=stopped,
            helm_rl_version=__version__,
        )
        loop = Loop(
            observation=np.asarray(obs, dtype=np.float64),
            actions=action_log[:logged],
            episode_return=episode_return,
            episode_length=episode_length,
            recent=np.array(recent, dtype=np.float64).reshape(-1, 2),
        )
        return capture(net, optimiser, generator, loop, best), section

    def save() -> None:
        nonlocal saved_iterations
        if snapshot is None or snapshot[1].iterations == saved_iterations:
            return
        with undisturbed():
            save_training_state(
                run,
                snapshot[0],
                network=network_section(action_size),
                environment=environment,
                training=snapshot[1],
                wandb_id=wandb_id,
            )
            saved_iterations = snapshot[1].iterations

    names = [source.name for source in environment.scenarios]
    what = f"scenario{'s' if len(names) > 1 else ''} {', '.join(names)}" if names else args.env_id
    console.print(f"training on {what}: {num_iterations} iterations of {batch_size} steps, run folder {run}")
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("iterations"), TimeElapsedColumn(), TimeRemainingColumn())
    # Twice a second is enough, and without a terminal there is nothing to draw: a bar takes a part of a millisecond
    progress = Progress(
        TextColumn("{task.description}"),
        *columns,
        console=console,
        auto_refresh=console.is_terminal,
        refresh_per_second=2,
    )
    task = progress.add_task("training", total=num_iterations, completed=iteration)
    try:
        progress.start()
        if saved is None:
            snapshot = take_snapshot()
            save()
        while iteration < num_iterations:
            # Every so often the environments start afresh, from seeds that a resumed run can know
            if iteration % args.checkpoint_every == 0:
                whole = iteration - start_iteration >= args.checkpoint_every
                if whole and episodes == episodes_at_reset and not warned:
                    warned = True
                    console.print(
                        f"warning: no episode ended within the {logged} steps between two resets; raise "
                        f"--checkpoint-every (now {args.checkpoint_every}) so that one fits"
                    )
                if start is None or iteration > 0:
                    obs, _ = envs.reset(seed=reset_seed(args.seed, iteration))
                logged, episodes_at_reset = 0, episodes
                episode_return[:], episode_length[:] = 0.0, 0

            # Annealing the rate
            lr = args.learning_rate * (1.0 - iteration / num_iterations if args.anneal_lr else 1.0)
            for group in optimiser.param_groups:
                group["lr"] = lr

            # Rollout: act on normalised observations; remember the action as drawn, hand it on clipped
            truncations: list[tuple[int, npt.NDArray[np.intp], torch.Tensor]] = []
            acting.draw_noise(generator)
            for step in range(args.num_steps):
                action = acting(step, obs, action_log[logged + step])
                if action is None:
                    check_rollout(args.env_id, iteration * batch_size, rewards[:step], obs)
                obs, rewards[step], terminated[step], truncated[step], infos = envs.step(action)
                if "final_obs" in infos:
                    cut = np.flatnonzero(truncated[step] & ~terminated[step])
                    if cut.size:
                        final = np.stack([np.asarray(infos["final_obs"][i], dtype=np.float64) for i in cut])
                        where = f"{args.env_id}, step {iteration * batch_size + (step + 1) * args.num_envs}"
                        check_finite(where, final_observation=final)
                        truncations.append((step, cut, net.normaliser(torch.from_numpy(final)) * read))
            check_rollout(args.env_id, iteration * batch_size, rewards, obs)
            ends = terminated | truncated

            with torch.no_grad():
                # Accounting of episodes, out of the steps' way
                logged += args.num_steps
                for step in range(args.num_steps):
                    episode_return += rewards[step]
                    episode_length += 1
                    for i in np.flatnonzero(ends[step]):
                        episodes += 1
                        recent.append((float(episode_return[i]), float(episode_length[i])))
                        global_step = iteration * batch_size + (step + 1) * args.num_envs
                        ended_step = episode_steps(global_step, args.num_envs, i)
                        writer.add_scalar("charts/episodic_return", episode_return[i], ended_step)
                        writer.add_scalar("charts/episodic_length", episode_length[i], ended_step)
                        episode_return[i], episode_length[i] = 0.0, 0

                # Bootstrap: a truncated episode would have gone on; the value of its final observation says how
                for step, cut, final_obs in truncations:
                    rewards[step, cut] += gamma[cut] * net.value(final_obs).numpy()
                values = net.value(b_obs).numpy().reshape(steps_by_envs)
                next_value = net.value(net.normaliser(torch.as_tensor(obs)) * read).numpy()
                b_logprobs = net.log_prob(b_means, b_actions)

            # Advantages, and the value's targets in units of the returns' spread
            adv = advantages(rewards, values, next_value, ends, gamma, args.gae_lambda)
            returns = adv + values
            variance = float(returns.var())
            explained_var = math.nan if variance == 0 else 1 - float(adv.var()) / variance
            b_advantages = torch.from_numpy(adv).flatten().float()
            b_returns = torch.from_numpy(returns).flatten()
            net.returns.update(b_returns.unsqueeze(-1))
            b_targets = net.scale_returns(b_returns)

            # Optimising the policy and the value network; a value network that knows nothing would spoil a good start
            policy_weight = 0.0 if args.start is not None and iteration < args.critic_first else 1.0
            batch = Batch(b_obs, b_actions, b_logprobs, b_advantages, b_targets)
            clipfracs = []
            for _ in range(args.update_epochs):
                b_inds = torch.randperm(batch_size, generator=generator)
                for minibatch in batch.minibatches(b_inds, minibatch_size):
                    losses = gradient(minibatch, policy_weight)
                    clipfracs.append(losses.clip_fraction)
                    grad_norm = steps.clip()
                    if not math.isfinite(losses.total) or not math.isfinite(grad_norm):
                        raise UserError(
                            f"in iteration {iteration + 1} the loss became {losses.total} (gradient norm "
                            f"{grad_norm}); the checkpoint after iteration {iteration} is kept in "
                            f"{run}; a smaller --learning-rate (now {args.learning_rate:g}) may help"
                        )
                    steps.step()
                old_approx_kl, approx_kl = gradient.kl_divergence()
                if args.target_kl is not None and approx_kl > args.target_kl:
                    break

            # Recording what the iteration gave
            iteration += 1
            global_step = iteration * batch_size
            sps = (iteration - start_iteration) * batch_size / (time.perf_counter() - started)
            statistics = {
                "charts/learning_rate": lr,
                "losses/value_loss": losses.value,
                "losses/policy_loss": losses.policy,
                "losses/entropy": losses.entropy,
                "losses/old_approx_kl": old_approx_kl,
                "losses/approx_kl": approx_kl,
                "losses/clipfrac": float(torch.tensor(clipfracs).mean()),
                "losses/explained_variance": None if math.isnan(explained_var) else explained_var,
            }
            for tag, value in statistics.items():
                writer.add_scalar(tag, math.nan if value is None else value, global_step)
            writer.add_scalar("charts/SPS", int(sps), global_step)
            shown = "no episode yet"
            if recent:
                mean_return, mean_length = np.mean(recent, axis=0)
                statistics |= {"charts/episodic_return": mean_return, "charts/episodic_length": mean_length}
                shown = f"return {mean_return:.4g}"

            # Looking at held-out arrivals: the best policy so far is kept, and without any gain for long it is over
            last = iteration == num_iterations
            if validation is not None and (iteration % args.validate_every == 0 or last):
                assert environment.bounds is not None
                replays = validation.look(policy_of(net), network_section(action_size), environment.bounds)
                regrets = validation.regrets(replays)
                found = with_look(found, iteration, regrets)
                if found.best == iteration:
                    best = policy_of(net)
                for name, regret in regrets.items():
                    writer.add_scalar(f"validation/p99_regret/{name}", regret, global_step)
                writer.add_scalar("validation/mean_p99_regret", mean_regret(regrets.values()), global_step)
                assert found.best is not None
                least = mean_regret(found.regrets[found.best].values())
                writer.add_scalar("validation/best_mean_p99_regret", least, global_step)
                writer.add_figure("validation/replays", look_figure(validation.held, replays), global_step)
                idle = looks_without_gain(found)
                if 0 < args.patience <= idle and not last:
                    stopped = f"no lower regret on held-out arrivals in {idle} looks, after {iteration} iterations"
            if found.best is not None:
                shown += f"  regret {100 * mean_regret(found.regrets[found.best].values()):.1f} %"
            progress.update(task, completed=iteration, description=f"training  {shown}  {sps:.0f} steps/s")

            # Checkpoint: in memory after every iteration, on disk every so often and whenever training stops
            snapshot = take_snapshot()
            if iteration % args.checkpoint_every == 0 or last or stopped is not None:
                save()
            if stopped is not None:
                console.print(f"stopped: {stopped}")
                break
    except BaseException as error:
        progress.stop()
        try:
            save()
        finally:
            if isinstance(error, KeyboardInterrupt | OSError) and saved_iterations is not None:  # else nothing is kept
                console.print(
                    f"stopped: {saved_iterations} of {num_iterations} iterations are saved; the one in "
                    f"progress is dropped, and done again by: helm-rl train base --resume {run}"
                )
        raise
    progress.stop()
    return net


def check_rollout(env_id: str, steps: int, rewards: npt.NDArray[np.float64], obs: npt.NDArray[Any]) -> None:
    """Raise UserError if rewards, (steps, envs), or the observations after them, (envs, size), are not finite.

    steps: those before the rollout, over all environments.
    """
    for k in np.flatnonzero(~np.isfinite(rewards).all(1))[:1]:
        check_finite(f"{env_id}, step {steps + (k + 1) * rewards.shape[1]}", reward=rewards[k])
    check_finite(f"{env_id}, step {steps + rewards.size}", observation=np.asarray(obs, dtype=np.float64))


def check_finite(where: str, kept: str = "; the last checkpoint is kept", **arrays: npt.NDArray[Any]) -> None:
    """Raise UserError if an environment handed out a number that is not finite; the arrays' names say what it is."""
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            i = int(np.argwhere(~np.isfinite(array))[0][0])
            raise UserError(f"{where}: the {name.replace('_', ' ')} of an environment is not finite: {array[i]}{kept}")


def replay(envs: VectorEnv[Any, Any, Any], seed: int, loop: Loop, console: Console) -> npt.NDArray[Any]:
    """Bring fresh environments to where the checkpoint left them, by repeating the actions; return the observations.

    Raises:
        UserError: They came out elsewhere: the environment is not deterministic, or has changed.
    """
    with Progress(console=console, transient=True) as progress:
        obs, _ = envs.reset(seed=seed)
        for action in progress.track(loop.actions, description="replaying the environments"):
            obs, *_ = envs.step(action.copy())
    if not np.array_equal(np.asarray(obs, dtype=np.float64), loop.observation):
        raise UserError(
            "the environments did not come back to the saved observations when the saved actions were "
            "repeated; they are not deterministic, or have changed since (another version?), so this run "
            "cannot be resumed; start a new one"
        )
    return obs


def main(args: Args, given: Collection[str] | None = None) -> None:
    """Train as the command line says, and tell where the result is and what can be done with it.

    given: names of the arguments that stand on it.
    """
    run = train(args, given=given)
    print(f"run: {run}")
    if load_training_state(run)[0].environment.bounds is not None:  # of a resumed run, only the state knows
        print(f"next: helm-rl export {run} --output {run.name}-bundle")


if __name__ == "__main__":
    try:
        main(tyro.cli(Args), given_options(Args, sys.argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
