"""`memtools run`: what counts as a step of an unchanged program."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.optim.optimizer import register_optimizer_step_post_hook

import memtools
from memtools import _core
from memtools._monitor import inprocess
from memtools._monitor.inprocess import KEPT_BACK, StepCounter
from tests.cli.runs import run, write
from tests.kit.ownprocess import in_own_process


class Actor:
    """An optimizer, or a module; what is weakly referenced, as torch's are."""


class Steps:
    """A monitor that counts."""

    def __init__(self) -> None:
        self.count = 0
        self.calls: list[int] = []
        self.anew: list[int] = []

    def step(self, n: int = 1) -> None:
        self.count += n
        self.calls.append(n)

    def _count(self, steps: int) -> None:
        self.count += steps

    def _begin_anew(self) -> None:
        self.anew.append(self.count)


@pytest.fixture(autouse=True)
def no_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have made one."""
    monkeypatch.setattr(inprocess, "has_optimizer", lambda: False)


def counting() -> tuple[Steps, StepCounter]:
    steps = Steps()
    return steps, StepCounter(steps)  # type: ignore[arg-type,unused-ignore]


# --- several in turn ------------------------------------------------------------------------------


@pytest.mark.parametrize("many", [1, 2, 3, 30, 200])
def test_any_number_of_optimizers_in_turn_make_one_step(many: int) -> None:
    """Two of a GAN, and one for each layer that step in the backward pass."""
    steps, counter = counting()
    layers = [Actor() for _ in range(many)]
    for done in range(1, 41):
        for optimizer in layers:
            counter(optimizer, (), {})
        assert steps.count == done
    assert steps.calls == [1] * 40


def test_an_optimizer_that_acts_more_often_than_the_other_makes_the_steps() -> None:
    """As a critic that is trained five times for each update of a generator."""
    steps, counter = counting()
    critic, generator = Actor(), Actor()
    for done in range(1, 11):
        for _ in range(5):
            counter(critic, (), {})
        counter(generator, (), {})
        assert steps.count == 5 * done


def test_optimizers_made_anew_count_at_once() -> None:
    """As in folds, one optimizer after another, whether or not Python uses an id again."""
    steps, counter = counting()
    between = []
    for fold in range(6):
        optimizer = Actor()
        for _ in range(10):
            counter(optimizer, (), {})
        assert steps.count == (fold + 1) * 10
        del optimizer
        if fold % 2:
            between.append(Actor())  # takes the place that became free
    assert not counter._steps


def test_an_optimizer_made_for_each_step_counts() -> None:
    steps, counter = counting()
    optimizer = Actor()
    for _ in range(40):
        optimizer = Actor()  # while the one before is alive
        counter(optimizer, (), {})
    del optimizer
    assert 39 <= steps.count <= 40


@pytest.mark.parametrize("follows", [0, 1])
def test_one_that_is_made_anew_beside_another_is_not_counted_twice(follows: int) -> None:
    """As a discriminator that is made anew each epoch beside one generator."""
    steps, counter = counting()
    other = Actor()
    for epoch in range(5):
        optimizer = Actor()
        for _ in range(10):
            for one in (optimizer, other) if follows else (other, optimizer):
                counter(one, (), {})
        assert (epoch + 1) * 10 - epoch <= steps.count <= (epoch + 1) * 10
        del optimizer, one


def test_optimizers_of_a_second_stage_count_although_those_of_the_first_are_kept() -> None:
    steps, counter = counting()
    stages = [[Actor() for _ in range(30)] for _ in range(3)]
    for stage, layers in enumerate(stages):
        for _ in range(40):
            for optimizer in layers:
                counter(optimizer, (), {})
        assert steps.count == (stage + 1) * 40 - stage  # which is new is known at its second step
    assert len(counter._steps) == 30


# --- modules, until an optimizer acts -------------------------------------------------------------


def test_modules_count_from_the_sixteenth_call_on() -> None:
    steps, counter = counting()
    model, loss = Actor(), Actor()
    for done in range(1, 41):
        counter.module_ended(model)
        counter.module_ended(loss)
        assert steps.count == (done if done >= KEPT_BACK else 0)
    assert steps.calls == [0] * (KEPT_BACK - 1) + [KEPT_BACK] + [1] * (40 - KEPT_BACK)
    counter.end()
    assert steps.count == 40


def test_a_few_calls_before_an_optimizer_acts_are_no_steps() -> None:
    steps, counter = counting()
    model, optimizer = Actor(), Actor()
    for _ in range(KEPT_BACK - 1):
        counter.module_ended(model)
    counter(optimizer, (), {})
    counter.module_ended(model)
    counter.end()
    assert (steps.count, steps.anew) == (1, [])


def test_a_few_calls_are_the_steps_of_a_program_without_an_optimizer() -> None:
    steps, counter = counting()
    model = Actor()
    for _ in range(KEPT_BACK - 1):
        counter.module_ended(model)
    counter.end()
    counter.end()
    assert steps.count == KEPT_BACK - 1


def test_the_leak_test_begins_anew_where_training_follows_many_calls() -> None:
    """Steps are something else from there on: a window of accumulated gradients, for one."""
    steps, counter = counting()
    model, optimizer = Actor(), Actor()
    for _ in range(20):
        counter.module_ended(model)
    for _ in range(3):
        counter(optimizer, (), {})
        counter.module_ended(model)
    assert (steps.count, steps.anew) == (23, [20])


def test_calls_before_the_first_step_of_an_optimizer_that_is_there_are_no_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As those of a policy that samples before each update."""
    monkeypatch.setattr(inprocess, "has_optimizer", lambda: True)
    steps, counter = counting()
    model, optimizer = Actor(), Actor()
    for _ in range(200):
        counter.module_ended(model)
    assert steps.count == 0
    for _ in range(3):
        counter(optimizer, (), {})
        counter.module_ended(model)
    counter.end()
    assert (steps.count, steps.anew) == (3, [])


