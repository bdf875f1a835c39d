"""Samples the responses of a model to what is missing of the results, problem by problem."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from areal_core.errors import DataError
from areal_core.evaluate.answers import answer_of
from areal_core.evaluate.data import DataSet
from areal_core.evaluate.results import ModelSource, Response, Results, SamplingSettings
from areal_core.generate.embedded import EmbeddedEngine
from areal_core.generate.engine import Engine, GeneratedSample, GenerateRequest
from areal_core.model import Tokenizer, load_model, load_tokenizer
from areal_core.rl.config import RolloutConfig
from areal_core.rl.workflow import SingleTurnWorkflow

__all__ = ["Done", "sample_model"]

Done = Callable[[DataSet, list[Response]], None]  # called when a problem is done

_CALL_SECONDS = (0.05, 0.2)  # a call of the engine should take, so that Ctrl-C is heard and Python costs little


def sample_model(
    model: ModelSource,
    data_sets: Sequence[DataSet],
    results: Results,
    settings: SamplingSettings,
    done: Done,
    *,
    slots: int = 256,
    threads: int = 1,
) -> None:
    """Add to `results` what `model` has not answered yet.

    The responses to a problem depend on the weights, the prompt, the settings and the number of the problem alone, so
    an evaluation that was interrupted, or runs with other slots and threads, gives the same ones.

    Raises: DataError for a prompt that cannot be encoded or leaves no room for a response; ValueError for sampling
        parameters out of range.
    """
    todo = [(data, results.missing(model.label, data.label)) for data in data_sets]
    if not any(missing for _, missing in todo):
        return
    decoder = load_model(model.directory)
    tokenizer = load_tokenizer(model.directory)
    context = decoder.config.max_position_embeddings
    sampling = settings.params(context, decoder.config.eos_token_ids)
    judges = [_Judge(data, tokenizer, settings, context) for data in data_sets]
    prompts = [[judge.prompt(index) for index in missing] for judge, (_, missing) in zip(judges, todo, strict=True)]
    longest = max(len(prompt) for listed in prompts for prompt in listed)
    total = sum(len(listed) for listed in prompts) * settings.samples
    needed = min(context, longest + sampling.max_new_tokens)
    engine = EmbeddedEngine(decoder.config, max_slots=min(slots, total), max_context=needed, threads=threads)
    engine.load_weights(decoder.named_weights(), 0)
    del decoder
    for judge, (data, missing), listed in zip(judges, todo, prompts, strict=True):
        for index, prompt in zip(missing, listed, strict=True):
            engine.submit(GenerateRequest(index, prompt, settings.samples, sampling))
        open_problems: dict[int, list[Response | None]] = {index: [None] * settings.samples for index in missing}
        for sample in _finished(engine):
            responses = open_problems[sample.request_id]
            responses[sample.sample_index] = judge.response(sample)
            whole = [response for response in responses if response is not None]
            if len(whole) == settings.samples:
                del open_problems[sample.request_id]
                results.add(model.label, data.label, sample.request_id, whole)
                done(data, whole)


class _Judge:
    """Prompts of a data set as tokens, and its samples as responses with rewards, as in training."""

    def __init__(self, data: DataSet, tokenizer: Tokenizer, settings: SamplingSettings, context: int) -> None:
        self._data = data
        self._template = settings.template
        self._workflow = SingleTurnWorkflow(
            data.task,
            tokenizer,
            RolloutConfig(truncated="keep"),
            max_context=context,
            max_new_tokens=settings.max_new_tokens or 1,
        )

    def prompt(self, index: int) -> npt.NDArray[np.int32]:
        problem = self._data.problems[index]
        try:
            return self._workflow.prompt_ids(
                replace(problem, prompt=self._template.replace("{prompt}", problem.prompt))
            )
        except DataError as error:
            raise DataError(f"{self._data.label}: {error}") from None

    def response(self, sample: GeneratedSample) -> Response:
        problem = self._data.problems[sample.request_id]
        text = self._workflow.response_text(sample)
        return Response(
            text=text,
            reward=self._workflow.reward(problem, sample),
            tokens=len(sample.token_ids),
            finish=sample.finish_reason,
            answer=answer_of(self._data.task, problem, text),
        )


def _finished(engine: Engine) -> Iterator[GeneratedSample]:
    """Samples as they finish, until the engine is idle."""
    steps = 1
    while engine.num_active + engine.num_waiting > 0:
        start = time.monotonic()
        samples = engine.decode(steps)
        seconds = time.monotonic() - start
        yield from samples
        if seconds < _CALL_SECONDS[0]:
            steps *= 2
        elif seconds > _CALL_SECONDS[1]:
            steps = max(1, steps // 2)
