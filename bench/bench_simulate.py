"""Seconds to simulate 1,000 GPUs for 1,000 steps on one core, and where they go.

    python bench/bench_simulate.py [steps]

Prints wall and CPU seconds for synchronous, asynchronous and draining generators; the aim is below ten for each.
"""

from __future__ import annotations

import sys
import time

from areal_core.rl.config_file import load_settings
from areal_core.simulate import SimulateConfig, simulate

_CLUSTER = ("cluster.gpus=1000", "train.gpus_per_replica=2", "skip_steps=10")
_CASES = {
    "synchronous": ("rollout.eta=0",),
    "asynchronous, eta 1": ("rollout.eta=1",),
    "asynchronous, eta 4": ("rollout.eta=4",),
    "eta 4, engines that drain": ("rollout.eta=4", "generate.on_update=drain"),
}


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    for name, overrides in _CASES.items():
        config = load_settings(SimulateConfig, None, (*_CLUSTER, f"steps={steps}", *overrides))
        wall, cpu = time.perf_counter(), time.process_time()
        result = simulate(config)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        samples = steps * config.rollout.batch_groups * config.rollout.group_size
        print(
            f"{name:28}{wall:7.2f} s wall {cpu:7.2f} s CPU  {samples / cpu / 1e6:5.2f} M samples/s  "
            f"({result.seconds / 3600:.1f} simulated hours)",
            flush=True,
        )


if __name__ == "__main__":
    main()
