"""Padded batches of every layout, for the tests of packing."""

from typing import Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

Layout = tuple[list[int], int, Literal["right", "left"]]
MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 1, 1, 1]])


def make_mask(lengths: list[int], width: int, padding: str) -> Tensor:
    column, length = torch.arange(width), torch.tensor(lengths, dtype=torch.int64)[:, None]
    return column < length if padding == "right" else column >= width - length


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    width = draw(st.integers(0, 9))
    lengths = draw(st.lists(st.integers(0, width), max_size=7))
    return lengths, width, draw(st.sampled_from(["right", "left"]))
