"""logprob_from_logits against fp64 torch."""

import pytest
import torch

from areal_core import ops


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [1, 31, 33, 4097])
def test_matches_log_softmax(dtype: torch.dtype, vocab: int) -> None:
    logits = (3 * torch.randn(5, vocab, dtype=torch.float64)).to(dtype)
    labels = torch.randint(0, vocab, (5,))
    out = ops.logprob_from_logits(logits, labels, temperature=0.7)
    truth = (logits.double() / 0.7).log_softmax(-1)
    torch.testing.assert_close(out.logprobs.double(), truth.gather(1, labels[:, None])[:, 0], rtol=1e-6, atol=3e-6)
    torch.testing.assert_close(out.entropy.double(), -(truth.exp() * truth).sum(-1), rtol=1e-6, atol=3e-6)
