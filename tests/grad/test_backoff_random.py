"""Random models, batches, optimizers and settings, out of memory in any operator: what step()
leaves behind is what a run of the same micro-batches leaves that never ran out of memory."""

from __future__ import annotations

import collections
import copy
import dataclasses
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import memtools
from tests.grad.accumulatecases import summed_in_fp32
from tests.grad.backoffcases import undoing
from tests.kit.long import LONG
from tests.kit.oominject import AtOperators

WIDTH = 4

# --- models that a pass changes: the input is shifted by what earlier passes have left in them ---


class Holder(nn.Module):
    """A layer whose input is shifted by what earlier passes have left in the model."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, 1)
        self.prepare()

    def prepare(self) -> None: ...

    def shift(self, mean: torch.Tensor) -> Any:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x - self.shift(x.detach().mean(0)))


class FilledNone(Holder):
    """A buffer that is None until the first pass."""

    def prepare(self) -> None:
        self.register_buffer("mean", None)

    def shift(self, mean):
        self.mean = mean if self.mean is None else 0.5 * self.mean + 0.5 * mean
        return self.mean


class Registered(Holder):
    def shift(self, mean):
        if "mean" not in self._buffers:
            self.register_buffer("mean", mean, persistent=False)
        else:
            self.mean = 0.5 * self.mean + 0.5 * mean
        return self.mean


class Emptied(Holder):
    def prepare(self) -> None:
        self.register_buffer("mean", torch.full((WIDTH,), 3.0))
        self.register_buffer("other", torch.zeros(1))

    def shift(self, mean):
        shift, self.mean = mean if self.mean is None else self.mean, None
        return shift


class Deleted(Holder):
    def prepare(self) -> None:
        self.register_buffer("mean", torch.full((WIDTH,), 3.0))
        self.register_buffer("other", torch.zeros(1))

    def shift(self, mean):
        if "mean" not in self._buffers:
            return mean
        shift = self.mean
        del self.mean
        return shift


class AddedModule(Holder):
    """A submodule that the first pass makes; its buffers change in the next ones."""

    def shift(self, mean):
        if "inner" not in self._modules:
            self.inner = FilledNone()
        return self.inner.shift(mean)


class AddedAttribute(Holder):
    def shift(self, mean):
        self.mean = 0.5 * getattr(self, "mean", mean * 0) + 0.5 * mean
        return self.mean


class CountedAttribute(Holder):
    def prepare(self) -> None:
        self.passes = 0

    def shift(self, mean):
        self.passes += 1
        return mean / self.passes


class TensorAttribute(Holder):
    """A tensor that is no buffer, changed in place."""

    def prepare(self) -> None:
        self.mean = torch.zeros(WIDTH)

    def shift(self, mean):
        return self.mean.mul_(0.5).add_(mean)


class AddedParameter(Holder):
    def shift(self, mean):
        if "scale" not in self._parameters:
            self.scale = nn.Parameter(mean, requires_grad=False)
        return self.scale


class MomentumEncoder(Holder):
    """Parameters that are not trained, and follow the others in each pass."""

    def prepare(self) -> None:
        self.slow = nn.Linear(WIDTH, 3).requires_grad_(False)

    def shift(self, mean):
        for parameter in self.slow.parameters():
            parameter.data = 0.9 * parameter.data + mean.mean()
        return self.slow(mean).mean()


class Codebook(Holder):
    """And one that is changed in place, by a way that leaves no trace in its version."""

    def prepare(self) -> None:
        self.code = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def shift(self, mean):
        self.code.data.mul_(0.5).add_(mean)
        return self.code


class GrowingList(Holder):
    def prepare(self) -> None:
        self.norms = nn.ModuleList()

    def shift(self, mean):
        self.norms.append(nn.BatchNorm1d(WIDTH, affine=False))
        pair = torch.stack([mean, mean + 1])
        return sum(norm(pair).mean(0) + norm.running_mean for norm in self.norms)


class NormInLegacyClothes(Holder):
    def prepare(self) -> None:
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def shift(self, mean):
        return self.first(mean)


class Moving(Holder):
    """Buffers that change in every way that modules have."""

    def prepare(self) -> None:
        for name in ("in_place", "by_data", "replaced", "resized", "still"):
            self.register_buffer(name, torch.arange(4.0), persistent=name != "still")
        self.register_buffer("none", None)

    def shift(self, mean):
        self.in_place.add_(mean)
        self.by_data.data.mul_(0.5)
        self.replaced = self.replaced * 0.5
        self.resized.resize_(self.resized.numel() + 1).fill_(2.0)
        moved = self.in_place + self.by_data + self.replaced + self.still
        return moved * self.resized.numel() / 100


MODELS = [
    FilledNone,
    Registered,
    Emptied,
    Deleted,
    AddedModule,
    AddedAttribute,
    CountedAttribute,
    TensorAttribute,
    AddedParameter,
    MomentumEncoder,
    Codebook,
    GrowingList,
    NormInLegacyClothes,
    Moving,
]


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(3)


BUFFERS = {
    "expanded": lambda: torch.ones(1, 4).expand(4, 4),
    "expanded, large": lambda: torch.ones(1, 1 << 10).expand(1 << 10, 1 << 10),
    "expanded twice": lambda: torch.ones(1, 3, 1).expand(2, 3, 4),
    "inference": _inference,
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "every other": lambda: torch.ones(8)[::2],
    "conjugate": lambda: torch.ones(4, dtype=torch.cfloat).conj(),
    "flags": lambda: torch.ones(4, dtype=torch.bool),
    "meta": lambda: torch.empty(4, device="meta"),
    "empty": lambda: torch.empty(0),
    "8-bit float": lambda: torch.ones(4).to(torch.float8_e4m3fn),
}


def _change(buffer: torch.Tensor) -> None:
    """Halve its values in the way that its kind allows."""
    with torch.no_grad(), torch.inference_mode(buffer.is_inference()):
        if buffer.is_nested or buffer.layout is not torch.strided:
            buffer.values().mul_(0.5)
        elif 0 in buffer.stride():
            buffer.as_strided((buffer.untyped_storage().nbytes() // 4,), (1,), 0).mul_(0.5)
        elif buffer.dtype is torch.bool:
            buffer.logical_not_()
        elif buffer.itemsize == 1:
            buffer.copy_(buffer.float() * 0.5)
        else:
            buffer.mul_(0.5)


def _values(buffer: torch.Tensor) -> Any:
    if buffer.is_meta:
        return buffer.shape
    if buffer.is_nested:
        return buffer.values().tolist()
    return (buffer if buffer.layout is torch.strided else buffer.to_dense()).tolist()


# --- models: [rows, WIDTH] to [rows, 1] ---


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight, self.last = self.first.weight, nn.Linear(WIDTH, 1)
        self.unused = nn.Linear(2, 2)
        self.first.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Drawing(nn.Module):
    """Dropout, BatchNorm, and numbers of each generator."""

    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, 8), nn.BatchNorm1d(8, momentum=momentum)
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(self.norm(self.first(x)).relu(), 0.3)
        noise = torch.randn(len(x), 1, dtype=x.dtype)
        return self.last(x) + 0.01 * (noise + random.random() + float(np.random.rand()))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(2, 5, batch_first=True, num_layers=2, dropout=0.1)
        self.last = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.cells(x.reshape(len(x), 2, 2))[0][:, -1])


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 8))
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.2), nn.Tanh())
        self.last, self.reentrant = nn.Linear(8, 1), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        return self.last(checkpoint(self.first, x, use_reentrant=self.reentrant))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.block(self.first(x.reshape(len(x), 2, 2))).mean(1))


class OfKind(nn.Module):
    """A model whose output depends on a buffer of some kind, which each pass changes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, 1)
        self.register_buffer("buffer", BUFFERS[kind]())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _change(self.buffer)
        return self.last(x) + float(np.tanh(np.real(np.sum(_flat(_values(self.buffer))))))


