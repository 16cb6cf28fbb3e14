"""From a training run's last checkpoint to a bundle that serves, with its model card."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from helm_rl.checkpoint import (
    BundleConfig,
    EnvironmentSection,
    NetworkSection,
    TrainingSection,
    ValidationSection,
    load_training_state,
    policy_tensors,
    save_bundle,
)
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
    """Write the bundle of a run as the folder `output`, whole or not at all; return its config.

    The policy is the one that did best on the validation's arrivals; without a validation, the last checkpoint's.

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
    kept = "net" if state.training.validation.best is None else "best"
    return save_bundle(
        output,
        {name: tensors[f"{kept}.{name}"] for name in names if f"{kept}.{name}" in tensors},
        network=state.network,
        observation=environment.observation,
        bounds=environment.bounds,
        environment=environment,
        training=state.training,
        card=model_card(state.network, environment, state.training),
        overwrite=overwrite,
    )


def model_card(
    network: NetworkSection,
    environment: EnvironmentSection,
    training: TrainingSection,
    method: str = "Trained offline with PPO in helm-rl's serving simulator",
) -> str:
    """Return the card, Markdown: what the policy is, where it comes from, what it reads, where its limits are.

    Every number in it is taken from what is given; how well the policy does is for an evaluation to say.
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
        f"# Base policy, trained on the scenario{several} {_some([each.name for each in environment.scenarios])}",
        "",
        "A controller of alpha, the embedding cache's share of a pool of GPU memory that it divides with the KV cache",
        f"of a generative recommender. {method}; frozen in service.",
        "",
        "## Use",
        "",
        "```python",
        "from pathlib import Path",
        "from helm_rl.control.base import BasePolicy",
        "",
        f'policy = BasePolicy.load(Path("this-folder"), interval_s={bounds.interval_s[0]:g})',
        "policy.reset(seed=0)",
        "target = policy.decide(observation, applied_alpha, now_ns)  # observation: float32, as below",
        "```",
        "",
        f"Every interval ({intervals} s) the network's action, clipped to [-1, 1] and multiplied by "
        f"{bounds.rate_per_s:g} per second,",
        f"is added to the target alpha, which stays within [{bounds.alpha_min:g}, {bounds.alpha_max:g}].",
        f"Network: {len(observation.names)} normalised features, {hidden} {network.activation} units, "
        f"{network.action_size} action; it runs with NumPy alone.",
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
        "- It does not learn in service, and it has no safety net of its own against bursts.",
        "",
    ]
    return "\n".join(lines)


def _some(names: list[str]) -> str:
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
    """Export as the command line says, and tell where the bundle is."""
    export(args.run, args.output, args.overwrite)
    print(f"bundle: {args.output}")
