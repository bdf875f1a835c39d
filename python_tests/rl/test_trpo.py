"""The trust region step, on a tree MDP whose Fisher matrix, KL and objective are known exactly."""

import itertools
import math

import pytest
import torch
from torch import nn

from areal_core import ops
from areal_core.estimators import TreeMDP, example
from areal_core.rl.trpo import conjugate_gradient, hessian_product, kl_divergence, trpo_step


@pytest.fixture(autouse=True)
def one_thread():
    """Many small tensors: more threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Tabular(nn.Module):
    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(logits.clone())
        self.unused = nn.Parameter(torch.zeros(3, dtype=logits.dtype))

    def forward(self, states):
        return self.logits.log_softmax(-1)[states]


def visits(mdp: TreeMDP, logits):
    """Expected visits of each state: the weights of exact means over tokens."""
    responses = mdp.responses
    probabilities = mdp.probabilities(logits)[torch.arange(len(responses.rewards)).repeat_interleave(responses.lengths)]
    return torch.zeros(mdp.num_states, dtype=torch.float64).index_add(0, responses.states, probabilities)


def exact_batch(mdp: TreeMDP, logits):
    """Every state-action pair as a token, weighted by how often it occurs, with its exact advantage."""
    states = torch.arange(mdp.num_states).repeat_interleave(mdp.num_actions)
    actions = torch.arange(mdp.num_actions).repeat(mdp.num_states)
    advantages = mdp.q_values(logits) - mdp.values(logits)[:, None]
    weights = visits(mdp, logits)[:, None] * logits.softmax(-1)
    return states, actions, advantages.flatten(), weights.flatten()


def exact_fisher(mdp: TreeMDP, logits):
    share = visits(mdp, logits)
    policy = logits.softmax(-1)
    blocks = torch.diag_embed(policy) - policy[:, :, None] * policy[:, None, :]
    return torch.block_diag(*(blocks * (share / share.sum())[:, None, None]))


def step(policy, mdp, **options):
    states, actions, advantages, weights = exact_batch(mdp, policy.logits.detach())
    return trpo_step(policy, lambda: policy(states), actions, advantages, weights=weights, **options)


@pytest.fixture
def mdp_and_logits():
    return example()


def fisher_product(mdp, policy):
    states, _, _, weights = exact_batch(mdp, policy.logits.detach())
    share = weights / weights.sum()
    current = policy(states)
    return hessian_product((share * kl_divergence(current.detach(), current)).sum(), [policy.logits])


def test_the_hessian_product_is_the_fisher_matrix(mdp_and_logits):
    mdp, logits = mdp_and_logits
    product = fisher_product(mdp, Tabular(logits))
    fisher = exact_fisher(mdp, logits)
    columns = torch.stack([product(v) for v in torch.eye(logits.numel(), dtype=torch.float64)])
    assert torch.allclose(columns, fisher, rtol=0, atol=1e-12)
    vector = torch.randn(logits.numel(), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(product(vector), fisher @ vector, rtol=1e-10, atol=1e-12)


def test_conjugate_gradient_solves_the_fisher_system(mdp_and_logits):
    mdp, logits = mdp_and_logits
    product = fisher_product(mdp, Tabular(logits))
    gradient = mdp.policy_gradient(logits).flatten()
    x, residual = conjugate_gradient(product, gradient, 50, 1e-12)  # singular, but the gradient lies in its range
    assert residual <= 1e-12
    assert torch.allclose(x, torch.linalg.pinv(exact_fisher(mdp, logits)) @ gradient, rtol=1e-8, atol=1e-10)


def test_conjugate_gradient_stops():
    matrix = torch.diag(torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64))
    x, residual = conjugate_gradient(lambda v: matrix @ v, torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64), 10)
    assert x.tolist() == pytest.approx([1, 1, 0])
    assert residual <= 1e-10
    zero = torch.zeros(3, dtype=torch.float64)
    assert conjugate_gradient(lambda v: matrix @ v, zero, 10)[1] == 0
    x, residual = conjugate_gradient(lambda v: 0 * v, zero + 1, 10)
    assert x.equal(zero), "without curvature there is nothing to solve"
    assert residual == 1


@pytest.mark.parametrize("damping", [0.0, 0.1])
def test_the_step_is_the_formula(mdp_and_logits, damping):
    mdp, logits = mdp_and_logits
    policy, delta = Tabular(logits), 1e-4
    result = step(policy, mdp, delta=delta, cg_iters=50, damping=damping, max_backtracks=3, backtrack=0.99)
    gradient = mdp.policy_gradient(logits).flatten() / mdp.mean_length(logits).mean()
    damped = exact_fisher(mdp, logits) + damping * torch.eye(logits.numel(), dtype=torch.float64)
    natural = torch.linalg.pinv(damped) @ gradient
    expected = (2 * delta / (gradient @ natural)).sqrt() * natural
    assert result.accepted
    assert torch.allclose(policy.logits.detach().flatten() - logits.flatten(), result.scale * expected, rtol=1e-7)
    assert result.gradient_norm == pytest.approx(float(gradient.norm()), rel=1e-12)
    assert result.expected_improvement == pytest.approx(result.scale * float(gradient @ expected), rel=1e-8)


@pytest.mark.parametrize("delta", [1e-6, 1e-4, 1e-2])
def test_the_kl_of_a_step_is_delta(mdp_and_logits, delta):
    mdp, logits = mdp_and_logits
    policy = Tabular(logits)
    result = step(policy, mdp, delta=delta, damping=0.0, backtrack=0.99)
    share = visits(mdp, logits) / visits(mdp, logits).sum()
    exact = float((share * kl_divergence(logits.log_softmax(-1), policy.logits.detach().log_softmax(-1))).sum())
    assert result.kl == pytest.approx(exact, rel=1e-9)
    assert exact <= delta
    assert exact / result.scale**2 == pytest.approx(delta, rel=3 * math.sqrt(delta) + 1e-3)


def test_every_step_improves_the_objective(mdp_and_logits):
    mdp, logits = mdp_and_logits
    policy, reached = Tabular(logits), [float(mdp.objective(logits))]
    for _ in range(40):
        result = step(policy, mdp, delta=0.01)
        assert result.accepted
        assert 0 < result.kl <= 0.01
        assert result.improvement > 0
        reached.append(float(mdp.objective(policy.logits.detach())))
    assert all(after > before for before, after in itertools.pairwise(reached))
    assert reached[-1] > 0.98
    assert policy.unused.eq(0).all()
    assert policy.logits.grad is None


def test_the_line_search_backs_off_where_the_kl_overshoots(mdp_and_logits):
    mdp, logits = mdp_and_logits
    confident = -3 * logits  # and mostly wrong: the KL grows faster than its second order
    policy = Tabular(confident)
    result = step(policy, mdp, delta=0.5, damping=0.0)
    assert result.accepted
    assert result.scale <= 0.8
    assert 0 < result.kl <= 0.5
    assert step(Tabular(confident), mdp, delta=math.nextafter(result.kl, 1), damping=0.0).scale < 1
    given_up = Tabular(confident)
    assert not step(given_up, mdp, delta=0.5, damping=0.0, max_backtracks=0).accepted
    assert given_up.logits.equal(confident), "a step that is given up leaves the parameters as they were"


def test_the_line_search_backs_off_where_the_surrogate_falls_short(mdp_and_logits):
    mdp, logits = mdp_and_logits
    results = [step(Tabular(logits), mdp, delta=1.0, damping=0.0, accept_ratio=share) for share in (0.1, 0.9)]
    assert results[0].scale == 1
    assert results[0].improvement < 0.9 * results[0].expected_improvement
    assert results[1].scale <= 0.8
    assert results[1].improvement >= 0.9 * results[1].expected_improvement


def test_damping_shortens_the_step(mdp_and_logits):
    mdp, logits = mdp_and_logits
    results = [step(Tabular(logits), mdp, delta=1e-4, damping=damping) for damping in (0.0, 0.01, 1.0)]
    kls = [result.kl / result.scale**2 for result in results]
    assert 1e-4 * 1.01 > kls[0] > 1.1 * kls[1] > 2 * kls[2] > 0


def packed_batch():
    """Two prompts of two tokens with two responses each, sampled from nothing in particular."""
    generator = torch.Generator().manual_seed(3)
    cu_seqlens = torch.tensor([0, 5, 9, 15, 18])
    ids = torch.randint(7, (18,), generator=generator)
    mask = torch.ones(18, dtype=torch.bool)
    for start in cu_seqlens[:-1]:
        mask[start : start + 2] = False
    advantages = ops.compute_advantages(
        "rloo",
        rewards=torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64),
        cu_seqlens=cu_seqlens,
        group_ids=torch.tensor([0, 0, 1, 1]),
        loss_mask=mask,
    )
    return ids, mask, advantages, cu_seqlens


class Bigram(nn.Module):
    """Log-probabilities of each token given the one before it, token-aligned."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.embed = nn.Parameter(torch.randn(7, 4, dtype=torch.float64, generator=generator))
        self.head = nn.Parameter(torch.randn(4, 7, dtype=torch.float64, generator=generator))

    def forward(self, ids, cu_seqlens):
        rows = (torch.tanh(self.embed[ids]) @ self.head).log_softmax(-1)
        return ops.to_token_aligned(rows, cu_seqlens)


