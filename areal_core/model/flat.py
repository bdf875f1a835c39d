"""The flat buffer of a decoder's parameters, and the matrices that a forward pass cuts out of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from areal_core.model.config import DecoderConfig


class Block(NamedTuple):
    """The weights of one layer, those that multiply the same input side by side."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Weights(NamedTuple):
    """The weights of a decoder. With tied embeddings, `head` is `embedding`."""

    embedding: Tensor
    blocks: list[Block]
    final_norm: Tensor
    head: Tensor


def parameter_count(config: DecoderConfig) -> int:
    """The size of the flat buffer."""
    return sum(math.prod(shape) for shape in config.tensor_shapes().values())


def unflatten(flat: Tensor, config: DecoderConfig) -> Weights:
    """Cut the buffer, [parameter_count], in one operation: its backward is one concatenation of the gradients."""
    sizes, shapes = _sections(config)
    section = iter([part.view(shape) for part, shape in zip(flat.split_with_sizes(sizes), shapes, strict=True)])
    embedding = next(section)
    blocks = [_block(section, config) for _ in range(config.num_layers)]
    final_norm = next(section)
    return Weights(embedding, blocks, final_norm, embedding if config.tie_word_embeddings else next(section))


def _block(section: Iterator[Tensor], config: DecoderConfig) -> Block:
    norm, qkv = next(section), next(section)
    bias = next(section) if config.qkv_bias else None
    return Block(norm, qkv, bias, next(section), next(section), next(section), next(section))


@lru_cache
def _sections(config: DecoderConfig) -> tuple[list[int], list[tuple[int, ...]]]:
    """Sizes and shapes in the order of the buffer: those of `tensor_shapes` with neighbours merged."""
    hidden, qkv = config.hidden_size, config.q_size + 2 * config.kv_size
    block: list[tuple[int, ...]] = [(hidden,), (qkv, hidden)]
    block += [(qkv,)] if config.qkv_bias else []
    block += [(hidden, config.q_size), (hidden,)]
    block += [(2 * config.intermediate_size, hidden), (hidden, config.intermediate_size)]
    embedding = (config.vocab_size, hidden)
    head = [] if config.tie_word_embeddings else [embedding]
    shapes = [embedding, *block * config.num_layers, (hidden,), *head]
    return [math.prod(shape) for shape in shapes], shapes
