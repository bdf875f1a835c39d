from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from areal_core.generate import EmbeddedEngine, GenerateRequest, SamplingParams, UnfinishedSample

from .models import CONFIGS, TINY, assert_same, engine, generate, prompts_of, random_weights, run

SAMPLING = SamplingParams(30, temperature=1.2, stop_token_ids=(3, 9), seed=11)


def make(name: str = "tiny", **options: int) -> EmbeddedEngine:
    result = EmbeddedEngine(CONFIGS[name], **options)
    result.load_weights(random_weights(CONFIGS[name]), 0)
    return result


@pytest.mark.parametrize("name", ["tiny", "llama-odd", "qwen2-tied"])
def test_a_sample_does_not_depend_on_the_batch(name: str) -> None:
    """Bit for bit: alone, in batches of many sizes, with prompts cut in pieces, on several threads."""
    torch.set_num_threads(3)
    prompts = prompts_of(CONFIGS[name], [1, 5, 16, 17, 33, 40, 2, 31])
    alone = {}
    for i, prompt in enumerate(prompts):
        single = make(name, max_slots=1)
        single.submit(GenerateRequest(i, prompt, 3, SAMPLING))
        alone.update(run(single))
    for options in (
        {"max_slots": 2, "prefill_tokens": 1},
        {"max_slots": 7, "prefill_tokens": 5},
        {"max_slots": 24, "prefill_tokens": 400},
        {"max_slots": 24, "prefill_tokens": 50, "threads": 3},
    ):
        together = generate(make(name, **options), prompts, 3, SAMPLING)
        assert together.keys() == alone.keys()
        for key, sample in together.items():
            assert_same(sample, alone[key])


def test_the_number_of_steps_per_call_makes_no_difference() -> None:
    prompts = prompts_of(TINY, [3, 20, 9])
    runs = []
    for steps in (1, 4, 1000):
        target = make(max_slots=4)
        for i, prompt in enumerate(prompts):
            target.submit(GenerateRequest(i, prompt, 3, SAMPLING))
        runs.append(run(target, steps))
    for other in runs[1:]:
        for key, sample in runs[0].items():
            assert_same(sample, other[key])


def test_samples_of_a_request_differ_and_ids_and_seeds_matter() -> None:
    prompt = prompts_of(TINY, [6])[0]
    target = make()
    sampling = SamplingParams(20, temperature=2.0)
    samples = generate(target, [prompt, prompt], 4, sampling)
    other = generate(target, [prompt], 1, SamplingParams(20, temperature=2.0, seed=1))
    texts = {tuple(sample.token_ids.tolist()) for sample in [*samples.values(), *other.values()]}
    assert len(texts) == 9


def test_finish_reasons_and_lengths() -> None:
    samples = generate(
        make(), prompts_of(TINY, [4, 70]), 16, SamplingParams(40, temperature=1.5, stop_token_ids=(3, 9))
    )
    reasons = set()
    for (request, _), sample in samples.items():
        reasons.add(sample.finish_reason)
        ids = sample.token_ids.tolist()
        stops = [i for i, token in enumerate(ids) if token in (3, 9)]
        room = 40 if request == 0 else TINY.max_position_embeddings - 70
        assert sample.token_ids.dtype == np.int32
        assert sample.logprobs.dtype == np.float32
        assert sample.versions.dtype == np.int64
        assert len(ids) == len(sample.logprobs) == len(sample.versions) <= room
        assert (sample.logprobs <= 0).all()
        if sample.finish_reason == "stop":
            assert stops == [len(ids) - 1]
        else:
            assert stops == []
            assert len(ids) == room
    assert reasons == {"stop", "length"}


def test_more_samples_than_slots_keep_the_slots_full() -> None:
    target = make(max_slots=3)
    prompts = prompts_of(TINY, [3, 4, 5, 6])
    for i, prompt in enumerate(prompts):
        target.submit(GenerateRequest(i, prompt, 5, SamplingParams(4 + i)))
    assert (target.num_active, target.num_waiting) == (0, 20)
    finished = []
    while target.num_active + target.num_waiting:
        finished += target.decode(1)
        assert target.num_active + len(finished) <= 20
        assert target.num_active + target.num_waiting + len(finished) == 20
        assert target.num_active <= 3
    assert [sample.request_id for sample in finished] == sorted(sample.request_id for sample in finished)
    stats = target.stats()
    assert stats.generated_tokens == sum(5 * (4 + i) for i in range(4))
    assert stats.prefill_tokens == 3 + 4 + 5 + 6
    assert stats.finished_samples == 20
    assert stats.busy_seconds > 0


def test_abort_forgets_a_request_wherever_it_is() -> None:
    target = make(max_slots=2, prefill_tokens=4)
    expected = generate(make(), [np.array([1, 2], np.int32)], 2, SAMPLING)
    for i in (5, 6, 7):
        target.submit(GenerateRequest(i, prompts_of(TINY, [30])[0], 3, SamplingParams(10)))
    target.decode(1)  # request 5 is half way through its prompt
    assert target.abort(5) == 3
    target.decode(12)  # request 6 is generating
    assert target.abort(6) == 3
    assert target.abort(7) == 3
    assert target.abort(7) == 0
    assert (target.num_active, target.num_waiting) == (0, 0)
    assert target.decode(5) == []
    assert target.stats().aborted_samples == 9
    again = generate(target, [np.array([1, 2], np.int32)], 2, SAMPLING)
    for key, sample in again.items():
        assert_same(sample, expected[key])


