"""One step of trust region policy optimisation, in plain torch autograd.

For policies whose full distributions fit in memory: small models and tests of theory. The training loop uses the
clipped loss of `ops.ppo_loss`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Matvec = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TRPOResult:
    """What a step did.

    Attributes:
        accepted: whether the parameters changed; if not, they are what they were, to the bit.
        scale: share of the full step that was taken; 0 when none was.
        kl: mean KL(old || new) after the step, nats.
        improvement: surrogate after the step - before it.
        expected_improvement: what the gradient promised for the step that was taken.
        gradient_norm: of the surrogate.
        residual: |(F + damping I) x - g| / |g| at which conjugate gradient stopped.
    """

    accepted: bool
    scale: float
    kl: float
    improvement: float
    expected_improvement: float
    gradient_norm: float
    residual: float


def trpo_step(
    policy: nn.Module,
    log_probs: Callable[[], Tensor],
    actions: Tensor,
    advantages: Tensor,
    *,
    weights: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    delta: float = 0.01,
    cg_iters: int = 10,
    cg_tolerance: float = 1e-10,
    damping: float = 1e-2,
    backtrack: float = 0.8,
    max_backtracks: int = 20,
    accept_ratio: float = 0.1,
) -> TRPOResult:
    """Maximise E[pi/pi_old A] subject to mean KL(pi_old || pi) <= delta: a natural gradient step and a line search.

    The full step is sqrt(2 delta / x'(F + damping I)x) x with (F + damping I) x = g, where g is the gradient of the
    surrogate and F the Hessian of the mean KL, the Fisher matrix. It is shortened by `backtrack` until the KL is at
    most delta and the surrogate has risen by `accept_ratio` of what g promises.

    Args:
        policy: its parameters that require a gradient are changed in place; their .grad is left alone.
        log_probs: gives the log-probabilities of all actions under the current parameters, float [T, A], nats, twice
            differentiable and the same whenever called (no dropout).
        actions: int64 [T].
        advantages: float [T]; no gradient.
        weights: number or bool [T], >= 0, share of each token in all means. 0 masks it: its action, advantage and old
            log-probability are never looked at. None: equal shares.
        old_log_probs: float [T], of `actions` under the policy that took them. None: the policy as it is now, as in
            the source; given, the ratio of the surrogate corrects for the difference, and the KL is still measured
            from the policy as it is now.
        delta: bound of the mean KL, nats.
        cg_iters: most iterations of conjugate gradient; each costs one product with the Hessian.
        cg_tolerance: relative residual at which it stops earlier.
        damping: added to the diagonal of F; makes x finite along directions that do not change the policy.
        backtrack: in (0, 1).
        max_backtracks: after which the step is given up.
        accept_ratio: in [0, 1).

    Returns:
        TRPOResult. A zero gradient, no token of positive weight, or a line search without success change nothing.

    Raises:
        ValueError: wrong shape, an argument out of range, or a surrogate or gradient that is not finite.

    Source: arXiv 1502.05477, eq. 14 and appendix C.
    """
    _check_range("delta", delta, 0 < delta < math.inf, "> 0 and finite")
    _check_range("cg_iters", cg_iters, cg_iters >= 1, ">= 1")
    _check_range("damping", damping, 0 <= damping < math.inf, ">= 0 and finite")
    _check_range("backtrack", backtrack, 0 < backtrack < 1, "in (0, 1)")
    _check_range("max_backtracks", max_backtracks, max_backtracks >= 0, ">= 0")
    _check_range("accept_ratio", accept_ratio, 0 <= accept_ratio < 1, "in [0, 1)")
    parameters = [p for p in policy.parameters() if p.requires_grad]
    problem = _Problem.pose(log_probs, actions, advantages, weights, old_log_probs)
    if not parameters or len(problem.live) == 0:
        return _nothing_done()
    current = log_probs()[problem.live]
    before = problem.surrogate(current)
    gradient = _flat_gradient(before, parameters, retain_graph=True)
    norm, reached = float(gradient.norm()), float(before.detach())
    if not (math.isfinite(norm) and math.isfinite(reached)):
        raise ValueError(f"trpo_step: expected a finite surrogate and gradient, got {reached} and norm {norm}")
    fisher = hessian_product(problem.divergence(current), parameters)
    x, residual = conjugate_gradient(lambda v: fisher(v) + damping * v, gradient, cg_iters, cg_tolerance)
    curvature = float(x @ (fisher(x) + damping * x))
    if not 0 < curvature < math.inf:
        return _nothing_done(norm, residual)
    step = math.sqrt(2 * delta / curvature) * x
    promised = float(gradient @ step)

    original = [p.detach().clone() for p in parameters]
    scale = 1.0
    for _ in range(max_backtracks + 1):
        _move(parameters, original, scale * step)
        improvement, kl = problem.measure(before)
        if kl <= delta and improvement > 0 and improvement >= accept_ratio * scale * promised:
            return TRPOResult(True, scale, kl, improvement, scale * promised, norm, residual)
        scale *= backtrack
    _move(parameters, original, None)
    return _nothing_done(norm, residual)


@dataclass(frozen=True)
class _Problem:
    """The live tokens of a step: everything that stays constant while the parameters move."""

    log_probs: Callable[[], Tensor]
    live: Tensor  # int64 [L], positions of tokens of positive weight
    share: Tensor  # [L], summing to 1
    chosen: Tensor  # int64 [L, 1]
    advantages: Tensor  # [L]
    start: Tensor  # [L, A], log-probabilities before the step
    taken: Tensor  # [L], of the actions, under the policy that took them

    @staticmethod
    def pose(
        log_probs: Callable[[], Tensor],
        actions: Tensor,
        advantages: Tensor,
        weights: Tensor | None,
        old_log_probs: Tensor | None,
    ) -> _Problem:
        with torch.no_grad():
            start = log_probs()
        if start.dim() != 2:
            raise ValueError(f"trpo_step: expected log_probs() [T, A], got {list(start.shape)}")
        weights = torch.ones_like(start[:, 0]) if weights is None else weights.detach().to(start)
        per_token = {"actions": actions, "advantages": advantages, "weights": weights, "old_log_probs": old_log_probs}
        for name, tensor in per_token.items():
            if tensor is not None and tensor.shape != start.shape[:1]:
                raise ValueError(f"trpo_step: expected {name} [{start.shape[0]}], got {list(tensor.shape)}")
        if not bool(((weights >= 0) & weights.isfinite()).all()):
            raise ValueError("trpo_step: expected weights >= 0 and finite, got others")
        live = weights.nonzero().squeeze(1)
        start, chosen = start[live], actions[live, None]
        return _Problem(
            log_probs=log_probs,
            live=live,
            share=weights[live] / weights.sum(),
            chosen=chosen,
            advantages=advantages.detach()[live].to(start),
            start=start,
            taken=start.gather(1, chosen).squeeze(1) if old_log_probs is None else old_log_probs.detach()[live],
        )

    def surrogate(self, current: Tensor) -> Tensor:
        """E[pi/pi_old A] from the log-probabilities of the live tokens, [L, A]."""
        ratio = (current.gather(1, self.chosen).squeeze(1) - self.taken).exp()
        return (self.share * ratio * self.advantages).sum()

    def divergence(self, current: Tensor) -> Tensor:
        """Mean KL from the policy before the step."""
        return (self.share * kl_divergence(self.start, current)).sum()

    @torch.no_grad()
    def measure(self, before: Tensor) -> tuple[float, float]:
        """How far the current parameters improve on `before`, and their KL."""
        current = self.log_probs()[self.live]
        return float(self.surrogate(current) - before), float(self.divergence(current))


def kl_divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of each row, nats, from log-probabilities [..., A]; an action that p never takes adds 0."""
    return torch.where(p == -math.inf, 0.0, p.exp() * (p - q)).sum(-1)


def hessian_product(value: Tensor, parameters: Sequence[Tensor]) -> Matvec:
    """Product with the Hessian of a 0-d tensor in the parameters, flattened, by a second backward pass.

    Of a mean KL at the parameters it was measured from, this is the product with the Fisher matrix.
    """
    first = _flat_gradient(value, parameters, create_graph=True)

    def product(vector: Tensor) -> Tensor:
        return _flat_gradient(first @ vector.detach(), parameters, retain_graph=True)

    return product


def conjugate_gradient(matvec: Matvec, b: Tensor, iters: int, tolerance: float = 1e-10) -> tuple[Tensor, float]:
    """Solve A x = b for a symmetric positive semidefinite A given by its product; also |A x - b| / |b|.

    Stops at the relative residual `tolerance`, after `iters` products, or where A has no curvature left.
    """
    x = torch.zeros_like(b)
    residual = b.clone()
    direction = residual
    square = residual @ residual
    norm = float(b.norm())
    for _ in range(iters):
        if not float(square) ** 0.5 > tolerance * norm:
            break
        image = matvec(direction)
        curvature = direction @ image
        if not float(curvature) > 0:
            break
        length = square / curvature
        x = x + length * direction
        residual = residual - length * image
        square, previous = residual @ residual, square
        direction = residual + square / previous * direction
    return x, float(residual.norm()) / norm if norm > 0 else 0.0


def _flat_gradient(
    value: Tensor, parameters: Sequence[Tensor], *, create_graph: bool = False, retain_graph: bool = False
) -> Tensor:
    """Gradient in all parameters as one vector; 0 for those that the value does not depend on."""
    grads = torch.autograd.grad(
        value, parameters, create_graph=create_graph, retain_graph=create_graph or retain_graph, materialize_grads=True
    )
    return torch.cat([grad.reshape(-1) for grad in grads])


@torch.no_grad()
def _move(parameters: Sequence[Tensor], original: Sequence[Tensor], step: Tensor | None) -> None:
    """Set the parameters to original + step, or back to original."""
    parts = None if step is None else torch.split(step, [p.numel() for p in parameters])
    for index, (parameter, value) in enumerate(zip(parameters, original, strict=True)):
        parameter.copy_(value if parts is None else value + parts[index].view_as(value))


def _nothing_done(gradient_norm: float = 0.0, residual: float = 0.0) -> TRPOResult:
    return TRPOResult(False, 0.0, 0.0, 0.0, 0.0, gradient_norm, residual)


def _check_range(name: str, value: float, valid: bool, expected: str) -> None:
    if not valid:
        raise ValueError(f"trpo_step: expected {name} {expected}, got {value}")
