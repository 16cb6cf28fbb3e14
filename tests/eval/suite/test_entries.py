"""Which bundles a suite measures, and under which names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from eval.suite.entries import Prepared, entries, serving
from helm_rl.control.burst import BurstSettings
from helm_rl.control.detector_file import Detector, save_detector
from helm_rl.errors import UserError
from helm_rl.export import export
from tests.eval.conftest import MakeBundle
from tests.eval.suite.worlds import small_scenario
from tests.helm_rl.control.test_detector_file import DETECTOR

RULE = """
from helm_rl.control.static import StaticAlpha

def half():
    return StaticAlpha({alpha})
"""


def policies(policy: Path | None, *beside: Path) -> list[tuple[str, str]]:
    found = entries(policy, (), [small_scenario("burst")], beside)
    return [(entry.key, entry.title) for entry in found if entry.kind == "policy"]


def test_what_stands_beside_a_policy_has_its_folder_s_name_and_what_both_have_is_measured_once(
    make_bundle: MakeBundle, tmp_path: Path
) -> None:
    plain = make_bundle("plain")
    save_detector(tmp_path / "d.json", DETECTOR)
    export(plain, tmp_path / "full", detector=tmp_path / "d.json")
    assert policies(plain) == [("policy", "HELM")]
    assert policies(plain, tmp_path / "full") == [("policy", "HELM"), ("full", "full")]
    assert policies(tmp_path / "full", plain) == [("policy", "HELM"), ("policy_base", "HELM (base)")]
    assert policies(plain, plain, tmp_path / "full", tmp_path / "full") == [("policy", "HELM"), ("full", "full")]


def test_bundles_of_one_name_are_refused(make_bundle: MakeBundle, tmp_path: Path) -> None:
    plain = make_bundle("plain")
    for name, sigmas in (("a", 5.0), ("b", 6.0)):
        detector = Detector(BurstSettings(p99_sigmas=sigmas), DETECTOR.rule, DETECTOR.origin)
        save_detector(tmp_path / f"{name}.json", detector)
        (tmp_path / name).mkdir()
        export(plain, tmp_path / name / "full", detector=tmp_path / f"{name}.json")
    with pytest.raises(UserError, match="a bundle of that name is measured already"):
        policies(plain, tmp_path / "a" / "full", tmp_path / "b" / "full")
    with pytest.raises(UserError, match="--beside is for bundles beside a policy"):
        policies(None, plain)


def test_what_is_another_where_it_is_measured_is_refused(
    make_bundle: MakeBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "suite_rule.py").write_text(RULE.format(alpha=0.5))
    scenario = small_scenario("burst")
    found = {entry.key: entry for entry in entries(make_bundle("plain"), ["suite_rule:half"], [scenario])}
    prepared = Prepared(deployable=0.5)
    for key in ("policy", "half"):
        assert serving(found[key], scenario, prepared)[2] == 0.5
        other = replace(found[key], identity=found[key].identity[::-1])  # as where another one was planned with
        with pytest.raises(UserError, match=r"(plain|suite_rule:half): is not the one here"):
            serving(other, scenario, prepared)


def test_a_shipped_bundle_goes_by_its_name_wherever_it_lies() -> None:
    shipped = entries(Path("helm-base-v1"), (), [small_scenario("burst")])[0]
    assert shipped.source == "helm-base-v1"
    serving(shipped, small_scenario("burst"), Prepared(deployable=0.5))


@pytest.mark.parametrize("name", ["single_static", "marginal-hits", "naive", "statics", "host tier 96"])
def test_a_bundle_beside_takes_no_name_that_figures_or_store_have(make_bundle: MakeBundle, name: str) -> None:
    plain = make_bundle("plain")
    with pytest.raises(UserError, match="is the name of another controller here; rename its folder"):
        policies(plain, make_bundle(name, action=0.5))


def test_a_controller_takes_no_name_that_the_store_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "store_rule.py").write_text(RULE.format(alpha=0.5) + "Statics = Pace = half\n")
    for name in ("Statics", "Pace"):
        with pytest.raises(UserError, match="is the name of another controller here; rename the class"):
            entries(None, [f"store_rule:{name}"], [small_scenario("burst")])
