"""Which ranks share a node, and how fast bytes leave and reach them: what a plan is made for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from areal_core import _C
from areal_core.reshard.placements import check_int

_RATE = re.compile(r"(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([kKMGT]?)(i?)(B|b|bit)/s")
_POWERS = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_rate(text: str) -> float:
    """Bytes per second of "50GB/s", "400Gb/s" (bits), "12.5 GiB/s" or "1e9B/s".

    Raises: ValueError for anything else.
    """
    match = _RATE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"parse_rate: expected a rate such as 50GB/s or 400Gb/s, got {text!r}")
    number, prefix, binary, unit = match.groups()
    base = 1024 if binary else 1000
    return float(number) * float(base ** _POWERS[prefix]) / (1 if unit == "B" else 8)


@dataclass(frozen=True)
class Topology:
    """Nodes and links. Rank r lives on node r // ranks_per_node.

    nic_bytes_per_s: each way, of one rank (a GPU's own NIC).
    intra_node_bytes_per_s: each way, of one rank, within its node.
    links: rank -> bytes/s of its NIC, where that differs: a slow one, or 0 for a rank that cannot be reached (a dead
        replica): nothing is sent from it or to it.

    Raises: ValueError for rates outside [1, 1e14] (a link's may be 0), nodes without ranks, ranks from
    2^31 on.
    """

    ranks_per_node: int = 8
    nic_bytes_per_s: float = 50e9
    intra_node_bytes_per_s: float = 200e9
    links: Mapping[int, float] = field(default_factory=dict)
    native: _C.Topology = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if check_int("Topology", "ranks_per_node", self.ranks_per_node) >= 2**31:
            raise ValueError(f"Topology: expected ranks_per_node below 2^31, got {self.ranks_per_node}")
        links = {check_int("Topology", "links' ranks", rank): float(self.links[rank]) for rank in sorted(self.links)}
        if links and max(links) >= 2**31:
            raise ValueError(f"Topology: expected links of ranks below 2^31, got {max(links)}")
        object.__setattr__(self, "links", MappingProxyType(links))
        rates = float(self.nic_bytes_per_s), float(self.intra_node_bytes_per_s)
        object.__setattr__(self, "native", _C.Topology(self.ranks_per_node, *rates, list(links.items())))

    def __hash__(self) -> int:
        rates = self.nic_bytes_per_s, self.intra_node_bytes_per_s
        return hash((self.ranks_per_node, *rates, tuple(self.links.items())))

    def __reduce__(self) -> tuple[type[Topology], tuple[object, ...]]:
        rates = self.nic_bytes_per_s, self.intra_node_bytes_per_s
        return Topology, (self.ranks_per_node, *rates, dict(self.links))
