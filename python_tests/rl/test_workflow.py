import math
import time

import numpy as np
import pytest

from areal_core.errors import DataError
from areal_core.generate.engine import GeneratedSample
from areal_core.model import Tokenizer
from areal_core.rl.config import RolloutConfig
from areal_core.rl.workflow import SingleTurnWorkflow
from areal_core.tasks import Problem

TOKENIZER = Tokenizer.from_characters("0123456789+=", 16)
PROBLEM = Problem(prompt="1+1=", answer="2", problem_id="7")


class FakeTask:
    def __init__(self, verify):
        self.verify = verify


def workflow(verify=lambda problem, text: float(text == problem.answer), **config):
    return SingleTurnWorkflow(FakeTask(verify), TOKENIZER, RolloutConfig(**config), max_context=12, max_new_tokens=4)


def response(text, *, stop=True):
    ids = TOKENIZER.encode(text, special=False) + ([TOKENIZER.eos_token_id] if stop else [])
    return GeneratedSample(
        request_id=0,
        sample_index=0,
        token_ids=np.array(ids, dtype=np.int32),
        logprobs=np.zeros(len(ids), dtype=np.float32),
        versions=np.zeros(len(ids), dtype=np.int64),
        finish_reason="stop" if stop else "length",
    )


def test_the_verifier_sees_the_text_before_the_stop_token():
    assert workflow().reward(PROBLEM, response("2")) == 1.0
    assert workflow().reward(PROBLEM, response("3")) == 0.0
    assert workflow().reward(PROBLEM, response("2", stop=False)) == 1.0


def test_truncated_responses_can_be_penalised():
    assert workflow(truncated="penalise").reward(PROBLEM, response("2", stop=False)) == 0.0
    assert workflow(truncated="penalise").reward(PROBLEM, response("2")) == 1.0


def test_a_verifier_that_raises_excludes_its_sample():
    def broken(problem, text):
        raise RuntimeError("no parser")

    flow = workflow(broken)
    assert math.isnan(flow.reward(PROBLEM, response("2")))
    assert flow.last_error == "problem 7: the verifier raised RuntimeError: no parser"


@pytest.mark.parametrize("value", [math.nan, math.inf, "text", None])
def test_a_verifier_that_returns_no_number_excludes_its_sample(value):
    assert math.isnan(workflow(lambda problem, text: value).reward(PROBLEM, response("2")))


def test_a_verifier_that_hangs_is_interrupted():
    def hang(problem, text):
        end = time.monotonic() + 60
        while time.monotonic() < end:
            pass
        return 1.0

    assert math.isnan(workflow(hang, reward_timeout_s=0.05).reward(PROBLEM, response("2")))
    assert workflow(reward_timeout_s=0.05).reward(PROBLEM, response("2")) == 1.0


def test_prompts_begin_with_bos():
    ids = workflow().prompt_ids(PROBLEM)
    assert ids.dtype == np.int32
    assert ids.tolist() == [TOKENIZER.bos_token_id, *TOKENIZER.encode("1+1=", special=False)]


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("", "problem 7: expected a prompt of at least 1 token, got none"),
        ("1+1+1+1+1=", "problem 7: expected a prompt of at most 8 tokens .* got 11"),
        ("1 + 1", "problem 7: .*cannot encode"),
    ],
)
def test_unusable_prompts_name_their_problem(prompt, text):
    with pytest.raises(DataError, match=text):
        workflow().prompt_ids(Problem(prompt=prompt, answer="", problem_id="7"))
