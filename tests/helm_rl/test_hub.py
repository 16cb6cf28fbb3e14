"""A bundle as a Hugging Face style folder: the Hub's own library reads its metadata, and helm-rl the bundle again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tyro
import yaml

from helm_rl.checkpoint import ValidationSection, load_bundle, load_training_state, save_training_state
from helm_rl.errors import UserError
from helm_rl.export import ExportArgs, main
from helm_rl.hub import read_figures
from tests.helm_rl.policies import NETWORK, make_adapting_bundle, make_bundle, make_run, network

FIGURES = {
    "default.burst.single.policy.p99_ms": 84.5,
    "default.burst.single.policy.slo": 0.9965,
    "default.burst.single.half_static.p99_ms": 105.0,  # another controller's
    "default.burst.single.policy.onset_p99_ms": 71.0,  # none of those that a card tells
    "default.a.b: #1.single.policy.p99_ms": 90.25,
    "default.burst.single.policy.regret": None,  # was not finite
    "default.burst.headroom": 0.1,
}


def figures(path: Path, rows: dict[str, Any] = FIGURES, files: dict[str, str] | None = None) -> Path:
    """Write a file of figures; files: of the bundle that was measured, by their sha256."""
    document: dict[str, Any] = {
        "figures": {
            name: {"value": value, "unit": "ms", "better": "lower", "goal": None} for name, value in rows.items()
        },
        "machine": {},
        "command": "helm-rl eval p99 --policy bundle",
    }
    if files is not None:
        document["bundles"] = {"policy": files, "other": {"policy.safetensors": "0" * 64}}
    path.write_text(json.dumps(document))
    return path


def export(*arguments: object) -> None:
    main(tyro.cli(ExportArgs, args=[str(argument) for argument in arguments]))


def metadata(folder: Path) -> dict[str, Any]:
    _, front, _ = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(front)


def test_the_hubs_library_reads_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub", reason="huggingface-hub is not installed (extra 'dev')")
    make_bundle(tmp_path / "bundle", network())
    export(tmp_path / "bundle", "--hub", tmp_path / "my-policy", "--figures", figures(tmp_path / "p99.json"))
    assert capsys.readouterr().out.startswith(f"hub: {tmp_path / 'my-policy'}; to upload it: hf upload USER/NAME ")
    card = huggingface_hub.ModelCard.load(tmp_path / "my-policy" / "README.md")
    assert (card.data.library_name, card.data.pipeline_tag) == ("helm-rl", "reinforcement-learning")
    assert "helm_rl/HelmNode-v0" in card.data.tags
    assert card.data.model_name == "my-policy"
    read = {(one.dataset_name, one.metric_type): one.metric_value for one in card.data.eval_results}
    assert read == {("burst", "p99_ms"): 84.5, ("burst", "slo"): 0.9965, ("a.b: #1", "p99_ms"): 90.25}
    assert {one.dataset_type for one in card.data.eval_results} == {"helm_rl/HelmNode-v0"}
    assert "By `helm-rl eval p99 --policy bundle`:" in card.text
    assert "| burst | P99 latency, ms | 84.5 |" in card.text
    assert "that it was this one is unchecked." in card.text  # these figures do not say what was measured


def test_figures_of_another_bundle_are_refused(tmp_path: Path) -> None:
    adapting = make_adapting_bundle(tmp_path / "bundle", network(2))
    files = load_bundle(adapting).config.files
    assert set(files) == {"policy.safetensors", "residual.json"}
    export(adapting, "--hub", tmp_path / "hub", "--figures", figures(tmp_path / "own.json", files=files))
    text = (tmp_path / "hub" / "README.md").read_text()
    assert "| burst | P99 latency, ms | 84.5 |" in text
    assert "unchecked" not in text
    for name, other in {
        "policy.safetensors": {**files, "policy.safetensors": "ab" * 32},
        "residual.json": {"policy.safetensors": files["policy.safetensors"]},  # measured without the layer
        "detector.json": {**files, "detector.json": "ab" * 32},
    }.items():
        with pytest.raises(
            UserError, match=rf"another bundle's: its {name} had the sha256 (abababababab\.\.\.|none), "
        ):
            export(adapting, "--hub", tmp_path / "no", "--header", tmp_path / "h", "--figures",
                   figures(tmp_path / "p99.json", files=other))  # fmt: skip
    assert not (tmp_path / "no").exists()
    assert not (tmp_path / "h").exists()


def test_the_folder_is_the_bundle_again_with_all_its_layers(tmp_path: Path) -> None:
    bundle = make_adapting_bundle(tmp_path / "bundle", network(2))
    export(bundle, "--hub", tmp_path / "hub")
    assert {file.name for file in (tmp_path / "hub").iterdir()} == {
        ".gitattributes",
        "README.md",
        "config.json",
        "policy.safetensors",
        "residual.json",
    }
    assert "*.safetensors filter=lfs" in (tmp_path / "hub" / ".gitattributes").read_text()
    again = load_bundle(tmp_path / "hub")
    assert again.config == load_bundle(bundle).config
    assert again.layers == ("residual.json",)
    assert "model-index" not in metadata(tmp_path / "hub")  # nothing was measured
    text = (bundle / "README.md").read_text().rstrip("\n")
    assert (tmp_path / "hub" / "README.md").read_text().endswith(f"---\n\n{text}\n")
    # Downloaded and written once more, it has its metadata once.
    export(tmp_path / "hub", "--hub", tmp_path / "hub-2")
    assert (tmp_path / "hub-2" / "README.md").read_text() == (tmp_path / "hub" / "README.md").read_text()
    # In the place of an older one, and of nothing else.
    export(bundle, "--hub", tmp_path / "hub", "--overwrite", "--figures", figures(tmp_path / "p99.json"))
    assert metadata(tmp_path / "hub")["model-index"][0]["name"] == "hub"
    export(tmp_path / "hub", "--hub", tmp_path / "hub-3", "--figures", figures(tmp_path / "p99.json"))
    assert (tmp_path / "hub-3" / "README.md").read_text().count("## Evaluation") == 1
    (tmp_path / "hub" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds more than a bundle"):
        export(bundle, "--hub", tmp_path / "hub", "--overwrite")


def test_a_runs_validation_is_told_as_what_it_is(tmp_path: Path) -> None:
    make_run(tmp_path / "run", network())
    state, tensors = load_training_state(tmp_path / "run")
    name = 'odd\x85 "name" \U0001f600 - yes'
    seen = ValidationSection(reference_ms={name: 80.0}, regrets={3: {name: 0.125}}, best=3)
    save_training_state(
        tmp_path / "run",
        tensors | {f"best.{key[4:]}": value for key, value in tensors.items()},
        network=NETWORK,
        environment=state.environment,
        training=state.training.model_copy(update={"validation": seen}),
    )
    export(tmp_path / "run", "--output", tmp_path / "bundle", "--hub", tmp_path / "hub")
    (result,) = metadata(tmp_path / "hub")["model-index"][0]["results"]
    assert result["dataset"]["name"] == name
    (metric,) = result["metrics"]
    assert (metric["type"], metric["value"]) == ("validation_p99_regret", 0.125)
    assert metric["name"].endswith("on the arrivals that chose the policy")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a file of figures"),
        ("[]", "not a file of figures"),
        ('{"figures": {"a": 1}, "command": "x"}', "not a file of figures"),
        ('{"figures": {}, "command": "x"}', "has no figure of a policy"),
        ('{"figures": {}, "command": "x", "bundles": []}', "not a file of figures"),
        ('{"figures": {}, "command": "x", "bundles": {"policy": {"policy.safetensors": 5}}}', "not a file of figures"),
        ('{"figures": {}, "command": "x", "bundles": {"policy": "x"}}', "not a file of figures"),
        ('{"figures": {"default.burst.single.policy.slo": {"value": true}}, "command": "x"}', "no figure of a policy"),
        ('{"figures": {"default.burst.single.policy.slo": {"value": 1}}, "command": 3}', "no figure of a policy"),
        ('{"figures": {"default.burst.single.policy.slo": {"value": NaN}}, "command": "x"}', "no figure of a policy"),
        (f'{{"figures": {{"default.burst.single.policy.slo": {{"value": {10**400}}}}}, "command": "x"}}', "no figure"),
        (
            '{"figures": {"default.burst.single.policy.slo": {"value": 1}}, "command": "\\ud800"}',
            "not a file of figures",
        ),
        (
            '{"figures": {"default.\\udfff.single.policy.slo": {"value": 1}}, "command": "x"}',
            "not a file of figures",
        ),
    ],
)
def test_what_is_no_file_of_figures_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "figures.json").write_text(content)
    with pytest.raises(UserError, match=message):
        read_figures(tmp_path / "figures.json")
    with pytest.raises(UserError, match=r"no such file; 'helm-rl eval p99"):
        read_figures(tmp_path / "none.json")


def test_mistakes_are_told_before_anything_is_made(tmp_path: Path) -> None:
    make_bundle(tmp_path / "bundle", network())
    with pytest.raises(UserError, match="name its folder with --hub"):
        export(tmp_path / "bundle", "--output", tmp_path / "new", "--figures", figures(tmp_path / "p99.json"))
    with pytest.raises(UserError, match="is the bundle that is read, or lies in it"):
        export(tmp_path / "bundle", "--hub", tmp_path / "bundle" / "hub")
    with pytest.raises(UserError, match="exists already"):
        export(tmp_path / "bundle", "--output", tmp_path / "new", "--hub", tmp_path / "p99.json")
    assert {path.name for path in tmp_path.iterdir()} == {"bundle", "p99.json"}
