"""Decoding with a slow verifier: in the generator's own process, and in worker processes.

    python bench/bench_rewards.py [--responses 256] [--verify-ms 4] [--workers 2]

The bundled policy answers chains; the verifier sleeps before it judges, as one that waits for a sandbox does. Both ways
must give every response the same reward.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

from areal_core.assets import resolve_model
from areal_core.generate.embedded import EmbeddedEngine
from areal_core.generate.engine import GeneratedSample, GenerateRequest, SamplingParams
from areal_core.model import load_model, load_tokenizer
from areal_core.rl.reward_pool import RewardPool
from areal_core.tasks import ChainArithmetic, Problem

sys.path.insert(0, str(Path(__file__).parent))  # the workers import this file by name


class SleepyChain:
    """The bundled task with a verifier that takes `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.task, self.seconds = ChainArithmetic(), seconds

    def verify(self, problem: Problem, text: str) -> float:
        time.sleep(self.seconds)
        return self.task.verify(problem, text)


class Run:
    """One pass of decoding and verifying all responses."""

    def __init__(self, responses: int) -> None:
        path = resolve_model("chain_policy")
        self.tokenizer, self.model = load_tokenizer(path), load_model(path)
        self.problems = [ChainArithmetic().problem(i) for i in range(responses)]

    def engine(self) -> EmbeddedEngine:
        engine = EmbeddedEngine(self.model.config, max_slots=32, max_context=64, threads=1)
        engine.load_weights(self.model.named_weights(), 0)
        sampling = SamplingParams(max_new_tokens=24, stop_token_ids=self.model.config.eos_token_ids)
        for index, problem in enumerate(self.problems):
            ids = np.asarray(self.tokenizer.encode(problem.prompt), dtype=np.int32)
            engine.submit(GenerateRequest(index, ids, 1, sampling))
        return engine

    def text(self, sample: GeneratedSample) -> str:
        return self.tokenizer.decode(sample.token_ids[:-1].tolist())

    def inline(self, task: SleepyChain) -> tuple[float, list[float]]:
        engine, rewards, start = self.engine(), [0.0] * len(self.problems), time.perf_counter()
        while engine.num_active + engine.num_waiting:
            for sample in engine.decode(1):
                rewards[sample.request_id] = task.verify(self.problems[sample.request_id], self.text(sample))
        return time.perf_counter() - start, rewards

    def pooled(self, pool: RewardPool) -> tuple[float, float, list[float]]:
        """Seconds to the last reward, and to the last token."""
        engine, rewards, start = self.engine(), [0.0] * len(self.problems), time.perf_counter()
        decoded = 0.0
        while engine.num_active + engine.num_waiting or pool.outstanding:
            for sample in engine.decode(1):
                pool.submit(sample.request_id, self.problems[sample.request_id], self.text(sample))
            busy = engine.num_active + engine.num_waiting > 0
            decoded = decoded if busy or decoded else time.perf_counter() - start
            for ticket, reward, _ in pool.poll(0.0 if busy else 0.1):
                rewards[ticket] = reward
        return time.perf_counter() - start, decoded, rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, default=256)
    parser.add_argument("--verify-ms", type=float, default=4.0)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    from bench_rewards import SleepyChain as Importable

    run, make_task = Run(args.responses), partial(Importable, args.verify_ms / 1e3)
    inline, pooled = [], []
    with RewardPool(make_task, workers=args.workers, timeout_s=30.0) as pool:
        run.pooled(pool)  # the workers are up
        for _ in range(3):
            inline.append(run.inline(make_task()))
            pooled.append(run.pooled(pool))
            if inline[-1][1] != pooled[-1][2]:
                raise SystemExit("the rewards differ")
    own, all_rewards, tokens = min(i[0] for i in inline), min(p[0] for p in pooled), min(p[1] for p in pooled)
    print(f"{args.responses} responses, a verifier of {args.verify_ms:g} ms, {args.workers} workers, best of 3")
    print(f"in the generator   {own:7.3f} s to the last token and reward")
    print(f"in the pool        {tokens:7.3f} s to the last token ({own / tokens:.1f}x)")
    print(f"                   {all_rewards:7.3f} s to the last reward ({own / all_rewards:.1f}x)")


if __name__ == "__main__":
    main()
