"""The controller of a bundle: the layers that it has, those that were asked for, and what does not fit."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from helm_rl.checkpoint import POLICY_FILE, load_bundle
from helm_rl.control.base import BasePolicy
from helm_rl.control.burst import BurstSettings
from helm_rl.control.detector_file import Detector, save_detector
from helm_rl.control.layers import controller, layers_of
from helm_rl.control.protocol import Watching
from helm_rl.control.residual import Residual
from helm_rl.control.residual_file import SavedResidual, save_residual
from helm_rl.errors import UserError
from helm_rl.export import export
from helm_rl.observation import SIZE
from tests.helm_rl.control.test_detector_file import DETECTOR
from tests.helm_rl.control.test_detector_file import ORIGIN as DETECTED
from tests.helm_rl.control.test_residual_file import ORIGIN
from tests.helm_rl.policies import make_bundle, network


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """A bundle, a detector, and an adapter that learnt above the bundle's policy."""
    config = make_bundle(tmp_path / "plain", network(3))
    adapter = Residual(BasePolicy.load(tmp_path / "plain"))
    adapter.net.weights[2][...] += 0.3
    origin = ORIGIN.model_copy(update={"policy_sha256": config.files[POLICY_FILE]})
    save_residual(tmp_path / "r.json", SavedResidual(adapter.learnt(), origin))
    save_detector(tmp_path / "d.json", DETECTOR)
    return {"plain": tmp_path / "plain", "residual": tmp_path / "r.json", "detector": tmp_path / "d.json"}


def test_a_bundle_serves_with_the_layers_it_was_given(files: dict[str, Path], tmp_path: Path) -> None:
    export(files["plain"], tmp_path / "full", detector=files["detector"], residual=files["residual"])
    bundle = load_bundle(tmp_path / "full")
    assert layers_of(bundle) == ("residual", "recovery")
    assert bundle.config.files[POLICY_FILE] == load_bundle(files["plain"]).config.files[POLICY_FILE]
    full = controller(bundle)
    assert isinstance(full, Watching)
    assert full.recovery is not None
    assert full.adapter is not None
    assert full.recovery.inner is full.adapter
    assert full.recovery.settings == DETECTOR.settings
    assert full.recovery.rule == DETECTOR.rule
    assert full.recovery.rate_per_s == bundle.config.bounds.rate_per_s
    assert (full.adapter.net.weights[2] == 0.3).all()
    card = (tmp_path / "full" / "README.md").read_text()
    assert "goes on learning in service" in card
    assert "a recovery rule, which takes over" in card
    assert "no safety net" not in card
    assert "It does not learn" not in card


def test_layers_can_be_left_out(files: dict[str, Path], tmp_path: Path) -> None:
    export(files["plain"], tmp_path / "full", detector=files["detector"], residual=files["residual"])
    bundle = load_bundle(tmp_path / "full")
    alone = controller(bundle, layers=())
    assert not isinstance(alone, Watching)
    plain = BasePolicy.load(files["plain"])
    rng = np.random.default_rng(1)
    seen = [rng.uniform(0, 1, SIZE).astype(np.float32) for _ in range(50)]
    assert [alone.decide(one, 0.4, 0) for one in seen] == [plain.decide(one, 0.4, 0) for one in seen]
    learning = controller(bundle, layers=("residual",))
    assert learning.adapter is not None
    assert learning.recovery is None
    recovering = controller(bundle, layers=("recovery",))
    assert recovering.adapter is None
    assert recovering.recovery is not None
    assert recovering.recovery.inner is recovering.base


def test_a_layer_can_be_put_on_later_and_replaced(files: dict[str, Path], tmp_path: Path) -> None:
    export(files["plain"], tmp_path / "one", detector=files["detector"])
    export(tmp_path / "one", tmp_path / "two", residual=files["residual"])
    assert layers_of(load_bundle(tmp_path / "one")) == ("recovery",)
    assert layers_of(load_bundle(tmp_path / "two")) == ("residual", "recovery")
    save_detector(tmp_path / "d2.json", Detector(BurstSettings(threshold=9.0), DETECTOR.rule, DETECTED))
    export(tmp_path / "two", tmp_path / "one", detector=tmp_path / "d2.json", overwrite=True)
    other = controller(load_bundle(tmp_path / "one"))
    assert other.recovery is not None
    assert other.recovery.settings.threshold == 9.0


def test_a_layer_that_is_not_there_is_named(files: dict[str, Path]) -> None:
    with pytest.raises(UserError, match=r"has no residual\.json, so no residual"):
        controller(load_bundle(files["plain"]), layers=("residual",))


def test_a_layer_that_does_not_fit_makes_no_bundle(files: dict[str, Path], tmp_path: Path) -> None:
    make_bundle(tmp_path / "other", network(4))
    save_detector(tmp_path / "ruleless.json", Detector(BurstSettings(), None, DETECTED))
    for source, layers, message in (
        (tmp_path / "other", {"residual": files["residual"]}, r"r\.json: learnt above the policy"),
        (files["plain"], {"detector": tmp_path / "ruleless.json"}, r"ruleless\.json: has no recovery rule"),
        (files["plain"], {"detector": files["residual"]}, r"r\.json: "),
        (files["plain"], {"residual": tmp_path / "nowhere.json"}, r"nowhere\.json: no such file"),
    ):
        with pytest.raises(UserError, match=message):
            export(source, tmp_path / "made", **layers)
        assert not (tmp_path / "made").exists()
    for output in (files["plain"], files["plain"] / "new"):
        with pytest.raises(UserError, match="is the bundle that is read, or lies in it"):
            export(files["plain"], output, overwrite=True, detector=files["detector"])


def test_a_bundle_hands_no_layer_on_that_would_not_load(files: dict[str, Path], tmp_path: Path) -> None:
    export(files["plain"], tmp_path / "one", detector=files["detector"])
    config = tmp_path / "one" / "config.json"
    before = hashlib.sha256((tmp_path / "one" / "detector.json").read_bytes()).hexdigest()
    (tmp_path / "one" / "detector.json").write_text("{}")
    config.write_text(config.read_text().replace(before, hashlib.sha256(b"{}").hexdigest()))
    with pytest.raises(UserError, match=r"one/detector\.json: format_version"):
        export(tmp_path / "one", tmp_path / "two", residual=files["residual"])
    assert not (tmp_path / "two").exists()


def test_a_layer_that_was_changed_afterwards_is_found(files: dict[str, Path], tmp_path: Path) -> None:
    export(files["plain"], tmp_path / "full", detector=files["detector"])
    path = tmp_path / "full" / "detector.json"
    path.write_text(path.read_text().replace('"alpha_hot": 0.2', '"alpha_hot": 0.9'))
    with pytest.raises(UserError, match=r"detector\.json: its sha256 is .* damaged or replaced"):
        load_bundle(tmp_path / "full")
    path.unlink()
    with pytest.raises(UserError, match=r"detector\.json: no such file"):
        load_bundle(tmp_path / "full")
