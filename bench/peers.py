"""Other projects' functions for the same work, wherever they import.

Every peer is imported when it is first asked for, and what does not import says why: a package that is missing, a CUDA
library that is absent, a top-level import that needs half a framework. If only the latter stands in the way, the single
module is loaded from the installed package without running the package's own `__init__` ("module alone").

    python bench/peers.py            # which peers this machine has, by task
    python bench/peers.py --device cuda

Calling conventions of the tasks, T tokens, V vocabulary, H hidden, S sequences, L padded length:

    logprob(logits [T,V], labels [T]) -> logprobs [T]
    logprob_entropy(logits [T,V], labels [T]) -> (logprobs [T], entropy [T])
    linear_logprob(hidden [T,H], weight [V,H], labels [T]) -> logprobs [T]
    ppo_loss(logprobs, proximal_logprobs, advantages, loss_mask: all [S,L]; clip_low, clip_high, dual_clip) -> loss
    gae(rewards, values: [S,L], mask: bool [S,L], gamma, lam) -> returns [S,L]
    pack(batch: dict of [S,L], attention_mask: bool [S,L]) -> dict of [T]
    allocate(lengths, max_tokens) -> bins
    partition(lengths, k) -> bins
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]


@dataclass(frozen=True)
class Peer:
    """A function of another project, not imported yet. `adapt` makes the task's calling convention of its module."""

    task: str
    name: str
    distribution: str  # what pip installs
    module: str
    adapt: Callable[[Any], Function]
    devices: tuple[str, ...] = ("cpu", "cuda")

    @property
    def version(self) -> str | None:
        """The installed version; None where it is not installed."""
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    def load(self, device: str) -> tuple[Function, str]:
        """Return the function and its title with version and how it was imported.

        Raises:
            UnavailableError: with the reason.
        """
        version = self.version
        if version is None:
            raise UnavailableError(f"{self.distribution} is not installed")
        if device not in self.devices:
            raise UnavailableError(f"{self.distribution} {version} runs this on {' and '.join(self.devices)} only")
        module, how = load_module(self.module)
        try:
            return self.adapt(module), f"{self.name} {version}{how}"
        except AttributeError as error:
            raise UnavailableError(f"{self.distribution} {version} has moved it: {error}") from None


class UnavailableError(Exception):
    """A peer that this machine cannot run, and why."""


def available(task: str, device: str) -> tuple[dict[str, Function], dict[str, str]]:
    """Return the peers of a task that load, by title, and the reasons of those that don't, by name."""
    functions, reasons = {}, {}
    for peer in PEERS:
        if peer.task == task:
            try:
                function, title = peer.load(device)
                functions[title] = function
            except UnavailableError as reason:
                reasons[peer.name] = str(reason)
    return functions, reasons


def load_module(name: str) -> tuple[ModuleType, str]:
    """Import a module, or failing that load it alone; the second value says which."""
    try:
        return importlib.import_module(name), ""
    except Exception as error:  # whatever a framework does on import
        first = _reason(error)
    try:
        with _bare_parents(name):
            return importlib.import_module(name), " (module alone)"
    except Exception as error:
        second = _reason(error)
    raise UnavailableError(f"{name} does not import: {first}" + (f"; alone: {second}" if second != first else ""))


@contextmanager
def _bare_parents(name: str) -> Iterator[None]:
    """Let `name` be imported with parent packages that know their folder but have not run their `__init__`."""
    before = dict(sys.modules)
    parts = name.split(".")
    for key in [key for key in sys.modules if key.split(".")[0] == parts[0]]:
        del sys.modules[key]  # what the failed import left behind
    try:
        for depth in range(1, len(parts)):
            full = ".".join(parts[:depth])
            spec = importlib.util.find_spec(full)
            if spec is None or spec.submodule_search_locations is None:
                raise ImportError(f"{full} is no package")
            package = ModuleType(full)
            package.__path__ = list(spec.submodule_search_locations)
            package.__spec__ = spec
            sys.modules[full] = package
        yield
    except BaseException:
        sys.modules.clear()
        sys.modules.update(before)
        raise


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"


# --- what each project calls the work -------------------------------------------------------------------------------


def _negated(function: Function, **options: Any) -> Function:
    return lambda *args: -function(*args, **options)


def _verl_ppo_loss(module: Any) -> Function:
    def run(
        logprobs: Tensor, proximal: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float, dual: float
    ) -> Tensor:
        options = {"clip_ratio": low, "clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": dual}
        config = SimpleNamespace(**options, get=options.get, global_batch_info={})
        loss: Tensor = module.compute_policy_loss_vanilla(
            proximal, logprobs, advantages, mask.to(logprobs.dtype), "token-mean", config
        )[0]
        return loss

    return run