def _flat(values: Any) -> list[Any]:
    return [one for part in values for one in _flat(part)] if isinstance(values, list) else [values]


FACTORIES: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "drawing": lambda: Drawing(0.1),
    "drawing, averages": lambda: Drawing(None),
    "recurrent": Recurrent,
    "normed": Normed,
    "checkpointed": lambda: Checkpointed(False),
    "checkpointed, reentrant": lambda: Checkpointed(True),
    "attending": Attending,
    **{make.__name__: make for make in MODELS},
    **{
        f"{kind} buffer": lambda kind=kind: OfKind(kind)
        for kind in BUFFERS
        if kind not in ("expanded, large", "meta", "empty")
    },
}

# --- batches: made of (x, y, units, index), and read back ---


class Fields(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor
    units: torch.Tensor
    index: torch.Tensor


class Named(collections.namedtuple("Named", Fields._fields)):
    __slots__ = ()

    def __new__(cls, *, x: Any, y: Any, units: Any, index: Any) -> Any:
        return super().__new__(cls, x, y, units, index)


@dataclasses.dataclass(frozen=True)
class Data:
    fields: Fields
    rate: float = 0.5


class Samples(list):
    pass


def _samples(f: Fields) -> Samples:
    return Samples(dict(zip(Fields._fields, row, strict=True)) for row in zip(*f, strict=True))


def _stacked(rows: list[dict[str, torch.Tensor]]) -> Fields:
    return Fields(*(torch.stack([row[name] for row in rows]) for name in Fields._fields))


def _inner(batch: dict[str, Any]) -> Any:
    return batch["f"]


def _ragged(f: Fields) -> Any:
    return {"f": f, "r": Samples(torch.ones(i % 3 + 1) for i in range(len(f.x)))}


FORMS: dict[str, tuple[Callable[[Fields], Any], Callable[[Any], Any]]] = {
    "dict": (Fields._asdict, lambda b: b.values()),
    "tuple": (tuple, lambda b: b),
    "named tuple": (lambda f: f, lambda b: b),
    "named tuple by keyword": (lambda f: Named(**f._asdict()), lambda b: b),
    "dataclass": (Data, lambda b: b.fields),
    "user dict": (lambda f: collections.UserDict(f._asdict()), lambda b: b.values()),
    "nested": (
        lambda f: {"in": {"x": f.x}, "rest": f[1:], "k": 3},
        lambda b: [b["in"]["x"], *b["rest"]],
    ),
    "arrays": (
        lambda f: {"x": f.x.numpy(), "rest": f[1:]},
        lambda b: [torch.from_numpy(b["x"]), *b["rest"]],
    ),
    "texts": (lambda f: {"f": f, "id": [str(int(i)) for i in f.index], "set": "train"}, _inner),
    "ragged": (_ragged, _inner),
    "constants": (lambda f: {"f": f, "mask": None, "t": torch.tensor(2.0)}, _inner),
    "sorted": (lambda f: {"s": torch.sort(f.x, 1), "f": f}, _inner),
    "samples": (_samples, _stacked),
}


def _tensordict(fields: Fields) -> Any:
    import tensordict

    return tensordict.TensorDict(fields._asdict(), [len(fields.x)])


FORMS["tensordict"] = (_tensordict, lambda b: [b[name] for name in Fields._fields])

# --- a run ---

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9),
    "adamw": lambda ps: torch.optim.AdamW(ps, 0.01),
    "fused": lambda ps: torch.optim.AdamW(ps, 0.01, fused=True),
    "foreach": lambda ps: torch.optim.Adam(ps, 0.01, foreach=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, 0.01, centered=True),
}
LOSSES = ["units", "extras", "rows", "mean"]


