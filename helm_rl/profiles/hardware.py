"""Hardware profiles: what a node computes per second, and its fixed costs.

Every efficiency says where it is from. A profile without a published point of its own says so in `source`.
"""

from __future__ import annotations

from dataclasses import dataclass

from helm_rl.errors import UserError
from helm_rl.scenario import HardwareSection


@dataclass(frozen=True)
class HardwareProfile:
    """One accelerator as the serving model sees it."""

    peak_tflop_s: float  # dense bf16
    efficiency: float  # share of the peak that a prefill reaches
    batch_ms: float  # fixed cost of a batch: launches, gathers from HBM, the scoring head
    request_ms: float  # fixed cost of a request outside the queues: network, (de)serialisation
    source: str

    @property
    def flop_per_s(self) -> float:
        """FLOP/s that a prefill reaches."""
        return self.peak_tflop_s * 1e12 * self.efficiency


HARDWARE: dict[str, HardwareProfile] = {
    "a100-80g": HardwareProfile(312.0, 0.55, 0.5, 2.0, "extrapolated: the L20's share of peak, rounded down"),
    "h100": HardwareProfile(989.0, 0.45, 0.4, 2.0, "extrapolated: no published point fitted yet"),
    # NVIDIA recsys-examples' HSTU benchmark on an L20 (chart): 8 x 4096 tokens in 71.5 ms, uncached.
    "l20": HardwareProfile(119.5, 0.58, 0.5, 2.0, "HSTU 8 x 1024, batch 8, 4096 tokens, uncached: 71.5 ms (chart)"),
}


REMOTE_PS_GB_S = 1.5
"""A remote parameter server over 100 GbE that 8 GPUs share."""
LOCAL_GB_S = 14.0
PCIE_GB_S = 20.0


def link_gb_s(section: HardwareSection) -> float:
    """Return the GB/s over which missing embedding rows come: the scenario's, or else the profile's for its link."""
    if section.link_gb_s is not None:
        return section.link_gb_s
    return REMOTE_PS_GB_S if section.link == "remote-ps" else LOCAL_GB_S


def pcie_gb_s(section: HardwareSection) -> float:
    """Return the GB/s over which keys and values come back from host memory."""
    return PCIE_GB_S if section.pcie_gb_s is None else section.pcie_gb_s


def resolve_hardware(section: HardwareSection) -> HardwareProfile:
    """Return the scenario's hardware profile; UserError for an unknown name."""
    if section.profile not in HARDWARE:
        raise UserError(f"hardware.profile = {section.profile!r} is unknown; known: {', '.join(sorted(HARDWARE))}")
    return HARDWARE[section.profile]
