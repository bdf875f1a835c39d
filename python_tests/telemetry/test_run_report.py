import json
import math
import re
import xml.etree.ElementTree

import pytest
from synthetic_run import SyntheticRun, write_synthetic_run

from areal_core.telemetry import (
    EventLog,
    MetricsLog,
    SampleLog,
    plot_summary,
    plot_timelines,
    read_metrics,
    report_command,
    write_report,
)
from areal_core.telemetry import report_data as limits
from areal_core.telemetry.facts import gather_facts, gather_settings, generator_seconds, summarize, trainer_seconds
from areal_core.telemetry.report import render_report
from areal_core.telemetry.report_data import report_data
from areal_core.telemetry.run_data import read_run
from areal_core.telemetry.series import age_shares, build_curves, smooth


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "chain"
    write_synthetic_run(run_dir, 120)
    return run_dir


def embedded_data(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL).group(1))


def facts_of(run_dir):
    return {label: (value, note) for label, value, note in gather_facts(read_run(run_dir))}


def test_the_report_needs_nothing_but_itself(finished):
    page = write_report(finished).read_text(encoding="utf-8")
    assert re.findall(r"(?:src|href)=[\"'](?!#)[^\"']*", page) == []
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "@import" not in page
    assert "url(#" in page  # the one use of url() is inside the page
    assert re.findall(r"url\((?!#)", page) == []
    assert "<!--slot" not in page


def test_facts_are_the_runs_numbers(finished):
    rows = read_metrics(finished)
    facts = facts_of(finished)
    time = rows[-1]["time_s"]
    assert facts["Steps"] == ("120", "of 120 planned")
    generated = sum(row["tokens/generated"] for row in rows)
    assert float(facts["Generation"][0].split("k")[0]) == pytest.approx(generated / time / 1e3, rel=5e-3)
    idle = sum(row["idle/trainer"] * (row["time_s"] - before["time_s"]) for before, row in zip(
        [{"time_s": 0}, *rows], rows, strict=False)) / time  # fmt: skip
    assert facts["Trainer idle"][0] == f"{100 * idle:.1f}%"
    evaluated = [row["eval/accuracy_greedy"] for row in rows if "eval/accuracy_greedy" in row]
    assert facts["Accuracy"] == (f"{100 * evaluated[0]:.1f}% → {100 * evaluated[-1]:.1f}%", "greedy evaluation")
    assert "bound 4" in facts["Token age"][1]
    assert ("η", "4") in gather_settings(read_run(finished))


def test_settings_are_short(tmp_path):
    (tmp_path / "config.yaml").write_text("rollout: {eta: 4.0}\ntrain: {learning_rate: 0.00002}\nseed: 3\n")
    assert gather_settings(read_run(tmp_path)) == [("η", "4"), ("learning rate", "2e-05"), ("seed", "3")]


def test_settings_show_what_was_changed_and_the_critic_where_there_was_one(tmp_path):
    unchanged = "gamma: 1.0, lam: 1.0, beta: 0.0"
    (tmp_path / "config.yaml").write_text(
        f"advantage: {{name: ppo, {unchanged}}}\nreward: {{kl_coef: 0.01}}\nreference: {{path: null}}\n"
        "loss: {ratio_level: sequence, aggregation: token_mean}\ncritic: {learning_rate: 0.001}\n"
    )
    expected = [("advantages", "ppo"), ("KL in the reward", "0.01"), ("ratio", "sequence")]
    assert gather_settings(read_run(tmp_path)) == expected
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "critic/loss": 0.5}\n')
    assert gather_settings(read_run(tmp_path)) == [*expected, ("learning rate of the critic", "0.001")]


def test_time_shares_add_up(finished):
    run = read_run(finished)
    assert sum(trainer_seconds(run).values()) == pytest.approx(run.wall_time_s, rel=1e-3)
    assert sum(generator_seconds(run).values()) == pytest.approx(2 * run.wall_time_s, rel=1e-2)


def test_a_synchronous_run_shows_idle_generators(tmp_path):
    write_synthetic_run(tmp_path / "sync", 30, eta=0)
    facts = facts_of(tmp_path / "sync")
    assert float(facts["Generators idle"][0].rstrip("%")) > 25
    assert float(facts["Trainer idle"][0].rstrip("%")) > 40
    assert facts["Token age"] == ("0.00", "versions, mean; oldest 0, bound 0")


