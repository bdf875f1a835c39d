"""gae and compute_advantages against their definitions in fp64."""

import pytest
import torch

from areal_core import ops
from areal_core.reference import advantages as reference


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("live", [1.0, 0.9, 0.3, 0.0])
def test_gae_matches_the_definition(gamma: float, lam: float, dtype: torch.dtype, live: float) -> None:
    cu_seqlens = torch.tensor([0, 1, 15, 16, 17, 33, 100, 7, 0]).cumsum(0)
    tokens = int(cu_seqlens[-1])
    rewards, values = torch.randn(2, tokens, dtype=dtype)
    mask = torch.rand(tokens) < live
    out = ops.gae(rewards, values, cu_seqlens, gamma=gamma, lam=lam, loss_mask=mask)
    truth = reference.gae(rewards, values, cu_seqlens, gamma=gamma, lam=lam, loss_mask=mask)
    tol = 2e-6 if dtype == torch.float32 else 1e-13
    for ours, true in zip(out, truth, strict=True):
        torch.testing.assert_close(ours.double(), true, rtol=tol, atol=10 * tol)


@pytest.mark.parametrize(
    ("name", "rewards", "expected"),
    [
        ("grpo_r1", [1, 0, 0, 0], [1.5, -0.5, -0.5, -0.5]),
        ("rloo", [1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]),
        ("dr_grpo", [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
        ("maxrl", [1, 0, 0, 0], [3, -1, -1, -1]),
        ("grpo_r1", [1, 0], [0.5**0.5, -(0.5**0.5)]),
        ("rloo", [1, 0], [1, -1]),
        ("dr_grpo", [1, 0], [0.5, -0.5]),
    ],
)
def test_known_values(name: str, rewards: list[float], expected: list[float]) -> None:
    count = len(rewards)
    out = ops.compute_advantages(
        name,
        rewards=torch.tensor(rewards, dtype=torch.float32),
        cu_seqlens=torch.arange(count + 1),
        group_ids=torch.zeros(count, dtype=torch.int64),
    )
    torch.testing.assert_close(out, torch.tensor(expected, dtype=torch.float32), rtol=1e-5, atol=0)
