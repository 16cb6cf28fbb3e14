"""Hardware profiles: what a node computes and moves per second, its fixed costs, and the memory of its device.

`python -m helm_rl.profiles.fit` fits the numbers to published measurements (helm_rl.profiles.published) and shows how
far off each point is. A field without a published point of its own is named in `extrapolated`, and `source` says by
which rule it was filled in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from helm_rl.errors import UserError
from helm_rl.profiles.model import ModelProfile
from helm_rl.scenario import HardwareSection

ONBOARD_BATCH = 8
"""Requests of the batches whose onboarding was measured: they shared its fixed cost."""


@dataclass(frozen=True)
class HardwareProfile:
    """One accelerator as the serving model sees it.

    The efficiencies were fitted to HSTU; a decoder is taken to reach the same shares of the peak.
    """

    peak_tflop_s: float  # dense bf16
    linear_efficiency: float  # share of the peak that work per token reaches: matrix products, norms, gates
    pair_efficiency: float  # share of the peak that attention over pairs of tokens reaches
    batch_ms: float  # fixed cost of a batch: launches, the scoring head
    request_ms: float  # fixed cost of a request outside the queues: network, (de)serialisation
    local_gb_s: float  # GB/s of embedding rows gathered at random from host memory
    pcie_gb_s: float  # GB/s of keys and values brought back from host memory
    onboard_ms: float  # fixed cost of bringing a batch's keys and values back
    hbm_gib: float  # memory of the device, as its driver shows it
    source: str
    extrapolated: tuple[str, ...]  # fields without a published point

    @property
    def flop_per_s(self) -> float:
        """FLOP/s that the work per token reaches."""
        return self.peak_tflop_s * 1e12 * self.linear_efficiency

    def prefill_ns(self, linear_flop: float, pair_flop: float) -> float:
        """Return the ns that a batch's work per token and its attention take, without `batch_ms`."""
        flop_per_ns = self.peak_tflop_s * 1e3
        return linear_flop / (flop_per_ns * self.linear_efficiency) + pair_flop / (flop_per_ns * self.pair_efficiency)


_L20 = HardwareProfile(
    peak_tflop_s=119.5,
    linear_efficiency=0.618,
    pair_efficiency=0.737,
    batch_ms=0.31,
    request_ms=2.0,
    local_gb_s=15.5,
    pcie_gb_s=25.2,
    onboard_ms=9.7,
    hbm_gib=45.0,
    source="compute: recsys-examples' HSTU block, 12 points; onboarding: recsys-examples' FlexKV tests, 3 points; "
    "gathering: as the A100, whose PCIe is of the same generation",
    extrapolated=("request_ms", "local_gb_s"),
)
_A100 = HardwareProfile(
    peak_tflop_s=312.0,
    linear_efficiency=_L20.linear_efficiency,
    pair_efficiency=_L20.pair_efficiency,
    batch_ms=_L20.batch_ms,
    request_ms=2.0,
    local_gb_s=15.5,
    pcie_gb_s=20.0,
    onboard_ms=_L20.onboard_ms,
    hbm_gib=80.0,
    source="gathering: HierarchicalKV, 2 points; compute: the shares of the L20, which runs the same kernels and has "
    "about as many FLOP per byte of HBM; onboarding: the L20's fixed cost, and what PCIe 4 gives in practice at most",
    extrapolated=("linear_efficiency", "pair_efficiency", "batch_ms", "request_ms", "pcie_gb_s", "onboard_ms"),
)
_B200 = HardwareProfile(
    peak_tflop_s=2250.0,
    linear_efficiency=0.382,
    pair_efficiency=0.382,
    batch_ms=0.12,
    request_ms=2.0,
    local_gb_s=8.0,
    pcie_gb_s=42.4,
    onboard_ms=10.2,
    hbm_gib=179.0,
    source="compute: recsys-examples' HSTU block, batches of 8 and of 1, 12 points, which do not tell attention from "
    "the rest; gathering, onboarding: as the H100, whose PCIe is of the same generation",
    extrapolated=("request_ms", "local_gb_s", "pcie_gb_s", "onboard_ms"),
)
_H100 = HardwareProfile(
    peak_tflop_s=989.0,
    linear_efficiency=0.235,
    pair_efficiency=0.255,
    batch_ms=_B200.batch_ms,
    request_ms=2.0,
    local_gb_s=8.0,
    pcie_gb_s=42.4,
    onboard_ms=10.2,
    hbm_gib=79.6,
    source="compute: generative-recommenders issue 530, 1 batch and its kernels' shares, Triton, d 512; onboarding: "
    "recsys-examples, 3 points; gathering: DynamicEmb, 1 point, which pays for admission to its cache too, so a lower "
    "bound; batch_ms: as the B200",
    extrapolated=("batch_ms", "request_ms"),
)

