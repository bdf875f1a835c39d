"""The asynchronous loop: the one place where rollout, trainer, publication and evaluation meet.

    who                    does                                              waits for
    ---------------------  ------------------------------------------------  ---------------------------------
    generator processes    decode, load new versions between decode steps,   requests
      (worker.py)          verify responses
    rollout thread         opens groups as the staleness gate allows,        reports, set_version, a death
      (rollout.py)         assembles them, restarts dead generators
    main thread            batch -> train -> publish -> record               a batch that keeps every deadline
      (this file)          -> evaluate -> checkpoint

Version v is the policy after v training batches; batch v trains version v into v + 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from areal_core.assets import resolve_model
from areal_core.errors import ArealError, CheckpointError
from areal_core.model import load_model, load_tokenizer, save_model
from areal_core.rl.checkpoint import load_latest, save_checkpoint
from areal_core.rl.config import Config
from areal_core.rl.config_file import save_config
from areal_core.rl.data import Group
from areal_core.rl.evaluator import Evaluator
from areal_core.rl.fleet import Fleet
from areal_core.rl.frozen import load_frozen
from areal_core.rl.interrupts import interrupts
from areal_core.rl.publish import Publisher
from areal_core.rl.recorder import Recorder
from areal_core.rl.rollout import Rollout
from areal_core.rl.trainer import Trainer
from areal_core.rl.worker import GeneratorSpec
from areal_core.rl.workflow import SingleTurnWorkflow
from areal_core.tasks import Problem, get_task

__all__ = ["RunResult", "train"]


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Attributes:
        run_dir: folder with metrics, checkpoints and report.
        steps: finished training steps, those before a resume included.
        interrupted: whether Ctrl-C (or SIGTERM) ended it; a checkpoint was written.
        before: evaluation of the starting policy (metric name -> value), empty when evaluate.every is 0.
        after: evaluation of the final policy, likewise.
        elapsed_s: wall seconds, those before a resume included.
    """

    run_dir: Path
    steps: int
    interrupted: bool
    before: dict[str, float]
    after: dict[str, float]
    elapsed_s: float


def train(config: Config, *, resume: bool = False) -> RunResult:
    """Run the loop to the end of `config.train.steps`, to Ctrl-C, or to an error.

    Args:
        config: the run.
        resume: continue from the newest usable checkpoint in run_dir.

    Raises:
        FileExistsError: run_dir holds a run and resume is False.
        CheckpointError: resume is True and there is no usable checkpoint.
        ArealError: rollout failed (generators died too often, no usable problems).
    """
    torch.set_num_threads(config.train.threads)
    with ExitStack() as stack:
        run = Run(config, stack, resume=resume)
        try:
            return run.loop()
        except Exception as error:
            run.recorder.on_event("failed", f"{type(error).__name__}: {error}")
            raise


