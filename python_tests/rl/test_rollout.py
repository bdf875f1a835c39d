import math

import numpy as np
import pytest

from areal_core.errors import ArealError, GeneratorError

from .fakes import FakeFleet, make_rollout


@pytest.fixture
def fleet():
    return FakeFleet()


def ids(groups):
    return [group.group_id for group in groups]


def test_a_batch_is_the_groups_admitted_at_its_version(fleet):
    rollout = make_rollout(fleet)
    rollout.start(0)
    first, second = fleet.next_request(), fleet.next_request()
    assert fleet.requests.empty()
    fleet.finish(second)
    fleet.finish(first)
    groups = rollout.next_batch(0)
    assert ids(groups) == [0, 1]
    assert groups[0].prompt == "p0"
    assert [t.sample_index for t in groups[0].trajectories] == [0, 1]
    assert [t.reward for t in groups[0].trajectories] == [0.0, 1.0]
    rollout.set_version(1)
    assert fleet.next_request().problem.problem_id == "2"
    rollout.stop()
    assert fleet.stopped


def test_samples_of_a_group_may_finish_apart_and_in_any_order(fleet):
    rollout = make_rollout(fleet, batch=1, group=3)
    rollout.start(0)
    request = fleet.next_request()
    for index in (2, 0, 1):
        fleet.finish(request, [index], rewards=[float(index)])
    (group,) = rollout.next_batch(0)
    assert [t.response_ids[0] for t in group.trajectories] == [10, 11, 12]
    assert [t.reward for t in group.trajectories] == [0.0, 1.0, 2.0]
    rollout.stop()


def test_a_straggler_that_would_be_too_old_is_waited_for(fleet):
    rollout = make_rollout(fleet, batch=1, eta=1.0)
    rollout.start(0)
    straggler, young = fleet.next_request(), fleet.next_request()  # both admitted at version 0, due by version 1
    fleet.finish(young)
    assert ids(rollout.next_batch(0)) == [1]
    rollout.set_version(1)
    younger = fleet.next_request()
    fleet.finish(younger)
    # At version 1 the younger group is ready, but the straggler is due.
    assert rollout.next_batch(1, lambda: fleet.actions.empty()) is None
    fleet.finish(straggler)
    assert ids(rollout.next_batch(1)) == [0]
    rollout.stop()


def test_unbounded_staleness_takes_what_is_ready(fleet):
    rollout = make_rollout(fleet, batch=1, eta=math.inf)
    rollout.start(0)
    _straggler, young = fleet.next_request(), fleet.next_request()
    fleet.finish(young)
    assert ids(rollout.next_batch(0)) == [1]
    rollout.stop()


def test_lost_samples_are_sampled_again_and_finished_ones_kept(fleet):
    events = []
    rollout = make_rollout(fleet, batch=1, group=4, events=events)
    rollout.start(0)
    request = fleet.next_request()
    fleet.finish(request, [1, 3], rewards=[1.0, 3.0])
    fleet.die([request.request_id])
    again = fleet.next_request()
    assert again.n == 2
    assert again.problem == request.problem
    fleet.finish(again, rewards=[0.0, 2.0])
    (group,) = rollout.next_batch(0)
    assert [t.reward for t in group.trajectories] == [0.0, 1.0, 2.0, 3.0]
    assert rollout.counters.requeued_samples == 2
    assert rollout.counters.generator_restarts == 1
    assert events == [("generator_restart", "generator 0 exited with code -9; 2 responses sampled again")]
    rollout.stop()


def test_failed_samples_stay_in_their_group_and_empty_groups_are_replaced(fleet):
    events = []
    rollout = make_rollout(fleet, events=events)
    rollout.start(0)
    first, second = fleet.next_request(), fleet.next_request()
    fleet.finish(first, rewards=[math.nan, math.nan])
    fleet.finish(second, rewards=[math.nan, 1.0])
    replacement = fleet.next_request()
    fleet.finish(replacement)
    groups = rollout.next_batch(0)
    assert ids(groups) == [1, 2]
    assert [t.failed for t in groups[0].trajectories] == [True, False]
    assert rollout.counters.failed_samples == 3
    assert rollout.counters.dropped_groups == 1
    assert events[0][0] == "dropped_group"
    rollout.stop()


def test_unusable_problems_are_counted_and_passed_over(fleet):
    events = []
    rollout = make_rollout(fleet, bad=["0", "2"], events=events)
    rollout.start(0)
    assert [fleet.next_request().problem.problem_id for _ in range(2)] == ["1", "3"]
    assert rollout.counters.bad_problems == 2
    assert events[0] == ("excluded_problem", "problem 0: empty")
    rollout.stop()


def test_a_source_without_usable_problems_fails_instead_of_hanging(fleet):
    rollout = make_rollout(fleet, bad=map(str, range(2000)))
    rollout.start(0)
    with pytest.raises(ArealError, match="1000 unusable problems in a row"):
        rollout.next_batch(0)
    rollout.stop()


def test_a_failure_of_the_fleet_reaches_the_trainer(fleet):
    rollout = make_rollout(fleet)
    rollout.start(0)
    fleet.fail(GeneratorError("generator 0 exited with code 1; 9 deaths exceed generate.max_restarts = 8"))
    with pytest.raises(ArealError, match="9 deaths"):
        rollout.next_batch(0)
    rollout.stop()


