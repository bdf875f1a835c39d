"""Models of transformers whose training loss computes no logits, against the same models that do."""

from __future__ import annotations

import copy
import logging
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from areal_core.errors import PatchError
from areal_core.integrations.huggingface import apply_to

import tiny
from patched import close

pytest.importorskip("transformers", reason="transformers is not installed")

READS = "something other than a plain cross entropy reads the logits"


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def batch() -> dict[str, Tensor]:
    ids = torch.randint(2, 64, (3, 9))
    labels = ids.clone()
    labels[:, :3] = labels[1] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def loss_and_gradients(model: Any, batch: dict[str, Any]) -> tuple[Any, list[Tensor | None]]:
    outputs = model(**batch)
    return outputs, list(torch.autograd.grad(outputs.loss, list(model.parameters()), allow_unused=True))


def same(model: Any, batch: dict[str, Any]) -> dict[str, int]:
    theirs, expected = loss_and_gradients(model, batch)
    with apply_to(model) as patches:
        mine, gradients = loss_and_gradients(model, batch)
    assert mine.keys() | {"logits"} == theirs.keys() | {"logits"}
    close(mine.loss, theirs.loss)
    close(gradients, expected)
    if not patches.fallbacks:
        assert mine.logits is None
    return patches.fallbacks


FAMILIES = {
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Llama": {},
    "Mistral": {},
    "GPTNeoX": {},
    "Phi3": {},
    "Mixtral": {"output_router_logits": True},
    "Cohere": {"logit_scale": 0.3},
    "Granite": {"logits_scaling": 2.5},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_loss_and_gradients(family: str, tied: bool, batch: dict[str, Tensor]) -> None:
    model = tiny.causal_lm(family, tie_word_embeddings=tied, **FAMILIES[family]).train()
    assert not same(model, batch)


@pytest.mark.parametrize(
    "extra",
    [
        {"num_items_in_batch": 7},
        {"num_items_in_batch": torch.tensor(40)},
        {"ignore_index": 5},
        {"shift_labels": torch.randint(0, 64, (3, 9))},
        {"output_hidden_states": True},
    ],
    ids=str,
)
def test_options_of_the_loss(extra: dict[str, Any], batch: dict[str, Tensor]) -> None:
    labels = batch["labels"].masked_fill(batch["labels"] == -100, 5) if "ignore_index" in extra else batch["labels"]
    assert not same(tiny.causal_lm(bias=True).train(), batch | {"labels": labels} | extra)


def test_frozen_backbone_and_frozen_head(batch: dict[str, Tensor]) -> None:
    for frozen in ("model", "lm_head"):
        model = tiny.causal_lm().train()
        getattr(model, frozen).requires_grad_(False)
        with apply_to(model):
            model(**batch).loss.backward()
        mine = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
        model.zero_grad()
        model(**batch).loss.backward()
        close(mine, {name: x.grad for name, x in model.named_parameters() if x.grad is not None})
        assert mine


def test_a_batch_without_labels_to_learn_gives_zero_and_nan_in_strict_mode(batch: dict[str, Tensor]) -> None:
    model, batch = tiny.causal_lm().train(), batch | {"labels": torch.full((3, 9), -100)}
    assert model(**batch).loss.isnan()
    with apply_to(model):
        outputs, gradients = loss_and_gradients(model, batch)
    assert outputs.loss == 0
    assert all(x is None or x.eq(0).all() for x in gradients)
    with apply_to(model, strict=True):
        assert model(**batch).loss.isnan()


def test_half_precision_is_closer_to_the_truth(batch: dict[str, Tensor]) -> None:
    model = tiny.causal_lm().bfloat16().train()
    model.lm_head.weight.data *= 8
    theirs = model(**batch).loss.item()
    hidden = model.model(batch["input_ids"]).last_hidden_state[:, :-1].double()
    logits = hidden @ model.lm_head.weight.double().T
    truth = functional.cross_entropy(logits.reshape(-1, 64), batch["labels"][:, 1:].reshape(-1)).item()
    with apply_to(model) as patches:
        mine, gradients = loss_and_gradients(model, batch)
    assert not patches.fallbacks
    assert abs(mine.loss.item() - truth) < 1e-5 < 1e-4 < abs(theirs - truth)
    assert all(x is not None and x.dtype == torch.bfloat16 for x in gradients)


def test_autocast(batch: dict[str, Tensor]) -> None:
    model = tiny.causal_lm().train()
    with torch.autocast("cpu", torch.bfloat16):
        theirs = model(**batch).loss
        with apply_to(model) as patches:
            mine, gradients = loss_and_gradients(model, batch)
    assert not patches.fallbacks
    close(mine.loss, theirs, rtol=2e-2)
    assert all(x is not None and x.isfinite().all() for x in gradients)


# -- where the logits are computed ------------------------------------------------------------------------------------


def test_evaluation_generation_and_calls_without_labels_are_untouched(batch: dict[str, Tensor]) -> None:
    model = tiny.causal_lm().train()
    prompt = batch["input_ids"][:1, :4]
    generate = lambda: model.generate(prompt, max_new_tokens=6, do_sample=False)  # noqa: E731
    without_labels = {name: x for name, x in batch.items() if name != "labels"}
    logits = model(**batch).logits
    generated = generate()
    with apply_to(model) as patches:
        assert generate().equal(generated)
        assert model(**without_labels).logits.equal(logits)
        with torch.no_grad():
            assert model(**batch).logits.equal(logits)
        model.eval()
        assert model(**batch).logits.equal(logits)
        assert generate().equal(generated)
        assert not patches.fallbacks
        kept = model(**without_labels, logits_to_keep=2).logits
        assert kept.equal(logits[:, -2:])


def test_a_softcap_falls_through(batch: dict[str, Tensor]) -> None:
    model = tiny.causal_lm("Gemma2", head_dim=8, final_logit_softcapping=3.0).train()
    assert same(model, batch) == {READS: 1}


@pytest.mark.parametrize("options", [{"label_smoothing": 0.1}, {"weight": torch.rand(64)}], ids=["smoothing", "weight"])
def test_another_loss_falls_through(options: dict[str, Any], batch: dict[str, Tensor]) -> None:
    model = tiny.causal_lm().train()

    def loss_function(logits: Any, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
        return functional.cross_entropy(logits.view(-1, vocab_size), labels.view(-1), **options)

    model.loss_function = loss_function
    assert same(model, batch) == {READS: 1}


def test_tuples_hold_the_logits(batch: dict[str, Tensor]) -> None:
    model = tiny.causal_lm().train()
    theirs = model(**batch, return_dict=False)
    with apply_to(model) as patches:
        mine = model(**batch, return_dict=False)
    close(mine[:2], theirs[:2])
    assert patches.fallbacks == {READS: 1}


def test_a_head_that_is_not_plain_falls_through(batch: dict[str, Tensor], caplog: pytest.LogCaptureFixture) -> None:
    model = tiny.causal_lm().train()
    caplog.set_level(logging.INFO, "areal_core.integrations")
    seen: list[Any] = []
    handle = model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output))
    assert same(model, batch) == {"hooks on the output embedding": 1}
    assert all(isinstance(x, Tensor) for x in seen)
    handle.remove()
    model.lm_head.weight.ds_id = 1
    with apply_to(model) as patches:
        model(**batch)
        model(**batch)
    assert patches.fallbacks == {"a sharded or special parameter": 2}
    said = [x.getMessage() for x in caplog.records]
    assert said.count("the training loss computes logits (a sharded or special parameter)") == 1


