"""TRL patched against TRL unpatched: scoring functions, LM head, and its trainers for a few steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from areal_core.errors import UnsupportedVersionError
from areal_core.integrations import trl as ours

import tiny
from patched import both, close

grpo = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is not installed")
utils = pytest.importorskip("trl.trainer.utils")

B, L, V = 4, 7, 19


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


# -- log-probabilities and entropy ------------------------------------------------------------------------------------


def gradients(function: Callable[..., Any], logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Tensor]:
    leaf = logits.detach().clone().requires_grad_()
    outputs = function(leaf if logits.dim() < 3 else leaf[:, :-1], *args, **kwargs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    total = sum((x * torch.linspace(1, 2, x.numel()).view_as(x)).sum() for x in outputs if x.requires_grad)
    return outputs, torch.autograd.grad(total, leaf)[0]


SCORES: dict[str, Callable[..., Any]] = {
    "selective_log_softmax": lambda logits, index, **k: utils.selective_log_softmax(logits, index, **k),
    "entropy_from_logits": lambda logits, index, **k: utils.entropy_from_logits(logits, chunk_size=3),
    "both": lambda logits, index, **k: utils.selective_log_softmax_and_entropy(logits, index, **k),
    "detached": lambda logits, index, **k: utils.selective_log_softmax_and_entropy(logits, index, False, **k),
}


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7}, {"row_mask": None}], ids=["plain", "temperature", "mask"]
)
@pytest.mark.parametrize("shape", [(B, L + 1, V), (B, V)], ids=["batch", "matrix"])
def test_scores_and_gradients_are_those_of_trl(name: str, options: dict[str, Any], shape: tuple[int, ...]) -> None:
    logits = 5 * torch.randn(shape)
    rows = (B, L) if len(shape) == 3 else (B,)
    index = torch.randint(0, V, rows)
    if "row_mask" in options:
        options = {"row_mask": torch.arange(index.numel()).view(rows) % 3 != 0}
    theirs, mine, fallbacks = both(ours, lambda: gradients(SCORES[name], logits, index, **options))
    close(mine, theirs)
    assert not fallbacks


def test_logits_of_minus_infinity_are_impossible_tokens_and_nan_in_strict_mode() -> None:
    logits = torch.randn(3, V)
    logits[0, 4] = -math.inf
    logits[1] = -math.inf
    index = torch.zeros(3, dtype=torch.int64)
    run = lambda: gradients(SCORES["both"], logits, index)  # noqa: E731
    theirs, mine, _ = both(ours, run)
    assert theirs[0][1].isnan().tolist() == [True, True, False]
    assert mine[0][1].isfinite().all()
    assert mine[1].isfinite().all()
    close(mine[0][1][0], torch.distributions.Categorical(logits=logits[0].double()).entropy().float())
    theirs, mine, _ = both(ours, run, strict=True)
    close(mine[0], theirs[0])
    assert theirs[1].isnan().any(-1).tolist() == [True, True, False]
    assert mine[1].isnan().any(-1).tolist() == [True, False, False], "no possible token: NaN, and no gradient"
    masked = torch.tensor([0, 0, 1])
    theirs, mine, _ = both(ours, lambda: SCORES["both"](logits, index, row_mask=masked), strict=True)
    close(mine, theirs)
    assert not mine[1].isnan().any()


def test_half_precision_logits_give_float32_results_and_trls_own_in_strict_mode() -> None:
    logits, index = (5 * torch.randn(B, V)).bfloat16(), torch.randint(0, V, (B,))
    truth = (logits.double() / 0.7).log_softmax(-1).gather(-1, index[:, None])[:, 0]
    run = lambda: utils.selective_log_softmax(logits, index, 0.7)  # noqa: E731
    theirs, mine, _ = both(ours, run)
    assert (theirs.dtype, mine.dtype) == (torch.bfloat16, torch.float32)
    close(mine, truth.float())
    theirs, mine, fallbacks = both(ours, run, strict=True)
    assert mine.equal(theirs)
    assert list(fallbacks) == ["selective_log_softmax: strict: half precision on the CPU"]


def test_a_masked_row_that_holds_nan_reaches_nothing() -> None:
    logits, mask = torch.randn(3, V), torch.tensor([1, 0, 1])
    logits[1] = math.nan
    with ours.apply():
        outputs, gradient = gradients(SCORES["both"], logits, torch.zeros(3, dtype=torch.int64), row_mask=mask)
    assert all(x.isfinite().all() for x in (*outputs, gradient))
    assert gradient[1].eq(0).all()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda logits, index: (logits, index[..., None].expand(-1, -1, 2)), "another shape"),
        (lambda logits, index: (logits.transpose(1, 2).contiguous().transpose(1, 2), index), "stride"),
    ],
    ids=["several labels a row", "strided"],
)
def test_what_the_kernel_does_not_take_falls_through(change: Callable[..., Any], reason: str) -> None:
    logits, index = change(torch.randn(B, L, V), torch.randint(0, V, (B, L)))
    theirs, mine, fallbacks = both(ours, lambda: utils.selective_log_softmax(logits, index))
    assert mine.equal(theirs)
    ((key, count),) = fallbacks.items()
    assert key.startswith("selective_log_softmax: ")
    assert reason in key
    assert count == 1


def test_modules_that_imported_by_name_use_the_replacement_and_then_the_original() -> None:
    loss_utils = pytest.importorskip("trl.experimental.sdpo.loss_utils")
    before = loss_utils.selective_log_softmax
    assert before is utils.selective_log_softmax
    held = {name: utils.__dict__[name] for name in ("selective_log_softmax", "entropy_from_logits", "_use_triton")}
    loss = grpo.GRPOTrainer.__dict__["_compute_loss"]
    with ours.apply():
        assert loss_utils.selective_log_softmax is utils.selective_log_softmax is not before
        assert grpo.GRPOTrainer.__dict__["_compute_loss"] is not loss
    assert loss_utils.selective_log_softmax is before
    assert all(utils.__dict__[name] is function for name, function in held.items())
    assert grpo.GRPOTrainer.__dict__["_compute_loss"] is loss
    assert "apply" not in utils._ChunkedLogProbFunction.__dict__


def test_another_source_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def _compute_loss(self: Any, model: Any, inputs: Any) -> None: ...

    before = utils.selective_log_softmax
    monkeypatch.setattr(grpo.GRPOTrainer, "_compute_loss", _compute_loss)
    with pytest.raises(UnsupportedVersionError, match=r"trl 1\..*source of .*GRPOTrainer\._compute_loss"):
        ours.apply()
    assert utils.selective_log_softmax is before
    with ours.apply(only=["lm_head"]) as patches:
        assert patches.replaced == ("lm_head",)


# -- the LM head ------------------------------------------------------------------------------------------------------


def head_run(model: Any, labels: Tensor, **call: Any) -> tuple[Any, list[Tensor]]:
    out = model(
        input_ids=torch.arange(labels.numel()).view(labels.shape) % 64, labels=labels, fused_lm_head=True, **call
    )
    fields = ("loss", "log_probs", "entropy", "mean_logits")
    outputs = [getattr(out, name) for name in fields if getattr(out, name) is not None]
    total = out.loss + sum(
        (x * torch.linspace(1, 2, x.numel()).view_as(x)).sum() for x in outputs[1:] if x.requires_grad
    )
    return outputs, list(torch.autograd.grad(total, list(model.parameters())))


@pytest.mark.parametrize(
    ("outputs", "options"),
    [
        (("log_probs",), {}),
        (("log_probs", "entropy"), {"temperature": 0.6}),
        (("log_probs", "entropy", "mean_logits"), {"temperature": 1.7}),
        (("log_probs", "entropy"), {"cast_lm_head_to_fp32": True}),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_lm_head(outputs: tuple[str, ...], options: dict[str, Any], bias: bool) -> None:
    model = tiny.causal_lm(bias=bias)
    utils.add_fused_lm_head(model, outputs=outputs, **options)
    labels = torch.randint(0, 64, (3, 9))
    labels[:, :4] = labels[1, 6:] = -100
    theirs, mine, fallbacks = both(ours, lambda: head_run(model, labels, num_items_in_batch=5))
    close(mine, theirs, atol=1e-4)
    assert not fallbacks


@pytest.fixture
def some_labels() -> Tensor:
    return torch.randint(0, 64, (2, 9))


@pytest.mark.parametrize("family", ["Cohere", "Granite"])
def test_lm_head_with_scaled_logits(family: str, some_labels: Tensor) -> None:
    scaling = {"Cohere": {"logit_scale": 0.25}, "Granite": {"logits_scaling": 3.0}}[family]
    model = tiny.causal_lm(family, **scaling)
    utils.add_fused_lm_head(model, outputs=("log_probs", "entropy", "mean_logits"))
    theirs, mine, fallbacks = both(ours, lambda: head_run(model, some_labels))
    close(mine, theirs, atol=1e-4)
    assert not fallbacks


def test_lm_head_without_a_live_row() -> None:
    model = tiny.causal_lm()
    utils.add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    theirs, mine, _ = both(ours, lambda: head_run(model, torch.full((2, 9), -100)))
    close(mine, theirs)
    assert all(x.eq(0).all() for x in mine[1])


def test_lm_head_multiplies_live_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = tiny.causal_lm(), []
    utils.add_fused_lm_head(model)
    linear = ours.ops.linear_logprob
    monkeypatch.setattr(ours.ops, "linear_logprob", lambda x, *a, **k: (rows.append(len(x)), linear(x, *a, **k))[1])
    labels = torch.full((2, 9), -100)
    labels[0, 5:] = 3
    with ours.apply():
        head_run(model, labels)
    assert rows == [4]


def sharded(model: Any) -> Any:
    model.lm_head.weight.ds_id = 1  # as DeepSpeed ZeRO-3 marks its parameters
    return model


LEFT_TO_TRL: dict[str, tuple[Callable[[], Any], dict[str, Any], dict[str, Any]]] = {
    "outputs is_top1": (tiny.causal_lm, {"outputs": ("log_probs", "is_top1")}, {}),
    "final_logit_softcapping": (lambda: tiny.causal_lm("Gemma2", head_dim=8, final_logit_softcapping=3.0), {}, {}),
    "logit_scale <= 0": (lambda: tiny.causal_lm("Cohere", logit_scale=-0.5), {}, {}),
    "a sharded or special parameter": (lambda: sharded(tiny.causal_lm()), {}, {}),
    "a head of another dtype than the hidden states": (
        lambda: tiny.causal_lm().bfloat16(),
        {"cast_lm_head_to_fp32": True},
        {},
    ),
    "strict: a bias may be -inf": (lambda: tiny.causal_lm(bias=True), {}, {"strict": True}),
}


@pytest.mark.parametrize("reason", LEFT_TO_TRL)
def test_lm_head_falls_through(reason: str, some_labels: Tensor) -> None:
    make, head, options = LEFT_TO_TRL[reason]
    model = make()
    utils.add_fused_lm_head(model, **head)
    theirs, mine, fallbacks = both(ours, lambda: head_run(model, some_labels), **options)
    close(mine, theirs)
    assert fallbacks == {f"lm_head: {reason}": 1}


def test_lm_head_gives_the_outputs_that_were_asked_for(some_labels: Tensor) -> None:
    model = tiny.causal_lm()
    utils.add_fused_lm_head(model)
    with ours.apply():
        out = model(input_ids=some_labels, labels=some_labels, fused_lm_head=True)
    assert out.log_probs is not None
    assert out.entropy is out.mean_logits is out.is_top1 is out.log_sum_sq_probs is None


def test_lm_head_in_half_precision_is_closer_to_the_truth() -> None:
    model = tiny.causal_lm().bfloat16()
    utils.add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    labels = torch.randint(0, 64, (2, 9))
    run = lambda: head_run(model, labels)[0][1]  # noqa: E731
    theirs, mine, fallbacks = both(ours, run)
    assert not fallbacks
    ids = torch.arange(labels.numel()).view(labels.shape) % 64
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
    truth = (hidden.double() @ model.lm_head.weight.double().T).log_softmax(-1).gather(-1, labels[:, 1:, None])[..., 0]
    assert (mine - truth).abs().max() < 1e-5
    assert (theirs - truth).abs().max() > 1e-3
    theirs, mine, fallbacks = both(ours, run, strict=True)
    assert mine.equal(theirs)
    assert list(fallbacks) == ["lm_head: strict: logits rounded to half precision"]


# -- trainers ---------------------------------------------------------------------------------------------------------


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(token % 7 for token in ids)) for ids in completion_ids]


def train(algorithm: str, folder: Any, **options: Any) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    import trl

    common = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "max_steps": 3,
        "learning_rate": 0.05,
        "optim": "sgd",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 1,
    }
    prompts = [tiny.text(i, 2 + i % 4) for i in range(32)]
    model, rest = tiny.causal_lm(), {"processing_class": tiny.tokenizer()}
    if options.get("beta"):  # the trainer loads its reference by name
        model.save_pretrained(folder)
        model.config._name_or_path = str(folder)
    if algorithm in ("GRPO", "RLOO"):
        common |= {"num_generations": 4, "max_completion_length": 8}
        rest |= {"reward_funcs": reward, "train_dataset": tiny.dataset({"prompt": prompts})}
    else:
        columns = {
            "prompt": prompts,
            "completion": [f" {tiny.text(i, 3 + i % 5)}" for i in range(32)],
            "label": [i % 2 == 0 for i in range(32)],
        }
        if algorithm == "DPO":
            columns["chosen"], columns["rejected"] = columns.pop("completion"), prompts[::-1]
        if algorithm != "KTO":
            del columns["label"]
        if algorithm != "SFT":
            rest["ref_model"] = tiny.causal_lm()
        rest["train_dataset"] = tiny.dataset(columns)
    args = getattr(trl, f"{algorithm}Config")(**common | options)
    made = getattr(trl, f"{algorithm}Trainer")(model=model, args=args, **rest)
    made.train()
    return made.state.log_history, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.filterwarnings("ignore")
def test_training_in_mixed_precision_is_ours_too(tmp_path: Any) -> None:
    exact, _ = train("GRPO", tmp_path, max_steps=1)
    with ours.apply() as patches:
        mixed, _ = train("GRPO", tmp_path, max_steps=1, bf16=True)
    assert not patches.fallbacks
    assert mixed[0]["grad_norm"] == pytest.approx(exact[0]["grad_norm"], rel=0.1)


RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "GRPO": ("GRPO", {}),
    "GRPO off-policy": ("GRPO", {"num_iterations": 2, "loss_type": "dapo", "beta": 0.1, "temperature": 0.8}),
    "GRPO accumulating": (
        "GRPO",
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "num_iterations": 2, "entropy_coef": 0.1},
    ),
    "GSPO": ("GRPO", {"importance_sampling_level": "sequence", "num_iterations": 3, "epsilon": 3e-3}),
    "RLOO": ("RLOO", {"beta": 0.1}),
    "KTO": ("KTO", {}),
    "SFT": ("SFT", {}),
    "DPO": ("DPO", {}),
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.filterwarnings("ignore")
def test_training_gives_the_same_losses_and_parameters(name: str, tmp_path: Any) -> None:
    algorithm, options = RUNS[name]
    theirs, mine, fallbacks = both(ours, lambda: train(algorithm, tmp_path, **options))
    assert list(fallbacks) == (["lm_head: outputs is_top1"] if name in ("SFT", "DPO") else [])
    assert len(mine[0]) == len(theirs[0]) == 4
    for step, expected in zip(mine[0], theirs[0], strict=True):
        for key in {"loss", "grad_norm", "entropy", "kl", "reward", "train_loss"} & expected.keys():
            assert step[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-5), (key, step.get("step"))
    start = tiny.causal_lm().state_dict()
    close(mine[1], theirs[1], atol=2e-5)
    assert any(not mine[1][key].equal(start[key]) for key in start), "something was learnt"
