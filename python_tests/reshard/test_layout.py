"""Layouts: storage, digests, errors, and the JSON form against everything that may come in its place."""

import json
from typing import Any

import pytest
import torch
import torch.distributed.tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import layouts
from torch import Tensor

from areal_core.reshard import (
    Flat,
    Layout,
    Mesh,
    Ragged,
    Region,
    Replicate,
    Shard,
    Spec,
    Storage,
    StridedShard,
    TensorLayout,
)

HIDDEN = 6


def line(ranks: int) -> Mesh:
    return Mesh(range(ranks), (ranks,), ("tp",))


def sharded(shape: tuple[int, ...], mesh: Mesh, storage: Storage, dim: int = 0) -> TensorLayout:
    return TensorLayout(Spec(torch.int64, shape), mesh, (Shard(dim),), storage)


def fill(layout: Layout, rank: int, full: dict[str, Tensor]) -> dict[str, Tensor]:
    """The buffers of a rank by its regions; -1 where no tensor is."""
    buffers = {name: torch.full(spec.shape, -1, dtype=spec.dtype) for name, spec in layout.buffers(rank).items()}
    for region in layout.regions(rank):
        index = tuple(slice(start, start + size) for start, size in zip(*region.box, strict=True))
        region.view(buffers[region.buffer]).copy_(full[region.tensor][index])
    return buffers


