"""Native kernels for packed sequences: one file per folder of csrc/ops."""

import torch  # noqa: F401  (loads libtorch, which the native module links to)

from areal_core import _C as _C
from areal_core.ops.logprob import LogprobOutput, logprob_from_logits

__all__ = [
    "LogprobOutput",
    "logprob_from_logits",
]