def test_another_model_that_runs_inside_gives_its_logits(batch: dict[str, Tensor]) -> None:
    student, teacher, seen = tiny.causal_lm().train(), tiny.causal_lm(num_hidden_layers=1).train(), []
    student.model.register_forward_hook(lambda *_: seen.append(teacher(batch["input_ids"]).logits))
    with apply_to(student), apply_to(teacher):
        assert student(**batch).logits is None
    close(seen[0], teacher(batch["input_ids"]).logits)


def test_a_compiled_model_computes_logits(batch: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.causal_lm().train()
    with apply_to(model):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert model(**batch).logits is not None


# -- the model as an object -------------------------------------------------------------------------------------------


def test_undo_restores_the_model(batch: dict[str, Tensor], caplog: pytest.LogCaptureFixture) -> None:
    model = tiny.causal_lm().train()
    before = (set(vars(model)), set(vars(model.lm_head)))
    with caplog.at_level(logging.INFO, "areal_core.integrations"):
        patches = apply_to(model)
    assert [x.getMessage() for x in caplog.records] == ["Qwen2ForCausalLM: the training loss computes no logits"]
    with pytest.raises(PatchError, match="expected the model with the forward of its class"):
        apply_to(model)
    assert model(**batch).logits is None
    patches.undo()
    patches.undo()
    assert (set(vars(model)), set(vars(model.lm_head))) == before
    assert model(**batch).logits is not None
    with pytest.raises(RuntimeError, match="boom"), apply_to(model):
        raise RuntimeError("boom")
    assert model(**batch).logits is not None


def test_undo_under_another_wrapper_leaves_it_without_effect(batch: dict[str, Tensor]) -> None:
    model = tiny.causal_lm().train()
    patches = apply_to(model)
    inner = model.forward
    model.forward = lambda **inputs: inner(**inputs)  # as accelerate does for mixed precision
    patches.undo()
    assert model(**batch).logits is not None
    assert "forward" not in vars(model.lm_head)
    del model.forward
    with apply_to(model):
        inner, of_head = model.forward, model.lm_head.forward
        model.forward, model.lm_head.forward = lambda **inputs: inner(**inputs), lambda hidden: of_head(hidden)
    assert model(**batch).logits is not None


def test_a_pickled_model_comes_back_as_its_class_has_it(batch: dict[str, Tensor]) -> None:
    model = tiny.causal_lm().train()
    expected = model(**batch).loss
    with apply_to(model):
        loaded = pickle.loads(pickle.dumps(model))
    outputs = loaded(**batch)
    close(outputs.loss, expected)
    assert outputs.logits is not None
    with apply_to(loaded):
        assert loaded(**batch).logits is None


def test_labels_by_position(batch: dict[str, Tensor]) -> None:
    model = tiny.causal_lm().train()
    arguments = (batch["input_ids"], batch["attention_mask"], None, None, None, batch["labels"])
    expected = model(*arguments).loss
    with apply_to(model) as patches:
        outputs = model(*arguments)
    close(outputs.loss, expected)
    assert outputs.logits is None
    assert not patches.fallbacks


def test_a_head_that_is_replaced_later_falls_through(batch: dict[str, Tensor]) -> None:
    model = tiny.causal_lm().train()
    with apply_to(model) as patches:
        model.set_output_embeddings(torch.nn.Linear(32, 64))
        outputs = model(**batch)
        assert patches.fallbacks == {"the output embedding has been replaced, or its forward": 1}
    close(outputs.loss, model(**batch).loss)
    assert outputs.logits is not None


def test_a_copy_is_a_model_of_its_own(batch: dict[str, Tensor]) -> None:
    model = tiny.causal_lm().train()
    with apply_to(model):
        twin = copy.deepcopy(model)
        twin(**batch).loss.backward()
        assert all(x.grad is None for x in model.parameters())
        assert all(x.grad is not None for x in twin.parameters())
        names = model.state_dict().keys()
    assert names == model.state_dict().keys()
    assert twin(**batch).logits is None, "undo is for the model it was asked for"


@pytest.mark.parametrize("model", [torch.nn.Linear(2, 2), "a name"], ids=["layer", "text"])
def test_what_is_no_language_model_is_refused(model: Any) -> None:
    with pytest.raises(TypeError, match="apply_to: expected a model whose get_output_embeddings"):
        apply_to(model)


def test_a_model_without_labels_is_refused() -> None:
    class Scorer(torch.nn.Module):
        def get_output_embeddings(self) -> torch.nn.Linear:
            return torch.nn.Linear(2, 2)

        def forward(self, input_ids: Tensor) -> None: ...

    with pytest.raises(TypeError, match=r"whose forward takes labels .* got Scorer with Linear"):
        apply_to(Scorer())


def test_a_head_of_another_kind_is_refused() -> None:
    class Adapted(torch.nn.Linear):
        pass

    model = tiny.causal_lm()
    model.lm_head = Adapted(32, 64)
    with pytest.raises(TypeError, match="got Qwen2ForCausalLM with Adapted"):
        apply_to(model)


# -- Trainer ----------------------------------------------------------------------------------------------------------


class Prompts(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences of 12 tokens; the first few are not learnt."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids = torch.arange(12) * (i + 3) % 61 + 2
        return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(12) < i % 5, -100)}


