"""The residual adapter's arithmetic, compiled: its network, the gradient, and the offset of a decision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cache_engine.jit import inner, kernel
from helm_rl.control.base import (
    ALPHA,
    STEP,
    TARGET,
    PolicyState,
    all_finite,
    clamp,
    mean_action,
    move,
    normalise,
    within,
)
from helm_rl.control.guard import Mode
from helm_rl.control.protocol import FloatArray
from helm_rl.observation import SIZE

Float64Array = npt.NDArray[np.float64]

# AdapterState.numbers
BOUND = 0
OFFSET = 1
PACE = 2  # most that the offset changes in a decision
LIMIT = 3  # how far it may go in the block under way
N_ADAPTER = 4

_ACT = Mode.ACT.value  # the network's inputs are kept, to learn from


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

    inputs: of its network in the decisions of the sample under way, [intervals of a sample, SIZE + 1], of which
    taken[0] are there.
    """

    inputs: Float64Array
    taken: npt.NDArray[np.int64]
    numbers: Float64Array


def new_net(weights: Sequence[Float64Array]) -> NetState:
    """Return a network of two hidden layers of one width with these weights, [inputs, outputs] each, and no biases."""
    first, second, third = (np.ascontiguousarray(each) for each in weights)
    biases_1, biases_2, biases_3 = (np.zeros(each.shape[1]) for each in (first, second, third))
    values = np.zeros((2, second.shape[0]))
    return NetState(first, second, third, biases_1, biases_2, biases_3, values, np.zeros_like(values))


def new_adapter(bound: float, pace: float, sample: int) -> AdapterState:
    """Return an adapter that has not acted yet, and may not; pace: per decision; sample: the most inputs it keeps."""
    numbers = np.zeros(N_ADAPTER)
    numbers[BOUND], numbers[PACE] = bound, pace
    return AdapterState(np.zeros((sample + 1, SIZE + 1)), np.zeros(1, np.int64), numbers)


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
def own_alpha(adapter: AdapterState, observation: FloatArray) -> float:
    """Return the alpha that would be applied without the offset."""
    return clamp(np.float64(observation[ALPHA]) - adapter.numbers[OFFSET], 0.0, 1.0)


@inner
def choose_offset(policy: PolicyState, net: NetState, adapter: AdapterState, before: float, mode: int) -> bool:
    """Move the offset to what the network means, after the policy has moved its target from `before`, NaN: from none.

    The last row of the inputs is for those that nothing is learnt from. Return whether the network overflowed, and so
    meant nothing.
    """
    numbers, taken = adapter.numbers, adapter.taken
    meant, overflowed = 0.0, False
    if numbers[LIMIT] > 0.0:
        last = adapter.inputs.shape[0] - 1
        x = adapter.inputs[taken[0] if mode == _ACT else last]
        for i in range(SIZE):
            x[i] = policy.normalised[i]
        x[SIZE] = 0.0 if math.isnan(before) else (policy.numbers[TARGET] - before) / policy.numbers[STEP]
        meant = clamp(numbers[BOUND] * forward(net, x), -numbers[LIMIT], numbers[LIMIT])
        if mode == _ACT and taken[0] < last:  # some decisions may have had no feedback, and the sample goes on
            taken[0] += 1
        overflowed = math.isnan(meant)
    numbers[OFFSET] += clamp((0.0 if overflowed else meant) - numbers[OFFSET], -numbers[PACE], numbers[PACE])
    return overflowed


@kernel
def decide_adapted(
    policy: PolicyState, net: NetState, adapter: AdapterState, observation: FloatArray, applied_alpha: float, mode: int
) -> float:
    """As `Residual.decide`, without what it learns; mode: what the block is for."""
    finite, action = all_finite(observation), math.nan
    if finite:
        normalise(policy, observation, own_alpha(adapter, observation))
        action = mean_action(policy)
    before = policy.numbers[TARGET]
    target = move(policy, action, applied_alpha - adapter.numbers[OFFSET])
    if finite:
        choose_offset(policy, net, adapter, before, mode)
    return within(policy, target + adapter.numbers[OFFSET])
