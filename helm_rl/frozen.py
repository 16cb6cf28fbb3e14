"""What of a bundle's decision holds still, for servers without Python: normaliser, base policy, offset and bounds.

The function, of which `helm_rl.onnx_file` and `helm_rl.c_header` write one copy each: a raw observation, the alpha that
is applied, and a state of two numbers that the caller keeps come in; the next alpha and the next state come out. The
state is the base policy's own target, not finite before the first decision, and the offset that the residual adapter
adds to it. It decides as `helm_rl.control.helm.Helm` does on measurements that come in time while no burst is on: where
the observation holds what it cannot, alpha stays. What watches every tick or learns (detectors, recovery, the adapter's
guard), and what notices late or old telemetry, is not in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from helm_rl.checkpoint import POLICY_FILE, Bundle
from helm_rl.control.guard import Guard, Mode
from helm_rl.control.helm import Helm
from helm_rl.control.layers import Layer, controller, layers_of
from helm_rl.control.residual import Residual
from helm_rl.control.residual_kernel import BOUND, LIMIT, PACE
from helm_rl.observation import HIGH, LOW, SIZE

STATE_SIZE = 2
START = (math.nan, 0.0)
"""The state before the first decision, and after something else has steered: no target yet, no offset."""

Layers = tuple[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]], ...]


@dataclass(frozen=True)
class Frozen:
    """The numbers of the function.

    mean, std: of the normaliser, float64 [17]; clip: of what is normalised; base, residual: weight [outputs, inputs]
    and bias [outputs] of each layer, tanh between them, `residual` empty where no offset is added; bound: of the
    offset, of which limit is allowed; pace: most that it changes in a decision; step: what an action of 1 adds to the
    target.
    """

    mean: npt.NDArray[np.float64]
    std: npt.NDArray[np.float64]
    clip: float
    base: Layers
    residual: Layers
    bound: float
    limit: float
    pace: float
    step: float
    alpha_min: float
    alpha_max: float
    rate_per_s: float
    interval_s: float
    policy_sha256: str


def freeze(bundle: Bundle, interval_s: float | None = None) -> Frozen:
    """Return the function of a bundle at an interval, which may be left out where it was trained for one alone.

    The residual adapter's offset is in it if its guard let it act in the end, and is then always acted on.

    Raises:
        UserError: it was trained for other intervals, or the adapter's file is wrong.
    """
    helm = acting(bundle, interval_s)
    begin(helm)
    residual, bound, limit, pace = ((), 0.0, 0.0, 0.0) if helm.adapter is None else offset_of(helm.adapter)
    tensors, network, bounds = bundle.tensors, bundle.config.network, bundle.config.bounds
    depth = len(network.hidden)
    return Frozen(
        mean=tensors["normaliser.mean"],
        std=np.sqrt(tensors["normaliser.var"] + network.epsilon),
        clip=network.observation_clip,
        base=tuple((tensors[f"actor.{2 * i}.weight"], tensors[f"actor.{2 * i}.bias"]) for i in range(depth + 1)),
        residual=residual,
        bound=bound,
        limit=limit,
        pace=pace,
        step=helm.base.step,
        alpha_min=bounds.alpha_min,
        alpha_max=bounds.alpha_max,
        rate_per_s=bounds.rate_per_s,
        interval_s=helm.base.interval_s,
        policy_sha256=bundle.config.files[POLICY_FILE],
    )


def offset_of(adapter: Residual) -> tuple[Layers, float, float, float]:
    """Return an adapter's network, and bound, limit and pace of its offset in its block, as `Frozen` has them."""
    adapter.mode()
    bound, limit, pace = (float(adapter.state.numbers[k]) for k in (BOUND, LIMIT, PACE))
    layers = zip(adapter.net.weights, adapter.net.biases, strict=True)
    return tuple((weight.T.astype(np.float32), bias.astype(np.float32)) for weight, bias in layers), bound, limit, pace


def acting(bundle: Bundle, interval_s: float | None) -> Helm:
    """Return a bundle's controller without recovery, and without its adapter unless that may act; see `begin`."""
    with_adapter: tuple[Layer, ...] = ("residual",) if "residual" in layers_of(bundle) else ()
    helm = controller(bundle, interval_s, with_adapter)
    adapter = helm.adapter
    if adapter is None:
        return helm
    assert isinstance(adapter.guard, Guard)
    return helm if adapter.settings.bound > 0 and adapter.guard.may_act else controller(bundle, interval_s, ())


def begin(helm: Helm) -> None:
    """Let a controller that `acting` returned begin anew, its adapter acting on what it has learnt."""
    helm.reset(0)
    if helm.adapter is not None:
        assert isinstance(helm.adapter.guard, Guard)
        helm.adapter.guard.mode = Mode.ACT


@dataclass(frozen=True)
class Decisions:
    """Sequences of decisions of a bundle, `steps` long each.

    observation: raw, float32 [steps, n, 17]; applied_alpha, alpha: what was applied, and what was decided, float64
    [steps, n].
    """

    observation: npt.NDArray[np.float32]
    applied_alpha: npt.NDArray[np.float64]
    alpha: npt.NDArray[np.float64]


def decide_by_bundle(bundle: Bundle, interval_s: float | None, steps: int, sequences: int, seed: int = 0) -> Decisions:
    """Let a bundle decide, as `freeze` has it, on raw observations that are uniform over the schema's range.

    In one of twenty a number is out of range, NaN or infinite, and one of twenty applied alphas is no share.
    """
    rng = np.random.default_rng(seed)
    observation = rng.uniform(LOW, HIGH, (steps, sequences, SIZE)).astype(np.float32)
    applied, alpha = rng.uniform(0.0, 1.0, (steps, sequences)), np.empty((steps, sequences))
    odd = np.array([math.nan, math.inf, -math.inf, -1.5, 1.5])
    for where in np.argwhere(rng.random((steps, sequences)) < 0.05):
        observation[*where, rng.integers(SIZE)] = rng.choice(odd)
    wrong = rng.random((steps, sequences)) < 0.05
    applied[wrong] = rng.choice(odd, int(wrong.sum()))
    helm = acting(bundle, interval_s)
    for k in range(sequences):
        begin(helm)
        for step in range(steps):
            alpha[step, k] = helm.decide(observation[step, k], float(applied[step, k]), 0)
    return Decisions(observation, applied, alpha)