def _areal_ppo_loss(module: Any) -> Function:
    def run(
        logprobs: Tensor, proximal: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float, dual: float
    ) -> Tensor:
        loss: Tensor = module.ppo_actor_loss_fn(
            logprobs, proximal, proximal, advantages, low, mask, eps_clip_higher=high, c_clip=dual
        )[0]
        return loss

    return run


def _areal_pack(module: Any) -> Function:
    def run(batch: dict[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
        packed = module.pack_tensor_dict({**batch, "attention_mask": mask})
        return {key: packed[key] for key in batch}

    return run


def _verl_gae(module: Any) -> Function:
    return lambda rewards, values, mask, gamma, lam: module.compute_gae_advantage_return(
        rewards, values, mask.to(values.dtype), gamma, lam
    )[1]


def _quack_logprob(module: Any) -> Function:
    return _negated(module.cross_entropy, reduction="none")


def _flash_attn_logprob(module: Any) -> Function:
    return lambda logits, labels: -module.cross_entropy_loss(logits, labels)[0]


def _liger_linear(module: Any) -> Function:
    return lambda hidden, weight, labels: (
        -module.liger_fused_linear_cross_entropy(hidden, weight, labels, reduction="none")
    )


def _cce(module: Any, implementation: str) -> Function:
    return _negated(module.linear_cross_entropy, reduction="none", impl=implementation)


GPU = ("cuda",)
PEERS = [
    Peer("logprob", "AReaL", "areal", "areal.utils.functional.vocab_parallel", lambda m: m.gather_logprobs),
    Peer("logprob", "verl", "verl", "verl.utils.torch_functional", lambda m: m.logprobs_from_logits),
    Peer("logprob", "TRL", "trl", "trl.trainer.utils", lambda m: m.selective_log_softmax),
    Peer(
        "logprob",
        "Liger",
        "liger-kernel",
        "liger_kernel.transformers.functional",
        lambda m: _negated(m.liger_cross_entropy, reduction="none"),
        GPU,
    ),
    Peer("logprob", "quack", "quack-kernels", "quack.cross_entropy", _quack_logprob, GPU),
    Peer("logprob", "flash-attn", "flash-attn", "flash_attn.ops.triton.cross_entropy", _flash_attn_logprob, GPU),
    Peer(
        "logprob_entropy",
        "AReaL",
        "areal",
        "areal.utils.functional.vocab_parallel",
        lambda m: m.gather_logprobs_entropy,
    ),
    Peer("logprob_entropy", "TRL", "trl", "trl.trainer.utils", lambda m: m.selective_log_softmax_and_entropy),
    Peer(
        "linear_logprob",
        "cut-cross-entropy (torch.compile)",
        "cut-cross-entropy",
        "cut_cross_entropy",
        partial(_cce, implementation="torch_compile"),
    ),
    Peer(
        "linear_logprob",
        "cut-cross-entropy",
        "cut-cross-entropy",
        "cut_cross_entropy",
        partial(_cce, implementation="cce"),
        GPU,
    ),
    Peer("linear_logprob", "Liger", "liger-kernel", "liger_kernel.transformers.functional", _liger_linear, GPU),
    Peer("ppo_loss", "AReaL", "areal", "areal.utils.functional.functional", _areal_ppo_loss),
    Peer("ppo_loss", "verl", "verl", "verl.trainer.ppo.core_algos", _verl_ppo_loss),
    Peer("gae", "verl", "verl", "verl.trainer.ppo.core_algos", _verl_gae),
    Peer("pack", "AReaL", "areal", "areal.utils.data", _areal_pack),
    Peer(
        "allocate",
        "AReaL ffd",
        "areal",
        "areal.utils.seqpack",
        lambda m: lambda lengths, cap: m.ffd_allocate(lengths, cap, 1),
    ),
    Peer(
        "partition",
        "verl Karmarkar-Karp",
        "verl",
        "verl.utils.seqlen_balancing",
        lambda m: lambda lengths, k: m.get_seqlen_balanced_partitions(lengths, k, False),
    ),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    device = parser.parse_args().device
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("peers: --device cuda: no GPU, or a torch built without CUDA")
    for task in dict.fromkeys(peer.task for peer in PEERS):
        functions, reasons = available(task, device)
        print(task)
        for title in functions:
            print(f"  {title}")
        for name, reason in reasons.items():
            print(f"  {name}: no ({reason})")


if __name__ == "__main__":
    main()