def test_qkv_of_megatron_is_grouped_and_that_of_vllm_stacked() -> None:
    """Qwen2.5-7B's proportions: 28 query and 4 KV heads, here of size 2, over 2 ranks."""
    head, heads, kv_heads, tp = 2, 28, 4, 2
    per_group = heads // kv_heads * head
    full = {
        "q": torch.arange(heads * head * HIDDEN).reshape(-1, HIDDEN),
        "k": 10_000 + torch.arange(kv_heads * head * HIDDEN).reshape(-1, HIDDEN),
        "v": 20_000 + torch.arange(kv_heads * head * HIDDEN).reshape(-1, HIDDEN),
    }
    rows = {"q": per_group, "k": head, "v": head}
    shape = ((heads + 2 * kv_heads) * head // tp, HIDDEN)
    grouped, stacked, before = {}, {}, 0
    for name, group_rows in rows.items():
        megatron = Storage(
            "linear_qkv.weight", shape, before * HIDDEN, None, group_rows, (per_group + 2 * head) * HIDDEN
        )
        vllm = Storage("qkv_proj.weight", shape, before * kv_heads // tp * HIDDEN)
        grouped[name] = sharded(tuple(full[name].shape), line(tp), megatron)
        stacked[name] = sharded(tuple(full[name].shape), line(tp), vllm)
        before += group_rows
    for rank in range(tp):
        groups = [full[name].reshape(kv_heads, -1, HIDDEN) for name in rows]
        expected = torch.cat(groups, 1)[rank * 2 : rank * 2 + 2].reshape(-1, HIDDEN)
        assert torch.equal(fill(Layout(grouped), rank, full)["linear_qkv.weight"], expected)
        expected = torch.cat([full[name].chunk(tp)[rank] for name in rows])
        assert torch.equal(fill(Layout(stacked), rank, full)["qkv_proj.weight"], expected)
        assert Layout(stacked).padded_buffers(rank) == frozenset()


def test_padding_is_named() -> None:
    """151 rows in 8 shards of 20: the last holds 11 of them."""
    storage = Storage("word_embeddings", (20, HIDDEN))
    layout = Layout({"embed": TensorLayout(Spec(torch.int64, (151, HIDDEN)), line(8), (Shard(0, 20),), storage)})
    assert [layout.padded_buffers(rank) for rank in (0, 7)] == [frozenset(), {"word_embeddings"}]
    full = {"embed": torch.arange(151 * HIDDEN).reshape(151, HIDDEN)}
    last = fill(layout, 7, full)["word_embeddings"]
    assert torch.equal(last[:11], full["embed"][140:])
    assert bool((last[11:] == -1).all())


def test_regions_name_tensor_buffer_and_strides() -> None:
    storage = Storage("fused", (4, 10), offset=3, strides=(10, 1))
    layout = Layout({"w": sharded((8, 5), line(2), storage)})
    (region,) = layout.regions(1)
    assert region == Region("w", ((4, 0), (4, 5)), "fused", 3, (10, 1))
    buffer = torch.zeros(50)[10:].view(4, 10)  # a buffer may start anywhere in its memory
    region.view(buffer).fill_(1)
    assert buffer.sum() == buffer[:, 3:8].sum() == 20


def test_layouts_are_values() -> None:
    tensors = {"b": sharded((4,), line(2), Storage()), "a": sharded((4, 2), line(2), Storage(), 1)}
    layout = Layout(tensors)
    other = Layout(dict(sorted(tensors.items())))
    assert other == layout
    assert (other.digest, hash(other), list(other.tensors)) == (layout.digest, hash(layout), ["a", "b"])
    assert layout.ranks == (0, 1)
    changed = Layout({**tensors, "a": sharded((4, 2), line(2), Storage(), 0)})
    assert changed != layout
    assert changed.digest != layout.digest
    assert Layout({}).ranks == ()


@pytest.mark.parametrize(
    ("storage", "message"),
    [
        (Storage("b", (9,)), "tensor 'w' on rank 0: expected storage within buffer 'b' of shape \\[9\\]"),
        (Storage("b", (20,), offset=-1), "tensor 'w': expected storage with offset in"),
        (Storage("b", (20,), strides=(5,)), "tensor 'w': expected storage with 2 strides"),
        (Storage("b", (20,), strides=(0, 1)), "tensor 'w' on rank 0: expected strides that lay elements apart"),
        (Storage("b", (20,), group_stride=3), "tensor 'w': .* without group_stride"),
        (Storage("b", (30,), group_rows=1, group_stride=2), "tensor 'w' on rank 0: .* overlap with tensor 'w'"),
    ],
)
def test_storage_that_does_not_fit_is_refused(storage: Storage, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout({"w": sharded((4, 5), line(2), storage)}).buffers(0)


def test_overlapping_tensors_and_unlike_buffers_are_refused() -> None:
    def two(second: Storage, dtype: torch.dtype = torch.int64) -> Layout:
        other = TensorLayout(Spec(dtype, (2,)), line(1), (Replicate(),), second)
        return Layout({"a": sharded((2,), line(1), Storage("b", (4,))), "z": other})

    with pytest.raises(ValueError, match=r"tensor 'z' on rank 0: expected storage of its own in buffer 'b'.*'a'"):
        two(Storage("b", (4,), 1)).regions(0)
    with pytest.raises(ValueError, match="tensor 'z' on rank 0: expected buffer 'b' of shape \\[4\\]"):
        two(Storage("b", (5,), 2)).padded_buffers(0)
    with pytest.raises(ValueError, match="tensor 'z' on rank 0: expected buffer 'b' of dtype int64"):
        two(Storage("b", (4,), 2), torch.float64).buffers(0)


def test_what_is_of_another_type_is_refused() -> None:
    spec, mesh = Spec(torch.float32, (4,)), Mesh((0,), (1,), ("tp",))
    for tensors, error, message in (
        (
            {"w": TensorLayout(spec, mesh, (torch.distributed.tensor.Shard(0),))},
            TypeError,
            "'w': expected placements of",
        ),
        ({3: TensorLayout(spec, mesh, (Shard(0),))}, TypeError, "names of type str, got int"),
        ({"\ud800": TensorLayout(spec, mesh, (Shard(0),))}, ValueError, "names without surrogates"),
        ({"w": TensorLayout(spec, mesh, (Shard(0),), Storage(7))}, TypeError, "'w': expected a buffer of type str"),
        ({"w": TensorLayout(Spec(torch.float32, (4.0,)), mesh, (Shard(0),))}, TypeError, "'w': expected shape of type"),
        (
            {"w": TensorLayout(Spec(torch.float32, (True,)), mesh, (Shard(0),))},
            TypeError,
            "'w': expected shape of type",
        ),
        (
            {"w": TensorLayout(Spec(torch.float32, (2**63,)), mesh, (Shard(0),))},
            ValueError,
            "'w': expected shape of 64",
        ),
    ):
        with pytest.raises(error, match=message):
            Layout(tensors)  # type: ignore[arg-type]


def test_what_is_no_tensor_of_plain_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="Layout: tensor 'w': expected a dtype of plain bytes, got qint8"):
        Layout({"w": TensorLayout(Spec(torch.qint8, (2,)), line(1), (Replicate(),))})
    with pytest.raises(ValueError, match=r"Layout.boxes: expected a tensor of the layout, got 'v'"):
        Layout({}).boxes("v", 0)


# -- JSON --------------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(layouts())
def test_json_gives_an_equal_layout(layout: Layout) -> None:
    text = layout.to_json()
    read = Layout.from_json(text)
    assert read == layout
    assert read.digest == layout.digest
    assert read.to_json() == text
    assert Layout.from_json(text.encode()) == layout


STORED = Layout(
    {
        "model.w": TensorLayout(
            Spec(torch.bfloat16, (10, 6)),
            Mesh(range(4), (2, 2), ("dp", "tp")),
            (StridedShard(0, 2, 3), Shard(1, 4)),
            Storage("fused", (9, 4), 2, (4, 1), 3, 12),
        ),
        "é": TensorLayout(Spec(torch.float8_e4m3fn, ()), Mesh([7], (1,), ("dp",)), (Flat(4),)),
        "f": TensorLayout(Spec(torch.uint8, (3,)), Mesh([7], (1,), ("dp",)), (Flat(4, 1),), Storage("f", (4,))),
        "r": TensorLayout(Spec(torch.int8, (2, 2)), line(2), (Ragged([[((0, 0), (2, 1))], []]),)),
    }
)


def test_json_keeps_every_field() -> None:
    assert Layout.from_json(STORED.to_json()) == STORED


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value within a JSON value."""
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += places(item, (*path, key))
    return found


PLACES = places(json.loads(STORED.to_json()))
NUMBERS = st.integers() | st.integers(-3, 12) | st.sampled_from([2**31, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30])
LEAVES = (
    st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=6) | st.sampled_from(["shard", "bool", "nn"])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["kind", "dim", "name", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


def put(whole: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    inner = whole
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return whole


def equal_layout_or_value_error(text: str | bytes) -> None:
    """Whatever comes, no other error than ValueError, and no layout that would not come back the same."""
    try:
        layout = Layout.from_json(text)
        for rank in layout.ranks:
            layout.boxes(next(iter(layout.tensors)), rank)
    except ValueError:
        return
    assert Layout.from_json(layout.to_json()) == layout


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(PLACES), VALUES)
def test_any_value_in_any_place_is_a_layout_or_a_value_error(path: tuple[Any, ...], value: Any) -> None:
    equal_layout_or_value_error(json.dumps(put(json.loads(STORED.to_json()), path, value)))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(STORED.to_json().encode()) - 1), st.integers(0, 255), st.booleans())
def test_any_damaged_byte_is_a_layout_or_a_value_error(at: int, byte: int, ends: bool) -> None:
    text = bytearray(STORED.to_json().encode())
    text[at] = byte
    equal_layout_or_value_error(bytes(text[: at + 1] if ends else text))


@settings(max_examples=100, deadline=None)
@given(VALUES | st.binary(max_size=20) | st.text(max_size=20))
def test_any_text_is_a_layout_or_a_value_error(value: Any) -> None:
    equal_layout_or_value_error(value if isinstance(value, (str, bytes)) else json.dumps(value))


@pytest.mark.parametrize("path", [p for p in PLACES if p and isinstance(p[-1], str)], ids=str)
def test_a_missing_or_an_unknown_key_is_refused(path: tuple[Any, ...]) -> None:
    whole = json.loads(STORED.to_json())
    inner = whole
    for key in path[:-1]:
        inner = inner[key]
    value = inner.pop(path[-1])
    optional = {"chunk", "storage", "buffer", "buffer_shape", "offset", "strides", "group_rows", "group_stride"}
    if path[-1] not in optional:  # an optional one alone may be missing, and then says something else
        with pytest.raises(ValueError, match=r"Layout|group_rows"):
            Layout.from_json(json.dumps(whole))
    inner[f"{path[-1]}_"] = value
    with pytest.raises(ValueError, match=r"Layout.from_json: "):
        Layout.from_json(json.dumps(whole))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "shallow JSON|Expecting value"),
        ('{"a":1,"a":1}', "unique keys"),
        ('{"a":NaN}', "expected numbers, got NaN"),
        ("9" * 5000, "Layout.from_json"),
        ("", "Layout.from_json"),
        (b"\xff\xfe\xfd", "Layout.from_json"),
        ("\ud800", "Layout.from_json"),
    ],
)
def test_what_json_itself_allows_too_much_is_refused(text: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout.from_json(text)


def test_a_name_twice_and_half_a_character_are_refused() -> None:
    text = STORED.to_json()
    with pytest.raises(ValueError, match="expected unique names, got 'f' twice"):
        Layout.from_json(text.replace('"name":"r"', '"name":"f"'))
    with pytest.raises(ValueError, match=r"tensors\[1\].name: expected text"):
        Layout.from_json(text.replace("model.w", "\\ud800"))


def test_the_size_is_capped_before_anything_is_read() -> None:
    text = STORED.to_json()
    size = len(text.encode())
    assert Layout.from_json(text, max_bytes=size) == STORED
    for form in (text, text.encode()):
        with pytest.raises(ValueError, match=f"at most {size - 1} bytes, got {size}"):
            Layout.from_json(form, max_bytes=size - 1)


@pytest.mark.parametrize("version", ["2", "true", "1.0", '"1"'])
def test_another_version_is_refused(version: str) -> None:
    text = STORED.to_json().replace('"version":1', f'"version":{version}')
    with pytest.raises(ValueError, match=r"expected format areal_core.layout, version 1"):
        Layout.from_json(text)