@pytest.mark.parametrize(("calls", "count"), [(1023, 0), (1024, 1024), (1100, 1100)])
def test_many_calls_count_though_there_is_an_optimizer(
    calls: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inprocess, "has_optimizer", lambda: True)
    steps, counter = counting()
    model = Actor()
    for _ in range(calls):
        counter.module_ended(model)
    counter.end()
    assert steps.count == count


@pytest.mark.slow
def test_an_optimizer_is_known_from_when_it_is_made() -> None:
    code = """
import torch
from memtools._monitor.inprocess import has_optimizer
assert not has_optimizer()
class Mine(torch.optim.SGD):
    pass
assert not has_optimizer()
Mine([torch.nn.Parameter(torch.ones(1))], 0.1)
assert has_optimizer()
"""
    in_own_process(code)


def test_what_a_backward_pass_computes_again_is_no_step() -> None:
    steps, counter = counting()
    model = Actor()
    counter._graph_task = lambda: 0
    for _ in range(40):
        counter.module_ended(model)
    counter._graph_task = lambda: -1
    counter.end()
    assert steps.count == 0


# --- calls that are heard -------------------------------------------------------------------------


class Module:
    """What is called by one function of its class, as torch's modules are."""

    def __init__(self, forward: Callable[..., object]) -> None:
        self.forward = forward

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.forward(*args, **kwargs)


@pytest.fixture(autouse=True)
def _heard_no_longer() -> Iterator[None]:
    yield
    _core._hear_calls(None, None, 0)


def heard() -> list[object]:
    told: list[object] = []
    main = threading.main_thread().ident or 0
    assert _core._hear_calls(Module.__call__, told.append, main) is True
    return told


def test_outermost_calls_are_told_when_they_have_ended() -> None:
    told = heard()
    inner = Module(lambda: len(told))
    outer = Module(lambda x, y=0: (inner(), inner(), x, y))
    assert outer(1, y=2) == (0, 0, 1, 2)
    assert told == [outer]
    assert inner() == 1
    assert told == [outer, inner]
    _core._hear_calls(None, None, 0)
    outer(1)
    assert len(told) == 2


def test_one_function_is_heard_at_a_time() -> None:
    heard()
    assert _core._hear_calls(heard, print, 0) is False
    with pytest.raises(TypeError, match="function is a Python function or None, got builtin"):
        _core._hear_calls(print, print, 0)
    with pytest.raises(TypeError, match="ended cannot be called: int"):
        _core._hear_calls(heard, 3, 0)  # type: ignore[arg-type]


