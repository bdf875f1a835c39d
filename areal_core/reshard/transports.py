"""How bytes get from rank to rank: threads of one process, processes of one machine, machines.

Each rank makes its endpoint, gives its address to the others over whatever control plane the run has, and connects::

    transport = TcpTransport(rank=3, token=secret)
    addresses = exchange(transport.address)  # {rank: address} of all who take part
    transport.connect(addresses, timeout=60.0)

After an error (a peer gone, a deadline passed, cancelled) an endpoint is of no more use: make and connect a new one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

from areal_core import _C
from areal_core.reshard.arena import is_plain
from areal_core.reshard.spec import Spec

DEFAULT_CONNECT_TIMEOUT_S = 60.0
_ALIGNMENT_BYTES = 64


class ExposedBuffer(NamedTuple):
    """A buffer in shared memory that peers may write while this rank has granted them an update."""

    fd: int
    offset_bytes: int
    bytes: int


class Transport:
    """The endpoint of one rank. Use one of the subclasses."""

    def __init__(self, rank: int, native: _C.Transport | None) -> None:
        """Private: use one of the subclasses."""
        self.rank = rank
        self.native = native

    @property
    def name(self) -> str:
        """What kind it is."""
        return self._open().name

    @property
    def staging_bytes(self) -> int:
        """Memory made for chunks so far, of all peers: at most two chunks for each peer and direction. It is kept."""
        return self._open().staging_bytes

    def takes(self, tensor: Tensor) -> bool:
        """Whether it moves the tensor's memory as it is; other tensors go through a host copy."""
        return is_plain(tensor)

    def cancel(self) -> None:
        """End every wait of this endpoint, now and later; its peers see it gone. From any thread."""
        if self.native is not None:
            self.native.cancel()

    def close(self) -> None:
        """Give sockets and staging memory back, once no executor uses them."""
        self.native = None

    def run_update(
        self, executor: _C.Executor, epoch: int, buffers: _C.BoundBuffers, timeout: float
    ) -> _C.TransferStats:
        """Move one update; see `Executor.run`, the caller."""
        return executor.run(epoch, buffers, timeout)

    def _open(self) -> _C.Transport:
        if self.native is None:
            raise ValueError(f"{type(self).__name__}: expected an open transport, got a closed one")
        return self.native

    def __enter__(self) -> Transport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.cancel()
        self.close()


