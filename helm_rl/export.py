"""From a training run's last checkpoint to a bundle that serves, with its model card."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from helm_rl.checkpoint import BundleConfig, TrainingState, load_training_state, policy_tensors, save_bundle
from helm_rl.errors import UserError


@dataclass
class ExportArgs:
    """Turn the last checkpoint of a training run into a bundle: policy, config and model card."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run folder, as 'helm-rl train base' printed it."""
    output: Path
    """Bundle folder to make."""
    overwrite: bool = False
    """Replace a bundle that stands at the output already."""


def export(run: Path, output: Path, overwrite: bool = False) -> BundleConfig:
    """Write the bundle of a run's last checkpoint as the folder `output`, whole or not at all; return its config.

    Raises:
        UserError: The run cannot be read, has not been trained yet, or did not train a controller of alpha; the
            output exists.
    """
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
    state = state.model_copy(update={"training": state.training.model_copy(update={"arguments": arguments})})
    names = policy_tensors(state.network, len(environment.observation.names))
    return save_bundle(
        output,
        {name: tensors[f"net.{name}"] for name in names if f"net.{name}" in tensors},
        network=state.network,
        observation=environment.observation,
        bounds=environment.bounds,
        environment=environment,
        training=state.training,
        card=model_card(state),
        overwrite=overwrite,
    )


def model_card(state: TrainingState) -> str:
    """Return the card, Markdown: what the policy is, where it comes from, what it reads, where its limits are.

    Every number in it is taken from the state; how well the policy does is for an evaluation to say.
    """
    training, environment = state.training, state.environment
    observation, bounds = environment.observation, environment.bounds
    assert observation is not None
    assert bounds is not None
    if environment.trace is None:
        traces = "generated from the scenario, with seeds that follow from the seed of the training"
    else:
        traces = f"`{environment.trace}`, sha256 `{environment.trace_hash}`"
    hidden = " x ".join(str(width) for width in state.network.hidden)
    step = bounds.rate_per_s * bounds.interval_s
    statistics = [
        f"| {name} | {'not defined' if value is None else f'{value:.6g}'} |"
        for name, value in sorted(training.statistics.items())
    ]
    arguments = [
        f"| --{name.replace('_', '-')} | {value} |" for name, value in training.arguments.items() if value is not None
    ]
    lines = [
        f"# Base policy, trained on the scenario {environment.scenario}",
        "",
        "A controller of alpha, the embedding cache's share of a pool of GPU memory that it divides with the KV cache",
        "of a generative recommender. Trained offline with PPO in helm-rl's serving simulator; frozen in service.",
        "",
        "## Use",
        "",
        "```python",
        "from pathlib import Path",
        "from helm_rl.control.base import BasePolicy",
        "",
        'policy = BasePolicy.load(Path("this-folder"))',
        "policy.reset(seed=0)",
        "target = policy.decide(observation, applied_alpha, now_ns)  # observation: float32, as below",
        "```",
        "",
        f"Every {bounds.interval_s:g} s the network's action, clipped to [-1, 1] and multiplied by {step:g}, "
        "is added to the",
        f"target alpha, which stays within [{bounds.alpha_min:g}, {bounds.alpha_max:g}].",
        f"Network: {len(observation.names)} normalised features, {hidden} {state.network.activation} units, "
        f"{state.network.action_size} action; it runs with NumPy alone.",
        "",
        "## Training",
        "",
        f"- environment: `{environment.env_id}`",
        f"- scenario: `{environment.scenario}`, sha256 `{environment.scenario_hash}`",
        f"- traces: {traces}",
        f"- seed {training.seed}; {training.steps} environment steps in {training.iterations} iterations; "
        f"{training.episodes} episodes ended; {training.seconds:.1f} s of wall time",
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
        f"- It was trained to decide every {bounds.interval_s:g} s; at another interval it moves alpha at "
        "another rate.",
        f"- Features beyond {state.network.observation_clip:g} standard deviations of those seen in training "
        "are clipped.",
        "- It does not learn in service, and it has no safety net of its own against bursts.",
        "",
    ]
    return "\n".join(lines)


def main(args: ExportArgs) -> None:
    """Export as the command line says, and tell where the bundle is."""
    export(args.run, args.output, args.overwrite)
    print(f"bundle: {args.output}")
