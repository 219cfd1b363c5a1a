"""managed(clear=...): what is found by a name, how it is cleared, and what goes wrong."""

from __future__ import annotations

import collections
import functools
from typing import Any

import pytest
import torch

import memtools
from tests.cleanup.managedcases import policy
from tests.cleanup.test_managed import P, counted


class Block:
    def __init__(self) -> None:
        self.gates: list[object] = [1]
        self.loss: object = torch.ones(1)


class Model:
    def __init__(self) -> None:
        self.gate_history = memtools.GateHistory()
        self.gate_history.append(torch.rand(4, 8))
        self.aux_loss = memtools.AuxLoss()
        self.aux_loss.add(torch.ones((), requires_grad=True))
        self.blocks = [Block(), Block()]
        self.by_name = {"a": Block(), "b": Block()}
        self.losses: Any = [torch.ones(1), torch.ones(1)]
        self.total: object = torch.ones(1)

    @property
    def broken(self) -> object:
        raise AttributeError("no such luck")


class Agent:
    def __init__(self) -> None:
        self.model = Model()

    @memtools.managed(P, clear=("model.gate_history", "model.aux_loss"))
    def update(self, buffer: object = None, error: BaseException | None = None) -> str:
        assert len(self.model.gate_history) == 1
        if error is not None:
            raise error
        return "done"


def test_a_history_and_a_loss_are_cleared_after_each_update():
    agent = Agent()
    assert agent.update() == "done"
    assert len(agent.model.gate_history) == 0 == len(agent.model.aux_loss)
    assert agent.model.gate_history.stats().tokens == 4, "statistics stay"


def test_also_when_it_raised_and_inside_another_call():
    agent, error = Agent(), ValueError("why")
    with pytest.raises(ValueError, match="why") as caught:
        agent.update(error=error)
    assert caught.value is error
    assert not hasattr(error, "__notes__")
    assert len(agent.model.gate_history) == 0
    inner = Agent()
    memtools.managed(P)(inner.update)()
    assert len(inner.model.gate_history) == 0


def test_before_the_policy_acts():
    model, seen = Model(), []
    acting = policy(lambda mask, clock: seen.append(model.total))
    memtools.managed(acting, clear="model.total")(lambda model: None)(model)
    assert seen == [None]


# --- where names begin ----------------------------------------------------------------------------


def cleared(function: Any, name: str, *args: Any, **kwargs: Any) -> None:
    memtools.managed(P, clear=name)(function)(*args, **kwargs)


def test_names_begin_at_a_parameter_or_at_an_attribute_of_the_first_argument():
    def plain(agent: object, model: Any = None, *, other: Any = None) -> None: ...

    for call in (
        lambda agent, model: cleared(plain, "model.blocks.0.gates", agent, model),
        lambda agent, model: cleared(plain, "model.blocks.0.gates", agent, model=model),
        lambda agent, model: cleared(plain, "other.blocks.0.gates", agent, other=model),
        lambda agent, model: cleared(plain, "agent.model.blocks.0.gates", _with(agent, model)),
        lambda agent, model: cleared(lambda self: 0, "model.blocks.0.gates", _with(agent, model)),
        lambda agent, model: cleared(lambda self: 0, "self.blocks.0.gates", model),
        lambda agent, model: cleared(lambda *args: 0, "blocks.0.gates", model, agent),
        lambda agent, model: cleared(lambda x=model: 0, "x.blocks.0.gates"),
        lambda agent, model: cleared(functools.partial(plain, 1), "model.blocks.0.gates", model),
        lambda agent, model: cleared(id, "blocks.0.gates", model),
    ):
        agent, model = Agent(), Model()
        call(agent, model)
        assert model.blocks[0].gates == []
        assert model.blocks[1].gates == [1]


def _with(agent: Agent, model: Model) -> Agent:
    agent.model = model
    return agent


def test_names_of_a_bound_method_begin_at_its_object():
    agent = Agent()
    agent.update = memtools.managed(P, clear="model.total")(agent.update)  # type: ignore[method-assign]
    agent.update()
    assert agent.model.total is None