@dataclasses.dataclass(frozen=True)
class Case:
    """Everything but the operators that run out of memory."""

    model: str
    form: str
    optimizer: str
    loss: str
    undo: str
    precision: str
    rows: tuple[int, ...]
    size: int | None
    max_norm: float | None
    hooks: bool
    seed: int


class Trained:
    """A model in training, and the micro-batches of its window that ran."""

    def __init__(self, case: Case, size: int | None) -> None:
        self.case = case
        torch.manual_seed(case.seed)
        self.model = FACTORIES[case.model]()
        self.wide = case.precision == "fp32 sums"
        if self.wide:
            summed_in_fp32(self.model.bfloat16())
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if case.hooks:
            for p in parameters:
                p.register_hook(lambda grad: grad * 1.5)
        self.optimizer = OPTIMIZERS[case.optimizer](parameters)
        self.acc = memtools.GradAccumulator(
            self.model, self.optimizer, micro_batch_size=size,
            max_norm=case.max_norm, precision=None if self.wide else case.precision,
            init_scale=64.0,
        )  # fmt: skip
        self.acc._runner.precision.scale.growth_interval = 2
        undoing(self.acc, case.undo)
        self.tried: list[tuple[int, int]] = []
        self.stepped: list[torch.Tensor] = []
        if case.optimizer != "fused":  # which takes the average along where nobody looks
            self.optimizer.register_step_pre_hook(self.look)
        self.random: Any = None
        self.begin_pass: Callable[[], None] = lambda: None
        torch.manual_seed(case.seed + 1)
        random.seed(case.seed)
        np.random.seed(case.seed % 2**32)
        self.keep_random()

    def look(self, *_: Any) -> None:
        """Keep the gradients that the optimizer steps with."""
        grads = [p.grad for group in self.optimizer.param_groups for p in group["params"]]
        self.stepped = [grad.clone() for grad in grads if grad is not None]

    def keep_random(self) -> None:
        self.random = torch.get_rng_state(), random.getstate(), np.random.get_state()

    def use_random(self) -> None:
        torch.set_rng_state(self.random[0])
        random.setstate(self.random[1])
        np.random.set_state(self.random[2])

    def loss(self, micro: Any) -> Any:
        self.begin_pass()
        x, y, units, index = FORMS[self.case.form][1](micro)
        self.tried.append((int(index[0]), len(index)))
        out = self.model(x.bfloat16() if self.wide else x)
        errors = (out - y).float().square().squeeze(1)
        if self.case.loss == "mean":
            return errors.mean()
        if self.case.loss == "rows":
            return errors.sum(), len(x)
        found = (errors * units).sum(), units.sum()
        return (*found, {"low": (errors < 1).sum()}) if self.case.loss == "extras" else found

    def sizes(self) -> list[int]:
        """Rows of the micro-batches that count: what began later at the same row replaced them."""
        good: list[tuple[int, int]] = []
        for first, count in self.tried:
            while good and sum(good[-1]) > first:
                good.pop()
            good.append((first, count))
        return [count for _, count in good]

    def left(self) -> list[str]:
        """All that training leaves behind, in words that differ where a bit does."""
        found: dict[str, Any] = dict(self.model.named_parameters())
        for name, module in self.model.named_modules():
            for key, value in {**vars(module), **module._buffers}.items():
                if isinstance(value, (int, float, torch.Tensor)):
                    found[f"{name}.{key}"] = value
        for i, state in self.optimizer.state_dict()["state"].items():
            found |= {f"state {i} {key}": value for key, value in state.items()}
        last = self.acc.report().last
        if last is not None:
            numbers = (last.weight, last.norm, last.coefficient, last.scale, last.skipped)
            found["report"] = (*numbers, last.loss, dict(last.extras))
        found["random"] = self.random[0].tolist(), self.random[1], str(self.random[2])
        return [f"{name}: {_exact(value)}" for name, value in sorted(found.items())]


