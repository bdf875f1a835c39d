"""Tokenizers: Hugging Face's tokenizer.json, and a character-level one for small tasks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

_FILE, _CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
_SPECIAL = ("bos_token", "eos_token", "pad_token")


class Tokenizer:
    """Text to token ids and back, on the `tokenizers` library.

    backend: the tokenizer of the library; its post-processor decides what `encode` adds (usually <bos>).
    special: text of "bos_token", "eos_token" and "pad_token", as far as there are such tokens.
    Raises: ValueError when the vocabulary lacks a special token.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special: dict[str, str]) -> None:
        for role, text in special.items():
            if role not in _SPECIAL:
                raise ValueError(f"Tokenizer: expected one of {', '.join(_SPECIAL)}, got {role!r}")
            if backend.token_to_id(text) is None:
                raise ValueError(f"Tokenizer: expected {role} {text!r} in the vocabulary, where it is missing")
        self._backend = backend
        self._special = dict(special)

    @classmethod
    def from_characters(cls, characters: str, vocab_size: int) -> Tokenizer:
        """One token a character: <pad> 0, <bos> 1, <eos> 2, then `characters`, then unused ids up to `vocab_size`.

        `encode` puts <bos> first and raises ValueError for a character that is no token.
        """
        special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
        tokens = [*special.values(), *characters]
        if len(set(tokens)) != len(tokens) or len(tokens) > vocab_size:
            raise ValueError(f"Tokenizer: expected at most {vocab_size - 3} different characters, got {characters!r}")
        tokens += [f"<unused{i}>" for i in range(len(tokens), vocab_size)]
        backend = tokenizers.Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}))
        backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
        backend.decoder = decoders.Fuse()
        backend.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 1)])
        backend.add_special_tokens(list(special.values()))
        return cls(backend, special)

    @property
    def vocab_size(self) -> int:
        """The number of token ids, added tokens included."""
        return int(self._backend.get_vocab_size())

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a sequence."""
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a sequence."""
        return self._special_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        """The token that fills padding."""
        return self._special_id("pad_token")

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of `text`; with `special`, also those the tokenizer adds around it (usually <bos>)."""
        try:
            return list(self._backend.encode(text, add_special_tokens=special).ids)
        except Exception as error:  # the library raises nothing more specific
            raise ValueError(f"Tokenizer: cannot encode {text!r}: {error}") from error

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; special tokens vanish unless `skip_special` is False."""
        return str(self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_special))

    def token_text(self, token_id: int) -> str:
        """What to show for one token: special tokens by name, part of a UTF-8 character as U+FFFD."""
        return self.decode([token_id], skip_special=False)

    def save(self, directory: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json into an existing directory."""
        directory = Path(directory)
        self._backend.save(str(directory / _FILE))
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **self._special}
        config["clean_up_tokenization_spaces"] = False
        (directory / _CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def _special_id(self, role: str) -> int | None:
        return self._backend.token_to_id(self._special[role]) if role in self._special else None


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """Read tokenizer.json, and the special tokens from tokenizer_config.json (or config.json, by id).

    Raises: FileNotFoundError without a tokenizer.json; ValueError when a special token is not in the vocabulary.
    """
    directory = Path(directory)
    if not (directory / _FILE).exists():
        raise FileNotFoundError(f"{directory}: expected {_FILE}, which is missing")
    backend = tokenizers.Tokenizer.from_file(str(directory / _FILE))
    named, by_id = _read_json(directory / _CONFIG_FILE), _read_json(directory / "config.json")
    special: dict[str, str] = {}
    for role in _SPECIAL:
        value, token_id = named.get(role), by_id.get(f"{role}_id")
        if value is not None:
            special[role] = value["content"] if isinstance(value, dict) else value
        elif token_id is not None:
            special[role] = _token_of(backend, token_id[0] if isinstance(token_id, list) else token_id, role)
    return Tokenizer(backend, special)


def _token_of(backend: tokenizers.Tokenizer, token_id: int, role: str) -> str:
    text: str | None = backend.id_to_token(token_id)
    if text is None:
        raise ValueError(f"load_tokenizer: expected {role}_id {token_id} in the vocabulary, where it is missing")
    return text


def _read_json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