def test_names_of_a_classmethod_begin_at_the_class():
    class Counter:
        seen = [1, 2]

        @memtools.managed(P, clear=("seen", "cls.seen"))
        @classmethod
        def update(cls) -> None: ...

    Counter.update()
    assert Counter.seen == []


def test_objects_and_pairs():
    model, values = Model(), [1]
    update = memtools.managed(P, clear=[values, (model, "total"), model.gate_history])(lambda: None)
    update()
    assert values == []
    assert model.total is None
    assert len(model.gate_history) == 0
    memtools.managed(P, clear=model.aux_loss)(lambda: None)()
    assert len(model.aux_loss) == 0
    with memtools.managed(P, clear=[(model, "losses.0"), values]):
        values.append(2)
    assert model.losses[0] is None
    assert values == []


# --- what is found --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [[1], {1: 2}, {1}, collections.deque([1]), bytearray(b"x"), collections.Counter("a")],
    ids=lambda value: type(value).__name__,
)
def test_containers_are_emptied_and_stay(value):
    model = Model()
    model.total = value
    cleared(lambda self: 0, "total", model)
    assert model.total is value
    assert len(value) == 0


@pytest.mark.parametrize("value", [torch.ones(2), 3, 2.5, True, None, torch.ones(()) * 1j])
def test_tensors_and_numbers_become_none(value):
    model = Model()
    model.total = value
    cleared(lambda self: 0, "total", model)
    assert model.total is None


def test_stars_and_numbers_reach_items():
    model = Model()
    names = ("blocks.*.gates", "by_name.*.loss", "losses.*", "blocks.1.loss", "by_name.a.gates")
    memtools.managed(P, clear=names)(lambda self: 0)(model)
    assert [block.gates for block in model.blocks] == [[], []]
    assert [block.loss is None for block in model.blocks] == [False, True]
    assert [block.loss for block in model.by_name.values()] == [None, None]
    assert (model.by_name["a"].gates, model.by_name["b"].gates) == ([], [1])
    assert model.losses == [None, None]


def test_modules_of_torch():
    class Moe(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gates: list[int] = [1]
            self.aux: torch.Tensor | None = torch.ones(1)

    model = torch.nn.Module()
    model.layers = torch.nn.Sequential(Moe(), Moe())
    model.heads = torch.nn.ModuleDict({"a": Moe()})
    names = ("layers.0.gates", "layers.*.aux", "heads.a.gates", "heads.*.aux")
    memtools.managed(P, clear=[f"self.{name}" for name in names])(lambda self: 0)(model)
    (first, second), head = model.layers, model.heads["a"]
    assert (first.gates, second.gates, head.gates) == ([], [1], [])
    assert (first.aux, second.aux, head.aux) == (None, None, None)


# --- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "error", "sentence"),
    [
        ("gate_histroy", AttributeError, r"^clear='gate_histroy': Model has no attribute "
         r"'gate_histroy'; did you mean 'gate_history'\?$"),
        ("blocks.0.gate", AttributeError, r"Block has no attribute 'gate'; .* 'gates'\?"),
        ("blocks.7.gates", AttributeError, r"list has no item 7"),
        ("by_name.c.gates", AttributeError, r"dict has no attribute 'c'"),
        ("xyzzy", AttributeError, r"has no attribute 'xyzzy'$"),
        ("none.gates", AttributeError, r"clear='none.gates' ends at None, which has no 'gates'"),
        ("total.*.x", AttributeError, r"Tensor has no attribute 'x'"),
        ("text", TypeError, r"^clear='text' is an object of type str, which has neither clear\(\)"),
        ("kind", TypeError, r"is class Block, which has neither"),
        ("weight", TypeError, r"is a parameter of the model, which"),
        ("number.*", TypeError, r"'\*' means every item, and an object of type int has none"),
        ("pool", TypeError, r"is an object of type KVPool, which has neither"),
    ],
)  # fmt: skip
def test_what_cannot_be_cleared_is_said_after_the_call(name, error, sentence):
    model: Any = Model()
    model.none, model.text, model.kind, model.number = None, "text", Block, 3
    model.weight = torch.nn.Parameter(torch.ones(1))
    model.pool = memtools.KVPool(1, 1, 8, max_tokens=8, max_sequences=1)
    calls: list[int] = []
    update = memtools.managed(P, clear=("blocks.1.gates", name, "losses"))(
        lambda self: calls.append(1)
    )
    before = P.ticks(0)
    with pytest.raises(error, match=sentence):
        update(model)
    assert calls == [1]
    assert P.ticks(0) == before, "no update"
    assert model.losses == [] == model.blocks[1].gates, "the others are cleared all the same"
    assert isinstance(model.weight, torch.nn.Parameter)