def test_one_hears_arguments_beside_one_who_hears_modules() -> None:
    """What a step is given is noted before whoever counts steps ends the step."""
    told = heard()
    main = threading.main_thread().ident or 0
    assert _core._hear_calls(Module.__call__, lambda call: told.append(call[1]), main, True)
    assert not _core._hear_calls(Module.__call__, print, main, True)
    module = Module(lambda x: x)
    module(5)
    assert told == [5, module]
    _core._hear_calls(None, None, 0)
    module(6)
    assert told == [5, module, 6]
    _core._hear_calls(None, None, 0, True)
    module(7)
    assert len(told) == 3


def test_a_call_that_raises_is_not_told_and_the_next_is() -> None:
    told = heard()
    inner = Module(sorted)
    outer = Module(lambda x: inner(x))
    with pytest.raises(TypeError):
        outer(1)
    assert told == []
    assert outer([2, 1]) == [1, 2]
    assert told == [outer]


def test_what_the_told_raises_comes_out_of_the_call() -> None:
    inner = Module(lambda: 1)

    def told(who: object) -> None:
        assert inner() == 1  # a call of its own is a part of the one that is told
        raise memtools.HostMemoryPressure("full")

    assert _core._hear_calls(Module.__call__, told, threading.main_thread().ident or 0)
    for _ in range(2):
        with pytest.raises(memtools.HostMemoryPressure, match="full"):
            Module(lambda: 2)()


def test_a_module_may_call_itself_and_stop_the_hearing() -> None:
    told = heard()

    def forward(n: int) -> int:
        if n == 0:
            _core._hear_calls(None, None, 0)
            return 0
        return 1 + deep(n - 1)  # type: ignore[operator,no-any-return,unused-ignore]

    deep = Module(forward)
    assert deep(50) == 50
    assert told == []
    again = heard()
    Module(lambda: deep(1))()
    assert again == []
    heard()
    assert Module(lambda: 3)() == 3


def test_threads_side_by_side_are_told_each() -> None:
    told = heard()
    meet = threading.Barrier(4)
    modules = [Module(meet.wait) for _ in range(4)]
    threads = [threading.Thread(target=module) for module in modules]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(id, told)) == sorted(map(id, modules))


def test_calls_on_threads_of_the_main_threads_call_belong_to_it() -> None:
    """As of the replicas of a DataParallel module."""
    told = heard()
    part = Module(lambda: None)

    def on_a_thread() -> None:
        thread = threading.Thread(target=part)
        thread.start()
        thread.join()

    whole = Module(on_a_thread)
    whole()
    assert told == [whole]
    on_a_thread()
    assert told == [whole, part]


# --- programs -------------------------------------------------------------------------------------

