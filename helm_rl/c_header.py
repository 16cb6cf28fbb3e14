"""A bundle's decision as one C header: C99 or C++, with nothing but math.h."""

from __future__ import annotations

import string
from collections.abc import Iterable

from helm_rl import __version__
from helm_rl.frozen import Frozen, Layers
from helm_rl.observation import HIGH, LOW, OBSERVATION_NAMES, SCHEMA_VERSION, SIZE, schema_hash

_TEXT = string.Template("""\
/* A decision on alpha, the embedding cache's share of the pool, by the policy of a helm-rl bundle.
 * Written by helm-rl $version from the policy $sha256.
 *
 * helm_start once, and whenever something else has set alpha; then, every HELM_INTERVAL_S seconds, helm_decide with a
 * raw observation (schema v$schema_version, below) and the alpha that is applied now. It returns the target for the
 * next interval. An observation with a number outside the schema's range, NaN for one, leaves alpha where it was;
 * before there is a target, at applied_alpha. Where that is no share either, NaN comes back: keep what is applied.
 *
$names
 */
#ifndef HELM_RL_DECISION_H
#define HELM_RL_DECISION_H

#include <math.h>

#if defined __FAST_MATH__ || defined _M_FP_FAST || __FINITE_MATH_ONLY__
#error "helm-rl: -ffast-math and -ffinite-math-only take NaN for a number; compile without them"
#endif

#define HELM_SCHEMA_HASH "$schema_hash"
#define HELM_FEATURES $features
#define HELM_ALPHA $alpha /* of the features, the one that is the applied alpha */
#define HELM_CLIP $clip /* standard deviations */
#define HELM_INTERVAL_S $interval_s
#define HELM_STEP $step /* of alpha, for an action of 1 */
#define HELM_ALPHA_MIN $alpha_min
#define HELM_ALPHA_MAX $alpha_max
#define HELM_BOUND $bound /* of the offset that is added to the policy's own target; 0: there is none */
#define HELM_LIMIT $limit /* how far of that it may go */
#define HELM_PACE $pace /* most that it changes in a decision */

$arrays

static inline double helm_clip(double x, double low, double high)
{
    return x < low ? low : x > high ? high : x;
}

/* y = weight x + bias, weight by rows; with squash, tanh of that. */
static inline void helm_layer(const float *weight, const float *bias, int inputs, int outputs, int squash,
                              const float *x, float *y)
{
    int i, j;
    for (i = 0; i < outputs; i++) {
        double sum = bias[i];
        for (j = 0; j < inputs; j++) sum += (double)weight[i * inputs + j] * x[j];
        y[i] = squash ? tanhf((float)sum) : (float)sum;
    }
}

$networks

static inline void helm_start(double state[2])
{
    state[0] = NAN; /* the policy's own target: none yet */
    state[1] = 0.0; /* the offset */
}

static inline double helm_decide(const float observation[HELM_FEATURES], double applied_alpha, double state[2])
{
    const int first = !isfinite(state[0]), known = applied_alpha >= 0.0 && applied_alpha <= 1.0;
    float x[HELM_FEATURES + 1];
    double before, action;
    int usable = known || !first, i;
    for (i = 0; i < HELM_FEATURES; i++)
        usable = usable && observation[i] >= helm_low[i] && observation[i] <= helm_high[i];
    if (!usable && first) return known ? helm_clip(applied_alpha, HELM_ALPHA_MIN, HELM_ALPHA_MAX) : NAN;
    if (usable) {
        for (i = 0; i < HELM_FEATURES; i++) {
            double seen = observation[i];
            if (i == HELM_ALPHA) seen = (float)helm_clip(seen - state[1], 0.0, 1.0); /* as it were without the offset */
            x[i] = (float)helm_clip((seen - helm_mean[i]) / helm_std[i], -HELM_CLIP, HELM_CLIP);
        }
        before = first ? applied_alpha - state[1] : state[0];
        action = helm_base(x);
        if (isnan(action)) action = 0.0;
        state[0] = helm_clip(before + helm_clip(action, -1.0, 1.0) * HELM_STEP, HELM_ALPHA_MIN, HELM_ALPHA_MAX);
        x[HELM_FEATURES] = first ? 0.0f : (float)((state[0] - before) / HELM_STEP);
        action = helm_clip(HELM_BOUND * helm_residual(x), -HELM_LIMIT, HELM_LIMIT);
        if (isnan(action)) action = 0.0;
        state[1] += helm_clip(action - state[1], -HELM_PACE, HELM_PACE);
    }
    return helm_clip(state[0] + state[1], HELM_ALPHA_MIN, HELM_ALPHA_MAX);
}

#endif
""")

