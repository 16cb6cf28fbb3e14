"""From a training run's last checkpoint to a bundle that serves, and from a bundle to ONNX or a C header."""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from helm_rl import tracking
from helm_rl.c_header import header
from helm_rl.checkpoint import (
    CONFIG_FILE,
    DETECTOR_FILE,
    RESIDUAL_FILE,
    STATE_FILE,
    Bundle,
    BundleConfig,
    EnvironmentSection,
    NetworkSection,
    Tensors,
    TrainingSection,
    ValidationSection,
    load_bundle,
    load_training_state,
    policy_sha256,
    policy_tensors,
    save_bundle,
)
from helm_rl.control.layers import load_recovery
from helm_rl.control.residual_file import load_residual
from helm_rl.errors import UserError
from helm_rl.files import atomic_file, check_outputs, write_text
from helm_rl.frozen import decide_by_bundle, freeze
from helm_rl.hub import check_hub_output, check_measured, read_figures, write_hub_folder
from helm_rl.onnx_file import most_error, onnx_bytes, parse_onnx
from helm_rl.shipped import bundle_path

CHECKED = 10_000
MOST_ERROR = 1e-5
"""By how much an ONNX file's alpha may differ from the bundle's."""

_LAYERS = {
    RESIDUAL_FILE: "a residual adapter, which goes on learning in service from where this file left it",
    DETECTOR_FILE: "burst detectors and a recovery rule, which takes over while a burst is on",
}