SETUP = """
    import torch
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8) for _ in range(3)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(8, 1))
    batch = torch.randn(4, 8)
"""
PROGRAMS = {
    "inference": ("with torch.no_grad():\n    for _ in range(40): model(batch)", 40),
    "too short for the first look": ("for _ in range(7): model(batch)", 7),
    "evaluation with a loss": (
        "loss = torch.nn.MSELoss()\nfor _ in range(40): loss(model(batch), batch[:, :1])", 40
    ),
    "training": (
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(37):\n    model(batch).sum().backward()\n    optimizer.step()", 37
    ),
    "accumulated gradients": (
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(37):\n    for _ in range(4): model(batch).sum().backward()\n"
        "    optimizer.step()", 37
    ),
    "an optimizer that fails now and then": (
        "torch.optim.SGD(model.parameters(), 0.1)\n"
        "class Mine(torch.optim.SGD):\n"
        "    calls = 0\n"
        "    def step(self, closure=None):\n"
        "        Mine.calls += 1\n"
        "        if Mine.calls % 2: raise ValueError('not now')\n"
        "        return super().step(closure)\n"
        "optimizer = Mine(model.parameters(), 0.1)\n"
        "for _ in range(40):\n"
        "    model(batch).sum().backward()\n"
        "    try: optimizer.step()\n"
        "    except ValueError: pass", 20
    ),
    "a closure that computes many times": (
        "optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)\n"
        "def closure():\n"
        "    optimizer.zero_grad()\n"
        "    loss = model(batch).square().sum()\n"
        "    loss.backward()\n"
        "    return loss\n"
        "for _ in range(20): optimizer.step(closure)", 20
    ),
    "a GAN": (
        "other = torch.nn.Linear(8, 1)\n"
        "optimizers = [torch.optim.Adam(m.parameters()) for m in (model, other)]\n"
        "for _ in range(30):\n"
        "    for m, optimizer in zip((model, other), optimizers):\n"
        "        m(batch).sum().backward()\n"
        "        optimizer.step()", 30
    ),
    "checkpointing without an optimizer": (
        "from torch.utils.checkpoint import checkpoint\n"
        "for use_reentrant in (True, False):\n"
        "    for _ in range(20):\n"
        "        class Whole(torch.nn.Module):\n"
        "            def forward(self, x):\n"
        "                for layer in layers:\n"
        "                    x = checkpoint(layer, x, use_reentrant=use_reentrant)\n"
        "                return x\n"
        "        whole = Whole() if not _ else whole\n"
        "        whole(batch.clone().requires_grad_()).sum().backward()", 40
    ),
    "a module that raises and is called again": (
        "class Fails(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        model(x)\n"
        "        raise ValueError('not now')\n"
        "fails = Fails()\n"
        "for _ in range(20):\n"
        "    try: fails(batch)\n"
        "    except ValueError: pass\n"
        "    model(batch)", 20
    ),
    "a module that calls itself": (
        "class Again(torch.nn.Module):\n"
        "    def forward(self, x, n=3): return self(x, n - 1) if n else model(x)\n"
        "again = Again()\n"
        "for _ in range(20): again(batch)", 20
    ),
    "threads that run modules side by side": (
        "import threading\n"
        "def work():\n"
        "    mine = torch.nn.Linear(8, 8)\n"
        "    for _ in range(20): mine(batch)\n"
        "for _ in range(2):\n"
        "    thread = threading.Thread(target=work)\n"
        "    thread.start()\n"
        "    thread.join()", 40
    ),
    "a fork inside a forward": (
        "import os\n"
        "class Forks(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        if os.fork() == 0:\n"
        "            for _ in range(100): model(x)\n"
        "            os._exit(0)\n"
        "        os.wait()\n"
        "        return model(x)\n"
        "forks = Forks()\n"
        "for _ in range(20): forks(batch)", 20
    ),
    "a wrapped module": (
        "import torch.distributed as dist, tempfile\n"
        "store = tempfile.mktemp()\n"
        "dist.init_process_group('gloo', init_method=f'file://{store}', rank=0, world_size=1)\n"
        "wrapped = torch.nn.parallel.DistributedDataParallel(model)\n"
        "for _ in range(20): wrapped(batch).sum().backward()\n"
        "dist.destroy_process_group()", 20
    ),
    "scripted and traced modules": (
        "for other in (torch.jit.script(model), torch.jit.trace(model, batch)):\n"
        "    assert torch.equal(other(batch), model(batch))\n"
        "    for _ in range(20): other(batch)\n"
        "    del other", None
    ),
    "neither": ("x = [torch.ones(8) for _ in range(40)]", 0),
}  # fmt: skip


@pytest.fixture
def counter() -> Iterator[StepCounter]:
    """One that hears of this process's torch, as `memtools run` has it."""
    counter = counting()[1]
    counter.hear_modules(sys.modules["torch.nn.modules.module"])
    handle = register_optimizer_step_post_hook(counter)
    yield counter
    handle.remove()


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_steps_of_a_program(name: str, counter: StepCounter) -> None:
    program, expected = PROGRAMS[name]
    exec(textwrap.dedent(SETUP) + program, {"__name__": "program"})
    counter.end()
    found = counter._monitor.count  # type: ignore[attr-defined,unused-ignore]
    if expected is None:
        assert 40 <= found <= 50  # what is traced is computed, too
    else:
        assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inference", "training", "a fork inside a forward", "neither"])
def test_the_steps_of_an_unchanged_script(name: str, tmp_path: Path) -> None:
    program, expected = PROGRAMS[name]
    write(tmp_path, textwrap.dedent(SETUP) + program)
    found = run(tmp_path, "--json", "train.py")
    assert found.returncode == 0, found.stderr.decode()
    assert json.loads(found.stderr.splitlines()[-1])["steps"] == expected