HARDWARE: dict[str, HardwareProfile] = {
    "a100-80g": _A100,
    "b200": _B200,
    # No GPU: host memory is the device's, and the peak is what one large product reaches.
    "cpu": HardwareProfile(
        peak_tflop_s=0.184,
        linear_efficiency=0.95,
        pair_efficiency=0.65,
        batch_ms=0.1,
        request_ms=2.0,
        local_gb_s=5.2,
        pcie_gb_s=17.0,
        onboard_ms=0.0,
        hbm_gib=23.5,
        source="measured, not published: `helm-rl bench profiles --measure-cpu` on 2 cores of an AMD EPYC (Zen 3), "
        "NumPy in float32, the fastest of nine runs; other work on the machine held the others to .2 to .5 of its peak",
        extrapolated=("batch_ms", "request_ms", "onboard_ms"),
    ),
    "cpu-thread": HardwareProfile(
        peak_tflop_s=0.09,
        linear_efficiency=0.65,
        pair_efficiency=0.57,
        batch_ms=0.5,
        request_ms=1.0,
        local_gb_s=0.8,
        pcie_gb_s=8.0,
        onboard_ms=0.02,
        hbm_gib=23.5,
        source="measured, not published: an HSTU in PyTorch on one thread of an AMD EPYC (Zen 3), float32, scenario "
        "laptop; `helm-rl calibrate hardware` measures the machine at hand",
        extrapolated=("request_ms", "local_gb_s", "pcie_gb_s", "onboard_ms"),
    ),
    "h100": _H100,
    "h200": replace(
        _H100,
        hbm_gib=140.4,
        source="everything: as the H100, the same chip with more memory",
        extrapolated=(
            "linear_efficiency",
            "pair_efficiency",
            "batch_ms",
            "request_ms",
            "local_gb_s",
            "pcie_gb_s",
            "onboard_ms",
        ),
    ),
    "l20": _L20,
}

REMOTE_PS_GB_S = 1.5
"""A remote parameter server over 100 GbE that 8 GPUs share."""


def link_gb_s(section: HardwareSection) -> float:
    """Return the GB/s over which missing embedding rows come: the scenario's, or else the profile's for its link."""
    if section.link_gb_s is not None:
        return section.link_gb_s
    return REMOTE_PS_GB_S if section.link == "remote-ps" else resolve_hardware(section).local_gb_s


def pcie_gb_s(section: HardwareSection) -> float:
    """Return the GB/s over which keys and values come back from host memory: the scenario's, or the profile's."""
    return resolve_hardware(section).pcie_gb_s if section.pcie_gb_s is None else section.pcie_gb_s


def resolve_hardware(section: HardwareSection) -> HardwareProfile:
    """Return the scenario's hardware profile, by its name or from a file; UserError for an unknown one."""
    if section.profile.endswith(".toml"):
        from helm_rl.profiles.hardware_file import load_hardware  # it imports this module

        return load_hardware(Path(section.profile))
    if section.profile not in HARDWARE:
        raise UserError(
            f"hardware.profile = {section.profile!r} is unknown; known: {', '.join(sorted(HARDWARE))}, or the path "
            "of a .toml file from `helm-rl calibrate hardware`"
        )
    return HARDWARE[section.profile]


def check_fits(model: ModelProfile, hardware: HardwareProfile, section: HardwareSection) -> None:
    """Raise UserError unless the model's weights and the pool of `section` fit into the device's memory together.

    The first word of the message is the field to change.
    """
    weights_gib = model.weight_bytes / 2**30
    if weights_gib + section.pool_gib <= hardware.hbm_gib:
        return
    room_gib = math.floor((hardware.hbm_gib - weights_gib) * 100) / 100  # rounded down: what is told must fit
    if room_gib <= 0:
        raise UserError(
            f"model.layers = {model.layers}: the weights take {weights_gib:.1f} GiB, and hardware.profile = "
            f"{section.profile!r} has {hardware.hbm_gib:g} GiB; take a smaller model or a larger device"
        )
    raise UserError(
        f"hardware.pool_gib = {section.pool_gib:g} does not fit beside {weights_gib:.2f} GiB of model weights on "
        f"hardware.profile = {section.profile!r}, which has {hardware.hbm_gib:g} GiB; at most {room_gib:.2f} GiB does"
    )
