"""All of a training that a resumed run needs, as named arrays: network, optimiser, RNG, the environments' past."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from helm_rl.checkpoint import NetworkSection, Tensors, load_training_state
from helm_rl.control.policy_net import CLIP, EPSILON, HIDDEN, ActorCritic
from helm_rl.errors import UserError

ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class Loop:
    """Where the environments stand between two iterations.

    Simulators are too large to save. They are deterministic, so the actions since the last seeded reset say as
    much.
    """

    observation: npt.NDArray[np.float64]  # (num_envs, obs_size), raw: what the next action answers
    actions: npt.NDArray[Any]  # (steps since the last seeded reset, num_envs, action_size), as they got them
    episode_return: npt.NDArray[np.float64]  # (num_envs,), of the unfinished episodes
    episode_length: npt.NDArray[np.int64]  # (num_envs,)
    recent: npt.NDArray[np.float64]  # (k, 2), return and length of the last k finished episodes


def network_section(action_size: int) -> NetworkSection:
    """Describe the actor that this version trains."""
    return NetworkSection(hidden=HIDDEN, action_size=action_size, observation_clip=CLIP, epsilon=EPSILON)


def policy_of(net: ActorCritic) -> Tensors:
    """Copy what a bundle keeps of a network: its actor, and the normaliser before it."""
    state = net.state_dict()
    return {name: value.numpy().copy() for name, value in state.items() if name.startswith(("normaliser.", "actor."))}


def capture(
    net: ActorCritic, optimiser: torch.optim.Optimizer, generator: torch.Generator, loop: Loop, best: Tensors
) -> Tensors:
    """Copy the whole state; what training does afterwards does not show in the copy.

    best: the policy (`policy_of`) that did best on the validation's arrivals; empty before the first look.
    """
    tensors = {f"net.{name}": value.numpy().copy() for name, value in net.state_dict().items()}
    for name, parameter in net.named_parameters():
        for key, value in optimiser.state[parameter].items():
            tensors[f"optimiser.{name}.{key}"] = value.numpy().copy()
    tensors["generator"] = generator.get_state().numpy().copy()
    for name, array in vars(loop).items():
        tensors[f"loop.{name}"] = array.copy()
    return tensors | {f"best.{name}": array for name, array in best.items()}


def restore(
    where: str, tensors: Tensors, net: ActorCritic, optimiser: torch.optim.Optimizer, generator: torch.Generator
) -> tuple[Loop, Tensors]:
    """Put a captured state back into objects of the same shapes; return the loop's part and the best policy.

    Raises:
        UserError: A tensor is missing, left over, or of another dtype or shape. `where` names the run.
    """
    left = dict(tensors)
    _restore_net(where, left, net)
    # Before the first update the optimiser has no state at all.
    if any(name.startswith("optimiser.") for name in left):
        for name, parameter in net.named_parameters():
            shapes = {"step": torch.zeros(()), **dict.fromkeys(ADAM_MOMENTS, parameter)}
            optimiser.state[parameter] = {
                key: _take(where, left, f"optimiser.{name}.{key}", like) for key, like in shapes.items()
            }
    try:
        generator.set_state(_take(where, left, "generator", generator.get_state()))
    except RuntimeError as error:
        raise UserError(f"{where}: tensor 'generator' is no state of torch's generator: {error}") from None
    best = {}
    if any(name.startswith("best.") for name in left):
        best = {
            name: _take(where, left, f"best.{name}", torch.from_numpy(now)).numpy()
            for name, now in policy_of(net).items()
        }
    loop = Loop(**{name: left.pop(f"loop.{name}", np.empty(0)) for name in Loop.__dataclass_fields__})
    if left:
        raise UserError(f"{where}: tensor '{sorted(left)[0]}' does not belong in this training's state")
    envs = len(loop.observation)
    wanted: dict[str, tuple[int | None, ...]] = {
        "observation": (envs, net.normaliser.mean.numel()),
        "actions": (None, envs, net.log_std.numel()),
        "episode_return": (envs,),
        "episode_length": (envs,),
        "recent": (None, 2),
    }
    for name, shape in wanted.items():
        found = getattr(loop, name).shape
        if len(found) != len(shape) or any(w is not None and w != f for w, f in zip(shape, found, strict=True)):
            raise UserError(f"{where}: tensor 'loop.{name}' is missing or has the wrong shape {list(found)}")
    return loop, best


def load_net(run: Path) -> ActorCritic:
    """Return the network of a run's last checkpoint, frozen: in evaluation mode, whatever a validation found best.

    Raises:
        UserError: The run or its state cannot be read.
    """
    state, tensors = load_training_state(run)
    net = ActorCritic(state.environment.observation_size, state.environment.action_size, state.network.hidden)
    _restore_net(str(run), tensors, net)
    return net.eval()


def _restore_net(where: str, tensors: Tensors, net: nn.Module) -> None:
    net.load_state_dict({name: _take(where, tensors, f"net.{name}", like) for name, like in net.state_dict().items()})


def _take(where: str, tensors: Tensors, name: str, like: torch.Tensor) -> torch.Tensor:
    if name not in tensors:
        raise UserError(f"{where}: tensor '{name}' is missing from the training's state")
    tensor = torch.from_numpy(tensors.pop(name))
    if tensor.dtype != like.dtype or tensor.shape != like.shape:
        raise UserError(
            f"{where}: tensor '{name}' is {tensor.dtype} {list(tensor.shape)}, expected {like.dtype} {list(like.shape)}"
        )
    return tensor
