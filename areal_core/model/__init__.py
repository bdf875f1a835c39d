"""The decoder that trainer and generator share, its files, and its tokenizer."""

from areal_core.model.checkpoint import load_model, save_model
from areal_core.model.config import DecoderConfig
from areal_core.model.decoder import PackedDecoder
from areal_core.model.tokenizer import Tokenizer, load_tokenizer
from areal_core.model.value import ValueModel

__all__ = [
    "DecoderConfig",
    "PackedDecoder",
    "Tokenizer",
    "ValueModel",
    "load_model",
    "load_tokenizer",
    "save_model",
]