@pytest.mark.parametrize("steps", [0, 1, 3, 9])
def test_unfinished_samples_resume_in_another_engine_as_if_nothing_happened(steps: int) -> None:
    prompts = prompts_of(TINY, [5, 33, 16, 18])
    expected = generate(make(), prompts, 3, SAMPLING)
    first = make(max_slots=5, prefill_tokens=30)
    for i, prompt in enumerate(prompts):
        first.submit(GenerateRequest(i, prompt, 3, SAMPLING))
    done = {(s.request_id, s.sample_index): s for s in first.decode(steps)}
    left = first.unfinished()
    assert len(left) + len(done) == 12
    second = make(max_slots=4)
    for sample in left:
        second.resume(sample)
    done.update(run(second))
    assert done.keys() == expected.keys()
    for key, sample in done.items():
        assert_same(sample, expected[key])


def test_decode_returns_when_the_watched_version_moves() -> None:
    target = make()
    target.submit(GenerateRequest(0, np.array([1], np.int32), 1, SamplingParams(50)))
    watch = np.array([0], np.int64)
    assert target.decode(2, watch) == []
    watch[0] = 1
    assert target.decode(1000, watch) == []
    assert target.stats().generated_tokens == 2
    target.load_weights(random_weights(TINY), 1)
    (sample,) = target.decode(1000, watch)
    assert sample.versions.tolist() == [0, 0] + [1] * 48
    with pytest.raises(ValueError, match="expected watch to be an int64 array of 1 element, got 1 of int32"):
        target.decode(1, np.array([0], np.int32))


def test_threads_take_turns() -> None:
    target = make(max_slots=8)
    prompts = prompts_of(TINY, [4] * 60)
    expected = generate(make(), prompts, 2, SAMPLING)

    def submit(part: int) -> None:
        for i in range(part, 60, 3):
            target.submit(GenerateRequest(i, prompts[i], 2, SAMPLING))

    threads = [threading.Thread(target=submit, args=(part,)) for part in range(3)]
    for thread in threads:
        thread.start()
    samples = {}
    while len(samples) < 120:
        samples.update({(s.request_id, s.sample_index): s for s in target.decode(2)})
    for thread in threads:
        thread.join()
    for key, sample in samples.items():
        assert_same(sample, expected[key])


@pytest.mark.parametrize(
    ("prompt", "n", "sampling", "message"),
    [
        ([], 1, SamplingParams(4), "expected a prompt of at least 1 token, got an empty one"),
        ([1] * 96, 1, SamplingParams(4), "expected a prompt shorter than max_context = 96 tokens, got 96"),
        ([1, 32], 1, SamplingParams(4), r"expected prompt_ids in \[0, 32\), got 32"),
        ([-1], 1, SamplingParams(4), r"expected prompt_ids in \[0, 32\), got -1"),
        ([2**40], 1, SamplingParams(4), "expected prompt_ids that fit int32"),
        ([0.5], 1, SamplingParams(4), "expected prompt_ids as int32"),
        ([[1]], 1, SamplingParams(4), "expected prompt_ids as int32"),
        ([1], 0, SamplingParams(4), "expected n >= 1, got 0"),
        ([1], 1, SamplingParams(4, stop_token_ids=(32,)), r"expected stop_token_ids in \[0, 32\), got 32"),
    ],
)
def test_bad_requests_are_refused(prompt: list[int], n: int, sampling: SamplingParams, message: str) -> None:
    target = engine("tiny")
    with pytest.raises(ValueError, match=message):
        target.submit(GenerateRequest(0, np.array(prompt), n, sampling))
    assert target.num_waiting == 0


def test_a_request_id_in_use_is_refused() -> None:
    target = make()
    request = GenerateRequest(3, np.array([1], np.int32), 1, SamplingParams(4))
    target.submit(request)
    with pytest.raises(ValueError, match="expected a request_id that is not in use, got 3"):
        target.submit(request)
    run(target)
    target.submit(request)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": [1, 2, 3, 4]}, "expected a response of fewer than 4 tokens, got 4"),
        ({"token_ids": [1, 3]}, "that does not end in a stop token, got 3"),
        ({"token_ids": [99]}, r"expected token_ids in \[0, 32\), got 99"),
        ({"token_ids": [1], "logprobs": []}, "expected logprobs and versions for each of 1 tokens, got 0 and 1"),
        ({"sample_index": 0}, "expected a sample_index that is not in use, got 0"),
        ({"prompt_ids": [2]}, "expected the prompt and the sampling parameters of request_id 0, got others"),
    ],
)
def test_bad_resumptions_are_refused(change: dict[str, list[int]], message: str) -> None:
    target = make()
    sampling = SamplingParams(4, stop_token_ids=(3,))
    target.submit(GenerateRequest(0, np.array([1], np.int32), 2, sampling))
    size = len(change.get("token_ids", []))
    fields = {"prompt_ids": [1], "token_ids": [], "logprobs": [0.0] * size, "versions": [0] * size} | change
    with pytest.raises(ValueError, match=message):
        target.resume(UnfinishedSample(**{"request_id": 0, "sample_index": 2, "sampling": sampling} | fields))


def test_decode_without_weights_raises() -> None:
    target = EmbeddedEngine(TINY)
    assert target.version == -1
    with pytest.raises(ValueError, match="expected load_weights before it"):
        target.decode(1)


def test_a_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="expected max_context <= 96 of the model, got 97"):
        EmbeddedEngine(TINY, max_context=97)
    with pytest.raises(ValueError, match="expected max_slots >= 1, got 0"):
        EmbeddedEngine(TINY, max_slots=0)
