"""Small worlds of torch.distributed: a function on every rank of a gloo group of forked processes."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TIMEOUT_S = 60.0
# Forked from a server that has imported torch once: a fresh interpreter for each rank would take most of the time.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["torch", "torch.distributed.tensor.parallel", "torch.distributed.fsdp", "areal_core.reshard"]
)


def run_world(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """The results of function(*args), called on each rank of a group of this size. Fails when one of them does."""
    with tempfile.TemporaryDirectory() as folder:
        pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(size)]
        processes = [
            _CONTEXT.Process(target=_run, args=(pipes[rank][1], f"{folder}/store", rank, size, function, args))
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for _, end in pipes:
            end.close()
        try:
            results = [_receive(pipe, rank) for rank, (pipe, _) in enumerate(pipes)]
        finally:
            for process in processes:
                process.kill()
                process.join()
    failed = [text for is_error, text in results if is_error]
    assert not failed, "\n".join(failed)
    return [value for _, value in results]


def _receive(pipe: Connection, rank: int) -> tuple[bool, Any]:
    try:
        if pipe.poll(TIMEOUT_S):
            received: tuple[bool, Any] = pipe.recv()
            return received
    except EOFError:
        return True, f"rank {rank} died"
    return True, f"rank {rank} did not answer"


def _run(pipe: Connection, store: str, rank: int, size: int, function: Callable[..., Any], args: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        timeout = timedelta(seconds=TIMEOUT_S)
        dist.init_process_group("gloo", init_method=Path(store).as_uri(), rank=rank, world_size=size, timeout=timeout)
        pipe.send((False, function(*args)))
        dist.destroy_process_group()
    except Exception:
        pipe.send((True, f"rank {rank}: {traceback.format_exc()}"))


def run_all(calls: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[str]:
    """Call one function after the other on this rank; "" for each that returns, the traceback of one that fails.

    One world for many tests: starting it takes longer than they do.
    """
    results = []
    for function, args in calls:
        try:
            function(*args)
            results.append("")
        except Exception:
            results.append(traceback.format_exc())
    return results