def test_masked_tokens_of_a_packed_batch_are_not_looked_at():
    ids, mask, advantages, cu_seqlens = packed_batch()
    spoiled = torch.where(mask, advantages, math.nan)
    outcomes = []
    for actions, values, keep in (
        (torch.where(mask, ids, -100), spoiled, mask),  # packed, with masked prompts
        (ids, advantages, mask.double() * 3),  # any scale of the weights
    ):
        policy = Bigram()
        result = trpo_step(policy, lambda p=policy: p(ids, cu_seqlens), actions, values, weights=keep)
        outcomes.append((result, policy.embed.detach(), policy.head.detach()))
    alone = Bigram()
    result = trpo_step(alone, lambda: alone(ids, cu_seqlens)[mask], ids[mask], advantages[mask])
    assert result.accepted
    for other, embed, head in outcomes:
        assert other.kl == pytest.approx(result.kl, rel=1e-9)
        assert torch.allclose(embed, alone.embed, rtol=1e-9)
        assert torch.allclose(head, alone.head, rtol=1e-9)


def test_nothing_to_learn_changes_nothing():
    ids, mask, advantages, cu_seqlens = packed_batch()
    for values, weights in ((advantages * 0, mask), (advantages, mask & False)):
        policy, before = Bigram(), Bigram().head.detach()
        result = trpo_step(policy, lambda p=policy: p(ids, cu_seqlens), ids, values, weights=weights)
        assert not result.accepted
        assert result.gradient_norm == 0
        assert policy.head.equal(before)


