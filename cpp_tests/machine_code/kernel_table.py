"""What the machine code of each kernel must show.

Every kernel of the library needs a row, every row needs a kernel, and no kernel may use local memory: neither spills
nor arrays that ptxas could not keep in registers. A row's numbers hold for every instance that the pattern matches, on
every architecture.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelRow:
    """Requirements of the kernels whose demangled name the pattern matches (searched, anonymous namespaces removed)."""

    pattern: str
    registers: int  # at most, a thread
    wide_loads: int = 0  # at least so many 16-byte loads from global memory
    wide_stores: int = 0  # at least so many 16-byte stores to global memory
    shared_bytes: int = 48 * 1024  # at most, static
    wide_shared_loads: int = 0  # at least so many 16-byte loads from shared memory
    bulk_loads: int = 0  # at least so many bulk copies from global to shared memory


KERNELS: tuple[KernelRow, ...] = (
    KernelRow(r"::batch_statistics_kernel", registers=96, shared_bytes=0),
    KernelRow(r"::best_of_scores_kernel", registers=96, shared_bytes=0),
    KernelRow(r"::copy_segments_kernel<uint4>", registers=48, wide_loads=4, wide_stores=4, shared_bytes=10 * 1024),
    KernelRow(r"::copy_segments_kernel<unsigned \w+>", registers=32, shared_bytes=10 * 1024),
    KernelRow(
        r"::fused_loss_kernel<", registers=80, wide_stores=2, shared_bytes=1024, wide_shared_loads=4, bulk_loads=1
    ),  # sm_90 keeps 1 KB of its own
    KernelRow(r"::gae_kernel<[18], float>", registers=64, shared_bytes=2048),
    KernelRow(r"::gae_kernel<[18], double>", registers=96, shared_bytes=2048),
    KernelRow(r"::group_scores_kernel", registers=96, shared_bytes=0),
    KernelRow(r"::live_tokens_kernel", registers=48, shared_bytes=2048),
    KernelRow(r"::logprob_backward_kernel<.*, [48]>", registers=64, wide_loads=4, wide_stores=4, shared_bytes=0),
    KernelRow(r"::logprob_backward_kernel<.*, 1>", registers=40, shared_bytes=0),
    KernelRow(r"::logprob_forward_kernel<", registers=64, wide_loads=5, shared_bytes=2 * 1024),
    KernelRow(r"::logprob_forward_split_kernel<", registers=64, wide_loads=5, shared_bytes=2 * 1024),
    KernelRow(r"::logprob_merge_kernel", registers=64, wide_loads=2, shared_bytes=0),
    KernelRow(r"::mask_extents_kernel", registers=32, shared_bytes=0),
    KernelRow(r"::moment_sums_kernel", registers=48, shared_bytes=2048),
    KernelRow(r"::normalize_kernel", registers=32, shared_bytes=0),
    KernelRow(r"::policy_loss_finish_kernel", registers=64, shared_bytes=2048),
    KernelRow(r"::policy_loss_kernel<.*, float>", registers=112, shared_bytes=3072),
    KernelRow(r"::policy_loss_kernel<.*, double>", registers=160, shared_bytes=3072),
    KernelRow(r"::policy_loss_sequences_kernel<.*, float>", registers=64, shared_bytes=2048),
    KernelRow(r"::policy_loss_sequences_kernel<.*, double>", registers=96, shared_bytes=2048),
    KernelRow(r"::position_ids_kernel", registers=32, shared_bytes=0),
    KernelRow(r"::ranges_kernel", registers=48, shared_bytes=2048),
    KernelRow(r"::scale_kernel<", registers=48, wide_loads=4, wide_stores=4, shared_bytes=0),
    KernelRow(r"::sequence_rewards_kernel", registers=48, shared_bytes=2048),
    KernelRow(r"::spread_scores_kernel", registers=48, shared_bytes=0),
    KernelRow(r"::token_rewards_kernel", registers=48, shared_bytes=0),
    KernelRow(r"::value_loss_finish_kernel", registers=64, shared_bytes=2048),
    KernelRow(r"::value_loss_kernel<", registers=80, shared_bytes=2048),
)
