"""AuxLoss: the graph is kept until reset, and no longer."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from memtools import AuxLoss


def test_total_is_the_sum_with_its_graph():
    weight = torch.ones(3, requires_grad=True)
    aux = AuxLoss()
    for scale in (1.0, 2.0, 3.0):
        aux.add((weight * scale).sum())
    assert len(aux) == 3
    (0.5 * aux.total()).backward()
    assert weight.grad.tolist() == [3.0, 3.0, 3.0]


def test_total_of_nothing_adds_nothing():
    aux = AuxLoss()
    assert aux.total().item() == 0.0
    assert (torch.tensor(2.0) + 0.01 * aux.total()).item() == 2.0
    assert aux


def test_reset_lets_the_graph_go():
    aux = AuxLoss()
    weight = torch.ones(2, requires_grad=True)
    activation = weight.exp()
    probe = set[int]()  # lives as long as the graph: its hook refers to it
    activation.register_hook(lambda grad, probe=probe: None)
    aux.add(activation.sum())
    held = weakref.ref(probe)
    del activation, probe
    gc.collect()
    assert held() is not None
    aux.reset()
    gc.collect()
    assert held() is None
    assert len(aux) == 0


def test_one_element_losses_of_any_shape_are_scalars():
    aux = AuxLoss()
    aux.add(torch.tensor([[2.0]]))
    assert aux.total().shape == ()


@pytest.mark.parametrize("bad", [1.0, None, torch.tensor(1), torch.tensor(1j)])
def test_what_is_no_floating_point_tensor_is_refused(bad):
    aux = AuxLoss()
    with pytest.raises(TypeError, match="floating-point scalar"):
        aux.add(bad)
    assert len(aux) == 0


def test_an_unreduced_loss_is_refused_and_nothing_is_added():
    aux = AuxLoss()
    with pytest.raises(ValueError, match=r"shape \[2\]; reduce it"):
        aux.add(torch.ones(2))
    assert len(aux) == 0
    with pytest.raises(ValueError, match="at least 1"):
        AuxLoss(warn_after=0)


def update(aux: AuxLoss) -> None:
    aux.add(torch.ones(1, requires_grad=True).sum())
    aux.total().backward(retain_graph=True)


def test_warns_once_when_it_is_never_reset():
    aux = AuxLoss(warn_after=3)
    for _ in range(3):
        update(aux)
    with pytest.warns(RuntimeWarning, match="not reset for 3 updates"):
        update(aux)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        update(aux)


def test_does_not_warn_when_it_is_reset_every_update_or_adds_a_lot_in_one():
    aux = AuxLoss(warn_after=3)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(20):
            update(aux)
            aux.reset()
        for _ in range(100):
            aux.add(torch.ones(()))
    assert said == []
    assert len(aux) == 100


class Meddling(torch.Tensor):
    """A loss that runs code of the user's once, while AuxLoss adds it: as a signal handler or a
    finalizer may at that moment."""

    meddle: Callable[[], object] | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.add, torch.Tensor.__radd__, torch.Tensor.__add__):
            for loss in args:
                if getattr(loss, "meddle", None) is not None:
                    meddle, loss.meddle = loss.meddle, None
                    meddle()
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func is torch.Tensor.reshape:
            result.meddle = args[0].meddle
        return result


def meddling(meddle: Callable[[], object]) -> torch.Tensor:
    loss = torch.tensor(1.0).as_subclass(Meddling)
    loss.meddle = meddle
    return loss


@pytest.mark.parametrize(
    ("meddle", "total", "count"),
    [
        (lambda aux: aux.add(torch.tensor(10.0)), 111.0, 3),
        (lambda aux: aux.total(), 101.0, 2),
        (lambda aux: aux.reset(), 1.0, 1),
    ],
    ids=["add", "total", "reset"],
)
def test_a_handler_that_comes_again_while_a_loss_is_added(meddle, total, count):
    aux = AuxLoss()
    aux.add(torch.tensor(100.0))
    thread = threading.Thread(target=lambda: aux.add(meddling(lambda: meddle(aux))), daemon=True)
    thread.start()
    thread.join(timeout=30)
    assert not thread.is_alive(), "deadlock"
    assert (float(aux.total()), len(aux)) == (total, count)


def test_a_child_forked_while_another_thread_adds_goes_on():
    aux = AuxLoss()
    aux.add(torch.tensor(100.0))
    inside, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        go_on.wait(timeout=30)

    thread = threading.Thread(target=lambda: aux.add(meddling(wait)), daemon=True)
    thread.start()
    assert inside.wait(timeout=30)
    if (child := os.fork()) == 0:
        signal.alarm(20)  # ends a child that waits for ever
        aux.add(torch.tensor(1.0))
        os._exit(0 if aux.total().item() == 101.0 else 1)
    go_on.set()
    thread.join(timeout=30)
    assert os.waitpid(child, 0)[1] == 0
    assert (float(aux.total()), len(aux)) == (101.0, 2)


def through_a_file(aux: AuxLoss) -> AuxLoss:
    return pickle.loads(pickle.dumps(aux))


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, through_a_file])
def test_a_copy_is_empty_whether_or_not_it_was_used(again):
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.aux_loss = AuxLoss(warn_after=7)

    assert len(again(AuxLoss())) == 0
    model = Model()
    weight = torch.ones(1, requires_grad=True)
    model.aux_loss.add(weight.sum() * 2)  # with a graph, which no copy can have
    if again is not through_a_file:
        assert len(again(model).aux_loss) == (1 if again is copy.copy else 0)
    other = again(model.aux_loss)
    assert (len(other), other.total().item(), other._warn_after) == (0, 0.0, 7)
    other.add(torch.tensor(1.0))
    assert (len(other), len(model.aux_loss)) == (1, 1)
