"""logprob_from_logits against what other libraries gave on the same inputs, function by function.

Where a library and the fp64 truth differ, the truth counts: ours must be as near to it as theirs, value by value.
"""

import numpy as np
import pytest
import torch
from op_checks import EPSILON, assert_near, reference_data
from torch import Tensor

from areal_core import ops

DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16}
ROWS = {"logprob": 0, "entropy": 1}  # of LogprobOutput
# Recorded name of what theirs gives -> (output of ours, name of the truth, whether it is a gradient)
QUANTITIES = {
    "logprob": ("logprob", "logprob", False),
    "entropy": ("entropy", "entropy", False),
    "logprob_grad": ("logprob", "grad", True),
    "entropy_grad": ("entropy", "entropy_grad", True),
}
FUNCTIONS = (
    "areal._VocabParallelLogProbsEntropy[tp1]",
    "areal._VocabParallelLogProbs[tp1]",
    "areal._gather_logprobs[eager]",
    "areal.gather_logprobs",
    "areal.gather_logprobs_entropy",
    "nemo.ChunkedDistributedLogprob",
    "nemo.DistributedLogprob",
    "openrlhf.compute_entropy[eager]",
    "openrlhf.log_probs_from_logits",
    "prime.compute_entropy[eager]",
    "prime.selective_log_softmax[eager]",
    "skyrl.chunked_entropy_from_logits",
    "skyrl.logprobs_from_logits",
    "slime.calculate_log_probs_and_entropy",
    "trl.entropy_from_logits",
    "trl.selective_log_softmax",
    "verl.entropy_from_logits",
    "verl.entropy_from_logits_with_chunking",
    "verl.logprobs_from_logits",
    "verl.logprobs_from_logits[3d]",
    "verl.logprobs_from_logits_naive",
)


def ours(arrays: dict[str, np.ndarray], dtype: torch.dtype, output: str) -> tuple[Tensor, Tensor]:
    """The output, and the gradient of its sum with the recorded weights."""
    logits, labels, weights = (torch.from_numpy(arrays[name]) for name in ("logits", "labels", "w"))
    leaf = logits.to(dtype).requires_grad_()
    value = ops.logprob_from_logits(leaf, labels)[ROWS[output]]
    (gradient,) = torch.autograd.grad((weights.to(value.dtype) * value).sum(), leaf)
    return value.detach().double(), gradient.double()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_as_near_to_the_truth_as(function: str) -> None:
    cases = reference_data("logprob")
    compared = 0
    for (kind, case, dtype_name), arrays in cases.items():
        truths = cases.get(("truth", case, dtype_name), {})
        if kind != "in" or "logits" not in arrays or not truths:
            continue
        dtype = DTYPES[dtype_name]
        theirs = cases["out", case, dtype_name]
        for recorded, (output, truth_name, is_gradient) in QUANTITIES.items():
            if f"{function}/{recorded}" not in theirs or truth_name not in truths:
                continue
            truth = torch.from_numpy(truths[truth_name]).double()
            their_value = torch.from_numpy(theirs[f"{function}/{recorded}"]).double().reshape(truth.shape)
            our_value = ours(arrays, dtype, output)[is_gradient]
            known = truth.isfinite() & their_value.isfinite()  # softmax itself loses a row of -inf
            bound = (their_value - truth).abs() + 3e-6 + 3e-7 * truth.abs()
            if is_gradient:
                bound += 8 * EPSILON[dtype] * truth.abs()
            assert bool(((our_value - truth).abs() <= bound)[known].all()), f"{case}, {dtype_name}: {recorded}"
            compared += int(known.sum())
    assert compared > 0


def test_temperature_as_others_apply_it() -> None:
    cases = reference_data("logprob")
    arrays = cases["in", "temp0.7", "f32"]
    logits, labels = torch.from_numpy(arrays["logits"])[0], torch.from_numpy(arrays["labels"])[0]
    value = ops.logprob_from_logits(logits, labels, temperature=0.7).logprobs
    others = {k: v for k, v in cases["out", "temp0.7", "f32"].items() if k.endswith("/logprob")}
    assert others
    for other in others.values():
        assert_near(value, torch.from_numpy(other).reshape(value.shape), absolute=5e-6, relative=1e-6)
