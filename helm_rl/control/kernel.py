"""What a decision is, compiled: the arithmetic of each layer, over arrays, and all layers in one call.

The layers' classes call the parts, and `Helm` the whole, so that a layer does the same alone as in the stack.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cache_engine.jit import in_memory, inner, kernel
from helm_rl.control import burst
from helm_rl.control.burst import BurstState
from helm_rl.control.protocol import FloatArray
from helm_rl.observation import HIGH, LOW, OBSERVATION_NAMES, SIZE

Float64Array = npt.NDArray[np.float64]

ALPHA = OBSERVATION_NAMES.index("alpha")
HOT_USERS = OBSERVATION_NAMES.index("hot_user_ratio")

# PolicyState.numbers
CLIP = 0  # of a normalised signal, in standard deviations
STEP = 1  # of the target in a decision, at an action of 1
ALPHA_MIN = 2
ALPHA_MAX = 3
TARGET = 4  # the policy's own, NaN: none yet
N_POLICY = 5

# AdapterState.numbers
BOUND = 0
OFFSET = 1
SIDE = 2  # of its bound, tried in the block under way
ODDS = 3  # that the network gave when the side was drawn, -1 to 1
DRAW = 4  # uniform in [0, 1), to draw the next side with; NaN: used
N_ADAPTER = 5

# What a block is for: the values of `guard.Mode`
_TRY, _ACT = 1, 2

# RecoveryState.numbers
ALPHA_COLD = 0
ALPHA_HOT = 1
RATE_PER_S = 2
RETURNING = 3  # the target on its way back to that of the controller below; NaN: it is that
RULED = 4  # what the rule came to
N_RECOVERY = 5

# What `rule` says
RULES, ASKS, HANDS_BACK = 0, 1, 2

# HelmState.numbers
SAFE = 0  # the last target that was decided upon, NaN: none
N_HELM = 1

# HelmState.counts
NOT_FINITE, OUT_OF_RANGE, STALE, LATE, NO_ALPHA, NETWORK = 0, 1, 2, 3, 4, 5  # decisions, by what was wrong
DECIDED_NS = 6  # when the last decision was taken; burst.UNSET: none was
INTERVAL_NS = 7
LATE_NS = 8  # since the last decision: above it a call is late
STALE_NS = 9  # above this age an observation is stale
HANDED_BACK = 10  # whether a burst was over with the last decision
N_HELM_COUNTS = 11
_NOTHING = -1


class PolicyState(NamedTuple):
    """The base policy.

    weights: of each layer in turn, [inputs, outputs], then its biases; widths: of the input and of each layer;
    normalised: the signals of the last decision in standard deviations, clipped; values: of the neurons of a layer,
    and of the layer before, [2, the widest].
    """

    mean: Float64Array
    std: Float64Array
    weights: FloatArray
    widths: npt.NDArray[np.int64]
    normalised: FloatArray
    values: FloatArray
    numbers: Float64Array


class NetState(NamedTuple):
    """The adapter's network: weights [inputs, outputs] and biases of its layers, and what comes out of each."""

    weights_1: Float64Array
    weights_2: Float64Array
    weights_3: Float64Array
    biases_1: Float64Array
    biases_2: Float64Array
    biases_3: Float64Array
    values: Float64Array  # of the hidden layers, [2, hidden]
    slopes: Float64Array  # the same for their gradients


class AdapterState(NamedTuple):
    """The residual adapter.

    inputs: of its network in the decisions of the block under way, [intervals of a block, SIZE + 1], of which
    taken[0] are there.
    """

    inputs: Float64Array
    taken: npt.NDArray[np.int64]
    numbers: Float64Array


class RecoveryState(NamedTuple):
    """The recovery rule; took_over[0]: whether it has steered since the controller below did."""

    numbers: Float64Array
    took_over: npt.NDArray[np.bool_]


class HelmState(NamedTuple):
    """All layers, and the observation to decide upon."""

    policy: PolicyState
    net: NetState
    adapter: AdapterState
    recovery: RecoveryState
    detector: BurstState
    observation: FloatArray
    numbers: Float64Array
    counts: npt.NDArray[np.int64]


def new_net(weights: Sequence[Float64Array]) -> NetState:
    """Return a network of two hidden layers of one width with these weights, [inputs, outputs] each, and no biases."""
    first, second, third = (np.ascontiguousarray(each) for each in weights)
    biases_1, biases_2, biases_3 = (np.zeros(each.shape[1]) for each in (first, second, third))
    values = np.zeros((2, second.shape[0]))
    return NetState(first, second, third, biases_1, biases_2, biases_3, values, np.zeros_like(values))


