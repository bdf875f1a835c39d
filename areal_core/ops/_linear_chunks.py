"""Chunks of the fused LM head: which rows are multiplied, how many at once, and in which precision.

Logits exist for one chunk of rows at a time, in float32 (float64 for float64) whatever the inputs' dtype. On a GPU the
products take bfloat16 or float16 operands and give float32; on a CPU such weights are widened block by block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_native = torch.ops.areal_core
STATISTICS = 5  # what logprob_forward gives for a row
PARTS = 4  # what logprob_partial gives
_WIDENED_COLUMNS = 8192  # of the weight at a time: 29 MB of float32 at H = 896
_PRODUCT_ROWS = 8192  # added to a wider sum at a time
_CHUNK_MULTIPLE = 64
# A chunk costs a pass over the weight and one over its float32 gradient, so it must be long against the flops per byte
# of the machine; and no longer, for it costs memory.
_CHUNK_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}
_CHUNK_LIMITS = {"cpu": (128, 4096), "cuda": (1024, 4096)}


def row_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of logits and of everything per row: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def counts_rows(device: torch.device) -> bool:
    """Whether the number of live rows can be known without waiting for the device."""
    return device.type == "cpu"


def widens_operands(device: torch.device) -> bool:
    """Whether products take float32 operands for want of ones that take bfloat16 and give float32."""
    return device.type == "cpu"


class Rows(NamedTuple):
    """What each row has besides its hidden state; [T]."""

    labels: Tensor
    temperatures: Tensor | None  # None: `temperature` for all
    temperature: float
    loss_mask: Tensor | None
    ignore_index: int

    def live(self) -> Tensor:
        """Which rows count."""
        live = self.labels != self.ignore_index
        return live if self.loss_mask is None else live & self.loss_mask

    def check(self, op: str, vocab: int) -> None:
        """Check the values of live rows, on the host alone: elsewhere the kernels answer with NaN."""
        if self.labels.device.type != "cpu":
            return
        live, labels, temperatures = self.live(), self.labels, self.temperatures
        wrong = (live & ((labels < 0) | (labels >= vocab))).nonzero()
        if len(wrong):
            row = int(wrong[0])
            raise ValueError(
                f"{op}: expected labels[{row}] in [0, {vocab}) or equal to ignore_index = {self.ignore_index}, "
                f"got {int(labels[row])}"
            )
        if temperatures is None:
            return
        wrong = (live & ~((temperatures >= 2.0**-126) & (temperatures < torch.inf))).nonzero()
        if len(wrong):
            row = int(wrong[0])
            raise ValueError(f"{op}: expected temperature of row {row} > 0 and finite, got {float(temperatures[row])}")


def live_indices(op: str, live: Tensor, live_tokens: int | None) -> Tensor:
    """Indices of the live rows, int64 [n].

    Where they cannot be counted, n = min(T, live_tokens): spare places hold T; live rows beyond n are left out.
    """
    if counts_rows(live.device):
        index = live.nonzero().squeeze(1)
        if live_tokens is not None and len(index) > live_tokens:
            raise ValueError(f"{op}: expected live_tokens >= {len(index)} (number of live rows), got {live_tokens}")
        return index
    return torch.nonzero_static(live, size=live_places(live, live_tokens), fill_value=len(live)).squeeze(1)


def live_places(live: Tensor, live_tokens: int | None) -> int:
    """How many indices live_indices gives."""
    if counts_rows(live.device):
        return int(live.sum())
    return len(live) if live_tokens is None else min(live_tokens, len(live))


def split(index: Tensor, vocab: int, chunk_tokens: int | None) -> Sequence[Tensor]:
    """Cut into chunks of equal length, the last of which may be shorter."""
    length = chunk_length(len(index), vocab, chunk_tokens, index.device)
    return torch.split(index, length) if length else ()


def chunk_length(rows: int, vocab: int, chunk_tokens: int | None, device: torch.device) -> int:
    """The length of equal chunks, as few as chunk_tokens (None: chosen for the machine) allows."""
    if rows == 0:
        return 0
    if chunk_tokens is None:
        kind = device.type if device.type in _CHUNK_BYTES else "cuda"
        low, high = _CHUNK_LIMITS[kind]
        fitting = _CHUNK_BYTES[kind] // (4 * max(vocab, 1)) // _CHUNK_MULTIPLE * _CHUNK_MULTIPLE
        chunk_tokens = min(max(fitting, low), high)
    chunks = -(-rows // chunk_tokens)
    return -(-rows // chunks)


def longest(chunks: Sequence[Tensor]) -> int:
    """Length of the longest chunk."""
    return max((len(chunk) for chunk in chunks), default=0)


def take(values: Tensor, index: Tensor) -> Tensor:
    """The rows of a tensor at the indices of a chunk; an arbitrary one in spare places."""
    return values.index_select(0, index.clamp(max=len(values) - 1))


class ChunkedLinear:
    """hidden @ weight.T + bias for chunks of rows, and the products of backward."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, operand_dtype: torch.dtype, logits: Tensor | int
    ) -> None:
        """Products on a GPU take operands of operand_dtype; `logits`: a buffer for those of any chunk, or its rows."""
        self.dtype = row_dtype(operand_dtype)
        self.operand_dtype = self.dtype if widens_operands(hidden.device) else operand_dtype
        self.hidden = hidden
        self.bias = None if bias is None else bias.to(self.dtype)
        self._widens = widens_operands(hidden.device) and weight.dtype != self.operand_dtype
        self.weight = weight if self._widens else weight.to(self.operand_dtype)
        size = 0 if isinstance(logits, Tensor) else logits * len(weight)
        self.buffer = logits if isinstance(logits, Tensor) else hidden.new_empty(size, dtype=self.dtype)

    def operand(self, index: Tensor) -> Tensor:
        """The rows of hidden, as the products take them; zeros in spare places."""
        chunk = take(self.hidden, index).to(self.operand_dtype)
        if not counts_rows(index.device):
            chunk.masked_fill_((index == len(self.hidden))[:, None], 0)
        return chunk

    def logits(self, operand: Tensor) -> Tensor:
        """Logits [C, V] of a chunk, in the buffer, which the next call overwrites."""
        out = self.last_logits(operand)
        for begin, end, weight in self._blocks():
            bias = None if self.bias is None else self.bias[begin:end]
            _multiply(operand, weight.t(), out[:, begin:end], bias)
        return out

    def last_logits(self, operand: Tensor) -> Tensor:
        """What `logits` gave for the chunk, where it was the last to use the buffer."""
        shape = (len(operand), len(self.weight))
        return self.buffer[: shape[0] * shape[1]].view(shape)

    def grad_hidden(self, grad_logits: Tensor) -> Tensor:
        """grad_logits @ weight, for grad_logits as an operand."""
        out = grad_logits.new_zeros(len(grad_logits), self.weight.shape[1], dtype=self.dtype)
        for begin, end, weight in self._blocks():
            _multiply(grad_logits[:, begin:end], weight, out, out if begin else None)
        return out

    def _blocks(self) -> Iterator[tuple[int, int, Tensor]]:
        """Blocks of the weight as operands: (first row, end, rows)."""
        vocab = len(self.weight)
        step = _WIDENED_COLUMNS if self._widens else max(vocab, 1)
        for begin in range(0, vocab, step):
            end = min(begin + step, vocab)
            yield begin, end, self.weight[begin:end].to(self.operand_dtype)


