"""Policies, runs and bundles with random weights, for tests of what is done with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from helm_rl.checkpoint import (
    POLICY_FILE,
    BoundsSection,
    BundleConfig,
    EnvironmentSection,
    NetworkSection,
    ObservationSection,
    SourceSection,
    Tensors,
    TrainingSection,
    save_bundle,
    save_training_state,
)
from helm_rl.control.base import BasePolicy
from helm_rl.control.policy_net import CLIP, EPSILON, HIDDEN, ActorCritic
from helm_rl.control.residual import Residual, ResidualSettings
from helm_rl.control.residual_file import ResidualOrigin, SavedResidual, save_residual
from helm_rl.export import export
from helm_rl.observation import OBSERVATION_NAMES, SCHEMA_VERSION, schema_hash

NETWORK = NetworkSection(hidden=HIDDEN, action_size=1, observation_clip=CLIP, epsilon=EPSILON)
OBSERVATION = ObservationSection(
    schema_version=SCHEMA_VERSION, schema_hash=schema_hash(), names=tuple(OBSERVATION_NAMES)
)
BOUNDS = BoundsSection(alpha_min=0.1, alpha_max=0.9, rate_per_s=0.06, interval_s=(0.5,))
ENVIRONMENT = EnvironmentSection(
    env_id="helm_rl/HelmNode-v0",
    observation_size=17,
    action_size=1,
    observation=OBSERVATION,
    bounds=BOUNDS,
    scenarios=(SourceSection(name="burst", sha256="ab" * 32),),
)


def training(iterations: int = 3) -> TrainingSection:
    return TrainingSection(
        arguments={"seed": 7, "learning_rate": 0.001, "runs": "/home/me/runs", "resume": None},
        commands=["helm-rl train base --seed 7"],
        seed=7,
        iterations=iterations,
        steps=1024 * iterations,
        episodes=4,
        seconds=12.34,
        statistics={"losses/value_loss": 0.0123456, "losses/explained_variance": None},
        helm_rl_version="0.1.0",
    )


def network(seed: int = 0, scale: float = 1.0) -> ActorCritic:
    """Return a frozen policy whose actions are not near zero, and whose normaliser has seen observations."""
    generator = torch.Generator().manual_seed(seed)
    net = ActorCritic(17, 1, generator=generator)
    net.normaliser.update(observations(seed, 200, scale))
    with torch.no_grad():
        net.get_parameter("actor.4.weight").mul_(60.0)
    return net.eval()


def still_network() -> ActorCritic:
    """Return a frozen policy that never moves: what moves is what sits on it."""
    net = network()
    with torch.no_grad():
        net.get_parameter("actor.4.weight").zero_()
        net.get_parameter("actor.4.bias").zero_()
    return net


def observations(seed: int, count: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand((count, 17), generator=generator) * torch.arange(1, 18) * scale


def net_tensors(net: ActorCritic) -> Tensors:
    return {name: value.numpy().copy() for name, value in net.state_dict().items()}


def make_bundle(path: Path, net: ActorCritic, overwrite: bool = False) -> BundleConfig:
    return save_bundle(
        path,
        {name: array for name, array in net_tensors(net).items() if name.startswith(("normaliser.", "actor."))},
        network=NETWORK,
        observation=OBSERVATION,
        bounds=BOUNDS,
        environment=ENVIRONMENT,
        training=training(),
        card="# A card\n",
        overwrite=overwrite,
    )


def make_run(run: Path, net: ActorCritic, iterations: int = 3, environment: EnvironmentSection = ENVIRONMENT) -> None:
    run.mkdir(exist_ok=True)
    save_training_state(
        run,
        {f"net.{name}": array for name, array in net_tensors(net).items()},
        network=NETWORK,
        environment=environment,
        training=training(iterations),
    )


def make_adapting_bundle(path: Path, net: ActorCritic) -> Path:
    """Make a bundle at `path` whose adapter may act, by .05 of its bound of .15 and by .02 a decision; return it."""
    plain = path.with_name(f"{path.name}-plain")
    config = make_bundle(plain, net)
    adapter = Residual(BasePolicy.load(plain), ResidualSettings(pace=0.04))
    adapter.net.weights[2][...] += np.random.default_rng(5).normal(0.0, 0.5, adapter.net.weights[2].shape)
    p99 = np.linspace(-1.0, 1.0, 20).tolist()
    learnt = adapter.learnt()
    seen = replace(learnt.guard, claimed=p99, observed=p99, samples=20)
    origin = ResidualOrigin(
        policy_sha256=config.files[POLICY_FILE], scenario="trend", scenario_hash="0" * 64, intervals=800, measured={}
    )
    save_residual(path.with_suffix(".json"), SavedResidual(replace(learnt, guard=seen), origin))
    export(plain, path, residual=path.with_suffix(".json"))
    return path