def new_adapter(bound: float, block: int) -> AdapterState:
    """Return an adapter that has not acted yet; block: the most inputs that it keeps."""
    numbers = np.zeros(N_ADAPTER)
    numbers[BOUND] = bound
    numbers[DRAW] = math.nan
    return AdapterState(np.zeros((block, SIZE + 1)), np.zeros(1, np.int64), numbers)


def new_recovery(alpha_cold: float, alpha_hot: float, rate_per_s: float) -> RecoveryState:
    """Return a rule that has not steered yet."""
    return RecoveryState(np.array([alpha_cold, alpha_hot, rate_per_s, math.nan, math.nan]), np.zeros(1, np.bool_))


@inner
def _clamp(x: float, low: float, high: float) -> float:
    """Return x within [low, high]; NaN stays."""
    if x < low:
        return low
    return high if x > high else x


@inner
def _all_finite(observation: FloatArray) -> bool:
    finite = True
    for signal in observation:
        finite &= math.isfinite(signal)
    return finite


# The base policy


@kernel
def normalise(policy: PolicyState, observation: FloatArray, alpha: float) -> None:
    """Bring an observation, [17] float32, to what the network sees, with `alpha` in place of its own."""
    clip = policy.numbers[CLIP]
    for i in range(observation.size):
        signal = np.float64(np.float32(alpha) if i == ALPHA else observation[i])
        policy.normalised[i] = np.float32(_clamp((signal - policy.mean[i]) / policy.std[i], -clip, clip))


@kernel
def mean_action(policy: PolicyState) -> float:
    """Return the network's mean action, not clipped, for what `normalise` left; tanh between layers, float32."""
    widths = policy.widths
    before, weights = policy.normalised, policy.weights
    layers = widths.size - 1
    for k in range(layers):
        inputs, outputs = widths[k], widths[k + 1]
        after = policy.values[k % 2]
        biases = weights[inputs * outputs : (inputs + 1) * outputs]
        for j in range(outputs):
            after[j] = biases[j]
        for i in range(inputs):
            # Rows of their own: of an index that is a sum the compiler cannot tell its sign, and does not vectorise.
            signal, row = before[i], weights[i * outputs : (i + 1) * outputs]
            for j in range(outputs):
                after[j] += signal * row[j]
        if k < layers - 1:
            for j in range(outputs):
                after[j] = math.tanh(after[j])
        weights = weights[(inputs + 1) * outputs :]
        before = after
    return np.float64(before[0])


@inner
def _move(policy: PolicyState, action: float, applied_alpha: float) -> float:
    """Move the target by an action, clipped, or if it is NaN not at all; return it."""
    numbers = policy.numbers
    target = applied_alpha if math.isnan(numbers[TARGET]) else numbers[TARGET]
    if not math.isfinite(target):
        return target
    if not math.isnan(action):
        target += _clamp(action, -1.0, 1.0) * numbers[STEP]
    numbers[TARGET] = _clamp(target, numbers[ALPHA_MIN], numbers[ALPHA_MAX])
    return numbers[TARGET]


@kernel
def decide_base(policy: PolicyState, observation: FloatArray, applied_alpha: float) -> float:
    """As `BasePolicy.decide`."""
    action = math.nan
    if _all_finite(observation):
        normalise(policy, observation, observation[ALPHA])
        action = mean_action(policy)
    return _move(policy, action, applied_alpha)


# The residual adapter


@kernel
def forward(net: NetState, x: Float64Array) -> float:
    """Return the output of the adapter's network, within (-1, 1), for an input, float64 [inputs]."""
    _tanh_layer(x, net.weights_1, net.biases_1, net.values[0])
    _tanh_layer(net.values[0], net.weights_2, net.biases_2, net.values[1])
    total = net.biases_3[0]
    for i in range(net.weights_3.shape[0]):
        total += net.values[1, i] * net.weights_3[i, 0]
    return math.tanh(total)


@inner
def _tanh_layer(x: Float64Array, weights: Float64Array, biases: Float64Array, out: Float64Array) -> None:
    for j in range(out.size):
        out[j] = biases[j]
    for i in range(x.size):
        for j in range(out.size):
            out[j] += x[i] * weights[i, j]
    for j in range(out.size):
        out[j] = math.tanh(out[j])


