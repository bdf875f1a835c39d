"""Native core for asynchronous reinforcement learning on language models.

`areal_core.ops` holds the kernels, `areal_core.reshard` the weight transfer, `areal_core.rl` the training loop.
Importing a subpackage loads torch and nothing heavier; optional parts load when they are used.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("areal-core")
except PackageNotFoundError:  # run from a source tree
    __version__ = "0.1.0"
