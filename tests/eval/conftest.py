from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from helm_rl.checkpoint import (
    BoundsSection,
    EnvironmentSection,
    NetworkSection,
    ObservationSection,
    SourceSection,
    TrainingSection,
    policy_tensors,
    save_bundle,
)
from helm_rl.observation import OBSERVATION_NAMES, SCHEMA_VERSION, schema_hash
from tests.eval.browser import NAMES, Browser, find_browser

MakeBundle = Callable[..., Path]


@pytest.fixture
def make_bundle(tmp_path: Path) -> MakeBundle:
    """Write a bundle, in this test's folder, whose mean action is always `action`."""
    return bundle_maker(tmp_path)


def bundle_maker(folder: Path) -> MakeBundle:
    """Return what writes such bundles into a folder: weights zero, last bias `action`."""

    def make(name: str = "bundle", action: float = 0.0, interval_s: float = 1.0, alpha_max: float = 0.9) -> Path:
        network = NetworkSection(hidden=(4,), action_size=1, observation_clip=10.0, epsilon=1e-8)
        tensors = {key: np.zeros(shape, dtype=dtype) for key, (dtype, shape) in policy_tensors(network, 17).items()}
        tensors["normaliser.var"][:] = 1.0
        tensors["actor.2.bias"][:] = action
        observation = ObservationSection(
            schema_version=SCHEMA_VERSION, schema_hash=schema_hash(), names=tuple(OBSERVATION_NAMES)
        )
        bounds = BoundsSection(alpha_min=0.1, alpha_max=alpha_max, rate_per_s=0.06, interval_s=(interval_s,))
        environment = EnvironmentSection(
            env_id="helm_rl/HelmNode-v0",
            observation_size=17,
            action_size=1,
            scenarios=(SourceSection(name="burst", sha256="ab" * 32),),
        )
        training = TrainingSection(
            arguments={},
            commands=[],
            seed=7,
            iterations=1,
            steps=1234,
            episodes=0,
            seconds=0.0,
            statistics={},
            helm_rl_version="0",
        )
        save_bundle(
            folder / name,
            tensors,
            network=network,
            observation=observation,
            bounds=bounds,
            environment=environment,
            training=training,
            card="# made by a test\n",
        )
        return folder / name

    return make


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip(f"no browser on PATH (looked for {', '.join(NAMES)})")
    with Browser(program, tmp_path_factory.mktemp("browser")) as browser:
        yield browser