@kernel
def ascend(net: NetState, x: Float64Array, slope: float, step: float) -> None:
    """Move the weights by `step` along `slope` times the gradient of the output before its tanh."""
    forward(net, x)
    for i in range(net.weights_3.shape[0]):
        value = net.values[1, i]
        net.slopes[1, i] = slope * net.weights_3[i, 0] * (1.0 - value * value)
        net.weights_3[i, 0] += step * slope * value
    net.biases_3[0] += step * slope
    for i in range(net.weights_2.shape[0]):
        value, back = net.values[0, i], 0.0
        for j in range(net.weights_2.shape[1]):
            back += net.weights_2[i, j] * net.slopes[1, j]
            net.weights_2[i, j] += step * value * net.slopes[1, j]
        net.slopes[0, i] = back * (1.0 - value * value)
    for j in range(net.biases_2.size):
        net.biases_2[j] += step * net.slopes[1, j]
        net.biases_1[j] += step * net.slopes[0, j]
    for i in range(x.size):
        for j in range(net.weights_1.shape[1]):
            net.weights_1[i, j] += step * x[i] * net.slopes[0, j]


@inner
def _own_alpha(adapter: AdapterState, observation: FloatArray) -> float:
    """Return the alpha that would be applied without the offset."""
    return _clamp(np.float64(observation[ALPHA]) - adapter.numbers[OFFSET], 0.0, 1.0)


@inner
def _choose(policy: PolicyState, net: NetState, adapter: AdapterState, moved: float, mode: int) -> float:
    """Return the offset in units of its bound, by what the block is for."""
    numbers, taken = adapter.numbers, adapter.taken
    if mode != _TRY:
        taken[0] = 0
        if mode != _ACT:
            return 0.0
    elif taken[0] == adapter.inputs.shape[0]:  # some decisions had no feedback, and the block goes on
        return numbers[SIDE]
    x = adapter.inputs[taken[0]]
    for i in range(SIZE):
        x[i] = policy.normalised[i]
    x[SIZE] = moved
    if mode == _ACT:
        return forward(net, x)
    if taken[0] == 0:
        numbers[ODDS] = forward(net, x)
        numbers[SIDE] = 1.0 if numbers[DRAW] < 0.5 * (1.0 + numbers[ODDS]) else -1.0
        numbers[DRAW] = math.nan
    taken[0] += 1
    return numbers[SIDE]


@inner
def _offset(policy: PolicyState, net: NetState, adapter: AdapterState, before: float, mode: int) -> None:
    """Choose the offset, after the policy has moved its target from `before`, NaN: from none."""
    moved = 0.0 if math.isnan(before) else (policy.numbers[TARGET] - before) / policy.numbers[STEP]
    adapter.numbers[OFFSET] = adapter.numbers[BOUND] * _choose(policy, net, adapter, moved, mode)


@inner
def _within(policy: PolicyState, target: float) -> float:
    """Return a target within the bounds; NaN stays."""
    return _clamp(target, policy.numbers[ALPHA_MIN], policy.numbers[ALPHA_MAX])


@kernel
def decide_adapted(
    policy: PolicyState, net: NetState, adapter: AdapterState, observation: FloatArray, applied_alpha: float, mode: int
) -> float:
    """As `Residual.decide`, without what it learns; mode: what the block is for."""
    finite, action = _all_finite(observation), math.nan
    if finite:
        normalise(policy, observation, _own_alpha(adapter, observation))
        action = mean_action(policy)
    before = policy.numbers[TARGET]
    target = _move(policy, action, applied_alpha - adapter.numbers[OFFSET])
    if finite:
        _offset(policy, net, adapter, before, mode)
    return _within(policy, target + adapter.numbers[OFFSET])


# Recovery


@kernel
def rule(recovery: RecoveryState, burst_is_on: bool, hot_user_ratio: float, applied_alpha: float) -> int:
    """Say who decides: the rule, with RULED, the controller below, or it again after the rule.

    While a burst is on the rule does. Where it lacks a number it keeps to the applied alpha.
    """
    numbers = recovery.numbers
    if burst_is_on:
        recovery.took_over[0] = True
        hot = _clamp(hot_user_ratio, 0.0, 1.0)
        numbers[RULED] = numbers[ALPHA_COLD] + (numbers[ALPHA_HOT] - numbers[ALPHA_COLD]) * hot
        if not math.isfinite(hot_user_ratio):
            numbers[RULED] = applied_alpha
        return RULES
    if not recovery.took_over[0]:
        return ASKS
    if not math.isfinite(applied_alpha):
        numbers[RULED] = applied_alpha
        return RULES
    recovery.took_over[0] = False
    numbers[RETURNING] = applied_alpha
    return HANDS_BACK


