"""A step under fake tensors: its peak beside the real one, what is said of it, what is refused."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import memtools
from memtools._base.peak import GRADIENTS, INPUTS, OPTIMIZERS, PARAMETERS, SAVED, STATE, Part
from memtools._blocks.lifetimes import Tracer
from memtools._plan.plan import Plan, PlanLimit, PlanPhase

MIB = 1 << 20
OLD = torch.ones(4, 4)


@pytest.fixture(autouse=True)
def nothing_is_left_on() -> Iterator[None]:
    yield
    assert not _get_current_dispatch_mode_stack()
    assert torch.overrides._len_torch_function_stack() == 0


def trained(optimizer: Callable[[Any], Any], rows: int = 64) -> Callable[[], Any]:
    def make() -> Callable[[], None]:
        model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
        made = optimizer(model.parameters())
        inputs, targets = torch.randn(rows, 256), torch.randint(256, (rows,))

        def step() -> None:
            made.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            made.step()

        return step

    return make


@pytest.mark.parametrize("rows", [4, 2048])
@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.AdamW,
        lambda given: torch.optim.AdamW(given, foreach=True),
        lambda given: torch.optim.AdamW(given, fused=True),
        lambda given: torch.optim.SGD(given, momentum=0.9),
    ],
    ids=["adamw", "foreach", "fused", "sgd"],
)
def test_the_peak_is_that_of_the_real_step(optimizer: Any, rows: int) -> None:
    make = trained(optimizer, rows)
    with Tracer() as tracer:
        step = make()
        tracer.step_ended()
        step()
        tracer.step_ended()
        step()
    trace = tracer.trace()
    assert memtools.plan(make, device="cpu").peak_bytes == trace.peak(trace.steps[-1])[1]


def test_layers_that_are_copies_are_planned_as_the_real_ones() -> None:
    """torch's own Transformer copies its layer, and a slow target network is a copy as well."""

    def make() -> Callable[[], None]:
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        target = copy.deepcopy(model).requires_grad_(False)
        made = torch.optim.SGD(model.parameters(), 0.1)
        inputs = torch.randn(8, 32, 64)

        def step() -> None:
            made.zero_grad()
            (model(inputs) - target(inputs)).pow(2).mean().backward()
            made.step()

        return step

    with Tracer() as tracer:
        step = make()
        for _ in range(2):
            tracer.step_ended()
            step()
    trace = tracer.trace()
    planned = memtools.plan(make, device="cpu")
    assert planned.peak_bytes == pytest.approx(trace.peak(trace.steps[-1])[1], rel=1e-3)
    assert "__deepcopy__" not in vars(FakeTensor)


def test_the_peak_with_a_change_is_that_of_the_changed_step() -> None:
    plain = memtools.plan(trained(lambda given: torch.optim.AdamW(given, foreach=True)))
    fused = memtools.plan(trained(lambda given: torch.optim.AdamW(given, fused=True)))
    (change,) = (one for one in plain.changes if "fused" in one.change)
    assert change.peak_bytes == pytest.approx(fused.peak_bytes, rel=1e-5)
    assert change.peak_bytes < plain.peak_bytes


def test_of_the_changes_with_which_a_limit_would_do_the_smallest_is_named() -> None:
    make = trained(lambda given: torch.optim.SGD(given, lr=0.1), rows=65_536)
    found = memtools.plan(make, limits=["1 GiB", "300 MiB", "4 MiB"])
    fits, tight, hopeless = found.limits
    assert (fits.fits, fits.fits_with) == (True, "")
    assert not tight.fits
    assert tight.fits_with.startswith("2 micro-batches")
    assert (hopeless.fits, hopeless.fits_with) == (False, "")


