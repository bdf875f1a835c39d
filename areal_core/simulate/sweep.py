"""Shares of generators and staleness bounds side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from areal_core.errors import ConfigError
from areal_core.simulate.cluster import simulate
from areal_core.simulate.config import SimulateConfig
from areal_core.simulate.costs import Costs
from areal_core.simulate.result import Simulation

__all__ = ["ETAS", "SHARES", "Sweep", "sweep"]

SHARES = (0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
ETAS = (0.0, 1.0, 2.0, 4.0, 8.0)
_AS_GOOD = 0.98


@dataclass(frozen=True)
class Sweep:
    """Simulations by generator share and eta; a share that leaves one side too few GPUs is left out."""

    config: SimulateConfig
    shares: list[float]
    etas: list[float]
    results: dict[tuple[float, float], Simulation]

    @property
    def best(self) -> tuple[float, float]:
        """Share and eta of the highest throughput."""
        return max(self.results, key=lambda key: self.results[key].tokens_per_s)

    @property
    def advice(self) -> tuple[float, float]:
        """Share and eta with the lowest eta that is within two per cent of the best: older tokens teach worse."""
        enough = _AS_GOOD * self.results[self.best].tokens_per_s
        good = [key for key, result in self.results.items() if result.tokens_per_s >= enough]
        return min(good, key=lambda key: (key[1], -self.results[key].tokens_per_s))


def sweep(config: SimulateConfig, shares: Sequence[float] = SHARES, etas: Sequence[float] = ETAS) -> Sweep:
    """Simulate every share with every eta; sampling runs eta batches ahead.

    Raises:
        ConfigError: the configuration is colocated, an eta is no bound, or no share leaves both sides enough GPUs.
    """
    if config.cluster.colocated:
        raise ConfigError("cluster.colocated: expected false in a sweep over generator shares, got True")
    usable: list[float] = []
    results: dict[tuple[float, float], Simulation] = {}
    for share in sorted(set(shares)):
        try:
            split = replace(config, cluster=replace(config.cluster, generator_share=share))
        except ConfigError as error:
            if "cluster.generator_share" in str(error):
                raise
            continue
        usable.append(share)
        costs = Costs.of(split)
        for eta in sorted(set(etas)):
            rollout = replace(config.rollout, eta=eta, pipeline_depth=eta)
            results[share, eta] = simulate(replace(split, rollout=rollout), costs)
    if not usable:
        raise ConfigError(f"cluster.gpus: expected enough for a generator and a replica, got {config.cluster.gpus}")
    return Sweep(config, usable, sorted(set(etas)), results)
