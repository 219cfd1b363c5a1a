"""What the ranks send each other at the end of a window: a small table, then the gradients.

table   one all_reduce (SUM) of float64. Each rank fills its row, the others add zeros to it.
        rank 0  [code, micro-batches, weight, ...]   per parameter: how many ranks have a gradient
        rank 1  [code, micro-batches, weight, ...]
flat    gradients in buffers of up to 25 MiB, which are summed; fp16 and bf16 in fp32
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from memtools._base import torch as bridge
from memtools._base.ranks import device_of, host_group

if TYPE_CHECKING:
    import torch

#: The size of a buffer, the same as in DDP.
BUCKET_BYTES = 25 << 20


class Wire:
    """A process group, with tables in host memory if possible.

    Not all backends take host tensors (nccl does not). If the group is the whole job, a gloo group
    of the same ranks is made for the tables: making a group is a collective of the whole job.
    """

    def __init__(self, group: Any = None) -> None:
        torch = bridge.connect().torch
        self._torch, self._dist = torch, torch.distributed
        self.group = self._dist.group.WORLD if group is None else group
        self.rank: int = self._dist.get_rank(self.group)
        self.world: int = self._dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError("this rank is not in the process group of the model")
        host = host_group(self._dist, self.group, "memtools accumulation")
        self._table_group = self.group if host is None else host
        self._table_device = device_of(self._table_group)

    def table(self, row: Sequence[float], counts: Sequence[float] = ()) -> Table:
        """Return the rows of all ranks and the sums of the counts. A collective of
        (world * len(row) + len(counts)) * 8 bytes. Each number is exact: only zeros are added."""
        width, start = len(row), self.rank * len(row)
        with self._torch.inference_mode(False), self._torch.no_grad():
            sent = self._torch.zeros(
                self.world * width + len(counts), dtype=self._torch.float64, device="cpu"
            )
            sent[start : start + width] = self._torch.tensor(row, dtype=sent.dtype, device="cpu")
            if counts:
                sent[self.world * width :] = self._torch.tensor(
                    counts, dtype=sent.dtype, device="cpu"
                )
            sent = sent.to(self._table_device)
            self._dist.all_reduce(sent, group=self._table_group)
            flat: list[float] = sent.tolist()
        rows = [tuple(flat[i * width : (i + 1) * width]) for i in range(self.world)]
        return Table(rows, flat[self.world * width :])

    def objects(self, value: Any) -> list[Any]:
        """Return the values of all ranks, which are pickled: two collectives."""
        found: list[Any] = [None] * self.world
        with self._torch.inference_mode(False), self._torch.no_grad():
            self._dist.all_gather_object(found, value, group=self._table_group)
        return found

    def sum(self, tensors: Sequence[torch.Tensor], factor: float = 1.0) -> None:
        """Multiply each tensor by `factor`, and replace it by its sum over the ranks.

        The tensors must have the same shapes and dtypes on all ranks. Afterwards they have the same
        bits. Takes up to two buffers of 25 MiB; a larger contiguous tensor is summed in place.
        """
        self._each(tensors, factor, lambda flat: self._dist.all_reduce(flat, group=self.group,
                                                                       async_op=True))  # fmt: skip

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each tensor by that of the group's first rank."""
        source = self._dist.get_global_rank(self.group, 0)
        self._each(tensors, 1.0, lambda flat: self._dist.broadcast(
            flat, source, group=self.group, async_op=True), widen=False)  # fmt: skip

    def _each(
        self, tensors: Sequence[torch.Tensor], factor: float, send: Any, widen: bool = True
    ) -> None:
        """Send the tensors, and fill the next buffer while the one before is sent."""
        under_way: list[tuple[Any, torch.Tensor, list[torch.Tensor]]] = []
        with self._torch.inference_mode(False), self._torch.no_grad():
            for bucket in self._buckets(tensors):
                flat = self._filled(bucket, widen)
                if factor != 1.0:
                    flat.mul_(factor)
                under_way.append((send(flat), flat, bucket))
                if len(under_way) == 2:
                    _land(*under_way.pop(0))
            for work, flat, bucket in under_way:
                _land(work, flat, bucket)

    def _buckets(self, tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Yield lists of tensors of one device and dtype, in the same order on all ranks."""
        kinds: dict[Any, list[torch.Tensor]] = {}
        for tensor in tensors:
            real = self._torch.view_as_real(tensor) if tensor.is_complex() else tensor
            kinds.setdefault((real.device, real.dtype), []).append(real)
        for alike in kinds.values():
            bucket: list[torch.Tensor] = []
            size = 0
            for tensor in alike:
                if bucket and size + tensor.nbytes > BUCKET_BYTES:
                    yield bucket
                    bucket, size = [], 0
                bucket.append(tensor)
                size += tensor.nbytes
            yield bucket

    def _filled(self, bucket: list[torch.Tensor], widen: bool) -> torch.Tensor:
        """Return the bucket as one flat tensor. Sums of 16-bit floats are made in fp32, so that
        they are rounded once and intermediate sums do not overflow."""
        first = bucket[0]
        half = first.dtype in (self._torch.float16, self._torch.bfloat16)
        if len(bucket) == 1 and first.is_contiguous() and not (half and widen):
            return first.view(-1)
        flat: torch.Tensor = self._torch.empty(
            sum(tensor.numel() for tensor in bucket),
            dtype=self._torch.float32 if half and widen else first.dtype,
            device=first.device,
        )
        for part, tensor in _parts(flat, bucket):
            part.copy_(tensor)
        return flat


class Table(NamedTuple):
    """The rows of all ranks, and the sums of their counts."""

    rows: list[tuple[float, ...]]
    counts: list[float]

    def column(self, which: int) -> list[float]:
        return [row[which] for row in self.rows]


def _parts(
    flat: torch.Tensor, bucket: list[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    start = 0
    for tensor in bucket:
        yield flat[start : start + tensor.numel()].view(tensor.shape), tensor
        start += tensor.numel()


def _land(work: Any, flat: torch.Tensor, bucket: list[torch.Tensor]) -> None:
    work.wait()
    if flat.data_ptr() == bucket[0].data_ptr():
        return
    for part, tensor in _parts(flat, bucket):
        tensor.copy_(part)
