"""A version in the making: the inactive arena of a store, until `commit` shows it to readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType

from torch import Tensor

from areal_core import _C
from areal_core.reshard.arena import ArenaTensors, is_plain


class Draft:
    """The writer's seat of a store and the arena that no reader looks at: fill it, `seal`, `commit`.

    Leaving the `with` block without a commit aborts: readers keep the version they have, and the next draft starts
    over. A draft belongs to the thread that uses it.
    """

    def __init__(
        self, store: _C.VersionStore, layout: ArenaTensors, version: int, allow_rollback: bool, timeout: float
    ) -> None:
        """Private: use `VersionStore.draft`."""
        self._native = store.begin(version, allow_rollback, timeout)
        self._layout = layout
        self._chunks = store.chunks
        self._tensors: dict[str, Tensor] | None = None
        self.version = version

    @property
    def arena(self) -> int:
        """0 or 1: which of the two arenas this is. Its tensors have the same addresses whenever it is its turn."""
        return self._native.epoch % 2

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name, as writable views; not to be written once the draft is committed or aborted.

        They hold whatever the arena held before: zeros at first, then the version before the active one, or what an
        aborted draft left.
        """
        if self._tensors is None:
            self._tensors = self._layout.views(self._native.arena())
        return dict(self._tensors)

    def copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy all tensors into the arena; they are sealed on the way. Raises ValueError naming what does not fit."""
        self.copy_in_order(self._layout.in_order("Draft.copy", tensors))

    def copy_in_order(self, sources: Sequence[Tensor]) -> None:
        """The same for tensors that were checked, in the order of the store's specs."""
        addresses = [t.data_ptr() if is_plain(t) else 0 for t in sources]
        self._native.write(addresses, 0, self._chunks)
        if 0 not in addresses:
            return
        # torch copies what is not plain memory (strided, on a device, conjugated) straight into the arena
        others = [i for i, address in enumerate(addresses) if address == 0]
        views = list(self.tensors.values())
        for i in others:
            views[i].copy_(sources[i].detach())
        self._native.seal(others)

    def seal(self) -> int:
        """Take the checksums of everything written through `tensors`, in one pass; returns the digest of the contents.

        The digest is that of `Snapshot.checksum`. What changes after it is found by `commit(verify=True)` and by
        readers that verify. What has changed between the write and this call is not: a checksum taken on the way there
        (`copy`, an executor's chunks) is what guards that.
        """
        self._native.seal_rest()
        return self._native.content_digest()

    def commit(self, *, verify: bool = False, checksums: bool = True) -> None:
        """Make this the active version.

        verify: read everything again first.
        checksums: False: everything was written through `tensors`, and what was not sealed is shown all the same. The
            version then carries no checksums (`Snapshot.has_checksums`), and readers that verify are refused.

        Raises: ValueError naming a tensor that was not sealed; CorruptedError (verify). Nothing is published then.
        """
        self._native.commit(verify, checksums)

    def abort(self) -> None:
        """Give the seat back and publish nothing; does nothing after a commit."""
        self._native.abort()

    def __enter__(self) -> Draft:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()