def train(folder: Any, patched: bool, **options: Any) -> tuple[list[dict[str, Any]], dict[str, Tensor], dict[str, int]]:
    from transformers import Trainer, TrainingArguments

    model = tiny.causal_lm(tie_word_embeddings=True)
    fallbacks = apply_to(model) if patched else None
    common = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "max_steps": 4,
        "learning_rate": 0.1,
        "optim": "sgd",
        "use_cpu": True,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 3,
    }
    trainer = Trainer(model=model, args=TrainingArguments(**common | options), train_dataset=Prompts())
    trainer.train()
    history = [*trainer.state.log_history, trainer.evaluate(Prompts())]
    parameters = {name: x.clone() for name, x in model.state_dict().items()}
    return history, parameters, {} if fallbacks is None else fallbacks.fallbacks


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_accumulation_steps": 2}, {"label_smoothing_factor": 0.1}, {"gradient_checkpointing": True}],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_a_trainer_gives_the_same_losses_and_parameters(options: dict[str, Any], tmp_path: Any) -> None:
    pytest.importorskip("accelerate", reason="accelerate, which a Trainer needs, is not installed")
    theirs = train(tmp_path, False, **options)
    mine = train(tmp_path, True, **options)
    for step, expected in zip(mine[0], theirs[0], strict=True):
        for key in {"loss", "grad_norm", "train_loss", "eval_loss"} & expected.keys():
            assert step[key] == pytest.approx(expected[key], rel=1e-5), (key, step)
            assert math.isfinite(step[key])
    close(mine[1], theirs[1])
    assert not mine[2]


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_in_bfloat16_computes_no_logits(tmp_path: Any) -> None:
    pytest.importorskip("accelerate", reason="accelerate, which a Trainer needs, is not installed")
    exact = train(tmp_path, True, max_steps=2)
    mine = train(tmp_path, True, bf16=True, max_steps=2)
    assert [x["loss"] for x in mine[0][:2]] == pytest.approx([x["loss"] for x in exact[0][:2]], rel=0.02)
    assert not mine[2]
