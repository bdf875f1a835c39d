"""Evaluation during a run: the newest published version, pinned, while generation goes on."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from areal_core.assets import resolve_model
from areal_core.errors import DataError
from areal_core.evaluate import (
    Answering,
    EvaluationResult,
    answer_of,
    bootstrap,
    evaluate_policy,
    is_right,
    majority_at_k,
    pass_at_k,
    votes,
)
from areal_core.generate.embedded import EmbeddedEngine
from areal_core.generate.engine import GeneratedSample, SamplingParams
from areal_core.model import DecoderConfig, load_model, load_tokenizer
from areal_core.reshard import VersionStore
from areal_core.rl.config import Config
from areal_core.rl.workflow import SingleTurnWorkflow
from areal_core.tasks import Problem, get_task

__all__ = ["Evaluator", "evaluate_model"]


class Evaluator:
    """Evaluates the newest published version, pinned, on problems that training never draws."""

    def __init__(
        self, config: Config, workflow: SingleTurnWorkflow, model_config: DecoderConfig, store: VersionStore
    ) -> None:
        self.config = config
        self.workflow = workflow
        self.store = store
        count = min(config.evaluate.problems, workflow.task.size(held_out=True) or config.evaluate.problems)
        self.problems: list[Problem] = []
        self.prompts: list[npt.NDArray[np.int32]] = []
        self.excluded: list[str] = []  # why a problem cannot be used
        for index in range(count):
            problem = workflow.task.problem(index, held_out=True)
            try:
                self.prompts.append(workflow.prompt_ids(problem))
                self.problems.append(problem)
            except DataError as error:
                self.excluded.append(str(error))
        if not self.problems:
            raise DataError(f"evaluate: none of {count} held-out problems can be used; the first: {self.excluded[0]}")
        self.model_config = model_config
        self.engine = EmbeddedEngine(
            model_config,
            max_slots=min(256, len(self.problems) * config.evaluate.samples),
            max_context=max(len(prompt) for prompt in self.prompts) + config.generate.max_new_tokens,
            threads=config.train.threads,
        )

    def run(self) -> dict[str, float]:
        """Greedy and sampled pass@1 as metrics."""
        with self.store.pin() as snapshot:
            self.engine.load_weights(snapshot.tensors, snapshot.version)
        greedy = self._evaluate(temperature=0.0, samples=1)
        wanted = bool(self.config.evaluate.k) and isinstance(self.workflow.task, Answering)
        answers: dict[tuple[int, int], str | None] | None = {} if wanted else None
        sampled = self._evaluate(self.config.evaluate.temperature, self.config.evaluate.samples, answers)
        return {
            "eval/version": self.engine.version,
            "eval/accuracy_greedy": greedy.accuracy,
            "eval/accuracy_sampled": sampled.accuracy,
            "eval/accuracy_sampled_standard_error": sampled.standard_error,
            "eval/response_tokens_mean": sampled.response_tokens_mean,
            **self._at_k(sampled, answers),
        }

    def _at_k(self, result: EvaluationResult, answers: Mapping[tuple[int, int], str | None] | None) -> dict[str, float]:
        """pass@k and maj@k for `config.evaluate.k`, and the interval of the accuracy; nothing where there is no k."""
        ks = self.config.evaluate.k
        if not ks:
            return {}
        (accuracy,) = bootstrap(result.rewards.mean(axis=1))
        metrics = {"eval/accuracy_sampled_low": accuracy.low, "eval/accuracy_sampled_high": accuracy.high}
        right = is_right(result.rewards)
        for k in ks:
            metrics[f"eval/pass_at_{k}"] = float(pass_at_k(right.sum(axis=1), result.samples, k).mean())
            if answers is not None:
                shares = [
                    majority_at_k(votes([answers[problem, i] for i in range(result.samples)], row), row, k)
                    for problem, row in enumerate(right.tolist())
                ]
                metrics[f"eval/maj_at_{k}"] = float(np.mean(shares))
        return metrics

    def _evaluate(
        self, temperature: float, samples: int, answers: dict[tuple[int, int], str | None] | None = None
    ) -> EvaluationResult:
        """Evaluate; `answers`, if given, receives what sample j of problem i answers, under (i, j)."""

        def score(index: int, sample: GeneratedSample) -> float:
            problem = self.problems[index]
            if answers is not None:
                text = self.workflow.response_text(sample)
                answers[index, sample.sample_index] = answer_of(self.workflow.task, problem, text)
            return self.workflow.reward(problem, sample)

        sampling = SamplingParams(
            max_new_tokens=self.config.generate.max_new_tokens,
            temperature=temperature,
            stop_token_ids=self.model_config.eos_token_ids,
            seed=self.config.seed + 1_000_003 * (1 + self.engine.version),  # other draws for other runs and versions
        )
        return evaluate_policy(
            self.engine,
            self.prompts,
            score,
            sampling,
            samples=samples,
        )


def evaluate_model(config: Config) -> dict[str, float]:
    """Evaluate `config.model` on `config.task` as `config.evaluate` says, outside a run; metric name -> value."""
    model = load_model(resolve_model(config.model.path, "model.path"))
    workflow = SingleTurnWorkflow(
        get_task(config.task.name, **config.task.options),
        load_tokenizer(resolve_model(config.model.path)),
        config.rollout,
        max_context=model.config.max_position_embeddings,
        max_new_tokens=config.generate.max_new_tokens,
    )
    with VersionStore.create(model.named_weights()) as store:
        store.publish(model.named_weights(), 0)
        return Evaluator(config, workflow, model.config, store).run()