class Run:
    """The parts of a run, built in order of dependence and closed in reverse by `stack`."""

    def __init__(self, config: Config, stack: ExitStack, *, resume: bool) -> None:
        self.config = config
        self.run_dir = Path(config.run_dir)
        self.checkpoints = self.run_dir / "checkpoints"
        warnings: list[str] = []
        saved = load_latest(self.checkpoints, warnings.append) if resume else None
        if resume and saved is None:
            raise CheckpointError(f"{self.checkpoints}: no checkpoint to resume from")
        self.version, state, model_dir = saved or (0, {}, resolve_model(config.model.path, "model.path"))
        config.check_resumes(state.get("identity", {}))
        self.tokenizer = load_tokenizer(model_dir)
        self.model = load_model(model_dir)
        self.task = get_task(config.task.name, **config.task.options)
        # A prompt must leave room for a response, in the model's context and in a micro-batch of the trainer.
        self.max_context = min(
            config.generate.max_context or self.model.config.max_position_embeddings,
            self.model.config.max_position_embeddings,
            config.train.max_tokens_per_microbatch,
        )
        self.workflow = SingleTurnWorkflow(
            self.task,
            self.tokenizer,
            config.rollout,
            max_context=self.max_context,
            max_new_tokens=config.generate.max_new_tokens,
        )
        self.recorder = stack.enter_context(
            Recorder(
                config,
                self.tokenizer,
                resume_step=self.version if resume else None,
                elapsed_s=state.get("elapsed_s", 0.0),
            )
        )
        save_config(config, self.run_dir / "config.yaml")
        self.trainer = Trainer(
            self.model,
            config,
            tracer=self.recorder,
            **load_frozen(config, self.model),
        )
        # A generator that hangs with a pin is killed before the publication that waits for it gives up.
        self.publisher = Publisher(self.model.named_weights(), timeout_s=60.0 + 4 * config.generate.stall_timeout_s)
        stack.callback(self.publisher.close)
        self.publisher.publish(self.version)
        self.rollout = self._build_rollout()
        stack.callback(self.rollout.stop)
        self.evaluator: Evaluator | None = None
        if config.evaluate.every:
            self.evaluator = Evaluator(config, self.workflow, self.model.config, self.publisher.store)
            warnings += self.evaluator.excluded
        self.before: dict[str, float] = state.get("before", {})
        if resume:
            self.trainer.load_state_dict(state["trainer"])
            self.rollout.load_state_dict(state["rollout"], self.version)
            self.recorder.on_event("resume", f"from the checkpoint of step {self.version}")
        for warning in warnings:
            self.recorder.on_event("warning", warning)

    def loop(self) -> RunResult:
        """Batch, train, publish, record, evaluate, checkpoint; again."""
        evaluation: dict[str, float] = {}
        with interrupts(self.recorder.say) as interrupted:
            if not self.before:
                evaluation = self.before = self._evaluate()
            self.recorder.start(evaluation)
            self.rollout.start(self.version)
            while self.version < self.config.train.steps and not interrupted():
                start = time.monotonic()
                groups = self._next_batch(interrupted)
                if groups is None:
                    break
                waited = time.monotonic() - start
                metrics, advantages = self.trainer.step(self._screen(groups), self.version)
                published = self._publish()
                evaluation = self._evaluate_now() or evaluation
                metrics |= {
                    "step": self.version,
                    "version": self.version,
                    "time/wait_s": waited,
                    "time/publish_s": published,
                    **self._counts(),
                    **(evaluation if evaluation.get("eval/version") == self.version else {}),
                }
                self.recorder.step(metrics, groups, advantages)
                self._checkpoint_now()
            stopped = interrupted() and self.version < self.config.train.steps
            self._checkpoint("interrupted" if stopped else "finished")
        after = evaluation if evaluation.get("eval/version") == self.version else {}
        return RunResult(self.run_dir, self.version, stopped, self.before, after, self.recorder.elapsed_s)

    def _next_batch(self, interrupted: Callable[[], bool]) -> list[Group] | None:
        try:
            with self.recorder.span("wait"):
                return self.rollout.next_batch(self.version, interrupted)
        except ArealError:
            self._checkpoint("checkpoint")  # the trainer is healthy: what it learned is kept
            raise

    def _screen(self, groups: list[Group]) -> list[Group]:
        """Apply on_stale to groups older than eta, which only a resumed run can meet; withholding is the trainer's."""
        rollout = self.config.rollout
        fresh = [group for group in groups if self.version - group.oldest_version <= rollout.eta]
        if len(fresh) == len(groups) or rollout.on_stale == "withhold":
            return groups
        stale = [group for group in groups if group not in fresh]
        if rollout.on_stale == "resubmit":
            for group in stale:
                self.rollout.resample(group)
        self.recorder.on_event("stale_groups", f"{len(stale)} groups older than eta: {rollout.on_stale}")
        return fresh

    def _publish(self) -> float:
        """Make the new weights version `self.version`, and open the gate for it."""
        start = time.monotonic()
        self.version += 1
        with self.recorder.span("publish"):
            stats = self.publisher.publish(self.version)
        self.recorder.published(stats, start)
        self.rollout.set_version(self.version)
        self.recorder.instant(f"publish v{self.version}")
        return time.monotonic() - start

    def _counts(self) -> dict[str, float]:
        counters = self.rollout.counters
        return {
            "count/failed_samples": counters.failed_samples,
            "count/bad_problems": counters.bad_problems,
            "count/dropped_groups": counters.dropped_groups,
            "count/requeued_samples": counters.requeued_samples,
            "count/generator_restarts": counters.generator_restarts,
        }

    def _evaluate_now(self) -> dict[str, float]:
        every = self.config.evaluate.every
        last = self.version == self.config.train.steps
        return self._evaluate() if every and (self.version % every == 0 or last) else {}

    def _evaluate(self) -> dict[str, float]:
        if self.evaluator is None:
            return {}
        start = time.monotonic()
        with self.recorder.span("evaluate"):
            metrics = self.evaluator.run()
        return metrics | {"time/evaluate_s": time.monotonic() - start}

    def _checkpoint_now(self) -> None:
        every = self.config.checkpoint.every
        if every and self.version % every == 0 and self.version < self.config.train.steps:
            self._checkpoint("checkpoint")

    def _checkpoint(self, kind: str) -> None:
        def save_policy(directory: Path) -> None:
            save_model(self.model, directory)
            self.tokenizer.save(directory)

        state = {
            "trainer": self.trainer.state_dict(),
            "rollout": self.rollout.state_dict(),
            "before": self.before,
            "elapsed_s": self.recorder.elapsed_s,
            "identity": self.config.identity,
        }
        keep = self.config.checkpoint.keep
        path = save_checkpoint(self.checkpoints, self.version, state, save_policy, keep=keep)
        self.recorder.on_event(kind, f"step {self.version}: {path}")

    def _build_rollout(self) -> Rollout:
        config = self.config
        generators = config.generate.generators
        samples = config.rollout.batch_groups * config.rollout.group_size
        specs = [
            GeneratorSpec(
                index=index,
                tokenizer=self.tokenizer,
                model_config=self.model.config,
                task=config.task,
                generate=config.generate,
                rollout=config.rollout,
                max_slots=config.generate.max_slots or max(1, samples // generators),
                max_context=self.max_context,
                seed=config.seed,
            )
            for index in range(generators)
        ]
        fleet = Fleet(
            specs,
            self.publisher.store,
            max_restarts=config.generate.max_restarts,
            stall_timeout_s=config.generate.stall_timeout_s,
        )
        return Rollout(
            config.rollout,
            self.workflow,
            self._training_problem,
            fleet,
            on_report=self.recorder.on_report,
            on_event=self.recorder.on_event,
            greedy=config.needs_greedy,
        )

    def _training_problem(self, index: int) -> Problem:
        return self.task.problem(index, seed=self.config.seed)