LEFT_ALONE = """
    import copy, io, pickle, sys, traceback, warnings
    import torch
    warnings.simplefilter("ignore", DeprecationWarning)
    before = torch.nn.Module.__call__
    print(before.__qualname__, before is torch.nn.Module.__dict__["__call__"])

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)
        def forward(self, x):
            return self.layer(x).relu()

    torch.manual_seed(0)
    model, batch = Net(), torch.randn(4, 8)
    kinds = torch.nn.modules.module
    print(len(kinds._global_forward_hooks), len(kinds._global_forward_pre_hooks), model.__dict__)
    print([len(pickle.dumps(model)), len(copy.deepcopy(model).__dict__)])
    file = io.BytesIO()
    torch.save(model, file)
    print(len(file.getvalue()))

    graphs = []
    def backend(graph, inputs):
        graphs.append(len(graph.graph.nodes))
        return graph.forward
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    function = torch.compile(lambda x: model(x) + 1, backend=backend, fullgraph=True)
    own = copy.deepcopy(model)
    own.compile(backend=backend, fullgraph=True)
    for _ in range(20):
        print(torch.equal(compiled(batch), model(batch)), torch.equal(own(batch), model(batch)))
        function(batch)
    print(graphs, torch._dynamo.utils.counters["frames"], torch._dynamo.utils.counters["stats"])
    print(torch._dynamo.utils.counters["graph_break"])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        compiled(batch).sum().backward()
        optimizer.step()
        function(batch)
    print(graphs, torch._dynamo.utils.counters["stats"])

    print(torch.jit.script(Net()).code, torch.jit.trace(Net(), batch).graph)
    print(torch.fx.symbolic_trace(model).graph)
    print(torch.export.export(model, (batch,)).graph)
    class Fails(torch.nn.Module):
        def forward(self, x): return model(x[0, 0, 0])
    try: Fails()(batch)
    except IndexError: print(traceback.format_exc())
"""


@pytest.mark.slow
def test_torch_compile_and_jit_see_nothing_of_it(tmp_path: Path) -> None:
    path = write(tmp_path, LEFT_ALONE)
    expected = subprocess.run([sys.executable, str(path)], cwd=tmp_path, capture_output=True)
    assert expected.returncode == 0, expected.stderr.decode()
    found = run(tmp_path, "--quiet", "train.py")
    assert found.stdout.decode().replace(str(path), "train.py") == expected.stdout.decode().replace(
        str(path), "train.py"
    )
    assert (found.returncode, found.stderr) == (0, expected.stderr)


@pytest.mark.slow
def test_a_guard_stops_an_unchanged_script_at_the_end_of_a_step(tmp_path: Path) -> None:
    leaking = TRAINING.replace("optimizer.step()", "optimizer.step(); held.append(b'x' * 2**18)")
    # 1600 steps lie between the guard and the limit: the sampler has a turn in one of them.
    write(tmp_path, "held = []\n" + textwrap.dedent(leaking.replace("STEPS", "5000")))
    found = run(tmp_path, "--limit", "1 GiB", "--guard", "0.6", "train.py")
    assert found.returncode == 1
    errors = found.stderr.decode()
    assert "memtools.errors.HostMemoryPressure: host memory runs out at step" in errors
    assert "It ended by exception HostMemoryPressure: host memory runs out" in errors
    assert errors.count(", watermark 60%") == 2  # the traceback's and the end's, not a third
    record = memtools.read_record(tmp_path / "run.mem")
    assert "guard" in [event.kind for event in record.events]
    assert max(record.buckets.most["rss"]) < 1 << 30


TRAINING = """
    import sys
    import torch
    import torch.optim.optimizer as module
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert type(module.__loader__) is type(module.__spec__.loader) is type(torch.__loader__)
    kinds = {type(finder).__module__ for finder in sys.meta_path}
    assert "memtools._monitor.inprocess" not in kinds
    print(step, bool(model.weight.isfinite().all()))
"""


@pytest.mark.slow
def test_steps_of_an_unchanged_script_are_those_of_its_optimizer(tmp_path: Path) -> None:
    write(tmp_path, TRAINING.replace("STEPS", "37"))
    found = run(tmp_path, "--json", "train.py")
    assert found.returncode == 0, found.stderr
    assert found.stdout == b"36 True\n"
    assert json.loads(found.stderr)["steps"] == 37