@dataclass
class ExportArgs:
    """Turn the best policy of a training run into a bundle: policy, config, model card, and the layers above it.

    For servers without Python, a bundle becomes an ONNX file or a C header: normaliser, base policy, the offset of a
    residual adapter that may act, and bounds. Detectors, recovery and whatever learns stay with the bundle.
    """

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|BUNDLE")]
    """Run folder, as 'helm-rl train base' printed it, or a bundle, to put layers above its policy or for the files
    below."""
    output: Path | None = None
    """Bundle folder to make; may be left out where a bundle only becomes one of the things below."""
    detector: Annotated[Path | None, tyro.conf.arg(metavar="FILE.json")] = None
    """Burst detector and recovery rule, as 'helm-rl train burst' writes them."""
    residual: Annotated[Path | None, tyro.conf.arg(metavar="FILE.json")] = None
    """Residual adapter, as 'helm-rl train residual --output' writes it."""
    onnx: Annotated[Path | None, tyro.conf.arg(metavar="FILE.onnx")] = None
    """ONNX file to make of the bundle; held against it on 10,000 raw observations before it is written."""
    header: Annotated[Path | None, tyro.conf.arg(metavar="FILE.h")] = None
    """C header to make of the bundle: C99 or C++, no dependency."""
    hub: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Folder in the Hugging Face Hub's style to make of the bundle: its files, and a card with metadata in YAML. It is
    written, not uploaded."""
    figures: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE.json")] = ()
    """With --hub: what 'helm-rl eval p99 --policy BUNDLE --json' measured, to become metrics of the card. Figures of
    other weights or layers than the bundle's are refused; where a file does not say what was measured, as those of
    earlier versions do not, the card says that it is unchecked."""
    interval_s: float | None = None
    """Seconds between decisions for --onnx and --header; needed where the policy was trained for several."""
    track: bool = False
    """Also log the bundle to Weights and Biases, as an artefact of the run's own run there if it has one (needs the
    extra 'track'; WANDB_MODE=offline needs no network)."""
    wandb_project_name: str = tracking.PROJECT
    """Project at Weights and Biases."""
    wandb_entity: str | None = None
    """Team at Weights and Biases; your own account if not given."""
    overwrite: bool = False
    """Replace what stands at an output already."""


@dataclass(frozen=True)
class _Source:
    """A policy, how it came to be, and the files of layers that it has already."""

    network: NetworkSection
    environment: EnvironmentSection
    training: TrainingSection
    tensors: Tensors
    layers: Collection[str]


def export(
    source: Path, output: Path, overwrite: bool = False, detector: Path | None = None, residual: Path | None = None
) -> BundleConfig:
    """Write the bundle of a run, or of another bundle, as the folder `output`, whole or not at all; return its config.

    The policy of a run is the one that did best on the validation's arrivals; without a validation, the last
    checkpoint's. Layers that are given take the place of a bundle's own.

    Raises:
        UserError: The source cannot be read, has not been trained yet, or did not train a controller of alpha; a
            layer's file is wrong, or belongs to another policy; the output exists.
    """
    from_bundle = (source / CONFIG_FILE).is_file()
    if from_bundle and source.resolve() in (output.resolve(), *output.resolve().parents):
        raise UserError(
            f"{output}: is the bundle that is read, or lies in it; name another folder for the one to be made"
        )
    found = _of_bundle(source) if from_bundle else _of_run(source)
    given = {DETECTOR_FILE: detector, RESIDUAL_FILE: residual}
    files = {name: source / name for name in found.layers} | {n: path for n, path in given.items() if path is not None}
    if DETECTOR_FILE in files:
        load_recovery(files[DETECTOR_FILE])
    if RESIDUAL_FILE in files:
        load_residual(files[RESIDUAL_FILE], policy_sha256(found.tensors))
    layers = {name: file.read_bytes() for name, file in files.items()}
    environment = found.environment
    assert environment.observation is not None
    assert environment.bounds is not None
    return save_bundle(
        output,
        found.tensors,
        network=found.network,
        observation=environment.observation,
        bounds=environment.bounds,
        environment=environment,
        training=found.training,
        card=model_card(found.network, environment, found.training, sorted(layers)),
        layers=layers,
        overwrite=overwrite,
    )


def _of_bundle(path: Path) -> _Source:
    bundle = load_bundle(path)
    config = bundle.config
    served = {"observation": config.observation, "bounds": config.bounds}  # these are the ones that were checked
    environment = config.environment.model_copy(update=served)
    return _Source(config.network, environment, config.training, bundle.tensors, bundle.layers)


def _of_run(run: Path) -> _Source:
    state, tensors = load_training_state(run)
    if state.training.iterations == 0:
        raise UserError(f"{run}: nothing has been trained yet; continue it with: helm-rl train base --resume {run}")
    environment = state.environment
    if environment.observation is None or environment.bounds is None:
        raise UserError(
            f"{run}: trained on {environment.env_id}, not on a scenario; only a controller of alpha makes a bundle"
        )
    # Where the run's folder lies says nothing about the policy, and much about somebody's machine.
    arguments = {name: value for name, value in state.training.arguments.items() if name not in ("runs", "resume")}
    training = state.training.model_copy(update={"arguments": arguments})
    names = policy_tensors(state.network, len(environment.observation.names))
    kept = "net" if training.validation.best is None else "best"
    policy = {name: tensors[f"{kept}.{name}"] for name in names if f"{kept}.{name}" in tensors}
    return _Source(state.network, environment, training, policy, ())


def model_card(
    network: NetworkSection, environment: EnvironmentSection, training: TrainingSection, layers: Collection[str] = ()
) -> str:
    """Return the card, Markdown: what the policy is, where it comes from, what it reads, where its limits are.

    layers: files of those above the policy (checkpoint.LAYER_FILES). Every number in it is taken from what is given;
    how well the policy does is for an evaluation to say.
    """
    observation, bounds = environment.observation, environment.bounds
    assert observation is not None
    assert bounds is not None
    traces = [f"`{trace.name}`, sha256 `{trace.sha256}`" for trace in environment.traces]
    scenarios = [f"`{scenario.name}`, sha256 `{scenario.sha256}`" for scenario in environment.scenarios]
    several = "s" if len(scenarios) > 1 else ""
    if not traces:
        traces = [f"generated from the scenario{several}, with seeds that follow from the seed of the training"]
    hidden = " x ".join(str(width) for width in network.hidden)
    intervals = ", ".join(f"{interval_s:g}" for interval_s in bounds.interval_s)
    statistics = [
        f"| {name} | {'not defined' if value is None else f'{value:.6g}'} |"
        for name, value in sorted(training.statistics.items())
    ]
    arguments = [
        f"| --{name.replace('_', '-')} | {value} |" for name, value in training.arguments.items() if value is not None
    ]
    lines = [
        f"# Base policy, trained on the scenario{several} {first_few([each.name for each in environment.scenarios])}",
        "",
        "A controller of alpha, the embedding cache's share of a pool of GPU memory that it divides with the KV cache",
        f"of a generative recommender. {training.method}; frozen in service.",
        "",
        "## Use",
        "",
        "```python",
        "from pathlib import Path",
        "from helm_rl.checkpoint import load_bundle",
        "from helm_rl.control.layers import controller",
        "",
        f'policy = controller(load_bundle(Path("this-folder")), interval_s={bounds.interval_s[0]:g})',
        "policy.reset(seed=0)",
        "target = policy.decide(observation, applied_alpha, now_ns)  # observation: float32, as below",
        "```",
        "",
        f"Every interval ({intervals} s) the network's action, clipped to [-1, 1] and multiplied by "
        f"{bounds.rate_per_s:g} per second,",
        f"is added to the target alpha, which stays within [{bounds.alpha_min:g}, {bounds.alpha_max:g}].",
        f"Network: {len(observation.names)} normalised features, {hidden} {network.activation} units, "
        f"{network.action_size} action; it runs compiled, without torch.",
        "What it must not decide upon (NaN, out of range, stale) leaves the target at the last safe one;",
        "`policy.fallbacks()` counts such decisions by their causes.",
        *[f"Above it: {_LAYERS[name]} (`{name}`)." for name in layers],
        "",
        "## Training",
        "",
        f"- environment: `{environment.env_id}`",
        *[f"- scenario: {scenario}" for scenario in scenarios],
        *[f"- traces: {each}" for each in traces],
        f"- seed {training.seed}; {training.steps} environment steps in {training.iterations} iterations; "
        f"{training.episodes} episodes ended; {training.seconds:.1f} s of wall time",
        *([] if training.stopped is None else [f"- stopped early: {training.stopped}"]),
        f"- helm-rl {training.helm_rl_version}",
        "",
        "Commands, in order:",
        "",
        "```",
        *training.commands,
        "```",
        "",
        "| argument | value |",
        "|---|---|",
        *arguments,
        "",
        "## Statistics at the end of the training",
        "",
        "Of the last iteration; return and length of an episode are means over the last 20 episodes that ended, with",
        "exploration noise. They say how the training went, not how well the policy serves: for that, replay it on a",
        "trace with `helm-rl eval p99` and `helm-rl eval ratio-gap`.",
        "",
        "| chart | value |",
        "|---|---|",
        *statistics,
        "",
        *_validation(training.validation),
        "## Observation",
        "",
        f"Schema v{observation.schema_version}, hash `{observation.schema_hash}`; float32, in this order:",
        "",
        *[f"{i}. {name}" for i, name in enumerate(observation.names)],
        "",
        "## Limits",
        "",
        "- Trained in a simulator, on the scenario and the traces named above and on no other load. Elsewhere "
        "it may be",
        "  worse than a fixed split: compare them first.",
        f"- It was trained to decide every {intervals} s, and serves within that range only.",
        f"- Features beyond {network.observation_clip:g} standard deviations of those seen in training are clipped.",
        *([] if RESIDUAL_FILE in layers else ["- It does not learn in service."]),
        *([] if DETECTOR_FILE in layers else ["- It has no safety net of its own against bursts."]),
        "",
    ]
    return "\n".join(lines)


def first_few(names: list[str]) -> str:
    """Name the first few of many."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _validation(found: ValidationSection) -> list[str]:
    """Return the card's part about held-out arrivals: P99 regret of the policy that was kept; empty without any."""
    if found.best is None:
        return []
    rows = [
        f"| {name} | {found.reference_ms[name]:.1f} | {100 * regret:+.1f} % |"
        for name, regret in found.regrets[found.best].items()
    ]
    return [
        "## Validation",
        "",
        f"On arrivals that it was not trained on; this is the policy after {found.best} iterations, of "
        f"{len(found.regrets)} looked at the one",
        "of least regret, so that the figures flatter it: `helm-rl eval p99` has arrivals that chose nothing.",
        "",
        "| scenario | P99 of the best schedule known, ms | the policy's above that |",
        "|---|---|---|",
        *rows,
        "",
    ]