@kernel
def way_back(recovery: RecoveryState, target: float, passed_s: float) -> float:
    """Return the target of the controller below, or after a burst the way to it, a step at the rate further."""
    numbers = recovery.numbers
    if math.isnan(numbers[RETURNING]) or not math.isfinite(target):
        return target
    step = numbers[RATE_PER_S] * passed_s
    if abs(target - numbers[RETURNING]) <= step:
        numbers[RETURNING] = math.nan
        return target
    numbers[RETURNING] += math.copysign(step, target - numbers[RETURNING])
    return numbers[RETURNING]


# All of it


@inner
def _fault(helm: HelmState, burst_is_on: bool, applied_alpha: float, age_ns: int) -> int:
    """Return what keeps from deciding upon what is shown, as the number of its count; -1: nothing."""
    if age_ns > helm.counts[STALE_NS]:
        return STALE
    found = _NOTHING
    for i in range(SIZE):
        if burst_is_on and i != HOT_USERS:  # the rule reads nothing else
            continue
        signal = helm.observation[i]
        if not math.isfinite(signal):
            return NOT_FINITE
        if not LOW[i] <= signal <= HIGH[i]:
            found = OUT_OF_RANGE
    needs_alpha = helm.recovery.took_over[0] or math.isnan(helm.policy.numbers[TARGET])
    if found == _NOTHING and needs_alpha and not burst_is_on and not 0.0 <= applied_alpha <= 1.0:
        return NO_ALPHA
    return found


@inner
def _last_safe(helm: HelmState, applied_alpha: float, cause: int) -> float:
    """Count a decision that was not taken; return the last safe alpha, else the applied one, else NaN."""
    helm.counts[cause] += 1
    if not math.isnan(helm.numbers[SAFE]):
        return helm.numbers[SAFE]
    return _within(helm.policy, applied_alpha) if 0.0 <= applied_alpha <= 1.0 else math.nan


def _example() -> HelmState:
    """Return a state for its type: that of each array."""
    weights = np.zeros(1, np.float32)
    policy = PolicyState(
        np.zeros(1), np.zeros(1), weights, np.zeros(1, np.int64), weights, np.zeros((1, 1), np.float32), np.zeros(1)
    )
    net = new_net([np.zeros((1, 1))] * 3)
    detector = BurstState(np.zeros(1), np.zeros(1), np.zeros(1, np.int64), np.zeros(1))
    counts = np.zeros(1, np.int64)
    return HelmState(
        policy, net, new_adapter(0.0, 1), new_recovery(0.0, 0.0, 0.0), detector, weights, np.zeros(1), counts
    )


_store, _load = in_memory(_example())


@kernel
def store(memory: npt.NDArray[np.uint8], helm: HelmState) -> None:
    """Leave a state's addresses in the memory, uint8 [MOST_BYTES], for `decide`; whoever calls it keeps the arrays."""
    _store(memory, helm)


@kernel
def decide(memory: npt.NDArray[np.uint8], applied_alpha: float, now_ns: int, age_ns: int, mode: int) -> float:
    """As `Helm.decide`, for the state that `store` left in the memory and the observation in it.

    mode: what the adapter's block is for; without an adapter that of `guard.Mode.OFF`.
    """
    helm = _load(memory)
    policy, adapter, recovery, counts = helm.policy, helm.adapter, helm.recovery, helm.counts
    counts[HANDED_BACK] = 0
    passed_ns = 0 if counts[DECIDED_NS] == burst.UNSET else max(now_ns - counts[DECIDED_NS], 0)
    counts[DECIDED_NS] = now_ns
    if passed_ns > counts[LATE_NS]:
        counts[LATE] += 1
        passed_ns = counts[INTERVAL_NS]
    burst_is_on = helm.detector.counts[burst.ACTIVE] > 0
    cause = _fault(helm, burst_is_on, applied_alpha, age_ns)
    if cause != _NOTHING:
        return _last_safe(helm, applied_alpha, cause)
    decides = rule(recovery, burst_is_on, np.float64(helm.observation[HOT_USERS]), applied_alpha)
    if decides == RULES:
        target = recovery.numbers[RULED]
    else:
        if decides == HANDS_BACK:
            counts[HANDED_BACK] = 1
            policy.numbers[TARGET] = math.nan
            adapter.numbers[OFFSET] = 0.0
            adapter.taken[0] = 0
        normalise(policy, helm.observation, _own_alpha(adapter, helm.observation))
        action = mean_action(policy)
        counts[NETWORK] += math.isnan(action)
        before = policy.numbers[TARGET]
        own = _move(policy, action, applied_alpha - adapter.numbers[OFFSET])
        _offset(policy, helm.net, adapter, before, mode)
        target = way_back(recovery, _within(policy, own + adapter.numbers[OFFSET]), passed_ns * 1e-9)
    helm.numbers[SAFE] = _within(policy, target)
    return helm.numbers[SAFE]