def _exact(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{value.dtype} {_values(value.detach()) if not value.is_meta else value.shape}"


def fields(case: Case, index: int) -> Fields:
    make = torch.Generator().manual_seed(case.seed + 7 * index)
    rows = case.rows[index]
    units = torch.randint(0, 4, (rows,), generator=make).float()
    units[0] += 1  # some have none, but not all of them
    x, y = (torch.randn(rows, size, generator=make) for size in (WIDTH, 1))
    return Fields(x, y, units, torch.arange(rows))


#: torch has no LSTM in fp16, and the others do not compute in bf16.
NOT_IN = {
    "fp16": ["recurrent"],
    "fp32 sums": [name for name in FACTORIES if name not in ("tied", "drawing", "attending")],
}
CASES = st.builds(
    Case,
    model=st.sampled_from(list(FACTORIES)),
    form=st.sampled_from(list(FORMS)),
    optimizer=st.sampled_from(list(OPTIMIZERS)),
    loss=st.sampled_from(LOSSES),
    undo=st.sampled_from(["scratch", "redo"]),
    precision=st.sampled_from(["fp32", "fp32", "bf16", "fp16", "fp32 sums"]),
    rows=st.lists(st.sampled_from([2, 3, 4, 5, 8, 9, 16, 17]), min_size=1, max_size=3).map(tuple),
    size=st.sampled_from([None, None, 2, 3, 5]),
    max_norm=st.sampled_from([None, None, 0.5, 1e-3]),
    hooks=st.booleans(),
    seed=st.integers(0, 2**31),
).filter(lambda case: case.model not in NOT_IN.get(case.precision, ()))
#: Where memory runs out, in parts of the operators of one pass over the whole batch.
PLACES = st.lists(st.sampled_from([i / 24 for i in range(1, 61)]), max_size=3)


def copied(model: nn.Module) -> nn.Module:
    """A deep copy; torch cannot copy buffers of all kinds so."""
    memo = {id(buffer): buffer.clone() for buffer in model.buffers()}
    return copy.deepcopy(model, memo)


def operators(run: Trained, batch: Any) -> int:
    """How many operators a pass of the whole batch has; on a copy."""
    other = copy.copy(run)
    other.model, other.tried = copied(run.model), []
    with AtOperators() as counted:
        loss = other.loss(batch)
        (loss[0] if isinstance(loss, tuple) else loss).backward()
    run.use_random()
    return counted.count


def plain(run: Trained, before: nn.Module, batch: Any, sizes: list[int]) -> list[torch.Tensor]:
    """The gradients of the same micro-batches by plain torch."""
    other = copy.copy(run)
    other.model, other.tried, total, at = before, [], 0.0, 0
    whole = Fields(*FORMS[run.case.form][1](batch))
    for size in sizes:
        micro = FORMS[run.case.form][0](Fields(*(part[at : at + size] for part in whole)))
        result, at = other.loss(micro), at + size
        loss, weight = result[:2] if isinstance(result, tuple) else (result * size, size)
        loss.backward()
        total += float(weight)
    return [p.grad / total for p in before.parameters() if p.grad is not None]


def assert_dropped(run: Trained, error: Exception, before: nn.Module, windows: int) -> None:
    """What no smaller micro-batch helps with comes out, and the window is dropped."""
    if "Expected more than 1 value per channel" not in str(error):  # BatchNorm's, of one row
        assert isinstance(error, torch.OutOfMemoryError), repr(error)
    if run.acc._runner.window.torn:  # the optimizer had begun to step
        return
    now = dict(run.model.named_parameters())  # a pass that went well may have added some
    assert all(parameter.grad is None for parameter in now.values())
    for name, old in before.named_parameters():  # others stay as the whole micro-batches left them
        assert not old.requires_grad or torch.equal(now[name], old)
    assert run.acc.report().windows == windows


SPARSE = "ignore:.*(Sparse CSR|nested tensors|resolve_conj|imaginary|lr_sched).*"


@pytest.mark.filterwarnings(SPARSE)
@pytest.mark.slow
@settings(max_examples=1200 if LONG else 60, deadline=None)
@given(CASES, PLACES, st.booleans(), st.booleans())
def test_out_of_memory_in_any_operator_leaves_what_an_undisturbed_run_leaves(
    case, places, after, from_pass
):
    compare(case, places, after, from_pass, event)


@pytest.mark.filterwarnings(SPARSE)
@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize("model", FACTORIES)
def test_any_model_is_as_before_a_pass_that_ran_out_of_memory(model):
    options = {"form": "dict", "optimizer": "sgd", "loss": "units", "precision": "fp32"}
    for undo in ("scratch", "redo"):
        for place in (0.2, 0.6):  # forward and backward
            case = Case(model, undo=undo, rows=(8, 8), size=None, max_norm=None, hooks=False,
                        seed=1, **options)  # fmt: skip
            report = compare(case, [place], after=True, from_pass=True).acc.report()
            assert (report.windows, report.ran_out) == (2, 2), place


def compare(
    case: Case,
    places: list[float],
    after: bool,
    from_pass: bool,
    note: Callable[[str], None] = lambda text: None,
) -> Trained:
    """Run windows that run out of memory at some operators, and windows of the same micro-batches
    that do not; what is left has to be the same. Returns the run that ran out.

    Args:
        places: the operators that fail, as in PLACES.
        after: whether they fail when they have done their work.
        from_pass: count operators from the first forward pass on, and not from the call of step().
    """
    run, calm = Trained(case, case.size), Trained(case, None)
    assert run.left() == calm.left()
    for index in range(len(case.rows)):
        batch = FORMS[case.form][0](fields(case, index))
        run.use_random()
        count = operators(run, batch)
        before, windows = copied(run.model), run.acc.report().windows
        run.tried.clear()
        inject = AtOperators((), after)

        def arm(inject: AtOperators = inject, count: int = count) -> None:
            """Count operators from here on."""
            inject.at, inject.count = {1 + int(place * count) for place in places}, 0
            run.begin_pass = lambda: None

        run.begin_pass = arm if from_pass else lambda: None
        if not from_pass:
            arm()
        try:
            with inject:
                run.acc.step(batch, run.loss)
        except Exception as error:
            note(f"came out: {type(error).__name__}")
            assert_dropped(run, error, before, windows)
            return run
        note(f"{len(inject.hits)} operators failed")
        run.keep_random()
        sizes = run.sizes()
        assert sum(sizes) == case.rows[index]
        calm.use_random()
        calm.tried.clear()
        calm.acc._get_back_off().step(batch, calm.loss, sizes=sizes)
        assert calm.sizes() == sizes
        if case.precision == "fp32" and not case.hooks and case.max_norm is None and run.stepped:
            calm.use_random()
            expected = plain(calm, before, batch, sizes)
            assert len(expected) == len(run.stepped)
            for got, grad in zip(run.stepped, expected, strict=True):
                assert torch.allclose(got, grad, rtol=1e-4, atol=1e-6)
            run.use_random()
        calm.keep_random()
        assert run.left() == calm.left()
        assert all(p.grad is None for p in run.model.parameters())
    return run


# --- beside torch's own autocast and GradScaler ---

WINDOWS = st.lists(
    st.tuples(st.integers(1, 12), st.sampled_from(["", "", "", "inf", "nan"]), st.booleans()),
    min_size=1,
    max_size=8,
)


@pytest.mark.slow
@settings(max_examples=150 if LONG else 8, deadline=None)
@given(WINDOWS, st.sampled_from([torch.float16, torch.bfloat16]), st.integers(0, 2**31))
def test_16_bits_give_the_scales_and_skips_of_autocast_and_a_grad_scaler(windows, dtype, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))
    twin = copy.deepcopy(model)
    precision = "fp16" if dtype is torch.float16 else "bf16"
    acc = memtools.GradAccumulator(
        model, torch.optim.SGD(model.parameters(), 0.05), precision=precision,
        init_scale=64.0,
    )  # fmt: skip
    ours = acc._runner.precision.scale
    ours.least, ours.growth_interval = 2.0**-9, 2
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    usual = torch.optim.SGD(twin.parameters(), 0.05)
    skips = 0
    for rows, bad, runs_out in windows:
        x = torch.randn(rows, WIDTH)
        if bad:
            x[-1, 0] = float(bad)
        left = [runs_out and rows > 1]

        def loss_fn(micro: torch.Tensor, left: list[bool] = left) -> Any:
            loss = model(micro).float().square().sum()
            if left.pop() if left else False:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return loss, len(micro)

        report = acc.step(x, loss_fn)
        with torch.autocast("cpu", dtype):
            out = twin(x)
        scaler.scale(out.float().square().sum() / rows).backward()
        before = scaler.get_scale()
        scaler.step(usual)
        scaler.update()
        usual.zero_grad()
        skips += scaler.get_scale() < before
        assert report.skipped == bool(bad)
        if precision == "fp16":
            assert acc.scale == scaler.get_scale()
    assert acc.report().skipped == skips
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=0.02, atol=0.005)
