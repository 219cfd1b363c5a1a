"""Which storages are parameters, gradients, state and buffers, of programs as they are."""

from __future__ import annotations

import collections
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from memtools import _core
from memtools._blocks import tensors as tensors_module
from memtools._blocks.peak import BUFFER, GRADIENT, INPUT, OF_STATE, PARAMETER
from memtools._blocks.tensors import Tensors, inputs_of, storage_of


@pytest.fixture(autouse=True)
def _own_objects_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests of this process keep is not seen."""
    find = _core._instances
    kept = find((*subclasses(torch.nn.Module), *subclasses(torch.optim.Optimizer)))
    before = {id(one) for one in kept}  # which live as long as `kept`

    def own(classes: tuple[type, ...]) -> list[object]:
        return [one for one in find(classes) if id(one) not in before]

    monkeypatch.setattr(
        tensors_module,
        "_core",
        SimpleNamespace(_instances=own, kept=kept, _instance_dict=_core._instance_dict),
    )


def subclasses(cls: type) -> list[type]:
    return [cls, *(inner for sub in cls.__subclasses__() for inner in subclasses(sub))]


def held(tensors: Tensors | None = None) -> dict[int, dict[str, tuple[int, ...]]]:
    """The shapes of what is held, by category and name."""
    tensors = tensors or Tensors()
    tensors.find()
    return {
        category: {one.name: one.shape for _, one in found} for category, found in tensors.held()
    }


class Pretends:
    """Says that it is an optimizer, and runs code to do so."""

    asked = 0

    @property
    def __class__(self) -> type:  # type: ignore[override]
        Pretends.asked += 1
        return torch.optim.Optimizer


def test_a_training_programs_tensors_are_known_by_name() -> None:
    gc.collect()
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3))
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    loss = torch.nn.CrossEntropyLoss()
    pretends = Pretends()
    loss(model(torch.randn(4, 5)), torch.zeros(4, dtype=torch.int64)).backward()
    optimizer.step()
    Pretends.asked = 0
    found = held()
    assert Pretends.asked == 0
    del pretends
    assert found[PARAMETER] == {
        "0.weight": (3, 5),
        "0.bias": (3,),
        "1.weight": (3,),
        "1.bias": (3,),
    }
    assert found[GRADIENT] == {"0.weight": (3, 5), "1.weight": (3,), "1.bias": (3,)}
    assert {name for name in found[BUFFER] if "running" in name} == {
        "1.running_mean",
        "1.running_var",
    }
    assert found[OF_STATE] == {
        f"{kind} of {name}": () if kind == "step" else shape
        for name, shape in found[GRADIENT].items()
        for kind in ("step", "exp_avg", "exp_avg_sq")
    }


def test_of_several_models_names_begin_with_the_class_and_a_storage_comes_once() -> None:
    gc.collect()
    first, second = torch.nn.Linear(2, 2, bias=False), torch.nn.Embedding(2, 2)
    second.weight = first.weight
    third = torch.nn.Conv1d(1, 1, 1, bias=False)
    names = held()[PARAMETER]
    assert len(names) == 2
    assert "Conv1d.weight" in names
    assert names.keys() & {"Linear.weight", "Embedding.weight"}
    del third


def test_addresses_and_sizes_are_those_of_storages() -> None:
    whole = torch.zeros(100)
    assert storage_of(torch, whole[10:20]) == (whole.data_ptr(), 400)
    assert storage_of(torch, torch.empty(0)) is None
    assert storage_of(torch, torch.empty(3, device="meta")) is None
    assert storage_of(torch, torch.eye(3).to_sparse()) is None


def test_nothing_is_kept_alive() -> None:
    model = torch.nn.Linear(2, 2)
    gone = weakref.ref(model), weakref.ref(model.weight)
    tensors = Tensors()
    held(tensors)
    del model
    assert [ref() for ref in gone] == [None, None]
    assert dict(tensors.held()) is not None


def test_what_was_frozen_is_found() -> None:
    gc.collect()
    weight = torch.nn.Parameter(torch.ones(7))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    gc.freeze()
    try:
        assert held()[PARAMETER] == {"": (7,)}
    finally:
        gc.unfreeze()
    assert optimizer.param_groups[0]["params"][0] is weight


def test_inputs_are_the_arguments_that_nothing_was_computed_for() -> None:
    x, y = torch.zeros(4, 2), torch.zeros(3)
    weight = torch.zeros(2, requires_grad=True)
    found = inputs_of([{"x": x, "more": [y, 3]}, weight, x @ weight, "text"])
    assert [(one.shape, one.category) for _, one in found] == [((4, 2), INPUT), ((3,), INPUT)]
    assert found[0][0] == (x.data_ptr(), 32)


def test_a_tensor_of_a_class_of_its_own_runs_no_code_of_it() -> None:
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args, **kwargs):  # type: ignore[no-untyped-def]
            raise RuntimeError("asked")

    x = torch.zeros(4).as_subclass(Loud)
    assert len(inputs_of([x])) == 1


def test_arguments_are_looked_through_without_code_of_theirs() -> None:
    class Meta(type):
        def __hash__(cls) -> int:  # isinstance() of an abstract class keeps classes by their hash
            raise AssertionError("asked")

    class Loud(dict, metaclass=Meta):  # type: ignore[type-arg]
        items = values = keys = __iter__ = None  # type: ignore[assignment]

    class Argument(metaclass=Meta):
        @property
        def __class__(self) -> type:  # type: ignore[override]
            raise AssertionError("asked")

    x, y = torch.zeros(4), torch.zeros(5)
    given = [Argument(), Loud(x=x), collections.UserDict(y=y)]
    assert [one.shape for _, one in inputs_of(given)] == [(4,), (5,)]


def test_a_mode_of_the_program_hears_nothing_of_it() -> None:
    class Loud(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            raise RuntimeError("asked")

    model, x = torch.nn.Linear(2, 2), torch.zeros(4)
    tensors = Tensors()
    tensors.find()
    with Loud():
        found = dict(tensors.held())
        assert len(inputs_of([x])) == 1
    assert (2, 2) in {one.shape for _, one in found[PARAMETER]}
    assert model.bias is not None
