from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_core.errors import DataError
from areal_core.model import Tokenizer, load_tokenizer
from areal_core.rl.config import RolloutConfig
from areal_core.rl.workflow import SingleTurnWorkflow
from areal_core.tasks import JsonlTask, Problem
from areal_core.tasks.prompts import PromptFormat

# In the manner of ChatML, with what templates of real models use: loops, conditions, filters, controls, markers.
CHATML = """{{ bos_token }}
{%- for message in messages %}
  {%- if message.role == 'tool' %}{% continue %}{% endif %}
<|{{ message['role'] }}|>
{% generation %}{{ message['content'] | trim }}{% endgeneration %}
{%- if thinking is defined and not thinking %} /no{% endif %}{{ eos_token }}
{%- endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}
<|assistant|>
{% endif %}"""
REFUSING = "{% if messages[0].role == 'system' %}{{ raise_exception('no system prompt') }}{% endif %}{{ bos_token }}"
USER = [{"role": "user", "content": " hi {x} "}]


def model_dir(path: Path, template: str, *, in_config: Any = True) -> Path:
    Tokenizer.from_characters("abcdefghijklmnopqrstuvwxyz|<>/ \n{}", 64).save(path)
    config = json.loads((path / "tokenizer_config.json").read_text())
    config["eos_token"] = {"content": "<eos>", "__type": "AddedToken"}
    if in_config == "list":
        config["chat_template"] = [{"name": "other", "template": "no"}, {"name": "default", "template": template}]
    elif in_config:
        config["chat_template"] = template
    else:
        (path / "chat_template.jinja").write_text(template)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("in_config", [True, False, "list"])
def test_chat_templates_are_found_and_rendered(tmp_path: Path, in_config: Any) -> None:
    chat = PromptFormat(chat_template=model_dir(tmp_path, CHATML, in_config=in_config), system_prompt="be good")
    text = "<bos><|system|>\nbe good<eos><|user|>\nhi {x}<eos><|assistant|>\n"
    assert chat.render(" hi {x} ") == chat.render(USER) == text
    assert chat.render([{"role": "system", "content": "mine"}, *USER]) == text.replace("be good", "mine")


@pytest.mark.parametrize("thinking", [None, False])
def test_transformers_renders_the_same(tmp_path: Path, thinking: bool | None) -> None:
    transformers = pytest.importorskip("transformers")
    options = {} if thinking is None else {"thinking": thinking}
    messages = [{"role": "system", "content": "s"}, {"role": "tool", "content": "t"}, *USER]
    path = model_dir(tmp_path, CHATML)
    peer = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    expected = peer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    assert PromptFormat(chat_template=path, chat_template_options=options).render(messages) == expected


def test_a_template_stands_around_the_prompt() -> None:
    plain = PromptFormat("Q: {prompt}\nAnswer in \\boxed{}.")
    assert plain.render("1{+}1") == "Q: 1{+}1\nAnswer in \\boxed{}."
    assert plain.render(USER) == "Q:  hi {x} \nAnswer in \\boxed{}."


def test_a_template_stands_around_the_last_message(tmp_path: Path) -> None:
    chat = PromptFormat("<{prompt}>", chat_template=model_dir(tmp_path, CHATML))
    assert "\n<a><eos>" in chat.render("a")
    assert "\na<eos>" in chat.render([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"template": "no place"}, 'template: expected a text that holds "{prompt}"'),
        ({"system_prompt": "x"}, "system_prompt: expected null without chat_template"),
        ({"chat_template_options": {"a": 1}}, "chat_template_options: expected null without chat_template"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        PromptFormat(**options)


def test_missing_and_broken_templates_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"chat_template: expected a model directory or a .jinja file"):
        PromptFormat(chat_template=tmp_path / "gone")
    with pytest.raises(
        ValueError, match=r"chat_template: expected one in chat_template.jinja or tokenizer_config.json"
    ):
        PromptFormat(chat_template=tmp_path)
    (tmp_path / "broken.jinja").write_text("{% if %}")
    with pytest.raises(ValueError, match=r"broken.jinja: "):
        PromptFormat(chat_template=tmp_path / "broken.jinja")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        PromptFormat(chat_template=tmp_path)


@pytest.mark.parametrize("source", ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ 1 // 0 }}"])
def test_a_template_cannot_do_harm(tmp_path: Path, source: str) -> None:
    (tmp_path / "bad.jinja").write_text(source)
    with pytest.raises(ValueError, match=r"chat_template: .*bad.jinja: \w+Error: "):
        PromptFormat(chat_template=tmp_path / "bad.jinja").render("x")


def test_a_template_that_refuses_names_the_record(tmp_path: Path) -> None:
    record = {"messages": [{"role": "system", "content": "s"}, *USER], "answer": "1"}
    (tmp_path / "data.jsonl").write_text(json.dumps(record))
    with pytest.raises(DataError, match=r"data.jsonl:1: 'messages': chat_template: .* no system prompt"):
        JsonlTask(tmp_path / "data.jsonl", chat_template=model_dir(tmp_path, REFUSING))


def test_special_tokens_are_written_once(tmp_path: Path) -> None:
    path = model_dir(tmp_path, "{{ bos_token }}{{ messages[0].content }}")
    (tmp_path / "data.jsonl").write_text('{"prompt": "ab", "answer": "1"}\n')
    tokenizer = load_tokenizer(path)
    for task in (JsonlTask(tmp_path / "data.jsonl", chat_template=path), JsonlTask(tmp_path / "data.jsonl")):
        flow = SingleTurnWorkflow(task, tokenizer, RolloutConfig(), max_context=12, max_new_tokens=4)
        ids = flow.prompt_ids(task.problem(0))
        assert ids.tolist() == [tokenizer.bos_token_id, *tokenizer.encode("ab", special=False)]
    assert Problem("x", "", "").special_tokens
    assert ids.dtype == np.int32
