from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import envs.serving.replay
from eval.suite.suite import Suite
from tests.eval.conftest import MakeBundle, bundle_maker
from tests.eval.suite.worlds import measured, serving, small_plan


@pytest.fixture(scope="session")
def fake_serving() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(envs.serving.replay, "replay", serving())
        yield


@pytest.fixture(scope="session")
def still_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that stays where it starts."""
    make: MakeBundle = bundle_maker(tmp_path_factory.mktemp("bundles"))
    return make("still")


@pytest.fixture(scope="session")
def suite(still_bundle: Path, fake_serving: None, tmp_path_factory: pytest.TempPathFactory) -> Suite:
    return measured(small_plan(still_bundle, families=("decoder", "hstu")), tmp_path_factory.mktemp("suite") / "out")
