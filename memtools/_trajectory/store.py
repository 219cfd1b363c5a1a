"""TrajectoryStore: what a rollout produced, kept over several epochs of updates in bounded memory.

    append(latents=x) ─► named ─► checked ─► reserved and allocated, where the field is new
                                                 │
                                  values alone ──┴─► block [T + 1, samples, ...] ─► epochs()

Everything that can be refused is refused before the first value is written, and a count is raised
after its values are there: so a call that raises leaves the store as it was.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self

from memtools import _core
from memtools._base import torch as bridge
from memtools._base.notice import logger
from memtools._base.number import whole_number
from memtools._base.size import format_bytes, parse_bytes
from memtools._base.text import as_name
from memtools._budget import Budget, check_device
from memtools._census.holders import graph_bytes
from memtools._trajectory import exchange
from memtools._trajectory.epochs import TrajectoryEpochs
from memtools._trajectory.field import DTYPES, Casts, Field, Kind, dtype_of
from memtools._trajectory.mapped import HEADER, Blocks, MappedFile, tensor_over
from memtools._trajectory.plan import Plan
from memtools.errors import BudgetError

if TYPE_CHECKING:
    import torch

#: The largest finite number of fp16.
FP16_MAX = 65_504


@dataclass(frozen=True, slots=True)
class TrajectoryStats:
    """What a TrajectoryStore holds and was given so far."""

    entries: int  #: appended since the store was made, over all fields
    with_graph: int  #: of these, with an autograd graph, which was dropped
    graph_bytes: int | None  #: of the last graph of a rollout
    cast: int  #: entries whose dtype was changed
    overflows: int  #: values refused because fp16 cannot hold them
    nbytes: int  #: memory of the blocks
    file_nbytes: int  #: bytes of the file's blocks


class _Given(NamedTuple):
    """What a call wants to write into one field."""

    field: Field
    is_new: bool
    parts: tuple[torch.Tensor, ...]  # each [entries, samples, ...], or [samples, ...] of one entry
    entries: int
    graph: tuple[torch.Tensor, ...]  # tensors as they came, of those that carried a graph

    def target(self) -> torch.Tensor:
        """Where the values are written: the field's block; memory of its own where they replace
        what was put before, which stays until nothing can fail any more.

        pre: the field has its block.
        """
        memory = self.field.memory
        is_put_again = self.field.kind == "samples" and self.field.count > 0
        return bridge.connect().torch.empty_like(memory) if is_put_again else memory

    def places(self, target: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Each part and where it goes in `target`, which is like the field's block."""
        at = 0 if self.field.kind == "samples" else self.field.count
        for part in self.parts:
            if part.dim() == target.dim():
                yield part, target[at : at + len(part)]
                at += len(part)
            else:
                yield part, target[at]