def main(args: ExportArgs) -> None:
    """Export as the command line says, and tell where everything is."""
    args = replace(args, source=bundle_path(args.source))
    files = {"onnx": args.onnx, "header": args.header}
    made = [option for option, path in (*files.items(), ("hub", args.hub)) if path is not None]
    if args.figures and args.hub is None:
        raise UserError("--figures become metrics of a card: name its folder with --hub")
    measured = [read_figures(path) for path in args.figures]
    if args.onnx is not None:
        importlib.import_module("onnx")  # that it is missing is said before anything is made
    if args.output is None:
        if not made:
            raise UserError(
                "nothing to make: name --output for a bundle, or --onnx, --header or --hub for what a bundle becomes"
            )
        if args.detector is not None or args.residual is not None:
            raise UserError("--detector and --residual become part of a bundle: name it with --output")
        if not (args.source / CONFIG_FILE).is_file():
            raise UserError(
                f"{args.source}: no bundle, of which --onnx, --header and --hub are made; name one with --output, too"
            )
    if args.track:
        tracking.check_installed()
        if args.output is None:
            raise UserError("--track logs the bundle that is made: name it with --output")
    check_outputs(args.overwrite, (args.source, args.output), **files)
    if args.hub is not None:
        check_hub_output(args.hub, args.output or args.source, args.overwrite)
    if args.output is not None:
        export(args.source, args.output, args.overwrite, args.detector, args.residual)
        print(f"bundle: {args.output}")
    if args.track:
        _log(args)
    if made:
        bundle = load_bundle(args.source if args.output is None else args.output)
        check_measured(measured, bundle)
        if any(files.values()):
            _export_files(bundle, args)
        if args.hub is not None:
            write_hub_folder(args.hub, bundle, measured, args.overwrite)
            print(f"hub: {args.hub}; to upload it: hf upload USER/NAME {shlex.quote(str(args.hub))}")


