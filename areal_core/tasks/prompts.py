"""From what a dataset holds, a text or a list of messages, to the prompt put before the model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

__all__ = ["ChatTemplate", "Message", "PromptFormat"]

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


class PromptFormat:
    """How prompts are written.

    template: a text that holds "{prompt}" (other braces stand for themselves), put around a text prompt or around the
        last message.
    chat_template: a Hugging Face model directory (chat_template.jinja or tokenizer_config.json), or a .jinja file. A
        text prompt becomes its user message, and the template writes the special tokens.
    system_prompt: the first message, where a list of messages has none; needs chat_template.
    chat_template_options: variables of the template, such as enable_thinking.
    Raises: ValueError naming the option that is wrong; FileNotFoundError.
    """

    def __init__(
        self,
        template: str | None = None,
        chat_template: str | Path | None = None,
        system_prompt: str | None = None,
        chat_template_options: Mapping[str, Any] | None = None,
    ) -> None:
        if template is not None and "{prompt}" not in template:
            raise ValueError(f'template: expected a text that holds "{{prompt}}", got {template!r}')
        for name, value in (("system_prompt", system_prompt), ("chat_template_options", chat_template_options)):
            if value and chat_template is None:
                raise ValueError(f"{name}: expected null without chat_template, got {value!r}")
        self._template = template
        self._system_prompt = system_prompt
        self.chat = ChatTemplate(chat_template, chat_template_options or {}) if chat_template is not None else None

    def render(self, content: str | Sequence[Message]) -> str:
        """The prompt. Raises ValueError for messages that cannot be written, with what was expected."""
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else check_messages(content)
        if self._template is not None:
            last = messages[-1]
            messages = [*messages[:-1], {**last, "content": self._template.replace("{prompt}", last["content"])}]
        if self.chat is None:
            if len(messages) > 1 or messages[0]["role"] != "user":
                raise ValueError(f"expected option chat_template for a prompt of {len(messages)} messages, got null")
            return str(messages[0]["content"])
        if self._system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._system_prompt}, *messages]
        return self.chat.render(messages)


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages of a prompt. Raises ValueError unless each has role and text, and the last is no assistant's."""
    for message in messages:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise ValueError(f"expected messages with a text each under role and content, got {_short(message)}")
    if not messages or messages[-1]["role"] == "assistant":
        last = _short(messages[-1]) if messages else "none"
        raise ValueError(f"expected a last message that asks, got {last}")
    return [dict(message) for message in messages]


class ChatTemplate:
    """The Jinja template that a tokenizer brings, rendered as Hugging Face's libraries do.

    Raises: FileNotFoundError; ValueError for a directory without a template and for a template with an error.
    """

    def __init__(self, path: str | Path, options: Mapping[str, Any]) -> None:
        source, self._special = _read_template(Path(path))
        self._path, self._options = path, dict(options)
        from jinja2 import TemplateError

        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise ValueError(f"chat_template: {path}: {error}") from None

    def render(self, messages: Sequence[Message]) -> str:
        """The text of the conversation, up to where the assistant begins. Raises ValueError if the template refuses."""
        variables = {"tools": None, "documents": None, "add_generation_prompt": True, **self._special, **self._options}
        try:
            return str(self._template.render(messages=messages, **variables))
        except Exception as error:  # a template runs code of its own
            raise ValueError(f"chat_template: {self._path}: {type(error).__name__}: {error}") from None


def _environment() -> Any:
    """Sandboxed, with what templates of Hugging Face models may use beyond plain Jinja."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks the assistant's tokens for training; in a prompt it means nothing."""

        tags = {"generation"}  # noqa: RUF012 (jinja2's own convention)

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, indent: int | None = None, **more: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, **more)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals.update(raise_exception=refuse, strftime_now=lambda form: datetime.now().strftime(form))
    return environment


def _read_template(path: Path) -> tuple[str, dict[str, str]]:
    """Source of the template, and the special tokens it may name."""
    if path.is_file():
        return path.read_text(encoding="utf-8"), {}
    if not path.is_dir():
        raise FileNotFoundError(f"chat_template: expected a model directory or a .jinja file, got {str(path)!r}")
    config_file, template_file = path / "tokenizer_config.json", path / "chat_template.jinja"
    try:
        config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.is_file() else {}
    except ValueError as error:
        raise ValueError(f"chat_template: {config_file}: not valid JSON: {error}") from None
    special = {name: config[name] for name in _SPECIAL if config.get(name) is not None}
    special = {name: token["content"] if isinstance(token, dict) else token for name, token in special.items()}
    if template_file.is_file():
        return template_file.read_text(encoding="utf-8"), special
    source = config.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = {entry.get("name"): entry.get("template") for entry in source}.get("default")
    if not isinstance(source, str):
        raise ValueError(
            f"chat_template: expected one in chat_template.jinja or tokenizer_config.json of {path}, got none"
        )
    return source, special


def _short(value: Any) -> str:
    return repr(value)[:80]
