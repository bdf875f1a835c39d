"""Layouts as JSON, from anywhere: a changed text is a layout that writes itself the same way again, or a ValueError."""

from __future__ import annotations

import os
import random

import torch
from test_control import mutate

from areal_core.reshard.layout import Layout, TensorLayout
from areal_core.reshard.placements import Mesh, Replicate, Shard
from areal_core.reshard.spec import Spec


def corpus() -> list[bytes]:
    mesh = Mesh((0, 1, 2, 3), (2, 2), ("dp", "tp"))
    tensors = {
        "a.weight": TensorLayout(Spec(torch.bfloat16, (10, 6)), mesh, (Replicate(), Shard(0))),
        "b": TensorLayout(Spec(torch.float8_e4m3fn, ()), mesh, (Replicate(), Replicate())),
    }
    return [Layout(tensors).to_json().encode(), Layout({}).to_json().encode()]


def test_fuzzed_layouts_are_valid_or_refused() -> None:
    rng = random.Random(int(os.environ.get("AREAL_FUZZ_SEED", "1")))
    texts, valid, refused = corpus(), 0, 0
    for _ in range(int(os.environ.get("AREAL_FUZZ_ROUNDS", "10000"))):
        text = mutate(rng.choice(texts), rng)
        try:
            layout = Layout.from_json(text)
        except ValueError:
            refused += 1
            continue
        valid += 1
        assert Layout.from_json(layout.to_json()).digest == layout.digest
        if rng.random() < 0.1 and len(texts) < 300:
            texts.append(text)
    assert valid > 10
    assert refused > 1000