class TrajectoryStore:
    """Named fields of a rollout, `[T, samples, ...]` or `[T + 1, samples, ...]`, kept for several
    epochs of updates.

        store = memtools.TrajectoryStore(50, states=("latents",), limit="256 MiB")
        store.append(latents=x)                       # before the first step
        for t in range(50):
            x, log_probs = denoise(model, x, t)
            store.append(latents=x, log_probs=log_probs)
        store.put(advantages=advantages)
        for epoch in store.epochs(3, time_steps=5, shuffle=True):
            for chunk in epoch:
                ...
        store.reset()                                 # the next rollout, in the same memory

    A field's block is allocated for the whole rollout when it first comes, and reused after
    `reset()`. Tensors are copied without their graph. An error changes nothing. Not thread-safe.

    Args:
        num_steps: T, the time steps of a rollout.
        num_samples: samples of a rollout. None: those of the first tensor.
        states: names of fields with T + 1 entries: one before the first step and one after each.
            Fields that come whole in one `extend()` need not be named.
        dtype: floating-point fields are cast to "fp32", "bf16", "fp16" or a torch.dtype, or to that
            of their name in a dict. Fields named here or in `states` are required.
        device: of the blocks.
        limit: the most bytes, or like "256 MiB", or a `Budget`.
        file: a new memory-mapped file for all fields, which `TrajectoryStore.open()` opens again.
        overflow: a folder for a nameless file with the fields that exceed the limit. None: they
            raise BudgetError.

    Raises ValueError if the Budget is for another device, or a file is on a device; FileExistsError
    if `file` exists, another OSError if it cannot be made.
    """

    __slots__ = (
        "_all_fields_known",
        "_budget",
        "_casts",
        "_changes",
        "_closed",
        "_device",
        "_fields",
        "_file",
        "_file_is_all",
        "_graph_bytes",
        "_overflow",
        "_part",
        "_states",
        "_totals",
        "_warned",
        "num_samples",
        "num_steps",
    )

    def __init__(
        self,
        num_steps: int,
        num_samples: int | None = None,
        *,
        states: Iterable[str] = (),
        dtype: str | torch.dtype | Mapping[str, str | torch.dtype] | None = None,
        device: str | torch.device = "cpu",
        limit: int | str | Budget | None = None,
        file: str | os.PathLike[str] | None = None,
        overflow: str | os.PathLike[str] | None = None,
    ) -> None:
        self._file: MappedFile | Blocks | None = None
        self._closed = False
        #: time steps of a rollout
        self.num_steps = whole_number("num_steps", num_steps)
        #: None before the first tensor, if not given
        self.num_samples = num_samples
        if num_samples is not None:
            self.num_samples = whole_number("num_samples", num_samples)
        if isinstance(states, str):
            raise TypeError(
                f"states must be a tuple of names, got a str; pass states=({states!r},)"
            )
        self._states = frozenset(map(str, states))
        self._casts = Casts(dtype)
        self._device = str(bridge.connect().torch.device(device))
        if (file is not None or overflow is not None) and self._device != "cpu":
            raise ValueError(
                f'a file is memory of the host, got device {self._device!r}; pass "cpu"'
            )
        if file is not None and overflow is not None:
            raise ValueError("file holds all fields, overflow those without room; pass one of them")
        self._budget = _budget(limit, self._device)
        self._part = _core.BudgetPart(self._budget, "TrajectoryStore")
        self._fields: dict[str, Field] = {}
        self._all_fields_known = False
        self._changes = 0  # of what epochs() has seen
        self._totals = {"entries": 0, "with_graph": 0, "cast": 0, "overflows": 0}
        self._graph_bytes: int | None = None
        self._warned = False
        self._overflow = None if overflow is None else os.fspath(overflow)
        self._file_is_all = file is not None
        if self._overflow is not None and not os.path.isdir(self._overflow):
            raise NotADirectoryError(f"overflow must be an existing folder, got {self._overflow!r}")
        if file is not None:
            self._file = MappedFile.create(file)
            try:
                self._describe()
            except BaseException:
                self._file.close()
                os.unlink(file)
                raise

    @classmethod
    def open(cls, file: str | os.PathLike[str]) -> Self:
        """Open the file of a store again, with what was appended before the program ended or was
        killed.

        Raises ValueError if `file` is not such a file, of another version, or damaged; OSError if
        it cannot be opened.
        """
        mapped, described, counts = MappedFile.open(file)
        try:
            steps, samples = described["num_steps"], described["num_samples"]
            store = cls(steps, samples, states=described["states"], dtype=described["dtype"])
            for line, count in zip(described["fields"], counts, strict=False):
                field = store._field_of(line, count, mapped.size)
                block = mapped.map(field.offset, field.nbytes) if field.nbytes else None
                field.block = tensor_over(block, field.dtype, _shape(field))
                store._fields[field.name] = field
            store._all_fields_known = bool(described["all_fields_known"])
        except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
            mapped.close()
            raise ValueError(
                f"{os.fspath(file)!r} is damaged: its header says what cannot be ({error}); sample "
                "again"
            ) from error
        store._file, store._file_is_all = mapped, True
        return store

    def _field_of(self, line: Mapping[str, Any], count: int, file_bytes: int) -> Field:
        """A field as a file describes it. Raises ValueError, KeyError and TypeError."""
        shape = tuple(whole_number("shape", length, 0) for length in line["shape"])
        if line["dtype"] not in DTYPES or line["kind"] not in ("steps", "states", "samples"):
            raise ValueError(f"dtype {line['dtype']!r}, kind {line['kind']!r}")
        dtype = dtype_of(line["dtype"])
        samples = whole_number("num_samples", self.num_samples)
        name, kind = as_name("the name of a field", line["name"]), line["kind"]
        if name in self._fields:
            raise ValueError(f"{name} twice")
        casts = self._casts.of(name) is not None and dtype.is_floating_point
        field = Field(name, kind, self._length(kind), samples, shape, dtype, dtype.itemsize, casts)
        field.in_file, field.count, field.index = True, count, len(self._fields)
        offset = field.offset = whole_number("offset", line["offset"], 0)
        misplaced = field.nbytes > 0 and (offset < HEADER or offset % mmap.PAGESIZE)
        if misplaced or offset + field.nbytes > file_bytes or count > field.length:
            raise ValueError(f"{name} has {count} entries, at {offset} of {file_bytes} bytes")
        for other in self._fields.values():
            if offset < other.offset + other.nbytes and other.offset < offset + field.nbytes:
                raise ValueError(f"{name} and {other.name} have the same bytes of the file")
        return field

    # --- what goes in ---

    def append(self, entries: Any = None, /, **fields: torch.Tensor) -> None:
        """Append one time step: tensors `[samples, ...]` by name.

        Fields may come in separate calls, at most one time step ahead of the others.

        Args:
            entries: a dict or a TensorDict of batch_size [samples].
            fields: more of them.

        Raises:
            TypeError: a value is not a tensor, or its memory cannot be read (sparse, nested ...).
            ValueError: a shape, dtype or number of samples differs, fp16 cannot hold a value, a
                field is left behind, or the store is closed.
            RuntimeError: in a forked child of a store with a file.
            IndexError: a field has all its entries.
            KeyError: a field that the first rollout did not have.
            BudgetError, OSError: a new field does not fit into the limit, or on the disk.
        """
        is_own = self._file is None or not self._file.is_of_parent
        if entries is None and is_own and self._append_plain(fields):
            return
        call = "append()"
        given = exchange.named_tensors(call, entries, fields, self._states, 1)
        self._take([self._check(call, name, came, False) for name, came in given.items()], call)

    def extend(self, entries: Any = None, /, **fields: torch.Tensor) -> None:
        """Append several time steps: tensors `[steps, samples, ...]` by name, as `append()` does.

        Args:
            entries: a dict or a TensorDict of batch_size [steps, samples]. A state may be given as
                `x` and `("next", "x")`, as in torchrl; only the last entry of the latter is read.
            fields: more of them.
        """
        call = "extend()"
        given = exchange.named_tensors(call, entries, fields, self._states, 2)
        self._take([self._check(call, name, came, True) for name, came in given.items()], call)

    def put(self, entries: Any = None, /, **fields: torch.Tensor) -> None:
        """Set values of samples without time, such as advantages: tensors `[samples, ...]` by name.

        Replaces earlier values; for a moment both are in memory. `entries`, `fields` and errors are
        as for `append()`.
        """
        call = "put()"
        given = exchange.named_tensors(call, entries, fields, self._states, 1)
        checked = [self._check(call, name, came, False, True) for name, came in given.items()]
        self._take(checked, call)

    def _check(
        self,
        call: str,
        name: str,
        came: tuple[Any, ...],
        stacked: bool,
        of_samples: bool = False,
    ) -> _Given:
        """Check what is written into a field, and make a new field. Changes nothing."""
        torch = bridge.connect().torch
        for part in came:
            if not isinstance(part, torch.Tensor):
                raise TypeError(f"{call} takes tensors, got {type(part).__name__} for {name!r}")
            fault = bridge.why_unreadable(part, name)
            if fault is not None:
                raise TypeError(f"{call} cannot read a tensor {name!r} that is {fault}")
        # From here on no code of a tensor's own class is run.
        parts = tuple(map(bridge.values_of, came))
        graph = tuple(
            part for part in came if torch._C.TensorBase.grad_fn.__get__(part) is not None
        )
        self._require_open(call)
        for part in parts:
            if part.dim() < 1 + stacked:
                wanted = "[steps, samples, ...]" if stacked else "[samples, ...]"
                raise ValueError(f"{call} takes {name} as {wanted}, got {list(part.shape)}")
        first, entries = parts[0], sum(map(len, parts)) if stacked else 1
        shape = tuple(first.shape[1 + stacked :])
        samples = first.shape[stacked]
        field = self._fields.get(name)
        is_new = field is None
        if field is None:
            field = self._new_field(call, name, first, shape, samples, entries, of_samples)
        if (field.kind == "samples") != of_samples:
            right = "put()" if field.kind == "samples" else "append() or extend()"
            raise ValueError(f"{name} is a field of {right}, got it in {call}")
        for part in parts:
            got = part.shape[stacked], tuple(part.shape[1 + stacked :])
            if got != (field.samples, field.shape):
                raise ValueError(
                    f"{name} has {field.samples} samples of {list(field.shape)}, got "
                    f"{got[0]} of {list(got[1])} in {call}; every entry has the same shape"
                )
            self._check_dtype(call, field, part)
        if not of_samples and field.count + entries > field.length:
            hint = (
                ""
                if field.kind == "states"
                else (f"; name it in states=({name!r},) if it has one more after the last step")
            )
            raise IndexError(
                f"{name} has {field.count} of {field.length} entries, got {entries} more in "
                f"{call}; reset() begins the next rollout{hint}"
            )
        return _Given(field, is_new, parts, entries, graph)

    def _new_field(
        self,
        call: str,
        name: str,
        first: torch.Tensor,
        shape: tuple[int, ...],
        samples: int,
        entries: int,
        of_samples: bool,
    ) -> Field:
        if self._all_fields_known:
            raise KeyError(
                f"{name!r} is not a field of this store, which has {self._names()} since the first "
                "rollout; make another store for other fields"
            )
        as_name(f"{call}: the name of a field", name)
        if samples < 1:
            raise ValueError(f"{name} has no samples in {call}: {list(first.shape)}")
        if self.num_samples is not None and samples != self.num_samples:
            raise ValueError(
                f"{name} has {samples} samples in {call}, the store {self.num_samples}; every "
                "field has a value of each sample"
            )
        cast = self._casts.of(name) if first.is_floating_point() else None
        dtype = first.dtype if cast is None else dtype_of(cast)
        if str(dtype).removeprefix("torch.") not in DTYPES:
            raise TypeError(f"{name} is of {dtype}, which a store cannot keep; cast it before")
        kind: Kind = "steps"
        if of_samples:
            kind = "samples"
        elif name in self._states or entries == self.num_steps + 1:
            kind = "states"
        length, casts = self._length(kind), cast is not None
        return Field(name, kind, length, samples, shape, dtype, dtype.itemsize, casts)

    def _check_dtype(self, call: str, field: Field, tensor: torch.Tensor) -> None:
        if tensor.dtype == field.dtype:
            return
        if field.casts and tensor.is_floating_point():
            return
        raise ValueError(
            f"{field.name} is kept in {field.dtype}, got {tensor.dtype} in {call}; cast it before, "
            'or make the store with dtype="fp32", "bf16" or "fp16"'
        )

    def _take(self, given: list[_Given], call: str) -> None:
        """Write everything that was checked, or nothing."""
        self._require_own(call)
        samples = {each.field.samples for each in given}
        if len(samples) > 1:
            sizes = ", ".join(f"{each.field.name} {each.field.samples}" for each in given)
            raise ValueError(f"{call} was given fields of different numbers of samples: {sizes}")
        if call == "append()":
            self._check_pace(given)
        new = [each.field for each in given if each.is_new]
        known = self.num_samples
        file_size = HEADER if self._file is None else self._file.size
        try:
            for field in new:
                self._allocate(field, call)
            targets = [each.target() for each in given]
            overflows = {
                each.field.name: count
                for each, target in zip(given, targets, strict=True)
                if (count := self._write(each, target))
            }
            if overflows:
                total = sum(overflows.values())
                self._totals["overflows"] += total
                raise ValueError(
                    f"{call} got {total:,} values that fp16 cannot hold (above {FP16_MAX:,} in "
                    f'size) in {", ".join(overflows)}; keep these fields in "bf16" or "fp32"'
                )
            self.num_samples = given[0].field.samples
            for field in new:
                field.index = len(self._fields)
                self._fields[field.name] = field
            if new:
                self._describe()
        except BaseException:
            self.num_samples = known
            self._unmake(new, file_size)
            raise
        for each, target in zip(given, targets, strict=True):
            if target is not each.field.block:
                each.field.memory.copy_(target)
        self._count(given)

    def _check_pace(self, given: list[_Given]) -> None:
        """Refuse a time step of some fields while others still lack the one before."""
        ahead = {each.field.name: each.field.steps_done + each.entries for each in given}
        others = [
            field
            for field in self._fields.values()
            if field.kind != "samples" and field.name not in ahead
        ]
        done = list(ahead.items()) + [(field.name, field.steps_done) for field in others]
        slowest, least = min(done, key=lambda pair: pair[1])
        fastest, most = max(ahead.items(), key=lambda pair: pair[1])
        if most - least > 1:
            raise ValueError(
                f"append() would give {fastest} time step {most} of {self.num_steps} while "
                f"{slowest} has {max(0, least)}; append every field of a time step before the next"
            )

    def _write(self, given: _Given, target: torch.Tensor) -> int:
        """Copy the values; returns how many of them did not fit."""
        torch = bridge.connect().torch
        overflows = 0
        with torch.no_grad():
            for part, place in given.places(target):
                place.copy_(part)
                if place.dtype == torch.float16 and part.dtype != torch.float16:
                    overflows += _overflows(torch, place, part)
        return overflows

    def _count(self, given: list[_Given]) -> None:
        """Count what was written."""
        changes_shape = any(each.is_new or each.field.kind != "samples" for each in given)
        self._changes += changes_shape
        totals, graphs = self._totals, list[Any]()
        for field, _, parts, entries, graph in given:
            field.count = 1 if field.kind == "samples" else field.count + entries
            totals["entries"] += entries
            totals["cast"] += entries * any(part.dtype != field.dtype for part in parts)
            if field.kind == "samples":
                field.with_graph = 0  # what was put before is gone
            if graph:
                totals["with_graph"] += entries
                field.with_graph += entries
                graphs += graph
            if isinstance(self._file, MappedFile):
                self._file.count(field.index, field.count)
        if totals["with_graph"] and not self._warned:
            self._warn_of_graphs(graphs)

    def _append_plain(self, given: Mapping[str, Any]) -> bool:
        """Append a time step in which nothing is special: its fields are there, and its tensors are
        plain, have no graph and the right shape. Returns False, with nothing done, in any other
        case: the long way takes 50 us more and says what is wrong."""
        torch = bridge.connect().torch
        plain, strided, half = torch.Tensor, torch.strided, torch.float16
        writes: list[tuple[Field, Any]] = []
        least, most, cast = self.num_steps, 0, 0
        for field in self._fields.values():
            if field.kind == "samples":
                continue
            done = field.count - field.before
            tensor = given.get(field.name)
            if tensor is not None:
                if (
                    type(tensor) is not plain
                    or tensor.requires_grad
                    or tensor.is_nested
                    or tensor.layout is not strided
                    or tensor.is_meta
                    or bridge.is_freed(tensor)
                    or tensor.shape != field.entry_shape
                    or field.count >= field.length
                ):
                    return False
                if tensor.dtype is not field.dtype:
                    if field.dtype is half or not (field.casts and tensor.is_floating_point()):
                        return False
                    cast += 1
                done += 1
                most = max(most, done)
                writes.append((field, tensor))
            least = min(least, done)
        if len(writes) != len(given) or not writes or most - least > 1:
            return False
        for field, tensor in writes:
            field.memory[field.count].copy_(tensor)
        for field, _ in writes:
            field.count += 1
            if isinstance(self._file, MappedFile):
                self._file.count(field.index, field.count)
        self._changes += 1
        totals = self._totals
        totals["entries"] += len(writes)
        totals["cast"] += cast
        if totals["with_graph"] and not self._warned:
            self._warn_of_graphs([])
        return True

    def _warn_of_graphs(self, last: list[torch.Tensor]) -> None:
        """Say once that samples came with their graphs, when a rollout is complete."""
        over_time = [field for field in self._fields.values() if field.kind != "samples"]
        carrying = [
            f"{field.with_graph} of {field.count} entries of {field.name}"
            for field in self._fields.values()
            if field.with_graph
        ]
        if not carrying or not over_time or any(field.count < field.length for field in over_time):
            return
        self._warned = True
        self._graph_bytes = graph_bytes(last)
        held = ""
        if self._graph_bytes:
            held = f", which holds {format_bytes(self._graph_bytes)} at the last one"
        logger.warning(
            "%s carried a graph%s; the store keeps the values alone, and the graph lives as long "
            "as the program keeps such a tensor: sample under torch.no_grad()",
            " and ".join(carrying),
            held,
        )

    # --- memory ---

    def _allocate(self, field: Field, call: str) -> None:
        torch = bridge.connect().torch
        if not self._file_is_all:
            remedy = "keep fields in a smaller dtype, or pass overflow=folder or a larger limit"
            try:
                self._part.reserve(field.nbytes, f"TrajectoryStore.{call}, {field.name}", remedy)
            except BudgetError:
                if self._overflow is None:
                    raise
                if self._file is None:
                    self._file = Blocks(self._overflow)
            else:
                try:
                    with torch.inference_mode(False):
                        field.block = torch.empty(
                            _shape(field), dtype=field.dtype, device=self._device
                        )
                except BaseException:
                    self._part.release(field.nbytes)
                    raise
                return
        assert self._file is not None
        field.in_file = True
        block = None
        if field.nbytes:
            field.offset, block = self._file.add(field.nbytes)
        field.block = tensor_over(block, field.dtype, _shape(field))

    def _unmake(self, new: list[Field], file_size: int) -> None:
        """Remove new fields whose first call has failed."""
        for field in new:
            self._fields.pop(field.name, None)
            if field.block is not None and not field.in_file:
                self._part.release(field.nbytes)
            field.block = None
        if self._file is not None and self._file.size > file_size:
            self._file.cut(file_size)
            self._describe()  # the header may have had them already

    def _describe(self) -> None:
        """Write what the file holds into its header."""
        if not isinstance(self._file, MappedFile):
            return
        described = {
            "num_steps": self.num_steps,
            "num_samples": self.num_samples,
            "states": sorted(self._states),
            "dtype": self._casts.as_json(),
            "all_fields_known": self._all_fields_known,
            "fields": [
                {
                    "name": field.name,
                    "kind": field.kind,
                    "shape": field.shape,
                    "dtype": str(field.dtype).removeprefix("torch."),
                    "offset": field.offset,
                }
                for field in self._fields.values()
            ],
        }
        self._file.describe(described)

    def reset(self) -> None:
        """Begin the next rollout: drop all entries, keep the memory and the fields.

        Raises RuntimeError in a forked child of a store with a file.
        """
        self._require_open("reset()")
        self._require_own("reset()")
        for index, field in enumerate(self._fields.values()):
            field.count = field.with_graph = 0
            if isinstance(self._file, MappedFile):
                self._file.count(index, 0)
        self._changes += 1
        if self._fields and not self._all_fields_known:
            self._all_fields_known = True
            self._describe()

    def flush(self) -> None:
        """Write the file to the disk, to survive a loss of power; a kill loses nothing without it.
        Raises OSError if that fails."""
        self._require_open("flush()")
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Release all memory, as the `with` block does; a named file stays, and so do blocks with
        views. May be called twice."""
        for field in self._fields.values():
            field.block = None
        self._fields.clear()
        self._changes += 1
        self._part.close()
        if self._file is not None:
            self._file.close()
            self._file = None
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- what comes out ---

    def epochs(
        self,
        num_epochs: int,
        *,
        time_steps: int | None = None,
        samples: int | None = None,
        max_tokens: int | None = None,
        lengths: str | torch.Tensor | Iterable[int] | None = None,
        shuffle: bool = False,
        seed: int = 0,
        kl_threshold: float | None = None,
        device: str | torch.device | None = None,
    ) -> TrajectoryEpochs:
        """Iterate over a complete rollout several times, in chunks.

        On the store's device a chunk of consecutive samples is a read-only view. Other chunks are
        copies into memory that the next chunk reuses.

        Args:
            num_epochs: the number of epochs.
            time_steps: consecutive steps of a chunk. None: all.
            samples: samples of a chunk. None: all.
            max_tokens: the most tokens (or nodes) of a chunk's samples; chunks are balanced.
            lengths: the tokens of each sample, or the name of a field that was `put()`; needed with
                `max_tokens`.
            shuffle: a new order in each epoch, from `seed` and its number.
            seed: of `shuffle`.
            kl_threshold: the mean KL divergence of an epoch, from `report_kl()`, above which no
                further epoch begins.
            device: of the chunks. None: the store's.

        Raises ValueError if a field is missing or incomplete, or a sample has more than
        `max_tokens`; BudgetError if copies on the store's device do not fit into the limit.
        """
        self._require_open("epochs()")
        self._require_complete("epochs()")
        if isinstance(lengths, str):
            lengths = self._lengths_in(lengths)
        plan = Plan(
            self.num_steps,
            whole_number("num_samples", self.num_samples),
            time_steps=time_steps,
            samples=samples,
            max_tokens=max_tokens,
            lengths=lengths,
            shuffle=shuffle,
            seed=seed,
        )
        where = self._device if device is None else str(bridge.connect().torch.device(device))
        return TrajectoryEpochs(self, num_epochs, plan, kl_threshold, where)

    def _lengths_in(self, name: str) -> torch.Tensor:
        field = self._fields.get(name)
        if field is None or field.kind != "samples" or field.shape:
            raise ValueError(
                f"lengths names a field of one number for each sample that was put(), got {name!r}"
            )
        return field.values

    def as_tensordict(self) -> Any:
        """Return a TensorDict of batch_size [T, samples] over the same memory, in which a state is
        `x` before each step and `("next", "x")` after it, and values of samples are expanded.

        Raises ImportError without tensordict, ValueError if a field is not complete.
        """
        self._require_open("as_tensordict()")
        self._require_complete("as_tensordict()")
        samples = self.num_samples or 0
        return exchange.tensordict_of(list(self._fields.values()), self.num_steps, samples)

    def __getitem__(self, name: str) -> torch.Tensor:
        """What was appended of a field so far, `[entries, samples, ...]`, or `[samples, ...]` of
        one that was put. A view: a write to it changes the store.

        Raises KeyError for a name that is not a field, or of which nothing was put since `reset()`;
        ValueError if the store is closed.
        """
        self._require_open(f"store[{name!r}]")
        if name not in self._fields:
            raise KeyError(f"{name!r} is not a field of this store, which has {self._names()}")
        field = self._fields[name]
        if field.kind == "samples" and field.count == 0:
            raise KeyError(f"{name!r} was not put() since reset()")
        return field.values

    def __contains__(self, name: object) -> bool:
        return name in self._fields

    def __len__(self) -> int:
        """Time steps that all fields have."""
        done = [field.steps_done for field in self._fields.values() if field.kind != "samples"]
        return max(0, min(done, default=0))

    def __bool__(self) -> bool:
        return True  # also when it is empty: `if self.store:` asks whether there is one

    @property
    def names(self) -> tuple[str, ...]:
        """The fields, in order of first use."""
        return tuple(self._fields)

    @property
    def is_complete(self) -> bool:
        """Whether every field has all its entries."""
        has_all = all(field.count == field.length for field in self._fields.values())
        return bool(self._fields) and has_all and not self._absent()

    @property
    def device(self) -> str:
        """Of the blocks, such as "cpu"."""
        return self._device

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks, without those in a file."""
        return sum(field.nbytes for field in self._fields.values() if not field.in_file)

    @property
    def file_nbytes(self) -> int:
        """Bytes of the blocks in the file."""
        return sum(field.nbytes for field in self._fields.values() if field.in_file)

    def stats(self) -> TrajectoryStats:
        """Return what the store holds and was given so far."""
        return TrajectoryStats(
            **self._totals,
            graph_bytes=self._graph_bytes,
            nbytes=self.nbytes,
            file_nbytes=self.file_nbytes,
        )

    # --- small parts ---

    def _length(self, kind: Kind) -> int:
        return {"steps": self.num_steps, "states": self.num_steps + 1, "samples": 1}[kind]

    def _absent(self) -> list[str]:
        """Fields that were named when the store was made, and did not come yet."""
        return sorted((self._states | self._casts.named.keys()) - self._fields.keys())

    def _names(self) -> str:
        return ", ".join(self._fields) or "none"

    def _require_open(self, call: str) -> None:
        if self._closed:
            raise ValueError(f"{call} of a TrajectoryStore that is closed; make another one")

    def _require_own(self, call: str) -> None:
        if self._file is not None and self._file.is_of_parent:
            raise RuntimeError(
                f"{call} in a forked child of a TrajectoryStore with a file would write to the "
                "parent's values; make a store in the child"
            )

    def _require_complete(self, call: str) -> None:
        if not self._fields:
            raise ValueError(f"{call} of an empty store; append() the rollout first")
        lacking = [field for field in self._fields.values() if field.count < field.length]
        absent = self._absent()
        if not lacking and not absent:
            return
        missing = [
            f"{field.name} was not put()"
            if field.kind == "samples"
            else f"{field.name} has {field.count} of {field.length} entries"
            for field in lacking
        ]
        missing += [f"{name} is named in states or dtype and did not come" for name in absent]
        hint = ""
        if any(field.kind == "states" and field.length == field.count + 1 for field in lacking):
            hint = "; a state has one before the first step as well"
        raise ValueError(f"{call} needs a whole rollout: {', '.join(missing)}{hint}")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raises TypeError, in copy.copy(), copy.deepcopy() and pickle."""
        raise TypeError(
            "a TrajectoryStore cannot be copied or pickled, as its blocks are memory of this "
            "process: pass on store['name'], or the path of its file to TrajectoryStore.open()"
        )

    def __repr__(self) -> str:
        if self._closed:
            return "TrajectoryStore(closed)"
        on_disk = f", {format_bytes(self.file_nbytes)} in a file" if self.file_nbytes else ""
        return (
            f"TrajectoryStore({len(self)} of {self.num_steps} steps, {self._names()}, "
            f"{format_bytes(self.nbytes)} on {self._device}{on_disk})"
        )


def _shape(field: Field) -> tuple[int, ...]:
    return (field.length, field.samples, *field.shape)


def _overflows(torch: Any, written: torch.Tensor, given: torch.Tensor) -> int:
    """Count the values that became infinite when written as fp16. Waits for a device."""
    infinite = torch.isinf(written)
    if not infinite.any():
        return 0
    return int((infinite & ~torch.isinf(given).to(written.device)).sum())


def _budget(limit: int | str | Budget | None, device: str) -> Budget:
    if isinstance(limit, Budget):
        check_device(limit, device, "TrajectoryStore")
        return limit
    size = None if limit is None else parse_bytes(limit, "limit", "256 MiB")
    return Budget(size, name="trajectory")
