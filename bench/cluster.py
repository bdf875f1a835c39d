"""What a plan would take on a cluster: its messages over links that are shared fairly. A model, not a measurement."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from areal_core.reshard import Plan, Topology

ROUNDS = 6  # of handing out what is left of the links; more change little
STEPS = 400  # of the lower bound: no step is shorter, so that the end is at most this part late


@dataclass(frozen=True)
class Flows:
    """The messages of one phase: positions of their ranks, bytes, and whether they stay within a node."""

    sources: NDArray[np.int64]
    targets: NDArray[np.int64]
    bytes: NDArray[np.float64]
    within: NDArray[np.bool_]


def simulated_seconds(made: Plan) -> float:
    """All messages of a phase start at once, NICs and links within nodes are shared max-min fairly, phase 1 follows."""
    ranks = sorted({*made.source.ranks, *made.target.ranks})
    position = {rank: i for i, rank in enumerate(ranks)}
    topology = made.topology
    messages = [m for rank in ranks for m in made.rank(rank).sends]
    seconds = 0.0
    for phase in (0, 1):
        rows = [(m.source, m.target, m.bytes) for m in messages if m.phase == phase]
        if rows:
            source, target, size = (np.array(column) for column in zip(*rows, strict=True))
            within = source // topology.ranks_per_node == target // topology.ranks_per_node
            places = [np.array([position[rank] for rank in side.tolist()]) for side in (source, target)]
            seconds += _drain(Flows(*places, size.astype(float), within), _rates(topology, ranks))
    return seconds


def _rates(topology: Topology, ranks: list[int]) -> NDArray[np.float64]:
    """bytes/s of each rank's links: NIC, then within its node."""
    nic = [topology.links.get(rank, topology.nic_bytes_per_s) for rank in ranks]
    return np.array([*nic, *[topology.intra_node_bytes_per_s] * len(ranks)])


def _drain(flows: Flows, rates: NDArray[np.float64]) -> float:
    links = np.where(flows.within, len(rates) // 2, 0)
    out, into = flows.sources + links, flows.targets + links
    left = flows.bytes.copy()
    bound = max((np.bincount(at, left, len(rates)) / np.maximum(rates, 1)).max() for at in (out, into))
    seconds = 0.0
    while (active := np.flatnonzero(left > 0)).size:
        speed = _fair(out[active], into[active], rates)
        step = max(float((left[active] / speed).min()), bound / STEPS)
        left[active] = np.maximum(left[active] - speed * step, 0)
        seconds += step
    return seconds


def _fair(out: NDArray[np.int64], into: NDArray[np.int64], rates: NDArray[np.float64]) -> NDArray[np.float64]:
    """bytes/s of each flow: again and again an equal part of what its two links have left."""
    speed = np.zeros(len(out))
    users = [np.maximum(np.bincount(at, minlength=len(rates)), 1) for at in (out, into)]
    for _ in range(ROUNDS):
        free = [rates - np.bincount(at, speed, len(rates)) for at in (out, into)]
        speed += np.minimum((free[0] / users[0])[out], (free[1] / users[1])[into]).clip(min=0)
    return speed
