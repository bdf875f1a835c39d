"""Writes the folder of a run that never happened, but could have: the asynchronous loop on a small arithmetic task."""

import math
import random
from pathlib import Path

from areal_core.telemetry import EventLog, MetricsLog, SampleLog, Tracer

CONFIG = """\
run_dir: runs/chain
seed: 0
model: {{path: chain_policy}}
task: {{name: chain_arithmetic}}
rollout: {{group_size: 8, batch_groups: 32, eta: {eta}, pipeline_depth: 1.0}}
generate: {{generators: {generators}, on_update: recompute, temperature: 1.0}}
advantage: {{name: grpo_r1}}
loss: {{objective: ppo, proximal: recompute, clip_low: 0.2, behavior_cap: 5.0}}
train: {{steps: {planned}, learning_rate: 0.0001, minibatches: 4}}
"""


class Time:
    """A clock in microseconds that only the run moves."""

    def __init__(self, start_s=1_000.0):
        self.us = round(start_s * 1e6)

    def __call__(self):
        return self.us


class SyntheticRun:
    """One run; `eta` 0 makes it synchronous: the generators stand still while the trainer works, and vice versa."""

    def __init__(self, run_dir, *, planned, eta=4, generators=2, seed=0):
        self.dir = Path(run_dir)
        self.dir.mkdir(parents=True, exist_ok=True)
        self.planned = planned
        self.eta = eta
        self.generators = generators
        self.random = random.Random(seed)
        self.time = Time()
        self.start_us = self.time.us
        text = ".inf" if math.isinf(eta) else str(eta)
        (self.dir / "config.yaml").write_text(CONFIG.format(eta=text, generators=generators, planned=planned))

    def write(self, first, last, *, resume_step=None, tensorboard=False, restart_at=None):
        """Run the steps first..last."""
        self.metrics = MetricsLog(self.dir, tensorboard=tensorboard, resume_step=resume_step)
        self.samples = SampleLog(self.dir, resume_step=resume_step)
        self.events = EventLog(self.dir)
        with Tracer(self.dir / "trace.json", "trainer", clock=self.time, wall_clock=self.time) as tracer, self.metrics:
            for step in range(first, last + 1):
                self.step(tracer, step)
                if step == restart_at:
                    self.event("generator_restart", step, "generator 1 stopped answering and was started again")
                if step % 100 == 0:
                    self.event("checkpoint", step, f"checkpoint of step {step}")

    def event(self, kind, step, text):
        self.events.log(kind, text, step=step, time_s=(self.time.us - self.start_us) / 1e6)

    def step(self, tracer, step):
        noise = self.random.gauss
        learned = 1 / (1 + math.exp(-8 * (step / self.planned - 0.35)))
        accuracy = min(max(0.14 + 0.68 * learned + noise(0, 0.03), 0), 1)
        length = 2.6 + 11.5 * learned + abs(noise(0, 0.4))
        phases = {
            "wait": (1.1 if self.eta == 0 else 0.05) * (1 + abs(noise(0, 0.5))),
            "pack": 0.012,
            "proximal": 0.09 + 0.004 * length,
            "forward_backward": 0.4 + 0.03 * length + abs(noise(0, 0.05)),
            "optimizer": 0.05,
            "publish": 0.03 + abs(noise(0, 0.01)),
            "evaluate": 0.7 if step % 25 == 0 or step == 1 else 0.0,
            "other": 0.02,
        }
        generated = round(256 * length)
        begin = self.time.us
        for name, seconds in phases.items():
            if name == "evaluate" and not seconds:
                continue
            start = self.time.us
            self.time.us += round(seconds * 1e6)
            if name != "other":
                tracer.add_spans("trainer", [("loop", name, start, self.time.us - start, {"step": step})])
            if name == "publish":
                tracer.instant(f"publish v{step}", "loop")
        duration = self.time.us - begin
        idle = self.generate(tracer, step, begin, phases["wait"])
        self.metrics.log(self.row(step, accuracy, length, phases, generated, duration, idle))
        self.log_samples(step, accuracy, length)

    def generate(self, tracer, step, begin, wait):
        """The generators' side of the step; returns the share of it that they idled."""
        duration = self.time.us - begin
        idle_total = 0
        for generator in range(self.generators):
            update = round(0.02e6 + abs(self.random.gauss(0, 0.01e6)))
            if self.eta == 0:
                idle = duration - round(wait * 1e6)
            else:
                idle = round(duration * abs(self.random.gauss(0, 0.03)))
            idle = min(max(idle, 0), duration - update - 1)
            spans, start = [], begin
            for name, length in (("weight_update", update), ("generate", duration - update - idle), ("idle", idle)):
                pieces = 4 if name == "generate" else 1
                for piece in range(pieces):
                    end = start + length // pieces if piece < pieces - 1 else start + length - length // pieces * piece
                    if end > start:
                        spans.append(
                            ("loop", name, start, end - start, {"version": step - 1} if name == "generate" else None)
                        )
                    start = end
            tracer.add_spans(f"generator {generator}", spans)
            idle_total += idle
        return idle_total / self.generators / max(duration, 1)

    def row(self, step, accuracy, length, phases, generated, duration, idle):
        noise = self.random.gauss
        progress = step / self.planned
        tokens = round(256 * length)
        ages = self.ages(step, tokens)
        row = {
            "step": step,
            "version": step,
            "time_s": (self.time.us - self.start_us) / 1e6,
            "reward/mean": accuracy + 0.05 * noise(0, 0.3),
            "reward/accuracy": accuracy,
            "response/tokens_mean": length,
            "response/truncated_fraction": max(0.0, 0.02 * progress + noise(0, 0.004)),
            "loss/loss": noise(0, 0.02),
            "loss/entropy": 0.9 * math.exp(-2 * progress) + 0.12 + noise(0, 0.01),
            "loss/ratio_mean": 1 + noise(0, 0.002),
            "loss/ratio_max": 1.2 + abs(noise(0, 0.5)),
            "loss/clip_fraction": abs(0.02 + noise(0, 0.006)),
            "loss/kl_proximal_behavior": abs(0.004 + noise(0, 0.002)),
            "loss/kl_current_proximal": abs(0.001 + noise(0, 0.0005)),
            "loss/behavior_weight_mean": 1 + noise(0, 0.004),
            "loss/behavior_weight_max": 1.4 + abs(noise(0, 1)) ** 3,
            "loss/behavior_capped_fraction": abs(noise(0, 0.0004)),
            "optim/learning_rate": 1e-4 * min(1, step / 10),
            "optim/grad_norm": math.nan if step == 7 else 0.4 + abs(noise(0, 0.15)),
            "staleness/mean": sum(age * count for age, count in enumerate(ages)) / sum(ages),
            "staleness/max": len(ages) - 1,
            "staleness/histogram": ages,
            "tokens/generated": generated,
            "tokens/trained": sum(ages),
            "rate/generated_tokens_per_s": generated / duration * 1e6,
            "rate/trained_tokens_per_s": tokens / duration * 1e6,
            "idle/trainer": phases["wait"] * 1e6 / duration,
            "idle/generator": idle,
            "count/groups": 32,
            "count/interrupted": self.random.randrange(20) if self.eta else 0,
            "count/excluded": int(self.random.random() < 0.03),
            "count/withheld_tokens": 0,
            "count/zero_variance_groups": round(12 * progress),
            "count/generator_restarts": 0,
        }
        row |= {f"time/{name}_s": seconds for name, seconds in phases.items()}
        if phases["evaluate"]:
            row |= {
                "eval/accuracy_greedy": min(1, accuracy + 0.02),
                "eval/accuracy_sampled": max(0, accuracy - 0.03),
                "eval/accuracy_sampled_standard_error": 0.02,
                "eval/response_tokens_mean": length,
                "eval/version": step,
            }
        return row

    def ages(self, step, tokens):
        oldest = int(min(self.eta, 4, step - 1))
        if oldest == 0:
            return [tokens]
        weights = [0.15, 0.72, 0.1, 0.025, 0.005][: oldest + 1]
        counts = [round(tokens * weight * (1 + 0.2 * self.random.random())) for weight in weights]
        while len(counts) > 1 and counts[-1] == 0:
            counts.pop()
        return counts

    def log_samples(self, step, accuracy, length):
        for index in range(2):
            first, second, third = (self.random.randrange(2, 10) for _ in range(3))
            answer = (first + second) * third
            right = self.random.random() < accuracy
            thought = [str(first), "+", str(second), "=", str(first + second), "\n", "*", str(third), "="]
            shown = thought if length > 7 else []
            tokens = [*shown, str(answer if right else answer + 1), "<eos>"]
            newest = max(step - 1, 0)
            versions = [max(0, newest - (1 if self.eta else 0) + (position > len(tokens) // 2 and step % 3 == 0))
                        for position in range(len(tokens))]  # fmt: skip
            self.samples.log(
                step=step,
                group=index,
                prompt=f"({first}+{second})*{third}=",
                tokens=tokens,
                versions=[min(version, newest) for version in versions],
                logprobs=[-abs(self.random.gauss(0, 0.5)) for _ in tokens],
                reward=float(right),
                advantage=(1 - accuracy) if right else -accuracy,
                finish_reason="stop",
            )


def write_synthetic_run(run_dir, steps, *, planned=None, **options):
    """A finished run of `steps` steps (or, with `planned`, one that stopped before its end)."""
    run = SyntheticRun(run_dir, planned=planned or max(steps, 1), **options)
    run.write(1, steps, restart_at=steps // 2 if steps >= 10 else None)
    return run