def test_resume_loses_and_repeats_nothing(fleet):
    rollout = make_rollout(fleet, eta=1.0)
    rollout.start(0)
    requests = [fleet.next_request() for _ in range(4)]
    fleet.finish(requests[0])
    fleet.finish(requests[1])
    assert ids(rollout.next_batch(0)) == [0, 1]
    fleet.finish(requests[2])  # finished, not consumed
    fleet.finish(requests[3], [1], rewards=[7.0])  # half of it
    fleet.die([])  # an action behind the others: once it is taken, they have been received
    while not fleet.actions.empty():
        pass
    rollout.stop()
    state = rollout.state_dict()

    again = FakeFleet()
    resumed = make_rollout(again, eta=1.0)
    resumed.load_state_dict(state, 1)
    resumed.start(1)
    missing = again.next_request()
    assert missing.request_id not in {request.request_id for request in requests}
    assert (missing.problem.problem_id, missing.n) == ("3", 1)
    again.finish(missing, rewards=[5.0])
    groups = resumed.next_batch(1)
    assert ids(groups) == [2, 3]
    assert [t.reward for t in groups[1].trajectories] == [5.0, 7.0]
    assert [again.next_request().problem.problem_id for _ in range(2)] == ["4", "5"]
    resumed.stop()


def test_resampled_prompts_come_before_new_ones(fleet):
    rollout = make_rollout(fleet, batch=1)
    rollout.start(0)
    fleet.finish(fleet.next_request())
    (group,) = rollout.next_batch(0)
    rollout.resample(group)
    rollout.set_version(1)
    assert fleet.next_request().problem.problem_id == "0"
    rollout.stop()


def test_trajectories_keep_tokens_logprobs_and_versions(fleet):
    rollout = make_rollout(fleet, batch=1, group=1)
    rollout.start(0)
    request = fleet.next_request()
    fleet.finish(request, version=0, tokens=5)
    ((trajectory,),) = [g.trajectories for g in rollout.next_batch(0)]
    assert trajectory.response_ids.tolist() == [10] * 5
    assert trajectory.prompt_ids.tolist() == [ord("p"), ord("0")]
    assert np.array_equal(trajectory.versions, np.zeros(5))
    assert trajectory.logprobs.dtype == np.float32
    rollout.stop()


def test_a_verifier_that_always_fails_ends_the_run_and_says_why(fleet):
    events = []
    rollout = make_rollout(fleet, batch=1, group=1, events=events)
    rollout.start(0)
    for _ in range(100):
        fleet.finish(
            fleet.next_request(), rewards=[math.nan], verifier_error="problem 7: the verifier raised NameError"
        )
    with pytest.raises(ArealError, match=r"every sample of 100 groups in a row failed: problem 7: .* NameError"):
        rollout.next_batch(0)
    assert [kind for kind, _ in events].count("verifier_failed") == 1
    rollout.stop()


@pytest.mark.parametrize("batch", [1, 4])
def test_resume_with_another_batch_size_neither_stalls_nor_overfills(batch):
    fleet = FakeFleet()
    rollout = make_rollout(fleet, batch=2, eta=1.0)
    rollout.start(0)
    for _ in range(4):
        fleet.finish(fleet.next_request())
    rollout.next_batch(0)
    rollout.stop()
    state = rollout.state_dict()

    again = FakeFleet()
    resumed = make_rollout(again, batch=batch, eta=1.0)
    resumed.load_state_dict(state, 1)
    resumed.start(1)
    for version in range(1, 5):
        while not resumed._makes_batch(version):
            again.finish(again.next_request())
            while not again.actions.empty():
                pass
        assert len(resumed.next_batch(version)) == batch
        resumed.set_version(version + 1)
    resumed.stop()


def test_a_greedy_response_belongs_to_its_group_and_outlives_the_death_of_a_generator(fleet):
    rollout = make_rollout(fleet, batch=1, greedy=True)
    rollout.start(0)
    sampled, greedy = fleet.next_request(), fleet.next_request()
    assert (sampled.n, sampled.greedy, greedy.n, greedy.greedy) == (2, False, 1, True)
    fleet.finish(sampled, [1], rewards=[1.0])
    fleet.die([greedy.request_id])  # the other request goes on elsewhere and must not be asked for twice
    again = fleet.next_request()
    assert again.greedy
    assert again.n == 1
    assert again.request_id not in (sampled.request_id, greedy.request_id)
    fleet.finish(again, rewards=[0.25])
    fleet.finish(sampled, [0], rewards=[0.0])
    (group,) = rollout.next_batch(0)
    assert [t.reward for t in group.trajectories] == [0.0, 1.0]
    assert group.greedy.reward == 0.25
    assert fleet.requests.empty()
    assert rollout.counters.requeued_samples == 1
    rollout.stop()


def test_a_group_whose_greedy_response_failed_is_replaced(fleet):
    rollout = make_rollout(fleet, batch=1, greedy=True)
    rollout.start(0)
    for rewards in ([math.nan], [0.5]):
        sampled, greedy = fleet.next_request(), fleet.next_request()
        fleet.finish(sampled)
        fleet.finish(greedy, rewards=rewards)
    assert rollout.next_batch(0)[0].group_id == 1
    rollout.stop()


def test_resume_keeps_a_greedy_response(fleet):
    rollout = make_rollout(fleet, batch=1, greedy=True)
    rollout.start(0)
    _, greedy = fleet.next_request(), fleet.next_request()
    fleet.finish(greedy, rewards=[0.75])
    while rollout.state_dict()["pending"][0]["greedy"] is None:
        pass
    rollout.stop()
    resumed = make_rollout(other := FakeFleet(), batch=1, greedy=True)
    resumed.load_state_dict(rollout.state_dict(), 0)
    resumed.start(0)
    request = other.next_request()
    assert not request.greedy
    assert request.n == 2
    other.finish(request)
    assert resumed.next_batch(0)[0].greedy.reward == 0.75
    resumed.stop()