def test_a_name_that_is_wrong_makes_no_item():
    kept = collections.defaultdict(list, a=[1])
    with pytest.raises(AttributeError, match="defaultdict has no attribute 'b'"):
        memtools.managed(P, clear="kept.b")(lambda kept: 0)(kept)
    assert kept == {"a": [1]}


def test_an_argument_cannot_become_none():
    with pytest.raises(TypeError, match=r"clear='x' is an argument, which cannot be set to None"):
        cleared(lambda x: 0, "x", torch.ones(1))
    values = [1]
    cleared(lambda x: 0, "x", values)
    assert values == []


def test_it_never_takes_the_place_of_the_functions_own_exception():
    own = ValueError("own")

    def update(self: object) -> None:
        raise own

    with pytest.raises(ValueError, match="own") as caught:
        cleared(update, "nothing", Model())
    assert caught.value is own
    assert own.__notes__ == [
        "while this exception propagated, clearing failed: AttributeError: clear='nothing': Model "
        "has no attribute 'nothing'"
    ]
    with pytest.raises(TypeError, match=r"missing 1 required positional"):
        cleared(update, "nothing")


def test_an_interrupt_while_clearing_does():
    class Stop:
        def clear(self) -> None:
            raise KeyboardInterrupt

    own = ValueError("own")

    def update() -> None:
        raise own

    with pytest.raises(KeyboardInterrupt) as caught:
        memtools.managed(P, clear=[Stop()])(update)()
    assert caught.value.__context__ is own


def test_what_a_clear_raises_passes():
    class Bad:
        def clear(self) -> None:
            raise OSError("disk")

    assert counted(lambda: None) == 0
    with pytest.raises(OSError, match="disk") as caught:
        memtools.managed(P, clear=[Bad(), Bad()])(lambda: None)()
    assert caught.value.__notes__ == ["and OSError: disk"]
    with pytest.raises(AttributeError, match="no attribute 'broken'") as caught_attribute:
        cleared(lambda self: 0, "broken", Model())
    assert "no such luck" in str(caught_attribute.value.__cause__)
    agent = Agent()
    assert counted(agent.update) == 1, "nothing is left open"


@pytest.mark.parametrize(
    "name", ["", ".", "a.", ".a", "a..b", "a b", "0.a", "*.a", "class.a", "a.-1", "a.**", "a.b()"]
)
def test_names_are_checked_where_they_are_written(name):
    with pytest.raises(ValueError, match=r"is not a name: '.*' is neither an attribute"):
        memtools.managed(P, clear=("fine", name))


def test_a_name_that_no_call_could_have_is_refused_at_the_decorator():
    with pytest.raises(ValueError, match=r"update\(\) has no parameter 'model', nor a first one"):

        @memtools.managed(P, clear="model.x")
        def update() -> None: ...


@pytest.mark.parametrize("bad", [3, None, object(), torch.ones(1), Block, ("a", object())])
def test_what_names_nothing_is_refused(bad):
    with pytest.raises(TypeError, match=r"clear=.* has neither clear\(\) nor reset\(\)"):
        memtools.managed(P, clear=[bad])


def test_an_object_and_a_name_are_one_target():
    class Environment:
        resets = 0

        def __init__(self) -> None:
            self.buffer = [1]

        def reset(self) -> None:
            self.resets += 1

    environment = Environment()

    class Player:
        buffer = [7]

        @memtools.managed(None, clear=(environment, "buffer"))
        def update(self) -> None: ...

    Player().update()
    assert (environment.resets, environment.buffer, Player.buffer) == (0, [], [7])
    with memtools.managed(None, clear=[environment, (environment, "buffer")]):
        environment.buffer.append(2)
    assert (environment.resets, environment.buffer) == (1, [])
