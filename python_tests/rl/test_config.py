import math
import re
from pathlib import Path

import pytest

from areal_core.errors import ConfigError
from areal_core.rl.config import Config, LossConfig
from areal_core.rl.config_file import build_config, load_config, save_config
from areal_core.rl.credit import CreditAssigner

ROOT = Path(__file__).parents[2]


def test_defaults_need_no_file():
    assert load_config() == Config()


def test_overrides_win_over_the_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("seed: 3\nrollout: {eta: 1, group_size: 4}\n")
    config = load_config(
        path, ["rollout.eta=inf", "train.learning_rate=1e-3", "loss.clip_high=0.3", "task.options.min_terms=2"]
    )
    assert (config.seed, config.rollout.group_size, config.rollout.eta) == (3, 4, math.inf)
    assert config.train.learning_rate == 1e-3
    assert config.loss.clip_high == 0.3
    assert config.task.options == {"min_terms": 2}


def test_saved_config_repeats_the_run(tmp_path):
    config = load_config(
        None, ["rollout.eta=inf", "train.betas=[0.8, 0.9]", "task.options.min_terms=2", "loss.dual_clip=3"]
    )
    save_config(config, tmp_path / "c.yaml")
    assert load_config(tmp_path / "c.yaml") == config


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("rollout.etta=1", "rollout.etta: unknown key; did you mean rollout.eta?"),
        ("nonsense=1", "nonsense: unknown key; known keys: run_dir,"),
        ("rollout.eta=-1", "rollout.eta: expected a whole number >= 0, or inf, got -1.0"),
        ("rollout.eta=0.5", "rollout.eta: expected a whole number >= 0, or inf, got 0.5"),
        ("rollout.eta=abc", "rollout.eta: expected a number, got 'abc'"),
        ("rollout.eta=nan", "rollout.eta: expected a number, got 'nan'"),
        ("rollout.group_size=2.5", "rollout.group_size: expected a whole number, got 2.5"),
        ("rollout.group_size=true", "rollout.group_size: expected a whole number, got True"),
        ("rollout=3", "rollout: expected a mapping, got 3"),
        ("loss.proximal=stale", "loss.proximal: expected one of recompute, loglinear, behavior, got 'stale'"),
        (
            "loss.objective=gspo",
            "loss.objective: expected in ('ppo', 'cispo', 'sapo', 'gmpo', 'reinforce'), ",
        ),
        ("reward.max_tokens=9", "reward.overlong_buffer: expected > 0 with max_tokens"),
        ("loss=gspo", "loss: expected a mapping, got 'gspo'; its keys: clip_low, clip_high,"),
        ("loss.clip_low=2", "loss.clip_low: expected in [0, 1], got 2.0"),
        ("advantage.gamma=2", "advantage.gamma: expected in [0, 1], got 2.0"),
        ("train.betas=[0.9]", "train.betas: expected 2 values, got [0.9]"),
        ("telemetry.trace=yes please", "telemetry.trace: expected true or false, got 'yes please'"),
        (
            "generate.temperature=0",
            "generate.temperature: expected finite and > 0 (the policy gradient needs sampling), got 0.0",
        ),
        (
            "train.minibatches=999",
            "train.minibatches: expected at most rollout.batch_groups * rollout.group_size = 256, got 999",
        ),
        ("rollout.reward_timeout_s=inf", "rollout.reward_timeout_s: expected a finite number > 0, got inf"),
        ("seed", "override: expected key=value, got 'seed'"),
        ("seed.x.y=1", "seed: expected a whole number, got {'x': {'y': 1}}"),
    ],
)
def test_mistakes_name_their_key(override, text):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    assert str(caught.value).startswith(text)