def test_weight_updates_are_summed_up_where_they_were_recorded(tmp_path, finished):
    assert "Weight update" not in facts_of(finished)
    with MetricsLog(tmp_path, tensorboard=False) as log:
        for step, factor in enumerate((1, 2, 9), start=1):
            update = {"visible_p50_s": 0.002, "visible_p95_s": 0.003, "pause_s": 0.0005}
            metrics = {f"publish/{key}": value * factor for key, value in update.items()}
            log.log({"step": step, **metrics, "publish/bytes": 2e9, "publish/bytes_over_bound": 1.0})
        log.log({"step": 4, "publish/loads": 0.0})
    value, note = facts_of(tmp_path)["Weight update"]
    assert value == "4 ms"
    assert note == (
        "until generators have a version (median step; p95 6 ms), of which they stand still 1 ms; "
        "2GB, 1.00 of the bound"
    )


def test_an_unbounded_run(tmp_path):
    write_synthetic_run(tmp_path / "free", 10, eta=math.inf)
    data = report_data(read_run(tmp_path / "free"))
    assert (data["staleness"]["eta"], data["staleness"]["unbounded"]) == (None, True)
    assert "bound ∞" in facts_of(tmp_path / "free")["Token age"][1]
    assert "bound" not in plot_summary(tmp_path / "free", tmp_path / "a.svg").read_text()


def test_an_empty_folder_gives_a_report(tmp_path):
    page = write_report(tmp_path).read_text()
    assert "No training step was recorded." in page
    assert embedded_data(page)["samples"] == []
    xml.etree.ElementTree.fromstring(plot_summary(tmp_path, tmp_path / "a.svg").read_text())


@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_of_few_steps_gives_a_report(tmp_path, steps):
    write_synthetic_run(tmp_path / "short", steps)
    page = write_report(tmp_path / "short").read_text()
    assert len(embedded_data(page)["curves"]["steps"]) == steps
    xml.etree.ElementTree.fromstring(plot_summary(tmp_path / "short", tmp_path / "a.svg").read_text())


def test_no_run_raises(tmp_path):
    with pytest.raises(FileNotFoundError, match="folder of a run"):
        write_report(tmp_path / "absent")


def interrupted_run(run_dir):
    run = write_synthetic_run(run_dir, 40, planned=100)
    run.event("interrupted", 40, "Ctrl-C")
    for name in ("metrics.jsonl", "samples.jsonl", "events.jsonl", "trace.json"):
        content = (run_dir / name).read_bytes()
        (run_dir / name).write_bytes(content[: len(content) - 9] if name != "events.jsonl" else content + b'{"ti')
    return run


def test_an_interrupted_run_gives_a_report_that_says_so(tmp_path):
    interrupted_run(tmp_path)
    page = write_report(tmp_path).read_text()
    assert facts_of(tmp_path)["Steps"] == ("39", "of 100 planned, interrupted")
    assert "1 of 40 lines of metrics.jsonl are damaged and left out" in page
    assert "interrupted" in page
    assert embedded_data(page)["timeline"]["rows"]


def test_values_that_were_not_finite_are_named(finished):
    page = write_report(finished).read_text()
    assert "optim/grad_norm was not finite in 1 step, first in step 7." in page


