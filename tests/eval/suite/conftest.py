from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from eval.suite.suite import Suite
from tests.eval.conftest import MakeBundle, bundle_maker
from tests.eval.suite.worlds import faked, measured, small_plan


@pytest.fixture
def fake_serving() -> Iterator[None]:
    with faked():
        yield


@pytest.fixture(scope="session")
def still_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that stays where it starts."""
    make: MakeBundle = bundle_maker(tmp_path_factory.mktemp("bundles"))
    return make("still")


@pytest.fixture(scope="session")
def suite(still_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Suite:
    plan = small_plan(still_bundle, families=("decoder", "hstu"))
    with faked():
        return measured(plan, tmp_path_factory.mktemp("suite") / "out")
