"""TrajectoryStore against lists of tensors: random calls, good and bad, in memory, in a file and in
overflow; a file is also opened as a killed process would have left it."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from memtools import BudgetError, TrajectoryStore
from tests.kit.long import LONG

pytestmark = pytest.mark.slow

SHAPES: dict[str, tuple[int, ...]] = {
    "x": (3,),
    "lp": (),
    "none": (0,),
    "ids": (2, 2),
    "mask": (5,),
}
DTYPES = {
    "x": torch.float32, "lp": torch.float64, "none": torch.float32, "ids": torch.int64,
    "mask": torch.bool,
}  # fmt: skip
CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
REFUSALS = (ValueError, IndexError, KeyError, TypeError, BudgetError)
WRONG: dict[str, Any] = {
    "a shape": torch.zeros(1, 7), "samples": torch.zeros(9, 3), "no samples": torch.zeros(()),
    "sparse": torch.zeros(2, 3).to_sparse(), "meta": torch.empty(2, 3, device="meta"),
    "complex": torch.zeros(2, 3, dtype=torch.complex64), "a list": [1.0], "None": None,
}  # fmt: skip


class AgainstLists(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.generator = torch.Generator()
        self.copies = itertools.count()

    @initialize(
        steps=st.integers(1, 5),
        samples=st.integers(1, 4),
        cast=st.sampled_from([None, *CASTS]),
        where=st.sampled_from(["memory", "limit", "file", "file", "overflow"]),
        seed=st.integers(0, 2**32),
    )
    def begin(self, steps: int, samples: int, cast: str | None, where: str, seed: int) -> None:
        self.generator.manual_seed(seed)
        self.steps, self.samples, self.cast = steps, samples, cast
        self.file = self.folder / "rollout" if where == "file" else None
        options: dict[str, Any] = {
            "memory": {}, "limit": {"limit": 600}, "file": {"file": self.file},
            "overflow": {"overflow": self.folder, "limit": 100},
        }[where]  # fmt: skip
        self.store = TrajectoryStore(steps, samples, states=("x",), dtype=cast, **options)
        self.fields: dict[str, list[torch.Tensor]] = {}
        self.put: dict[str, torch.Tensor] = {}

    def value(self, name: str, *lead: int) -> torch.Tensor:
        shape = (*lead, *SHAPES[name])
        made = torch.randn(shape, generator=self.generator) * 3
        return made > 0 if name == "mask" else made.to(DTYPES[name])

    def kept(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(CASTS[self.cast]) if self.cast and value.is_floating_point() else value

    @rule(names=st.sets(st.sampled_from(sorted(SHAPES)), min_size=1))
    def append(self, names: set[str]) -> None:
        given = {name: self.value(name, self.samples) for name in sorted(names)}
        try:
            self.store.append(**given)
        except REFUSALS:
            return
        for name, value in given.items():
            self.fields.setdefault(name, []).append(self.kept(value))

    @rule(name=st.sampled_from(sorted(SHAPES)), steps=st.integers(0, 6))
    def extend(self, name: str, steps: int) -> None:
        value = self.value(name, steps, self.samples)
        try:
            self.store.extend(**{name: value})
        except REFUSALS:
            return
        self.fields.setdefault(name, []).extend(self.kept(value))

    @rule(name=st.sampled_from(["advantages", "more"]))
    def put_values(self, name: str) -> None:
        value = torch.randn(self.samples, 2, generator=self.generator)
        try:
            self.store.put(**{name: value})
        except REFUSALS:
            return
        self.put[name] = self.kept(value)

    @precondition(lambda self: "x" in self.fields)
    @rule(value=st.sampled_from(sorted(WRONG)))
    def refused(self, value: str) -> None:
        with pytest.raises(REFUSALS):
            self.store.append(x=WRONG[value])

    @rule()
    def reset(self) -> None:
        self.store.reset()
        self.fields = {name: [] for name in self.fields}
        self.put = {}

    @precondition(lambda self: self.file is not None)
    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = TrajectoryStore.open(self.file)
        self.samples = self.store.num_samples or self.samples

    @precondition(lambda self: self.file is not None)
    @rule()
    def killed(self) -> None:
        """What was written lies in the kernel's pages, whenever the process ends."""
        left = self.folder / f"left{next(self.copies)}"
        left.write_bytes(self.file.read_bytes())
        with TrajectoryStore.open(left) as found:
            self.is_as_told(found)

    def is_as_told(self, store: TrajectoryStore) -> None:
        for name, values in self.fields.items():
            assert len(store[name]) == len(values), name
            if values:
                assert torch.equal(store[name], torch.stack(values)), name
        for name, value in self.put.items():
            assert torch.equal(store[name], value), name

    @invariant()
    def has_what_was_given(self) -> None:
        self.is_as_told(self.store)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        shutil.rmtree(self.folder)


test_against_lists = AgainstLists.TestCase
test_against_lists.settings = settings(
    max_examples=600 if LONG else 25, stateful_step_count=40, deadline=None
)
