"""A start for the base policy: a network that imitates the reference schedule, fitted by DAgger.

    helm-rl train imitate --output imitation
    helm-rl train base --start imitation

For some training arrivals the best schedule of alpha is sought offline (eval.reference). A schedule knows what is to
come; what can be learnt of it is what the observation tells. So the network is shown, at each decision, the move that
leads from the target it has to where the schedule stands next; at first along the schedule itself, disturbed, then
along its own way, so that it learns to come back from its own mistakes (Ross, Gordon, Bagnell, "A reduction of
imitation learning and structured prediction to no-regret online learning", 2011). PPO then refines it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import track

from helm_rl import __version__
from helm_rl.checkpoint import EnvironmentSection, TrainingSection, check_bundle_output, save_bundle
from helm_rl.control.policy_net import ActorCritic
from helm_rl.errors import UserError
from helm_rl.export import model_card
from helm_rl.figures import command
from helm_rl.observation import SIZE
from train.ppo_base import NODE_ENV, load_scenarios, plain_arguments, scenario_facts
from train.state import network_section, policy_of

if TYPE_CHECKING:
    from envs.node_env import HelmNodeEnv
    from envs.training_traces import TrainingTraces
    from eval.sweep import Work
    from helm_rl.control.schedule import ScheduledAlpha
    from helm_rl.scenario import Scenario

STEP = 0.05
"""Spacing of the statics that the search for a schedule starts from."""
DISTURBANCE = 0.5
"""Standard deviation of what is added to the schedule's own actions, so that they are seen being put right."""
BATCH = 1024
METHOD = "Fitted to schedules that were found offline, all arrivals known, in helm-rl's serving simulator"


@dataclass
class Args:
    """Fit a network to the best schedules on training arrivals; a bundle from which `train base --start` goes on."""

    output: Path
    """Bundle folder to make."""
    scenario: tuple[str, ...] = ("burst", "trend", "steady")
    """Scenarios to imitate on: shipped ones (the README lists them) or paths of TOML files."""
    load: Literal["limit", "moderate"] = "limit"
    """The scenarios' rates as they stand (near what a node bears), or moderate: 70 % of each."""
    seed: int = 1
    """Seed of everything that is drawn: weights, arrivals, disturbances, minibatches."""
    draws: int = 2
    """Sets of arrivals of each scenario."""
    replays: int = 20
    """Replays' worth of requests that the search for each schedule may take; 0: the best of the statics and of the
    schedule of each segment's best static."""
    rounds: int = 3
    """Rounds of showing and fitting; from the second on the network steers while it is shown."""
    steps: int = 2_000
    """Steps of the optimiser per round."""
    learning_rate: float = 1e-3
    """Step size of the Adam optimiser."""
    jobs: int = 2
    """Replays at a time; one core each."""
    overwrite: bool = False
    """Replace a bundle that stands at the output already."""


@dataclass(frozen=True)
class Example:
    """One set of arrivals and the schedule to imitate there; index: of the arrivals in `traces`."""

    traces: TrainingTraces
    index: int
    schedule: ScheduledAlpha


@dataclass(frozen=True)
class Shown:
    """What the network was shown: observations, float32 [n, SIZE], and moves, float32 [n, 1] within [-1, 1]."""

    observations: npt.NDArray[np.float32]
    moves: npt.NDArray[np.float32]


def main(args: Args) -> None:
    """Search, show, fit, and write the bundle."""
    check_args(args)
    check_bundle_output(args.output, args.overwrite)
    # Imported here: the simulator compiles kernels.
    from eval.sweep import Work, working

    begun = time.perf_counter()
    scenarios = load_scenarios(args.scenario, args.load)
    for scenario in scenarios:
        if scenario.hardware.nodes != 1 or scenario.event:
            raise UserError(f"scenario {scenario.name}: schedules are sought for one node without events")
    with working(args.jobs) as work:
        examples = find_examples(args, scenarios, work)
    generator = torch.Generator().manual_seed(args.seed)
    net = ActorCritic(SIZE, 1, generator=generator)
    console = Console(stderr=True)
    work = Work(args.jobs)
    seen: list[Shown] = []
    try:
        for number in range(args.rounds):
            console.print(f"round {number + 1} of {args.rounds}: showing")
            seen += work.map(
                lambda at: show(*at), [(each, net if number else None, args.seed + number) for each in examples]
            )
            error = fit(net, seen, args, generator, console)
            console.print(f"round {number + 1}: root mean square error of a move {error:.3f} (of 1)")
    finally:
        work.close()
    write(args, net, scenarios, sum(len(each.moves) for each in seen), error, time.perf_counter() - begun)
    print(f"bundle: {args.output}")