def test_a_model_that_is_moved_and_converted_is_planned_as_one_that_was_made_so() -> None:
    def made(convert: Callable[[Any], Any]) -> Callable[[], Any]:
        def make() -> Callable[[], None]:
            model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
            model[1].weight = model[0].weight
            model = convert(model)
            optimizer = torch.optim.AdamW(model.parameters())

            def step() -> None:
                model(torch.randn(32, 256).to(model[0].weight.dtype)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

            return step

        return make

    plain = memtools.plan(made(lambda model: model)).parts
    assert memtools.plan(made(lambda model: model.to("cpu").half().float().cpu())).parts == plain
    halves = memtools.plan(made(lambda model: model.to(torch.bfloat16)))
    (parameters,) = (part.bytes for part in plain if part.what == PARAMETERS)
    assert 2 * halves.bytes_of(PARAMETERS) == parameters
    assert nn.Linear(4, 4).double().weight.dtype == torch.float64  # as before


def test_the_categories_are_those_of_the_model() -> None:
    parameters = 4 * (256 * 512 + 512 + 512 * 256 + 256)
    found = memtools.plan(trained(torch.optim.AdamW), device="cpu")
    assert found.phase == "optimizer"
    assert found.bytes_of(PARAMETERS) == found.bytes_of(GRADIENTS) == parameters
    assert found.bytes_of(STATE) == 2 * parameters + 4 * 4  # and the steps
    # Two for the weight that the optimizer is at; the one of the bias before is still held.
    assert found.bytes_of(OPTIMIZERS) == 2 * 4 * 256 * 512 + 4 * 512
    assert found.bytes_of(INPUTS) == 64 * 256 * 4 + 64 * 8
    assert sum(part.bytes for part in found.parts) == found.peak_bytes == max(found.curve)
    wide = memtools.plan(trained(torch.optim.SGD, 4096))
    assert wide.phase == "backward"
    assert wide.bytes_of(SAVED) == 4096 * 512 * 4
    assert [one.phase for one in wide.phases] == ["forward", "backward", "optimizer"]
    assert sum(one.operators for one in wide.phases) == len(wide.curve)
    assert max(one.peak_bytes for one in wide.phases) == wide.peak_bytes
    assert re.fullmatch(r".*test_plan.py:\d+ in step", wide.line)


def test_a_plan_with_convolutions_says_what_is_not_part_of_it() -> None:
    def convolving() -> Callable[[], None]:
        model = nn.Conv2d(3, 8, 3)
        return lambda: model(torch.randn(2, 3, 16, 16)).sum().backward()

    (said,) = memtools.plan(convolving).assumed
    assert said.startswith("convolution kernels need no workspace")
    assert memtools.plan(trained(torch.optim.SGD)).assumed == ()


def test_a_step_that_is_larger_than_the_machine_is_planned() -> None:
    before = torch.get_rng_state()
    found = memtools.plan(
        trained(torch.optim.SGD, 1 << 30), limits=["8 GiB", found_limit := 1 << 45]
    )
    assert found.peak_bytes > 4 << 40
    assert [(one.limit_bytes, one.fits) for one in found.limits] == [
        (8 << 30, False),
        (found_limit, True),
    ]
    # It fails at the inputs already, and what is lacking is that of the peak.
    assert found.limits[0].left_bytes == (8 << 30) - found.peak_bytes
    assert torch.equal(before, torch.get_rng_state())


def made(name: str) -> Any:
    def to_cuda() -> Any:
        return nn.Linear(4, 4).to("cuda")

    def cuda_call() -> Any:
        return torch.ones(4).cuda()

    def autocast() -> Any:
        def step() -> None:
            with torch.autocast("cuda"):
                torch.ones(4).sum()

        return step

    def to_xpu() -> Any:
        return nn.Linear(4, 4, device=torch.device("xpu", 0))

    def two_devices() -> Any:
        return nn.Linear(4, 4, device="cuda:0").to("cuda:1")

    def older() -> Any:
        return lambda: OLD @ torch.ones(4, 4)

    def whole() -> Any:
        return lambda: int(torch.randn(4).sum())

    def shape() -> Any:
        def step() -> None:
            longest = 2 * torch.ones(4, dtype=torch.int64).max().item()
            torch.zeros(4, 64)[:, : longest + 1]

        return step

    def split() -> Any:
        return lambda: torch.ones(8).split(torch.ones(4, dtype=torch.int64).tolist())

    def equal() -> Any:
        return lambda: torch.equal(torch.ones(4), torch.ones(4))

    def nonzero() -> Any:
        return lambda: torch.randn(4).nonzero()

    def nothing() -> Any:
        return lambda: None

    def only_zero_grad() -> Any:
        return torch.optim.SGD(nn.Linear(4, 4).parameters()).zero_grad

    def no_step() -> Any:
        return 3

    def raises() -> Any:
        raise KeyError("lr")

    def step_raises() -> Any:
        return lambda: torch.ones(2, 3) @ torch.ones(2, 3)

    return locals()[name]


ON_CPU = [
    ("to_cuda", r'names the device cuda, but the plan is for cpu: .*="cuda" \(\S*plan.py:\d+\)'),
    ("cuda_call", r"names the device cuda, but the plan is for cpu: .* \(\S*plan.py:\d+\)"),
    ("autocast", r"the step uses the device cuda, but the plan is for cpu \(\S*plan.py:\d+\)"),
]
REFUSED = [
    ("to_xpu", ValueError, r"names the device xpu, but the plan is for cuda \(\S*plan.py:\d+\)"),
    ("two_devices", ValueError, r"cuda:1 and another device: a plan covers one device"),
    (
        "older",
        ValueError,
        r"the step uses a tensor that was made before \(\S*plan.py:\d+\): make",
    ),
    ("whole", ValueError, r"the step needs the values .*_local_scalar_dense.*memtools run"),
    ("shape", ValueError, r"makes a shape of the values of a tensor \(\S*plan.py:\d+\), .* run"),
    ("split", ValueError, r"makes a shape of the values of a tensor \(\S*plan.py:\d+\), .* run"),
    ("equal", ValueError, r"the step needs the values of a tensor \(aten.equal.*test_plan.py"),
    ("nonzero", ValueError, r"the step needs the values .*nonzero.*test_plan.py:\d+\).*"),
    ("nothing", ValueError, "the step ran no operator of torch"),
    ("only_zero_grad", ValueError, "the step ran no operator of torch"),
    ("no_step", TypeError, "must return the step, a callable without arguments, got int"),
    ("raises", ValueError, r"the function raised KeyError: 'lr' \(\S*plan.py:\d+\)"),
    ("step_raises", ValueError, r"the step raised RuntimeError: .*test_plan.py:\d+\)"),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="autocast(cuda) does something there")
@pytest.mark.filterwarnings("default")  # as in a program
@pytest.mark.parametrize(("name", "says"), ON_CPU)
def test_a_plan_for_the_cpu_refuses_what_names_cuda(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        memtools.plan(made(name), device="cpu")


@pytest.mark.parametrize(("name", "kind", "says"), REFUSED, ids=[row[0] for row in REFUSED])
def test_what_cannot_be_planned_is_refused_in_a_sentence(
    name: str, kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says) as caught:
        memtools.plan(made(name))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("step", "limits", "kind", "says"),
    [
        (3, (), TypeError, "a function that needs no arguments and returns the step, got int"),
        (made("nothing"), ("8 Gb",), ValueError, "unit of bits"),
        (made("nothing"), (0,), ValueError, "at least 1 byte"),
        (made("nothing"), (1.5,), TypeError, "each of limits must be an int"),
    ],
)
def test_arguments_are_checked_before_anything_is_called(
    step: Any, limits: Any, kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        memtools.plan(step, limits=limits)


def test_a_device_is_one_of_two() -> None:
    with pytest.raises(ValueError, match='device must be "cuda" or "cpu", got '):
        memtools.plan(made("nothing"), device="mps")


def test_a_plan_says_its_facts() -> None:
    limits = (
        PlanLimit(16 * MIB, True, 12 * MIB),
        PlanLimit(8 * MIB, False, 12 * MIB, "2 micro-batches"),
    )
    parts = (Part(PARAMETERS, 8 * MIB, 2), Part(SAVED, 2 * MIB, 1))
    phases = (PlanPhase("forward", 2, 10 * MIB),)
    found = Plan(10 * MIB, "forward", "aten.mm.default", "train.py:3 in step", parts,
                 (8 * MIB, 10 * MIB), phases, 12 * MIB, limits)  # fmt: skip
    assert found.sentence() == (
        "The step needs 10.0 MiB on cuda at its peak, in the forward pass (aten.mm.default, "
        "train.py:3 in step): parameters 8.0 MiB, saved for backward 2.0 MiB"
    )
    assert found.table().splitlines()[-2:] == [
        "  16.0 MiB: fits, 4.0 MiB left",
        "  8.0 MiB: does not fit, at least 4.0 MiB short; fits with 2 micro-batches",
    ]
    assert json.loads(json.dumps(found.as_json()))["limits"][1] == {
        "limit_bytes": 8 * MIB,
        "fits": False,
        "reserved_bytes": 12 * MIB,
        "fits_with": "2 micro-batches",
        "left_bytes": -4 * MIB,
    }