class InprocGroup:
    """The ranks of one process that `InprocTransport` connects."""

    def __init__(self, ranks: Sequence[int]) -> None:
        """ranks: unique."""
        self.native = _C.InprocGroup(list(ranks))
        self._exposed: dict[int, list[Tensor]] = {}  # a peer may be writing when their owner gives up

    def expose(self, rank: int, tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
        """Keep the tensors alive as long as the group; their addresses and bytes."""
        for i, tensor in enumerate(tensors):
            if not is_plain(tensor):
                raise ValueError(f"InprocTransport: expected exposed contiguous host tensors, got another at {i}")
        self._exposed[rank] = list(tensors)
        return [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]


class InprocTransport(Transport):
    """Ranks that are threads of one process: `InprocTransport(group, rank)`, one for each rank of the group.

    exposed: the rank's target buffers, in the order of `Layout.buffers(rank)`: peers then copy straight into them.
        Several sets (arenas) may follow one another; `Executor.run(first_exposed=...)` says which one is to be filled.
    """

    def __init__(self, group: InprocGroup, rank: int, exposed: Sequence[Tensor] = ()) -> None:
        self._group = group
        super().__init__(rank, group.native.endpoint(rank, group.expose(rank, exposed)))


class SocketTransport(Transport):
    """What `TcpTransport` and `ShmTransport` share."""

    def __init__(self, rank: int, native: _C.SocketEndpoint) -> None:
        """Private: use one of the subclasses."""
        super().__init__(rank, native)
        self._endpoint: _C.SocketEndpoint | None = native

    @property
    def address(self) -> str:
        """Where the others reach this rank."""
        if self._endpoint is None:
            raise ValueError(f"{type(self).__name__}: expected an open transport, got a closed one")
        return self._endpoint.address

    def connect(self, addresses: Mapping[int, str], timeout: float = DEFAULT_CONNECT_TIMEOUT_S) -> None:
        """Connect to every other rank of the map, all of which must call this too. The GIL is released.

        Raises: DeadlineError; PeerError for a peer that cannot be reached or does not know the token.
        """
        if self._endpoint is None:
            raise ValueError(f"{type(self).__name__}: expected an open transport, got a closed one")
        self._endpoint.connect(dict(addresses), timeout)

    def close(self) -> None:
        """Send what was posted, then close all connections. Peers that still wait see a PeerError."""
        self._endpoint = None
        super().close()


class TcpTransport(SocketTransport):
    """Ranks on any machines, over TCP.

    token: bytes that all ranks of the run know (16 or more). Peers prove with HMAC-SHA256 that they know it; bytes are
        not encrypted, so stay on loopback or a trusted network.
    host: the numeric address at which peers reach this machine, and to listen on.
    port: 0 takes any.
    streams: connections per pair of ranks, the same on all.
    """

    def __init__(self, rank: int, token: bytes, *, host: str = "127.0.0.1", port: int = 0, streams: int = 2) -> None:
        super().__init__(rank, _C.TcpTransport(rank, token, host, port, streams))


class ShmTransport(SocketTransport):
    """Ranks that are processes of one machine: bytes in shared memory, headers over Unix sockets.

    token: as for TcpTransport.
    exposed: the rank's target buffers in the order of `Layout.buffers(rank)`, such as the arena of a version store or
        `SharedTensors.exposed`: peers copy straight into them. Several sets may follow one another.
    """

    def __init__(self, rank: int, token: bytes, *, exposed: Sequence[ExposedBuffer] = ()) -> None:
        super().__init__(rank, _C.ShmTransport(rank, token, list(exposed)))


class CudaIpcTransport(SocketTransport):
    """Ranks that are processes with GPUs of one machine: the copy engines write straight into the peers' memory.

    token: as for TcpTransport.
    exposed: the rank's target buffers on its device, in the order of `Layout.buffers(rank)`, all of them, allocated by
        cudaMalloc (torch's expandable segments cannot be shared).
    device: the device of this rank; None: the current one.

    All buffers of the executor must lie on devices. No checksums are taken: the bytes never pass a CPU.

    Raises: ValueError without a GPU, or a build without CUDA.
    """

    def __init__(self, rank: int, token: bytes, *, exposed: Sequence[Tensor] = (), device: int | None = None) -> None:
        if not torch.cuda.is_available():
            raise ValueError("CudaIpcTransport: expected a GPU, got none")
        self._exposed = list(exposed)
        ranges = [(tensor.data_ptr(), tensor.nbytes) for tensor in self._exposed]
        number = torch.cuda.current_device() if device is None else device
        super().__init__(rank, _C.cuda_ipc_transport(rank, token, ranges, number))

    def takes(self, tensor: Tensor) -> bool:
        """Contiguous tensors on a device."""
        return tensor.is_cuda and tensor.is_contiguous()

    def run_update(
        self, executor: _C.Executor, epoch: int, buffers: _C.BoundBuffers, timeout: float
    ) -> _C.TransferStats:
        """Move one update, once the kernels that make or use the buffers are done; see `Executor.run`, the caller."""
        torch.cuda.synchronize()
        return executor.run(epoch, buffers, timeout)


class SharedTensors:
    """Tensors in one piece of shared memory, for a rank whose peers shall write them directly.

    specs: name -> Spec, such as `Layout.buffers(rank)`.
    """

    def __init__(self, specs: Mapping[str, Spec]) -> None:
        places = []
        end = 0
        for name in sorted(specs):
            spec = specs[name]
            start = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            end = start + torch.Size(spec.shape).numel() * spec.dtype.itemsize
            places.append((name, spec, start, end))
        self._area = _C.SharedArea(max(end, 1))
        memory = torch.frombuffer(self._area, dtype=torch.uint8)
        self.tensors: dict[str, Tensor] = {
            name: memory[start:end].view(spec.dtype).view(spec.shape) for name, spec, start, end in places
        }
        self.exposed = [ExposedBuffer(self._area.fd, start, end - start) for _, _, start, end in places]