_NO_RESIDUAL = """\
static inline float helm_residual(const float *x0)
{
    (void)x0;
    return 0.0f;
}"""


def header(frozen: Frozen) -> str:
    """Return the header's text: `helm_decide`, which does what `helm_rl.frozen` says."""
    networks = {"base": frozen.base} | ({"residual": frozen.residual} if frozen.residual else {})
    arrays = [
        _array("float", "helm_low", LOW),
        _array("float", "helm_high", HIGH),
        _array("double", "helm_mean", frozen.mean),
        _array("double", "helm_std", frozen.std),
    ]
    for name, layers in networks.items():
        for i, (weight, bias) in enumerate(layers):
            arrays.append(_array("float", f"helm_{name}_weight{i}", weight.ravel()))
            arrays.append(_array("float", f"helm_{name}_bias{i}", bias))
    functions = [_network(name, layers, squash=name == "residual") for name, layers in networks.items()]
    return _TEXT.substitute(
        version=__version__,
        sha256=frozen.policy_sha256,
        schema_version=SCHEMA_VERSION,
        schema_hash=schema_hash(),
        names="\n".join(f" *   {i:2d} {name}" for i, name in enumerate(OBSERVATION_NAMES)),
        features=SIZE,
        alpha=OBSERVATION_NAMES.index("alpha"),
        clip=repr(frozen.clip),
        interval_s=repr(frozen.interval_s),
        step=repr(frozen.step),
        alpha_min=repr(frozen.alpha_min),
        alpha_max=repr(frozen.alpha_max),
        bound=repr(frozen.bound),
        limit=repr(frozen.limit),
        pace=repr(frozen.pace),
        arrays="\n".join(arrays),
        networks="\n\n".join(functions if frozen.residual else [*functions, _NO_RESIDUAL]),
    )


def _array(kind: str, name: str, values: Iterable[float]) -> str:
    """Return the definition of an array, each number with as many digits as tell it from any other."""
    digits, mark = (8, "f") if kind == "float" else (16, "")
    numbers = [f"{float(value):.{digits}e}{mark}" for value in values]
    lines = [", ".join(numbers[k : k + 6]) for k in range(0, len(numbers), 6)]
    return f"static const {kind} {name}[{len(numbers)}] = {{\n    " + ",\n    ".join(lines) + "};"


def _network(name: str, layers: Layers, squash: bool) -> str:
    """Return the function of a network; squash: its output, too, goes through tanh."""
    widths = ", ".join(f"x{i + 1}[{len(bias)}]" for i, (_, bias) in enumerate(layers))
    lines = [f"static inline float helm_{name}(const float *x0)", "{", f"    float {widths};"]
    for i, (weight, _) in enumerate(layers):
        outputs, inputs = weight.shape
        last = i == len(layers) - 1
        arguments = f"helm_{name}_weight{i}, helm_{name}_bias{i}, {inputs}, {outputs}, {int(squash or not last)}"
        lines.append(f"    helm_layer({arguments}, x{i}, x{i + 1});")
    return "\n".join([*lines, f"    return x{len(layers)}[0];", "}"])