def _log(args: ExportArgs) -> None:
    """Log the bundle at `args.output` to Weights and Biases."""
    assert args.output is not None
    of_run = (args.source / STATE_FILE).is_file()
    run = tracking.start(
        project=args.wandb_project_name,
        entity=args.wandb_entity,
        run_id=load_training_state(args.source)[0].wandb_id if of_run else None,
    )
    tracking.log_bundle(run, load_bundle(args.output), args.output.name)
    run.finish()


def _export_files(bundle: Bundle, args: ExportArgs) -> None:
    """Make the ONNX file and the header of a bundle, as asked for."""
    frozen = freeze(bundle, args.interval_s)
    if args.onnx is not None:
        content = onnx_bytes(frozen)
        written = parse_onnx(content, str(args.onnx))
        error = most_error(written, decide_by_bundle(bundle, args.interval_s, CHECKED // 1_000, 1_000))
        if not error <= MOST_ERROR:
            raise UserError(
                f"{bundle.path}: by {written.runtime} alpha comes out up to {error:.1e} off, more than {MOST_ERROR:g}; "
                "its weights are too large for float32, so train it anew"
            )
        with atomic_file(args.onnx) as aside:
            aside.write_bytes(content)
        print(f"onnx: {args.onnx}, within {error:.1e} of the bundle on {CHECKED:,} observations ({written.runtime})")
    if args.header is not None:
        write_text(args.header, header(frozen))
        print(f"header: {args.header}")
    left = {DETECTOR_FILE: "detectors and recovery, which look at every tick"}
    if not frozen.residual:
        left[RESIDUAL_FILE] = "the residual adapter, which its guard does not let act"
    for file in bundle.layers:
        if file in left:
            print(f"left out: {left[file]}")