def test_stale_samples_are_corrected_by_the_ratio():
    ids, mask, advantages, cu_seqlens = packed_batch()
    policy = Bigram()
    with torch.no_grad():
        now = policy(ids, cu_seqlens).gather(1, ids[:, None]).squeeze(1)
    behind = torch.where(mask, now - math.log(2), math.nan)  # each token has become twice as likely
    stale = trpo_step(policy, lambda: policy(ids, cu_seqlens), ids, advantages, weights=mask, old_log_probs=behind)
    other = Bigram()
    fresh = trpo_step(other, lambda: other(ids, cu_seqlens), ids, advantages, weights=mask)
    assert stale.gradient_norm == pytest.approx(2 * fresh.gradient_norm, rel=1e-9)
    assert torch.allclose(policy.head, other.head, rtol=1e-9), "the scale of the gradient does not move the step"


def test_the_kl_of_an_action_never_taken_is_zero():
    p = torch.tensor([[0.0, -math.inf], [math.log(0.5), math.log(0.5)]], dtype=torch.float64)
    q = torch.tensor([[math.log(0.25), math.log(0.75)], [-math.inf, 0.0]], dtype=torch.float64, requires_grad=True)
    kl = kl_divergence(p, q)
    assert kl[0].item() == pytest.approx(math.log(4))
    assert kl[1].item() == math.inf
    assert torch.autograd.grad(kl[0], q)[0].isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"delta": 0.0}, "delta > 0"),
        ({"delta": math.nan}, "delta > 0"),
        ({"cg_iters": 0}, "cg_iters >= 1"),
        ({"damping": -1.0}, "damping >= 0"),
        ({"backtrack": 1.0}, r"backtrack in \(0, 1\)"),
        ({"max_backtracks": -1}, "max_backtracks >= 0"),
        ({"accept_ratio": 1.0}, r"accept_ratio in \[0, 1\)"),
        ({"weights": torch.ones(3)}, r"weights \[18\], got \[3\]"),
        ({"weights": -torch.ones(18)}, "weights >= 0"),
        ({"old_log_probs": torch.ones(3)}, r"old_log_probs \[18\], got \[3\]"),
        ({"advantages": torch.full((18,), math.inf)}, "finite surrogate"),
    ],
)
def test_broken_contracts(change, message):
    ids, _, advantages, cu_seqlens = packed_batch()
    policy = Bigram()
    arguments = {"actions": ids, "advantages": advantages} | change
    with pytest.raises(ValueError, match=message):
        trpo_step(policy, lambda: policy(ids, cu_seqlens), **arguments)
