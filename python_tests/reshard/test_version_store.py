"""VersionStore in one process: what is published is what is read, and nothing else is."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_core.errors import ClosedError, CorruptedError, DeadlineError
from areal_core.reshard import Spec, VersionStore

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The tensor's bytes in row-major order, NaN payloads and all."""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def random_bytes_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Every bit pattern the dtype can hold may occur (bool: 0 and 1 only)."""
    count = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    data = torch.randint(0, high, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(shape)


def same_bytes(store: VersionStore, tensors: dict[str, torch.Tensor]) -> bool:
    with store.pin(timeout=5.0) as snapshot:
        got = snapshot.tensors
        assert got.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert got[name].dtype == tensor.dtype
            assert got[name].shape == tensor.shape
        snapshot.checksum()
        return all(raw_bytes(got[name]) == raw_bytes(tensors[name]) for name in tensors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (31,), (33,), (3, 0, 5), (7, 11, 13), (257, 129)], ids=str)
def test_every_dtype_and_size_is_bit_exact(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensors = {"x": random_bytes_tensor(dtype, shape, 1), "neighbour": random_bytes_tensor(torch.uint8, (5,), 2)}
    with VersionStore.create(tensors) as store:
        store.publish(tensors, 0)
        assert same_bytes(store, tensors)


SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@settings(max_examples=60, deadline=None)
@given(
    specs=st.dictionaries(st.text(min_size=1, max_size=8), st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=12),
    chunk_units=st.integers(1, 8),
    reverse=st.booleans(),
)
def test_any_set_of_tensors_survives_any_chunking(
    specs: dict[str, tuple[torch.dtype, tuple[int, ...]]], chunk_units: int, reverse: bool
) -> None:
    tensors = {name: random_bytes_tensor(d, s, i) for i, (name, (d, s)) in enumerate(specs.items())}
    with VersionStore.create(tensors, chunk_bytes=64 * chunk_units) as store:
        stats = store.publish(dict(reversed(tensors.items())) if reverse else tensors, 3)
        assert stats.bytes == stats.bound_bytes == sum(t.nbytes for t in tensors.values())
        assert same_bytes(store, tensors)


def test_bf16_nan_payloads_survive() -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    tensors = {"w": patterns.view(torch.bfloat16)}
    with VersionStore.create(tensors) as store:
        store.publish(tensors, 0)
        with store.pin() as snapshot:
            assert torch.equal(snapshot.tensors["w"].view(torch.int16), patterns)


def test_several_threads_copy_and_verify_large_tensors() -> None:
    tensors = {f"w{i}": random_bytes_tensor(torch.bfloat16, (3_000_001,), i) for i in range(4)}
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with VersionStore.create(tensors) as store:
            assert store.publish(tensors, 0, verify=True).bytes == 4 * 2 * 3_000_001
            assert same_bytes(store, tensors)
    finally:
        torch.set_num_threads(threads)


def test_strided_conjugated_and_gradient_tensors_are_published_as_they_read() -> None:
    base = torch.randn(6, 8, requires_grad=True)
    tensors = {
        "transposed": base.t(),
        "sliced": base[::2, 1::3],
        "expanded": torch.randn(4, 1).bfloat16().expand(4, 5),
        "conjugated": torch.randn(4, dtype=torch.complex64).conj(),
        "negated": torch.randn(4, dtype=torch.complex64).conj().imag,
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "overlapping": torch.arange(10.0).as_strided((4, 3), (1, 2)),
    }
    with VersionStore.create(tensors) as store:
        store.publish(tensors, 0, verify=True)
        with store.pin() as snapshot:
            for name, tensor in tensors.items():
                assert torch.equal(snapshot.tensors[name], tensor.detach()), name
                assert not snapshot.tensors[name].requires_grad


def test_copy_into_fills_tensors_of_any_layout() -> None:
    tensors = {f"w{i}": random_bytes_tensor(torch.float32, (5, 7), i) for i in range(5)} | {"empty": torch.empty(0, 2)}
    targets = {
        "w0": torch.empty(5, 7),
        "w1": torch.empty(7, 5).t(),
        "w2": torch.empty(10, 14)[::2, ::2],
        "w3": torch.nn.Parameter(torch.empty(5, 7)),
        "w4": torch.empty(36)[1:].view(5, 7),
        "empty": torch.empty(0, 2),
    }
    with VersionStore.create(tensors) as store:
        store.publish(tensors, 0)
        with store.pin() as snapshot:
            snapshot.copy_into(targets)
    for name, tensor in tensors.items():
        assert raw_bytes(targets[name]) == raw_bytes(tensor), name


def test_copy_into_tells_autograd_that_a_saved_tensor_changed() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    with VersionStore.create({"w": weight}) as store:
        store.publish({"w": torch.zeros(3)}, 0)
        loss = (weight * weight).sum()
        with store.pin() as snapshot:
            snapshot.copy_into({"w": weight})
    assert weight.detach().tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_copy_into_checks_its_targets_and_what_it_copies() -> None:
    with VersionStore.create(GOOD) as store:
        store.publish(GOOD, 1)
        with store.pin() as snapshot:
            untouched = torch.full((2, 3), 7.0)
            with pytest.raises(ValueError, match=r"Snapshot.copy_into: tensor 'b': expected shape = \[4\]"):
                snapshot.copy_into({"a": untouched, "b": torch.zeros(5, dtype=torch.bfloat16)})
            with pytest.raises(ValueError, match="'b': expected, got no tensor"):
                snapshot.copy_into({"a": untouched})
            assert torch.equal(untouched, torch.full((2, 3), 7.0))
            flip_in_memory(store.fileno(), raw_bytes(GOOD["a"]))
            for target in (torch.zeros(2, 3), torch.zeros(3, 2).t()):
                with pytest.raises(CorruptedError, match="'a' of version 1"):
                    snapshot.copy_into(GOOD | {"a": target})
        with pytest.raises(ClosedError):
            snapshot.copy_into(GOOD)


GOOD = {"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"a": torch.ones(3, 2)}, "'a': expected shape"),
        ({"a": torch.ones(6)}, "'a': expected shape"),
        ({"b": torch.zeros(4, dtype=torch.float16)}, "'b': expected dtype"),
        ({"c": torch.ones(1)}, "'c': expected no tensor"),
        ({"a": None}, "'a': expected, got no tensor"),
        ({"a": [[1.0]]}, "'a': expected a torch.Tensor, got list"),
        ({"a": torch.ones(2, 3, device="meta")}, "'a': expected a dense tensor"),
        ({"a": torch.ones(2, 3).to_sparse()}, "'a': expected a dense tensor"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_published(change: dict[str, object], named: str) -> None:
    with VersionStore.create(GOOD) as store:
        store.publish(GOOD, 1)
        changed = {name: value for name, value in (GOOD | change).items() if value is not None}
        with pytest.raises(ValueError, match=named):
            store.publish(changed, 2)  # type: ignore[arg-type]
        assert store.version() == 1
        assert same_bytes(store, GOOD)


def test_versions_only_rise_unless_rollback_is_allowed() -> None:
    with VersionStore.create(GOOD) as store:
        assert store.version() == -1
        for refused in (-1, -7):
            with pytest.raises(ValueError, match="expected version >= 0"):
                store.publish(GOOD, refused)
        store.publish(GOOD, 5)
        for refused in (5, 4):
            with pytest.raises(ValueError, match="expected version > 5"):
                store.publish(GOOD, refused)
        assert store.version() == 5
        store.publish(GOOD, 2, allow_rollback=True)
        assert store.version() == 2
        assert store.wait(1, timeout=0.0) == 2


def test_a_pin_keeps_its_version_and_a_second_update_waits_for_it() -> None:
    old, new = {"a": torch.full((1000,), 1.0)}, {"a": torch.full((1000,), 2.0)}
    with VersionStore.create(old) as store:
        store.publish(old, 1)
        with store.pin() as snapshot:
            store.publish(new, 2)
            assert (snapshot.version, store.version()) == (1, 2)
            assert torch.equal(snapshot.tensors["a"], old["a"])
            with pytest.raises(DeadlineError, match=rf"pins on version 1 .*pid {os.getpid()} \(this process\)"):
                store.publish(old, 3, timeout=0.01)
            assert store.version() == 2
            assert torch.equal(snapshot.tensors["a"], old["a"])
        store.publish(old, 3, timeout=0.0)
        assert same_bytes(store, old)


def test_tensors_keep_the_pin_of_a_snapshot_that_nobody_released() -> None:
    old, new = {"a": torch.full((1000,), 1.0)}, {"a": torch.full((1000,), 2.0)}
    with VersionStore.create(old) as store:
        store.publish(old, 1)
        kept = store.pin().tensors["a"]
        store.publish(new, 2)
        with pytest.raises(DeadlineError, match="pins on version 1"):
            store.publish(new, 3, timeout=0.01)
        assert torch.equal(kept, old["a"])
        del kept
        store.publish(new, 3, timeout=0.0)


def test_waits_end_with_a_typed_error_that_says_for_what() -> None:
    with VersionStore.create(GOOD) as store:
        with pytest.raises(DeadlineError, match=r"version >= 0 within 0\.01 s, got -1; no writer yet"):
            store.pin(timeout=0.01)
        store.publish(GOOD, 1)
        with pytest.raises(TimeoutError, match=rf"version >= 2 .*got 1; last writer: pid {os.getpid()}"):
            store.wait(2, timeout=0.01)
        pins = [store.pin() for _ in range(64)]
        with pytest.raises(DeadlineError, match=rf"all 64 in use by .*pid {os.getpid()} \(this process\) \(64 pins\)"):
            store.pin(timeout=0.01)
        pins.pop().release()
        store.pin(timeout=0.0).release()


def test_released_and_closed_objects_refuse_use_but_their_tensors_stay_mapped() -> None:
    store = VersionStore.create(GOOD)
    store.publish(GOOD, 1)
    snapshot = store.pin()
    kept = snapshot.tensors["a"]
    snapshot.release()
    snapshot.release()
    store.close()
    store.close()
    assert torch.equal(kept, GOOD["a"])
    for use in (lambda: snapshot.tensors, snapshot.checksum, store.version, store.fileno, store.pin):
        with pytest.raises(ClosedError):
            use()
    with pytest.raises(ClosedError):
        store.publish(GOOD, 2)


def test_a_snapshot_may_be_published_again() -> None:
    with VersionStore.create(GOOD) as store:
        store.publish(GOOD, 1)
        with store.pin() as snapshot:
            store.publish(snapshot.tensors, 2)
            digest = snapshot.checksum()
        with store.pin() as again:
            assert again.checksum() == digest
        assert same_bytes(store, GOOD)


def test_digests_tell_contents_apart() -> None:
    with VersionStore.create(GOOD) as store, VersionStore.create(dict(reversed(GOOD.items()))) as other:
        assert store.digest == other.digest
        store.publish(GOOD, 1)
        other.publish(GOOD, 9)
        with store.pin() as one, other.pin() as two:
            assert one.checksum() == two.checksum(verify=False)
        store.publish(GOOD | {"a": torch.tensor([[1, 1, 1], [1, 1, -1.0]])}, 2)
        with store.pin() as one, other.pin() as two:
            assert one.checksum() != two.checksum()


def test_specs_describe_a_store_without_tensors() -> None:
    specs = {"w": Spec(torch.bfloat16, (4, 2)), "b": Spec(torch.float32, ())}
    with VersionStore.create(specs) as store, VersionStore.attach(store.fileno()) as attached:
        assert attached.specs == store.specs == specs
        assert attached.digest == store.digest


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        ({"q": Spec(torch.qint8, (2,))}, {}, "'q': expected a dtype of plain bytes"),
        ({"": torch.ones(1)}, {}, "expected tensors with a name"),
        ({"n": Spec(torch.int8, (-1,))}, {}, "'n': expected sizes >= 0"),
        ({"n": Spec(torch.int64, (2**40, 2**40))}, {}, "'n': expected fewer than 2\\^63 bytes"),
        ({"n": Spec(torch.int8, (2**60,))}, {}, "expected at most .* chunks"),
        ({"n": Spec(torch.int8, (2**40,))}, {}, "bytes of shared memory"),
        ({"n": torch.ones(1)}, {"chunk_bytes": 100}, "expected chunk_bytes"),
        ({"n": torch.ones(1)}, {"chunk_bytes": 0}, "expected chunk_bytes"),
    ],
)
def test_what_cannot_be_stored_is_refused(tensors: dict, options: dict, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match=message):
        VersionStore.create(tensors, **options)


def test_a_flipped_byte_is_found_and_named() -> None:
    tensors = {"first": torch.randn(1000), "second": torch.randn(5000).bfloat16(), "third": torch.randn(3)}
    with VersionStore.create(tensors, chunk_bytes=4096) as store:
        store.publish(tensors, 4)
        with store.pin() as snapshot:
            needle = raw_bytes(tensors["second"])[-64:]
            flip_in_memory(store.fileno(), needle)
            with pytest.raises(CorruptedError, match="'second' of version 4"):
                snapshot.checksum()
            snapshot.checksum(verify=False)
        store.publish(tensors, 5)  # the other arena
        store.publish(tensors, 6)  # mends the damaged one
        assert same_bytes(store, tensors)


def flip_in_memory(fd: int, needle: bytes) -> None:
    """Flip one bit in the middle of the one place where the shared memory holds these bytes."""
    content = os.pread(fd, os.fstat(fd).st_size, 0)
    at = content.index(needle)
    assert content.count(needle) == 1
    at += len(needle) // 2
    os.pwrite(fd, bytes([content[at] ^ 0x10]), at)