def check_args(args: Args) -> None:
    """Raise UserError naming the first argument that is out of range."""
    for name, least in (("draws", 1), ("replays", 0), ("rounds", 1), ("steps", 1), ("seed", 0)):
        if getattr(args, name) < least:
            raise UserError(f"--{name} must be at least {least}, not {getattr(args, name)}")
    if args.seed >= 2**32:
        raise UserError(f"--seed must be below 2^32, not {args.seed}")
    if not 0.0 < args.learning_rate <= 1.0:
        raise UserError(f"--learning-rate must be above 0 and at most 1, not {args.learning_rate}")


def find_examples(args: Args, scenarios: Sequence[Scenario], work: Work) -> list[Example]:
    """Return the best schedule known on each set of training arrivals."""
    from envs.training_traces import TrainingTraces
    from eval.reference import EFFORT, best_schedule

    effort = dataclasses.replace(EFFORT, replays=float(args.replays)) if args.replays else None
    found = []
    for scenario in scenarios:
        traces = TrainingTraces(scenario, count=args.draws, seed=args.seed)
        for index in range(args.draws):
            work.describe(f"{scenario.name}, arrivals {index + 1} of {args.draws}: the best schedule")
            best = best_schedule(scenario, traces.trace(index), work, STEP, effort)
            found.append(Example(traces, index, best.schedule))
    return found


def move_to(schedule: ScheduledAlpha, env: HelmNodeEnv, end_ns: int, target: float) -> float:
    """Return the action that brings the target to where the schedule stands in the coming interval, or towards it."""
    control = env.scenario.control
    most = control.rate_per_s * control.interval_s
    return float(np.clip((schedule.at(end_ns) - target) / most, -1.0, 1.0))


def show(example: Example, net: ActorCritic | None, seed: int) -> Shown:
    """Serve the arrivals from a random alpha; without a network the schedule steers, disturbed, else the network."""
    from envs.node_env import HelmNodeEnv

    rng = np.random.default_rng([seed, example.index])
    control = example.traces.scenario.control
    steps = example.traces.intervals(example.index)
    env = HelmNodeEnv(traces=example.traces, episode_s=steps * control.interval_s, paired=False)
    alpha = rng.uniform(control.alpha_min, control.alpha_max)
    obs, info = env.reset(seed=seed, options={"trace": example.index, "start": 0, "alpha": alpha})
    observations, moves = np.empty((steps, SIZE), np.float32), np.empty((steps, 1), np.float32)
    for step in range(steps):
        observations[step] = obs
        moves[step] = move_to(example.schedule, env, info["window"].end_ns, info["target"])
        if net is None:
            action = moves[step] + DISTURBANCE * rng.standard_normal(1).astype(np.float32)
        else:
            with torch.no_grad():
                action = net(torch.from_numpy(obs)).numpy()
        obs, _, _, _, info = env.step(np.clip(action, -1.0, 1.0))
    return Shown(observations, moves)


def fit(net: ActorCritic, seen: Sequence[Shown], args: Args, generator: torch.Generator, console: Console) -> float:
    """Fit the actor, in place, to all that was shown; return the root mean square error of a move."""
    torch.set_num_threads(1)  # fastest for networks this small
    observations = torch.from_numpy(np.concatenate([each.observations for each in seen]))
    moves = torch.from_numpy(np.concatenate([each.moves for each in seen]))
    net.normaliser.load_state_dict(type(net.normaliser)(SIZE).state_dict())  # of this data alone
    net.normaliser.update(observations)
    inputs = net.normaliser(observations)
    optimiser = torch.optim.Adam(net.actor.parameters(), lr=args.learning_rate)
    for _ in track(range(args.steps), "fitting", console=console, transient=True):
        at = torch.randint(len(inputs), (min(BATCH, len(inputs)),), generator=generator)
        loss = (net.actor(inputs[at]) - moves[at]).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    with torch.no_grad():
        return float((net.actor(inputs) - moves).square().mean().sqrt())


def write(
    args: Args, net: ActorCritic, scenarios: Sequence[Scenario], decisions: int, error: float, seconds: float
) -> None:
    """Write the bundle."""
    environment = EnvironmentSection(env_id=NODE_ENV, observation_size=SIZE, action_size=1, **scenario_facts(scenarios))
    arguments = {name: value for name, value in plain_arguments(args).items() if name != "output"}
    training = TrainingSection(
        method=METHOD,
        arguments=arguments,
        commands=[command()],
        seed=args.seed,
        iterations=args.rounds,
        steps=decisions,
        episodes=0,
        seconds=seconds,
        statistics={"imitation/rms_error": error},
        helm_rl_version=__version__,
    )
    network = network_section(1)
    assert environment.observation is not None
    assert environment.bounds is not None
    save_bundle(
        args.output,
        policy_of(net),
        network=network,
        observation=environment.observation,
        bounds=environment.bounds,
        environment=environment,
        training=training,
        card=model_card(network, environment, training),
        overwrite=args.overwrite,
    )
