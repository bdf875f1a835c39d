from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from areal_core.model import Tokenizer, load_tokenizer

CHARACTERS = "0123456789+-*=;,() "


@pytest.fixture(scope="module")
def characters() -> Tokenizer:
    return Tokenizer.from_characters(CHARACTERS, vocab_size=32)


def byte_level(directory: Path, config: dict[str, object]) -> None:
    """A small byte-level BPE in the files a real model comes with."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|end|>", "<|pad|>"], initial_alphabet=alphabet)
    backend.train_from_iterator(["the quick brown fox", "the answer is the question"], trainer)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def test_special_tokens_and_size(characters: Tokenizer) -> None:
    assert (characters.pad_token_id, characters.bos_token_id, characters.eos_token_id) == (0, 1, 2)
    assert characters.vocab_size == 32
    assert characters.encode("07") == [1, 3, 10]
    assert characters.encode("07", special=False) == [3, 10]


@given(st.text(alphabet=CHARACTERS))
def test_encode_then_decode_gives_the_text(text: str) -> None:
    tokenizer = Tokenizer.from_characters(CHARACTERS, vocab_size=32)
    assert tokenizer.decode([*tokenizer.encode(text), 2]) == text
    assert len(tokenizer.encode(text, special=False)) == len(text)


def test_decode_shows_special_tokens_on_request(characters: Tokenizer) -> None:
    assert characters.decode([1, 3, 2], skip_special=False) == "<bos>0<eos>"
    assert [characters.token_text(i) for i in (0, 2, 3, 21)] == ["<pad>", "<eos>", "0", " "]


def test_a_character_outside_the_vocabulary_is_an_error(characters: Tokenizer) -> None:
    with pytest.raises(ValueError, match="7x"):
        characters.encode("7x")


@pytest.mark.parametrize(("text", "size"), [("aba", 32), ("abc", 5)])
def test_characters_that_do_not_fit_are_refused(text: str, size: int) -> None:
    with pytest.raises(ValueError, match=repr(text)):
        Tokenizer.from_characters(text, vocab_size=size)


def test_save_then_load(tmp_path: Path, characters: Tokenizer) -> None:
    characters.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode("7*3+5=") == characters.encode("7*3+5=")
    assert (loaded.pad_token_id, loaded.bos_token_id, loaded.eos_token_id) == (0, 1, 2)


def test_transformers_loads_what_we_save(tmp_path: Path, characters: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    characters.save(tmp_path)
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert peer("7*3+5=")["input_ids"] == characters.encode("7*3+5=")
    assert (peer.pad_token_id, peer.bos_token_id, peer.eos_token_id) == (0, 1, 2)


def test_a_byte_level_tokenizer(tmp_path: Path) -> None:
    byte_level(tmp_path, {"eos_token": {"content": "<|end|>"}, "pad_token": "<|pad|>", "bos_token": None})
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (0, 1, None)
    text = "the naïve fox: 狐"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.token_text(tokenizer.encode("狐")[0]) == "\ufffd"


def test_special_tokens_by_id_from_the_model_config(tmp_path: Path) -> None:
    byte_level(tmp_path, {})
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [0, 1], "pad_token_id": 1}))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1)


@pytest.mark.parametrize(
    ("config", "model", "message"),
    [({"eos_token": "<nope>"}, {}, "<nope>"), ({}, {"eos_token_id": 100000}, "100000")],
)
def test_a_special_token_outside_the_vocabulary_is_an_error(
    tmp_path: Path, config: dict[str, object], model: dict[str, object], message: str
) -> None:
    byte_level(tmp_path, config)
    (tmp_path / "config.json").write_text(json.dumps(model))
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