def test_yaml_has_two_truth_values_and_short_floats(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("loss: {objective: reinforce, ratio_level: off}\nadvantage: {options: {eps: 1e-5}}\n")
    config = load_config(path, ["telemetry.trace=False", "task.options.scale=-2.5E+3"])
    assert config.loss.ratio_level == "off"
    assert config.advantage.options == {"eps": 1e-5}
    assert config.telemetry.trace is False
    assert config.task.options == {"scale": -2500.0}
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config
    with pytest.raises(ConfigError, match=r"telemetry\.trace: expected true or false, got 'off'"):
        load_config(None, ["telemetry.trace=off"])


def test_a_group_of_one_is_fine_where_nothing_is_compared():
    for overrides in (
        ["advantage.name=reinforce"],
        ["advantage.name=ppo"],
        ["advantage.options.singleton=raw"],
        ["teacher.path=chain_policy", "loss.distill_coef=1"],
    ):
        load_config(None, ["rollout.group_size=1", *overrides])


@pytest.mark.parametrize(
    ("overrides", "drops"),
    [
        ([], True),
        (["advantage.name=reinforce"], False),
        (["advantage.options.whiten=true"], False),
        (["advantage.beta=0.1"], False),
        (["teacher.path=chain_policy", "loss.distill_coef=1"], False),
        (["teacher.path=chain_policy", "loss.distill_coef=1", "advantage.drop_zero_variance=true"], True),
    ],
)
def test_groups_without_contrast_are_left_out_where_they_teach_nothing(overrides, drops):
    assert CreditAssigner(load_config(None, overrides)).drops_zero_variance is drops


OVERRIDES = re.compile(r"^ {4}((?:[a-z]\w*(?:\.\w+)*=\S+ *)+)(?:#.*)?$", re.MULTILINE)


def test_documented_settings_are_valid():
    """Every line of overrides in the guide, as a user would paste it."""
    lines = OVERRIDES.findall((ROOT / "docs" / "configuration.md").read_text())
    assert len(lines) >= 10
    for line in lines:
        load_config(None, line.split())


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_are_valid_and_keep_to_a_folder_of_their_own(path):
    config = load_config(path)
    assert config.run_dir == f"runs/{path.stem}"


def test_bad_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match="expected an existing file"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="expected a mapping at the top level, got list"):
        load_config(tmp_path / "list.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1\n")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(tmp_path / "bad.yaml")


def test_an_override_into_a_value_that_is_no_section():
    with pytest.raises(ConfigError, match="seed: expected a section, got 1"):
        load_config(None, ["seed=1", "seed.x=2"])
    assert build_config({}) == Config()


def test_something_must_pace_sampling():
    assert load_config(None, ["rollout.eta=2", "rollout.pipeline_depth=inf"]).rollout.batches_ahead == 2
    with pytest.raises(ConfigError, match=r"rollout.pipeline_depth: expected a whole number when rollout.eta is inf"):
        load_config(None, ["rollout.eta=inf", "rollout.pipeline_depth=inf"])


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["loss.distill_coef=1"], "teacher.path: expected a policy with loss.distill_coef, got None"),
        (["teacher.path=x"], "teacher.path: expected null without loss.distill_coef, got 'x'"),
        (["reference.path=x"], "reference.path: expected null without advantage.beta, reward.kl_coef or loss.kl_coef"),
        (["loss.m2po_threshold=0.04", "loss.proximal=loglinear"], "loss.proximal: expected recompute with"),
        (["loss.proximal=behavior", "loss.behavior_level=sequence"], "loss.proximal: expected recompute or loglinear"),
        (["reward.kl_target=1"], "reward.kl_coef: expected > 0 with kl_target, got 0.0"),
        (["advantage.name=grpo"], "advantage.name: expected one of dapo, dr_grpo"),
        (["advantage.options.foo=1"], "advantage.options: expected options among ['ddof', 'eps',"),
        (["advantage.options.ddof=3"], "advantage.options: expected ddof in (0, 1), got 3"),
        (["advantage.options.eps=x"], "advantage.options: "),
        (["advantage.name=rloo", "advantage.options.ddof=0"], "advantage.options: expected no ddof with rloo, which"),
        (["advantage.name=rloo", "advantage.gamma=0.9"], "advantage.gamma: expected 1 with advantage.name=rloo, which"),
        (
            ["advantage.lam=0.9"],
            "advantage.lam: expected 1 with advantage.name=grpo_r1, which does not use it",
        ),
        (
            ["advantage.name=orz", "advantage.beta=1"],
            "advantage.beta: expected 0 with advantage.name=orz, which",
        ),
        (["advantage.beta=inf"], "advantage.beta: expected a finite number, got inf"),
        (["critic.warmup_steps=1"], "critic.warmup_steps: expected 0 with advantage.name=grpo_r1, which has no critic"),
        (["rollout.group_size=1"], "rollout.group_size: expected >= 2 with advantage.name=grpo_r1, which gives"),
        (["rollout.group_size=3", "advantage.name=pass_at_k"], "rollout.group_size: expected >= 4 with"),
        (["critic.learning_rate=0"], "critic.learning_rate: expected > 0, got 0.0"),
    ],
)
def test_settings_that_do_not_fit_together_say_so(overrides, text):
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    assert str(caught.value).startswith(text)


def test_a_preset_fills_the_loss_and_other_keys_win(tmp_path):
    config = load_config(None, ["loss.preset=gspo", "loss.clip_high=1e-3"])
    assert config.loss == LossConfig(
        ratio_level="sequence", clip_low=3e-4, clip_high=1e-3, aggregation="sequence_mean_token_mean"
    )
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config
    assert load_config(None, ["loss.preset=tis"]).loss.behavior_cap == 2.0
    with pytest.raises(ConfigError, match=r"loss\.preset: in .*'gspo'.*got 'nothing'"):
        load_config(None, ["loss.preset=nothing"])