def test_of_a_step_that_is_there_twice_the_later_line_counts(tmp_path):
    lines = [{"step": 2, "a": 1.0}, {"step": 3, "a": 2.0}, {"step": 2, "a": 3.0}, {"step": 1, "a": 4.0}, {"a": 5.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(tmp_path)
    assert [(row["step"], row["a"]) for row in run.metrics] == [(1, 4.0), (2, 3.0), (3, 2.0)]


def test_sample_ages_count_from_the_version_that_trained(finished):
    data = report_data(read_run(finished))
    assert all(sample["version"] == sample["step"] - 1 for sample in data["samples"])
    ages = {sample["version"] - version for sample in data["samples"] for version in sample["versions"]}
    assert ages == {0, 1}


def test_an_evaluation_before_the_first_step_is_where_accuracy_starts(tmp_path):
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.log({"step": 0, "eval/accuracy_greedy": 0.25})
        assert summarize(read_run(tmp_path)) == "No training step was recorded."
        log.log({"step": 1, "version": 1, "time_s": 4.0})
        log.log({"step": 2, "version": 2, "time_s": 8.0, "eval/accuracy_greedy": 0.5})
    facts = facts_of(tmp_path)
    assert facts["Accuracy"][0] == "25.0% → 50.0%"
    assert facts["Steps"][0] == "2"
    assert facts["Wall time"] == ("8.0 s", "4 s per step")
    assert summarize(read_run(tmp_path)).startswith("In 2 steps and 8.0 s, accuracy (greedy evaluation) rose")


def test_counts_of_steps_add_up_and_running_counts_do_not(tmp_path):
    with MetricsLog(tmp_path, tensorboard=False) as log:
        for step in (1, 2, 3):
            log.log({"step": step, "count/groups": 8, "count/generator_restarts": min(step, 2)})
    page = write_report(tmp_path).read_text()
    assert re.search(r"<td>groups trained on</td><td class=\"number\">24</td>", page)
    assert re.search(r"<td>generator restarts</td><td class=\"number\">2</td>", page)


def test_samples_come_in_the_order_of_their_steps(tmp_path):
    log = SampleLog(tmp_path)
    for step in (5, 2, 9):
        log.log(step=step, group=0, prompt="", tokens=[], versions=[], logprobs=[], reward=0.0, advantage=0.0,
                finish_reason="stop")  # fmt: skip
    log.close()
    assert [sample["step"] for sample in report_data(read_run(tmp_path))["samples"]] == [2, 5, 9]


def test_a_resumed_run_has_one_history(tmp_path):
    run = SyntheticRun(tmp_path, planned=60)
    run.write(1, 40)
    run.event("interrupted", 40, "Ctrl-C")
    run.time.us += 30_000_000
    run.write(31, 60, resume_step=30)
    run.event("resume", 31, "from the checkpoint of step 30")
    data = report_data(read_run(tmp_path))
    assert data["curves"]["steps"] == list(range(1, 61))
    assert facts_of(tmp_path)["Steps"] == ("60", "of 60 planned")
    assert [event["kind"] for event in data["events"]] == ["interrupted", "resume"]


def test_missing_parts_are_left_out(tmp_path):
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.log({"step": 1, "custom/score": 3.0})
        log.log({"step": 2, "custom/score": None, "reward/accuracy": math.nan})
    page = write_report(tmp_path).read_text()
    assert set(embedded_data(page)["curves"]["values"]) == {"custom/score"}
    assert facts_of(tmp_path) == {"Steps": ("2", "")}
    assert "nothing but the figures below" in summarize(read_run(tmp_path))


def test_idle_shares_come_from_the_trace_when_the_metrics_lack_them(tmp_path):
    write_synthetic_run(tmp_path, 20)
    rows = [{k: v for k, v in row.items() if not k.startswith(("idle", "time"))} for row in read_metrics(tmp_path)]
    with_metrics = facts_of(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    without = facts_of(tmp_path)
    for label in ("Trainer idle", "Generators idle"):
        assert float(without[label][0].rstrip("%")) == pytest.approx(float(with_metrics[label][0].rstrip("%")), abs=0.5)
    assert "Wall time" in without


HOSTILE = "</script><script>alert(1)</script><!--slot:data--> & \u2028 \ud83d"


def test_text_from_the_run_cannot_become_markup(tmp_path):
    run_dir = tmp_path / "<b>run"
    log = SampleLog(run_dir)
    log.log(step=1, group=0, prompt=HOSTILE, tokens=[HOSTILE], versions=[0], logprobs=[-1.0], reward=1.0, advantage=0.0,
            finish_reason=HOSTILE)  # fmt: skip
    log.close()
    events = EventLog(run_dir)
    events.log(HOSTILE, HOSTILE, step=1, time_s=0.0)
    (run_dir / "config.yaml").write_text("task: {name: '</pre><script>alert(1)</script>'}\nbroken: [")
    with MetricsLog(run_dir, tensorboard=False) as metrics:
        metrics.log({"step": 1, "</script><script>alert(1)</script>": 1.0})
    page = write_report(run_dir).read_text(encoding="utf-8")
    assert page.count("<script") == page.count("</script>") == 2
    assert "<b>run" not in page
    assert "alert(1)&lt;/script&gt;" in page
    assert "config.yaml is not valid YAML" in page
    assert embedded_data(page)["samples"][0]["tokens"] == [HOSTILE]


def test_a_long_run_gives_a_small_report(tmp_path):
    write_synthetic_run(tmp_path, 5_000)
    page = write_report(tmp_path)
    assert page.stat().st_size < 5_000_000
    data = embedded_data(page.read_text())
    assert 1_000 < len(data["curves"]["steps"]) <= limits.MAX_POINTS
    assert len(data["samples"]) == limits.MAX_SAMPLES
    assert (data["samples"][0]["step"], data["samples"][-1]["step"]) == (1, 5_000)
    assert sum(len(row["flat"]) // 4 for row in data["timeline"]["rows"]) <= limits.MAX_SEGMENTS
    assert plot_summary(tmp_path, tmp_path / "a.svg").stat().st_size < 300_000


def shares_of_row(data, row):
    """Time by name: from the segments, and from the profile of the whole run."""
    kinds = len(data["timeline"]["names"])
    exact, profile = [0.0] * kinds, [0.0] * kinds
    for index in range(0, len(row["flat"]), 4):
        exact[row["flat"][index + 2]] += row["flat"][index + 1]
    for index, share in enumerate(row["profile"]):
        profile[index % kinds] += share / 1000 * data["timeline"]["duration"] * kinds / len(row["profile"])
    return exact, profile


def test_a_long_trace_keeps_its_shares_of_time_and_whole_excerpts(finished, monkeypatch):
    full = report_data(read_run(finished))
    assert full["timeline"]["excerpts"] == []
    monkeypatch.setattr(limits, "MAX_SEGMENTS", 600)
    thin = report_data(read_run(finished))
    assert sum(len(row["flat"]) // 4 for row in thin["timeline"]["rows"]) <= 600
    excerpts = thin["timeline"]["excerpts"]
    assert (excerpts[0][0], excerpts[2][1]) == (0, pytest.approx(full["timeline"]["duration"], abs=2))
    for before, after in zip(full["timeline"]["rows"], thin["timeline"]["rows"], strict=True):
        exact, _ = shares_of_row(full, before)
        _, profile = shares_of_row(thin, after)
        assert profile == pytest.approx(exact, rel=0.02, abs=full["timeline"]["duration"] * 1e-4)
        inside = [s for s in segments_of(before) if any(s[1] > low and s[0] < high for low, high in excerpts)]
        assert segments_of(after) == inside


def segments_of(row):
    segments, end = [], 0
    for index in range(0, len(row["flat"]), 4):
        gap, duration, name, _ = row["flat"][index : index + 4]
        segments.append((end + gap, end + gap + duration, name))
        end += gap + duration
    return segments


def test_downsampling_keeps_means_and_extremes():
    rows = [{"step": step, "loss/loss": float(step % 7), "time_s": 2.0 * step} for step in range(1, 101)]
    curves = build_curves(rows, 10)
    assert curves.bucket_steps == 10
    assert curves.steps[0] == 5.5
    assert curves.times[0] == 11.0
    assert sum(curves.values["loss/loss"]) / 10 == pytest.approx(sum(row["loss/loss"] for row in rows) / 100)
    assert curves.low["loss/loss"] == [0.0] * 10
    assert curves.high["loss/loss"] == [6.0] * 10


def test_curves_of_few_points_are_the_points():
    curves = build_curves([{"step": 3, "a": 1.0}, {"step": 9, "b": 2}], 10)
    assert curves.values == {"a": [1.0, None], "b": [None, 2.0]}
    assert curves.low == {}


def test_age_shares_add_up():
    rows = [{"step": step, "staleness/histogram": [step, 1, 0, 3]} for step in range(1, 8)]
    steps, shares = age_shares(rows, 3, 3)
    assert steps == [2.0, 5.0, 7.0]
    assert shares[0] == pytest.approx([6 / 18, 3 / 18, 9 / 18])
    assert all(sum(row) == pytest.approx(1) for row in shares)


def test_smoothing_leaves_gaps_and_constants_alone():
    assert smooth([2.0, 2.0, None, 2.0], 3) == [2.0, 2.0, None, 2.0]
    assert smooth([0.0, 3.0, 6.0], 3) == [1.5, 3.0, 4.5]
    assert smooth([], 3) == []


def test_numbers_are_bounded_and_whole_ones_short(finished):
    data = report_data(read_run(finished))
    assert data["curves"]["values"]["count/groups"][0] == 32
    assert isinstance(data["curves"]["values"]["count/groups"][0], int)
    huge = [{"step": 1, "loss/loss": 1.7976931348623157e308}]
    run = read_run(finished)
    run.metrics[:] = huge
    assert report_data(run)["curves"]["values"]["loss/loss"] == [None]


def test_report_command_writes_both_files(finished, capsys):
    assert report_command(finished) == 0
    out = capsys.readouterr().out
    assert "In 120 steps" in out
    assert str(finished / "report.html") in out
    xml.etree.ElementTree.fromstring((finished / "summary.svg").read_text())


def test_timelines_of_two_runs_share_one_scale(finished, tmp_path):
    write_synthetic_run(tmp_path / "sync", 40, eta=0)
    path = plot_timelines({"synchronous": tmp_path / "sync", "asynchronous <1>": finished}, tmp_path / "both.svg")
    picture = path.read_text()
    xml.etree.ElementTree.fromstring(picture)
    assert "asynchronous &lt;1&gt;" in picture
    idle = [float(share) for share in re.findall(r"generators idle ([0-9.]+)%", picture)]
    assert idle[0] > 25 > 5 > idle[1]
    assert picture.count(">0 s<") == 2


def test_timelines_need_traces(tmp_path):
    for runs in ({}, {"empty": tmp_path}):
        with pytest.raises(ValueError, match="runs with a trace"):
            plot_timelines(runs, tmp_path / "both.svg")


def test_rendering_is_deterministic(finished):
    assert render_report(read_run(finished)) == render_report(read_run(finished))
