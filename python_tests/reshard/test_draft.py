"""Drafts: what something else writes into the inactive arena becomes a version only by a commit."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from areal_core.errors import CorruptedError, DeadlineError
from areal_core.reshard import Spec, VersionStore

SPECS = {
    "w": Spec(torch.bfloat16, (33, 65)),
    "scale": Spec(torch.float32, (3,)),
    "empty": Spec(torch.float16, (0, 4)),
    "fp8": Spec(torch.float8_e4m3fn, (7, 5)),
    "scalar": Spec(torch.int64, ()),
}


@pytest.fixture
def store() -> VersionStore:
    return VersionStore.create(SPECS, chunk_bytes=1024)


def content(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(0, 256, (*spec.shape, spec.dtype.itemsize), dtype=torch.uint8, generator=generator)
        .view(spec.dtype)
        .reshape(spec.shape)
        for name, spec in SPECS.items()
    }


def fill(targets: dict[str, torch.Tensor], sources: dict[str, torch.Tensor]) -> None:
    for name, target in targets.items():
        raw(target)[:] = raw(sources[name])


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def serves(store: VersionStore, version: int, expected: dict[str, torch.Tensor]) -> bool:
    with store.pin(timeout=5.0) as snapshot:
        snapshot.checksum()
        same = all(np.array_equal(raw(snapshot.tensors[name]), raw(expected[name])) for name in SPECS)
        return same and snapshot.version == version


def test_what_was_written_in_place_is_published_by_the_commit(store: VersionStore) -> None:
    for version in range(4):
        with store.draft(version) as draft:
            assert draft.arena == (version + 1) % 2
            fill(draft.tensors, content(version))
            digest = draft.seal()
            assert store.version() == version - 1
            draft.commit(verify=True)
        assert serves(store, version, content(version))
        with store.pin() as snapshot:
            assert snapshot.checksum() == digest


def test_a_draft_has_the_digest_of_the_same_contents_copied(store: VersionStore) -> None:
    with store.draft(1) as draft:
        fill(draft.tensors, content(5))
        in_place = draft.seal()
    with store.draft(1) as draft:
        draft.copy(content(5))
        assert draft.seal() == in_place


def test_arenas_start_as_zeros_and_keep_their_addresses(store: VersionStore) -> None:
    addresses: dict[int, int] = {}
    for version in range(6):
        with store.draft(version) as draft:
            if version < 2:
                assert all(not raw(t).any() for t in draft.tensors.values())
            assert addresses.setdefault(draft.arena, draft.tensors["w"].data_ptr()) == draft.tensors["w"].data_ptr()
            draft.seal()
            draft.commit()
    assert addresses.keys() == {0, 1}


@pytest.mark.parametrize("end", ["abort", "leave", "raise", "unsealed"])
def test_a_draft_that_is_not_committed_changes_nothing(store: VersionStore, end: str) -> None:
    store.publish(content(1), 1)
    try:
        with store.draft(2) as draft:
            fill(draft.tensors, content(2))
            if end == "abort":
                draft.abort()
                with pytest.raises(ValueError, match="expected an open publication"):
                    draft.commit()
            elif end == "raise":
                raise KeyboardInterrupt
            elif end == "unsealed":
                with pytest.raises(ValueError, match="expected all bytes written"):
                    draft.commit()
    except KeyboardInterrupt:
        pass
    assert serves(store, 1, content(1))
    store.publish(content(3), 2, timeout=0.0)
    assert serves(store, 2, content(3))


def test_a_byte_changed_after_the_seal_is_found_before_readers_see_it(store: VersionStore) -> None:
    store.publish(content(1), 1)
    with store.draft(2) as draft:
        fill(draft.tensors, content(2))
        draft.seal()
        raw(draft.tensors["fp8"])[11] ^= 4
        with pytest.raises(CorruptedError, match="'fp8' of version 2"):
            draft.commit(verify=True)
    assert serves(store, 1, content(1))


@pytest.mark.parametrize("sealed", [False, True])
def test_a_version_without_checksums_says_so_to_readers_that_verify(store: VersionStore, sealed: bool) -> None:
    with store.draft(1) as draft:
        fill(draft.tensors, content(1))
        if sealed:
            draft.seal()
        draft.commit(checksums=False)
    targets = {name: torch.zeros_like(t) for name, t in content(1).items()}
    strided = {name: torch.zeros(2, *t.shape, dtype=t.dtype).movedim(0, -1)[..., 0] for name, t in targets.items()}
    with store.pin() as snapshot:
        assert snapshot.has_checksums is sealed
        if not sealed:
            for call in (
                snapshot.checksum,
                lambda: snapshot.checksum(verify=False),
                lambda: snapshot.copy_into(targets),
                lambda: snapshot.copy_into(strided),
            ):
                with pytest.raises(ValueError, match=r"expected checksums of version 1, got a version .* without"):
                    call()
            assert all(not raw(t).any() for t in (*targets.values(), *strided.values()))
        snapshot.copy_into(targets, verify=sealed)
        snapshot.copy_into(strided, verify=sealed)
        for name, expected in content(1).items():
            assert np.array_equal(raw(targets[name]), raw(expected))
            assert np.array_equal(raw(strided[name].contiguous()), raw(expected))
    store.publish(content(2), 2)
    assert serves(store, 2, content(2))  # the other arena
    store.publish(content(3), 3)
    assert serves(store, 3, content(3))  # and the same one has checksums again


def test_tensors_copied_partly_are_not_verifiable(store: VersionStore) -> None:
    first, rest = content(1), {n: t for n, t in content(1).items() if n != "w"}
    with store.draft(1) as draft:
        draft.copy(first)
        draft.commit(checksums=False)
    with store.pin() as snapshot:
        assert snapshot.has_checksums
    with store.draft(2) as draft:
        fill({n: t for n, t in draft.tensors.items() if n != "w"}, rest)
        with pytest.raises(ValueError, match="expected all bytes written"):
            draft.commit(verify=True, checksums=False)  # there is nothing to compare with
    assert store.version() == 1


def test_an_open_draft_holds_the_seat(store: VersionStore) -> None:
    with store.draft(1), pytest.raises(DeadlineError, match="the writer's seat"):
        store.draft(1, timeout=0.0)


@pytest.mark.parametrize("name", ["w", "scale", "scalar"])
def test_views_travel_by_dlpack_without_a_copy_and_keep_the_pin(store: VersionStore, name: str) -> None:
    store.publish(content(1), 1)
    snapshot = store.pin()
    view = snapshot.tensors[name]
    again = torch.from_dlpack(view)
    assert again.data_ptr() == view.data_ptr()
    assert again.dtype == view.dtype
    assert again.shape == view.shape
    if view.dtype != torch.bfloat16:  # NumPy has none
        assert np.from_dlpack(view).ctypes.data == view.data_ptr()
    del snapshot, view
    gc.collect()
    store.publish(content(2), 2)
    with pytest.raises(DeadlineError, match="pins on version 1"):  # the capsule's tensor still holds it
        store.publish(content(3), 3, timeout=0.0)
    assert np.array_equal(raw(again), raw(content(1)[name]))
    del again
    gc.collect()
    store.publish(content(3), 3, timeout=0.0)
