"""wrap_step(): a trainer's own step(), which calls backward() and the optimizer, in micro-batches.

    trainer.step(batch)                      wrapped: for each micro-batch of the batch
      optimizer.zero_grad()                    nothing
      loss = ...                               as it is
      loss.backward()                          the accumulator's: times its weight, into the sums
      clip_grad_norm_(parameters, 1.0)         nothing, where the accumulator has max_norm=1.0
      optimizer.step()                         noted
      scheduler.step()                         nothing, where the accumulator has this scheduler
      return loss.item()                       kept
                                             at the end: one update, and the mean of what was kept

What is held back is replaced while the function runs, on its thread, and put back when it returns.
What belongs to torch and not to the accumulator is put back when the last such function has
returned, as several threads may train, each with an accumulator of its own.
A step() that does something else with the gradients or makes other updates would train on parts of
a batch; it is refused, in a sentence that says what to change, and the window is dropped.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final, NoReturn

from memtools._base import torch as bridge
from memtools.grad.window import checked_weight

if TYPE_CHECKING:
    from memtools.grad.backoff import BackOff
    from memtools.grad.settings import Settings
    from memtools.grad.window import WindowRunner

REDUCTIONS: Final = ("mean", "sum")
_MISSING: Final = object()
_ORIGINAL: Final = "_memtools_original"  # of a function that stands in for another one
_thread = threading.local()  # `held`: what the innermost wrapped function on it holds back
_lock = threading.Lock()  # of `_originals`
#: How many contexts have replaced a function now, and the function, by its owner's id and name.
_originals: dict[tuple[int, str], tuple[int, Any]] = {}


class StepWrapper:
    """One function that is wrapped, and what it has returned in the window that is open.

    Args:
        back_off: makes the windows.
        runner, settings: of the accumulator.
        function: takes a batch, calls backward() and optimizer.step() once.
        weight: called as the function; returns the units of a micro-batch. None: its rows.
        reduction: "mean" or "sum": what the function's loss is of its units.
        combine: called with the list of results and the list of weights; returns the result. None:
            as `reduction` says.
        split: as of step().

    Raises TypeError or ValueError, in one sentence, if an argument makes no sense.
    """

    def __init__(
        self,
        back_off: Callable[[], BackOff],
        runner: WindowRunner,
        settings: Settings,
        function: Any,
        weight: Any,
        reduction: str,
        combine: Any,
        split: Any,
    ) -> None:
        _check(function, weight, reduction, combine)
        self._back_off, self._runner, self._settings = back_off, runner, settings
        self._function, self._weight, self._combine = function, weight, combine
        self._reduction, self._split = reduction, split
        self._results: list[tuple[Any, Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make one window of the batch, and return the result of its micro-batches together."""
        if not args and not kwargs:
            raise TypeError(
                f"{_name(self._function)}() was called without a batch, so that nothing can be "
                "cut: wrap a function that is called with its batch, and not one that draws it"
            )
        single = len(args) == 1 and not kwargs
        batch = args[0] if single else (*args, kwargs) if kwargs else args

        def loss_fn(micro: Any) -> None:
            if single:
                self._run((micro,), {})
            elif kwargs:
                self._run(micro[:-1], micro[-1])
            else:
                self._run(micro, {})

        self._results = []
        try:
            self._back_off().step(batch, loss_fn, self._split)
            found, self._results = self._results, []
        finally:
            self._results = []
        results, weights = [result for result, _ in found], [float(weight) for _, weight in found]
        if self._combine is not None:
            return self._combine(results, weights)
        if self._reduction == "sum":
            weights = [1.0] * len(weights)
            return _joined(results, weights, 1.0)
        return _joined(results, weights, math.fsum(weights))

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Run the function on one micro-batch, and keep what it returns."""
        count = self._runner.window.count
        rows = self._back_off().rows
        if self._weight is not None:
            weight = checked_weight(bridge.connect().torch, self._weight(*args, **kwargs))
        elif rows and self._split is None:
            weight = float(rows)
        else:
            raise ValueError(
                f"{_name(self._function)}() is cut by split, so that the rows of a micro-batch are "
                "not known: give wrap_step() weight, a function that counts its units"
            )
        held = _Held(self._runner, self._settings, self._function, weight, self._reduction, count)
        groups = _numbers(self._runner.optimizer)
        with held.back():
            result = self._function(*args, **kwargs)
        held.check()
        changed = _changed(groups, _numbers(self._runner.optimizer))
        if changed:
            self._refuse(
                f"changed {changed} of the optimizer's groups, which would happen once for each "
                "micro-batch: change it between the calls"
            )
        del self._results[count:]  # of micro-batches that are tried again
        if self._combine is None:
            result = _kept(result, _name(self._function))
            if self._results and _form(result) != _form(self._results[0][0]):
                self._refuse(
                    "returned other fields than for the micro-batch before, of which there is no "
                    "mean: give wrap_step() combine, a function of the list of results and the "
                    "list of weights"
                )
        self._results.append((result, weight))

    def _refuse(self, why: str) -> NoReturn:
        _refuse(self._function, why)


class _Held:
    """What one micro-batch's call of the function may not do, and what it did."""

    def __init__(
        self,
        runner: WindowRunner,
        settings: Settings,
        function: Any,
        weight: Any,
        reduction: str,
        count: int,
    ) -> None:
        self._torch = bridge.connect().torch
        self._runner, self._settings, self._function = runner, settings, function
        self._weight, self._sums = weight, reduction == "sum"
        self._count = count  # micro-batches of this window before
        self._thread = threading.get_ident()
        self.inside = False  # of the accumulator's own backward pass
        self._backwards = self._steps = 0

    @contextmanager
    def back(self) -> Iterator[None]:
        """Hold it back until the end of the block."""
        torch = self._torch
        utils = torch.nn.utils
        with ExitStack() as stack:
            put, share = _entering(stack, _replaced), _entering(stack, _shared)
            before = getattr(_thread, "held", None)
            stack.callback(setattr, _thread, "held", before)
            _thread.held = self
            share(torch.Tensor, "backward", "_backward")
            share(torch.autograd, "backward", "_other_backward")
            share(torch.nn.Module, "zero_grad", "_zero_module")
            for kind in _with_own_step(torch.optim.lr_scheduler.LRScheduler):
                share(kind, "step", "_other_schedule")
            for name in ("scale", "unscale_", "step", "update"):
                share(torch.amp.GradScaler, name, f"_scaler_{name.strip('_')}")
            names = _globals(self._function)
            for name in ("clip_grad_norm_", "clip_grad_value_"):
                original = share(utils, name, f"_{name.strip('_')}")
                ours = getattr(utils, name)
                for own, value in list(names.items()):
                    if value is original or value is ours:
                        share(names, own, f"_{name.strip('_')}")
            for optimizer in _inner(self._runner.optimizer):
                put(optimizer, "step", self._step)
                put(optimizer, "zero_grad", _nothing)
            if self._settings.scheduler is not None:
                put(self._settings.scheduler, "step", self._schedule)
            optimizers = sys.modules[torch.optim.Optimizer.__module__]
            hook = optimizers.register_optimizer_step_pre_hook(self._other_step)
            stack.callback(hook.remove)
            yield

    def check(self) -> None:
        """Raise RuntimeError where the function has not made what an update of its batch is."""
        if not self._backwards:
            self._refuse("did not call backward() on a loss")
        if not self._steps:
            self._refuse(
                "did not call optimizer.step(): one that accumulates by itself, or leaves updates "
                "out, cannot be wrapped; let it step in each call"
            )
        gradients = self._runner.gradients
        change = gradients.changed()
        gradients.forget()
        if change is not None:
            self._refuse(
                f"left gradients that were {change.what} after backward(): a norm or a value is "
                "clipped by GradAccumulator(max_norm=..., max_value=... or clip=...)"
            )

    # --- the gradients ---

    def _backward(
        self,
        original: Any,
        loss: Any,
        gradient: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        if gradient is not None or create_graph or inputs is not None:
            self._refuse(
                "called backward() with a gradient, create_graph or inputs: a loss without "
                "dimensions goes backward here, into all parameters"
            )
        if self._steps:
            self._refuse(
                "called backward() after optimizer.step(), so that it makes two updates: one "
                "update in a call can be wrapped"
            )
        first, self._backwards = not self._backwards, self._backwards + 1
        units, mean_of = self._weight, self._weight
        if self._sums:  # the units of a window are 1 altogether: nothing is divided
            units, mean_of = 1.0 if self._count == 0 else 0.0, None
        self.inside = True
        try:
            self._runner.backward(loss, units if first else 0.0, bool(retain_graph), mean_of)
        finally:
            self.inside = False
        self._runner.gradients.remember()

    def _other_backward(self, original: Any, *args: Any, **kwargs: Any) -> None:
        self._refuse("called torch.autograd.backward(): call backward() of the loss")

    def _zero_module(self, original: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        held = set(map(id, self._runner.gradients.trained))
        if held.isdisjoint(map(id, module.parameters())):
            original(module, *args, **kwargs)

    def _clip_grad_norm(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Of the whole gradient, and so at the window's end. Returns the norm of the last one."""
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        norm = float(given.get("norm_type", 2.0))
        self._check_clip(original, given, "max_norm", given["max_norm"], norm)
        last = self._runner.totals.last
        return self._torch.tensor(0.0 if last is None else last.norm)

    def _clip_grad_value(self, original: Any, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        self._check_clip(original, given, "max_value", given["clip_value"], 2.0)

    def _check_clip(self, original: Any, given: Any, limit: str, size: Any, norm: float) -> None:
        """Refuse what the accumulator does not do to all gradients at the window's end."""
        wanted, size = getattr(self._settings, limit), float(size)
        if wanted is None or size != wanted or norm != 2.0:
            has = "none" if wanted is None else f"{limit}={wanted:g}"
            self._refuse(
                f"clips gradients by torch's {original.__name__} to {size:g}, and GradAccumulator "
                f"has {has}: give it {limit}={size:g} (and the 2-norm), which clips the gradient "
                "of the whole batch"
            )
        clipped = given["parameters"]
        clipped = [clipped] if isinstance(clipped, self._torch.Tensor) else clipped
        held = [p for p in self._runner.gradients.trained if p.grad is not None]
        left = len(held) - len({id(p) for p in held} & set(map(id, clipped)))
        if left:
            self._refuse(
                f"clips gradients by torch's {original.__name__} without {left} of the optimizer's "
                f"{len(held)} parameters, and GradAccumulator clips all of them together: clip all "
                "in one call, or leave it out and give GradAccumulator clip, a function of the "
                "parameters"
            )

    # --- the update ---

    def _step(self, closure: Any = None, *args: Any, **kwargs: Any) -> None:
        if closure is not None:
            self._refuse("called optimizer.step() with a closure, which computes the loss again")
        self._steps += 1
        if self._steps > 1:
            self._refuse("called optimizer.step() twice: one update in a call can be wrapped")

    def _other_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if any(optimizer is own for own in _inner(self._runner.optimizer)):
            self._refuse(
                "called a step() of the optimizer that was looked up before the call, and is not "
                "held back: write optimizer.step() where it steps"
            )
        else:
            self._refuse(
                f"stepped a second optimizer ({type(optimizer).__name__}), which is not held back: "
                "one optimizer can be wrapped"
            )

    def _other_schedule(self, original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        self._refuse(
            f"stepped a scheduler ({type(scheduler).__name__}), which would happen once for each "
            "micro-batch: give it to GradAccumulator(scheduler=...), or step it between the calls"
        )

    def _schedule(self, *args: Any, **kwargs: Any) -> None:
        if args or kwargs:
            self._refuse("called scheduler.step() with arguments: call it between the calls")

    # --- the loss scale ---

    def _is_scaled(self, scaler: Any) -> bool:
        """Whether a scaler does anything. The accumulator's own loss scale takes its place."""
        if not scaler.is_enabled():
            return False
        if self._settings.precision != "fp16":
            self._refuse(
                "scales its loss by a GradScaler: make GradAccumulator with precision='fp16', "
                "whose own loss scale takes the scaler's place"
            )
        return True

    def _scaler_scale(self, original: Any, scaler: Any, outputs: Any) -> Any:
        return outputs if self._is_scaled(scaler) else original(scaler, outputs)

    def _scaler_unscale(self, original: Any, scaler: Any, optimizer: Any) -> Any:
        return None if self._is_scaled(scaler) else original(scaler, optimizer)

    def _scaler_step(
        self, original: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self._is_scaled(scaler):
            return optimizer.step(*args, **kwargs)
        return original(scaler, optimizer, *args, **kwargs)

    def _scaler_update(self, original: Any, scaler: Any, new_scale: Any = None) -> Any:
        return None if self._is_scaled(scaler) else original(scaler, new_scale)

    def _refuse(self, why: str) -> NoReturn:
        _refuse(self._function, why)


def _refuse(function: Any, why: str) -> NoReturn:
    raise RuntimeError(f"wrap_step(): {_name(function)}() {why}")


def _check(function: Any, weight: Any, reduction: str, combine: Any) -> None:
    kind = type(function).__name__
    if not callable(function) or inspect.isclass(function):
        raise TypeError(f"wrap_step() takes a function that trains on a batch, got {kind}")
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        raise TypeError("wrap_step() takes a plain function, not a generator or a coroutine")
    try:
        takes = inspect.signature(function).parameters
    except (TypeError, ValueError):
        takes = None
    if takes is not None and not takes:
        raise TypeError(
            f"wrap_step(): {_name(function)}() takes no argument, so that nothing can be cut: "
            "wrap a function that is called with its batch, and not one that draws it"
        )
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is one of {', '.join(REDUCTIONS)}; got {reduction!r}")
    for name, value in (("weight", weight), ("combine", combine)):
        if value is not None and not callable(value):
            raise TypeError(f"{name} is a function, got {type(value).__name__}")


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """In the place of zero_grad()."""


def _inner(optimizer: Any) -> Iterator[Any]:
    """The optimizer, and those that it wraps."""
    yield optimizer
    while hasattr(optimizer := getattr(optimizer, "optimizer", None), "param_groups"):
        yield optimizer


def _entering(stack: ExitStack, manager: Callable[..., Any]) -> Callable[..., Any]:
    """Enter a context of `manager` into `stack`, with the arguments of the call."""
    return lambda *args: stack.enter_context(manager(*args))


@contextmanager
def _replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    """An attribute of an object that the accumulator has, replaced and put back."""
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, new)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextmanager
def _shared(owner: Any, name: str, method: str) -> Iterator[Any]:
    """A function of a class, a module or a dict of globals, which all threads call, replaced while
    one of them is in such a context. On a thread that holds something back, `method` of that is
    called, with the function itself as the first argument. Yields the function itself."""
    place = id(owner), name
    with _lock:
        count, original = _originals.get(place, (0, None))
        if not count:
            original = owner[name] if isinstance(owner, dict) else getattr(owner, name)
            original = getattr(original, _ORIGINAL, original)
            _put(owner, name, _dispatched(original, method))
        _originals[place] = count + 1, original
    try:
        yield original
    finally:
        with _lock:
            count = _originals[place][0] - 1
            _originals[place] = count, original
            if not count:
                del _originals[place]
                _put(owner, name, original)


def _put(owner: Any, name: str, function: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = function
    else:
        setattr(owner, name, function)


def _dispatched(original: Any, method: str) -> Any:
    """What takes the place of a function that all threads call."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        held = getattr(_thread, "held", None)
        if held is None or held.inside:
            return original(*args, **kwargs)
        return getattr(held, method)(original, *args, **kwargs)

    setattr(call, _ORIGINAL, original)
    return call


def _with_own_step(kind: Any) -> Iterator[Any]:
    """A class of schedulers and those derived from it, as far as they define step()."""
    if "step" in vars(kind):
        yield kind
    for derived in kind.__subclasses__():
        yield from _with_own_step(derived)


def _globals(function: Any) -> dict[str, Any]:
    """The names of the module that a function was written in."""
    plain = inspect.unwrap(getattr(function, "__func__", function))
    found: dict[str, Any] = getattr(plain, "__globals__", {})
    return found


def _numbers(optimizer: Any) -> list[dict[str, Any]]:
    """The settings of an optimizer's groups."""
    return [
        {name: value for name, value in group.items() if isinstance(value, (int, float, tuple))}
        for group in optimizer.param_groups
    ]


def _changed(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> str:
    for one, other in zip(before, now, strict=False):
        for name in one:
            if one[name] != other.get(name):
                return name
    return "" if len(before) == len(now) else "the number"


# --- what the function returns ---


def _kept(result: Any, name: str) -> Any:
    """A result without graphs. Raises TypeError for what has no mean."""
    if result is None or isinstance(result, (bool, int, float, str)):
        return result
    if isinstance(result, bridge.connect().torch.Tensor) and result.numel() == 1:
        return result.detach().clone()
    if isinstance(result, Mapping):
        return {key: _kept(value, name) for key, value in result.items()}
    if type(result) in (list, tuple):
        return type(result)(_kept(value, name) for value in result)
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return type(result)(*(_kept(value, name) for value in result))
    raise TypeError(
        f"wrap_step(): {name}() returned a {type(result).__name__}, of which there is no mean over "
        "micro-batches: give wrap_step() combine, a function of the list of results and the list "
        "of weights"
    )


def _form(result: Any) -> Any:
    """What has to be the same of all results that are averaged."""
    if isinstance(result, Mapping):
        return {key: _form(value) for key, value in result.items()}
    if isinstance(result, (list, tuple)):
        return type(result), [_form(value) for value in result]
    return _is_number(result)


def _is_number(value: Any) -> bool:
    """Whether there is a mean of it."""
    if isinstance(value, (int, float)):
        return not isinstance(value, bool)
    return isinstance(value, bridge.connect().torch.Tensor)


def _joined(results: list[Any], weights: list[float], total: float) -> Any:
    """The weighted mean of what micro-batches returned, field by field; what is not a number is
    the last one's."""
    first = results[0]
    if isinstance(first, Mapping):
        return {key: _joined([one[key] for one in results], weights, total) for key in first}
    if isinstance(first, (list, tuple)):
        fields = [_joined(list(one), weights, total) for one in zip(*results, strict=True)]
        return type(first)(*fields) if hasattr(first, "_fields") else type(first)(fields)
    if not _is_number(first):
        return results[-1]
    if len(results) == 1:
        return first
    mean = sum(_wide(one) * weight for one, weight in zip(results, weights, strict=True)) / total
    narrow = _wide(first) is not first
    return mean.to(first.dtype) if narrow else mean


def _wide(value: Any) -> Any:
    """A number in which many can be added: in 16 bits sums are rounded much, and in fp16 often
    inf."""
    dtype = getattr(value, "dtype", None)
    is_narrow = dtype is not None and dtype.is_floating_point and dtype.itemsize < 4
    return value.float() if is_narrow else value
