"""A simulator of asynchronous reinforcement learning clusters: how many GPUs should generate, and how far ahead?

config.py      what a cluster, a model and a run are
costs.py       seconds of a decode step, of a training step, of an update: formulas of hardware and model
lengths.py     how long responses are
generators.py  all generators at once, in closed form between two updates of the weights
cluster.py     the loop: the staleness gate of `rl`, the trainer, publications
sweep.py       shares of generators and staleness bounds side by side
replay.py      a recorded run, simulated from its own step times
published.py   numbers published for AReaL, and what the simulator says of them
"""

from areal_core.simulate.cluster import Simulation, simulate
from areal_core.simulate.config import SimulateConfig
from areal_core.simulate.costs import Costs

__all__ = ["Costs", "SimulateConfig", "Simulation", "simulate"]
