"""Every public op on small inputs, forward and backward, on a GPU against the CPU: what the sanitizers watch.

python bench/device_samples.py                                  # 0: all agree, 1: some differ, 2: no GPU
compute-sanitizer --tool racecheck python bench/device_samples.py --sizes 1
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal_core import _C

sys.path.insert(0, str(Path(__file__).parents[1] / "python_tests" / "ops"))
from op_samples import SAMPLES, Sample, on_device, scalar, tensors_of, with_leaves

TOLERANCE = 1e-4


def run(sample: Sample, size: int, device: str) -> list[Tensor]:
    """Results and gradients, on the CPU."""
    arguments, leaves = with_leaves(sample, on_device(sample.make(size), device))
    result = sample.function(**arguments)
    gradients = torch.autograd.grad(scalar(result), leaves) if leaves else ()
    return [x.detach().cpu() for x in [*tensors_of(result), *gradients]]


def differs(sample: Sample, size: int, device: str) -> str | None:
    """What is wrong with the results there; None where they agree with the CPU's."""
    try:
        expected, found = run(sample, size, "cpu"), run(sample, size, device)
    except Exception as error:  # every other sample still counts
        return f"{type(error).__name__}: {error}"
    for i, (want, got) in enumerate(zip(expected, found, strict=True)):
        if not torch.allclose(got.double(), want.double(), rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
            return f"output {i} is off by {(got.double() - want.double()).abs().max().item():.3g}"
    return None


def main() -> Any:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 40])
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"], help="cpu: try this script without a GPU")
    args = parser.parse_args()
    if args.device == "cuda" and not (torch.cuda.is_available() and _C.cuda_compiled):
        print("device_samples: no GPU, or a build without CUDA; not measured on a GPU", file=sys.stderr)
        return 2
    problems = 0
    for sample in SAMPLES:
        for size in args.sizes:
            problem = differs(sample, size, args.device)
            problems += problem is not None
            print(f"{'ok' if problem is None else problem:8} {sample} size {size}", flush=True)
    print(f"{problems} of {len(SAMPLES) * len(args.sizes)} differ")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