def _multiply(a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None) -> None:
    """out = a @ b + addend, accumulated in the dtype of out; the addend may be out, or one row for all."""
    aten = torch.ops.aten
    if a.dtype == out.dtype:
        aten.mm.out(a, b, out=out) if addend is None else aten.addmm.out(addend, a, b, out=out)
    elif addend is out:  # not every torch has an addmm whose sum is wider than its operands
        part = out.new_empty(min(len(out), _PRODUCT_ROWS), out.shape[1])
        for begin in range(0, len(out), _PRODUCT_ROWS):
            rows = slice(begin, begin + _PRODUCT_ROWS)
            _multiply_wide(a[rows], b, part[: len(a[rows])])
            out[rows] += part[: len(a[rows])]
    else:
        _multiply_wide(a, b, out)
        if addend is not None:
            out.add_(addend)


def _multiply_wide(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b for bfloat16 or float16 operands and float32 out; on a GPU alone."""
    torch.ops.aten.mm.dtype_out(a, b, out.dtype, out=out)


class LinearGradients:
    """Gradients of hidden, weight and bias, added up over chunks in the logits' dtype."""

    def __init__(self, linear: ChunkedLinear, needs: Sequence[bool], main_grad: Tensor | None = None) -> None:
        """`needs`: which of the three; main_grad: where that of the weight is added."""
        self._linear, self._main_grad = linear, main_grad
        vocab, width = linear.weight.shape
        like, dtype = linear.hidden, linear.dtype
        # A row more, for the spare places of a chunk to write to.
        self._hidden = like.new_zeros(len(like) + 1 if needs[0] else 0, width)
        self._weight = like.new_empty(vocab if needs[1] and main_grad is None else 0, width, dtype=dtype)
        self._bias = like.new_zeros(vocab if needs[2] else 0, dtype=dtype)
        self._needs_hidden, self._needs_weight, self._needs_bias = needs
        self._weight_is_empty = True

    def add(self, index: Tensor, operand: Tensor, grad_logits: Tensor) -> None:
        """Add a chunk: its indices, its rows of hidden and its gradient of logits."""
        if self._needs_bias:
            self._bias += grad_logits.sum(0)
        grad = grad_logits.to(self._linear.operand_dtype)
        if self._needs_hidden:
            self._hidden.index_copy_(0, index, self._linear.grad_hidden(grad).to(self._hidden.dtype))
        if self._needs_weight and self._main_grad is not None:
            _multiply(grad.t(), operand, self._main_grad, self._main_grad)
        elif self._needs_weight:
            _multiply(grad.t(), operand, self._weight, None if self._weight_is_empty else self._weight)
            self._weight_is_empty = False

    def results(self, weight_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients, those of weight and bias in weight_dtype; empty where not needed or in main_grad."""
        weight = self._weight.zero_() if self._weight_is_empty else self._weight
        return self._hidden[: len(self._linear.hidden)], weight.to(weight_dtype), self._bias.to(weight_dtype)


class RowOutputs:
    """Results of all rows, [T, k], filled chunk by chunk."""

    def __init__(self, live: Tensor, columns: int, dtype: torch.dtype) -> None:
        """Masked rows are 0. Live rows that get no place stay NaN."""
        # A row more, for the spare places of a chunk to write to.
        self._values = torch.zeros(len(live) + 1, columns, dtype=dtype, device=live.device)
        self._values[:-1].masked_fill_(live[:, None], torch.nan)

    def put(self, index: Tensor, values: Tensor) -> None:
        """Keep the results [C, k] of a chunk."""
        self._values.index_copy_(0, index, values)

    def results(self) -> Tensor:
        """All rows, [T, k]."""
        return self._values[:-1]

    def columns(self) -> tuple[Tensor, ...]:
        """The same as k vectors."""
        return tuple(x.clone() for x in self.results().unbind(1))


class ChunkRows:
    """The rows of one chunk as the kernels of logprob take them."""

    def __init__(self, index: Tensor, rows: Rows) -> None:
        """Spare places count as masked."""
        labels = take(rows.labels, index)
        if not counts_rows(index.device):
            labels.masked_fill_(index == len(rows.labels), rows.ignore_index)
        temperatures = None if rows.temperatures is None else take(rows.temperatures, index)
        self._arguments = (labels, temperatures, rows.temperature, None, rows.ignore_index)

    def statistics(self, logits: Tensor) -> tuple[Tensor, ...]:
        """Give (logprobs, entropy, lse, row_max, log_sum) of the chunk's logits."""
        outputs: tuple[Tensor, ...] = _native.logprob_forward.default(logits, *self._arguments, False)
        return outputs

    def parts(self, logits: Tensor, vocab_start: int, vocab_total: int) -> Tensor:
        """[C, 4]: what this rank's logits contribute to the statistics."""
        parts: Tensor = _native.logprob_partial.default(logits, *self._arguments, vocab_start, vocab_total)
        return parts

    def to_gradient_(
        self, logits: Tensor, upstream: Sequence[Tensor | None], statistics: Sequence[Tensor], vocab_start: int = 0
    ) -> None:
        """Overwrite logits with their gradient, given upstream gradients and what statistics() gave."""
        logprobs, entropy, _lse, row_max, log_sum = statistics
        saved = (logprobs, entropy, row_max, log_sum)
        _native.logprob_backward_.default(*upstream, logits, *self._arguments, *saved, vocab_start)


def merge(parts: Tensor, rows: Rows, vocab_start: int) -> tuple[Tensor, ...]:
    """Statistics of all rows from the parts [ranks, T, 4] of all ranks."""
    # The kernel takes the shape and dtype of the logits from them, and reads none.
    logits = parts.new_empty(1, 1).expand(parts.shape[1], 1)
    temperatures = None if rows.temperatures is None else rows.temperatures.contiguous()
    arguments = (rows.labels.contiguous(), temperatures, rows.temperature, rows.live(), rows.ignore_index)
    outputs: tuple[Tensor, ...] = _native.logprob_merge.default(logits, parts, *arguments, vocab_start, False)
    return outputs
