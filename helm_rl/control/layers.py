"""The controller of a bundle: the base policy, and above it residual adapter and recovery, where it has them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Literal

from helm_rl.checkpoint import DETECTOR_FILE, POLICY_FILE, RESIDUAL_FILE, Bundle
from helm_rl.control.base import BasePolicy
from helm_rl.control.burst import BurstSettings
from helm_rl.control.detector_file import load_detector
from helm_rl.control.helm import Helm
from helm_rl.control.recovery import Recovery, RecoveryRule
from helm_rl.control.residual import Residual
from helm_rl.control.residual_file import load_residual
from helm_rl.errors import UserError

Layer = Literal["residual", "recovery"]
LAYERS: dict[Layer, str] = {"residual": RESIDUAL_FILE, "recovery": DETECTOR_FILE}
"""Layers above the base policy from below, and the file of a bundle that each comes from."""


def layers_of(bundle: Bundle) -> tuple[Layer, ...]:
    """Return the layers that a bundle has above its base policy, from below."""
    return tuple(layer for layer, file in LAYERS.items() if file in bundle.layers)


def controller(bundle: Bundle, interval_s: float | None = None, layers: Collection[Layer] | None = None) -> Helm:
    """Return the controller of a bundle.

    Args:
        bundle: what `load_bundle` read.
        interval_s: seconds between decisions, as for `BasePolicy`.
        layers: those above the base policy that are to be there; None: all that the bundle has.

    Raises:
        UserError: the bundle lacks such a layer, a layer's file is wrong, the adapter learnt above another policy, or
            the detector's file has no recovery rule.
    """
    asked = layers_of(bundle) if layers is None else layers
    for layer in asked:
        if LAYERS[layer] not in bundle.layers:
            raise UserError(f"{bundle.path}: has no {LAYERS[layer]}, so no {layer}; `helm-rl export` puts it there")
    base = BasePolicy.of(bundle, interval_s)
    adapter = recovery = None
    if "residual" in asked:
        adapter = Residual.of(base, load_residual(bundle.path / RESIDUAL_FILE, bundle.config.files[POLICY_FILE]).learnt)
    if "recovery" in asked:
        rule, settings = load_recovery(bundle.path / DETECTOR_FILE)
        recovery = Recovery(adapter or base, rule, settings, rate_per_s=bundle.config.bounds.rate_per_s)
    return Helm(base, adapter, recovery)


def load_recovery(path: Path) -> tuple[RecoveryRule, BurstSettings]:
    """Read a detector's file; UserError if it is none, or has no recovery rule."""
    detector = load_detector(path)
    if detector.rule is None:
        raise UserError(f"{path}: has no recovery rule; run helm-rl train burst without --skip recovery")
    return detector.rule, detector.settings
