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
from memtools._monitor.inprocess import StepCounter
from tests.cli.runs import run, write


class Actor:
    """An optimizer, or a module: an object with weak references, as torch's are."""


class Steps:
    """A monitor that counts."""

    def __init__(self) -> None:
        self.count = 0
        self.began_again_at: list[int] = []

    def step(self, n: int = 1) -> None:
        self.count += n

    def _count(self, steps: int) -> None:
        self.count += steps

    def _restart_leak_test(self) -> None:
        self.began_again_at.append(self.count)


@pytest.fixture(autouse=True)
def no_optimizer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Other tests of this process may have made one."""
    monkeypatch.setattr(inprocess, "has_optimizer", lambda: False)
    yield
    _core._watch_calls(None, None, 0)


def counting() -> tuple[Steps, StepCounter]:
    steps = Steps()
    return steps, StepCounter(steps)  # type: ignore[arg-type,unused-ignore]


#: what acts in which order, and how many steps that are, at least and at most
ORDERS = {
    **{f"{n} optimizers in turn": (
        f"layers = [Actor() for _ in range({n})]\n"
        "for _ in range(40):\n    for one in layers: acts(one)", 40, 40) for n in (1, 2, 30, 200)},
    "a critic that is trained five times for each update of a generator": (
        "critic, generator = Actor(), Actor()\n"
        "for _ in range(10):\n    for _ in range(5): acts(critic)\n    acts(generator)", 50, 50),
    "an optimizer for each fold": (
        "for _ in range(6):\n    one = Actor()\n    for _ in range(10): acts(one)\n    del one",
        60, 60),
    "an optimizer for each step, while the one before lives": (
        "for _ in range(40):\n    one = Actor()\n    acts(one)", 39, 40),
    "a discriminator for each epoch before one generator": (
        "other = Actor()\nfor _ in range(5):\n    one = Actor()\n"
        "    for _ in range(10): acts(one), acts(other)\n    del one", 46, 50),
    "a discriminator for each epoch after one generator": (
        "other = Actor()\nfor _ in range(5):\n    one = Actor()\n"
        "    for _ in range(10): acts(other), acts(one)\n    del one", 46, 50),
    "three stages whose optimizers are all kept": (
        "stages = [[Actor() for _ in range(30)] for _ in range(3)]\n"
        "for stage in stages:\n    for _ in range(40):\n        for one in stage: acts(one)",
        118, 120),  # which one is new is known at its second step
    "a model and its loss": (
        "model, loss = Actor(), Actor()\nfor _ in range(40): called(model), called(loss)", 40, 40),
    "15 calls of a model alone": ("model = Actor()\nfor _ in range(15): called(model)", 15, 15),
    "15 calls before an optimizer acts": (
        "model, one = Actor(), Actor()\nfor _ in range(15): called(model)\n"
        "acts(one), called(model)", 1, 1),
    "1,023 calls where there is an optimizer": (
        "optimizer_is_there()\nmodel = Actor()\nfor _ in range(1023): called(model)", 0, 0),
    "1,024 calls where there is an optimizer": (
        "optimizer_is_there()\nmodel = Actor()\nfor _ in range(1024): called(model)", 1024, 1024),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
def test_what_acts_in_turn_makes_one_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, counter = counting()
    names = {
        "Actor": Actor,
        "acts": lambda optimizer: counter(optimizer, (), {}),
        "called": counter.module_ended,
        "optimizer_is_there": lambda: monkeypatch.setattr(inprocess, "has_optimizer", lambda: True),
    }
    order, least, most = ORDERS[name]
    exec(order, names)
    counter.end()
    assert least <= steps.count <= most


def test_the_leak_test_begins_again_where_training_follows_many_calls() -> None:
    """Steps are something else from there on: a window of accumulated gradients, for one."""
    steps, counter = counting()
    model, optimizer = Actor(), Actor()
    for _ in range(20):
        counter.module_ended(model)
    for _ in range(3):
        counter(optimizer, (), {})
        counter.module_ended(model)
    assert (steps.count, steps.began_again_at) == (23, [20])


class Module:
    """Its instances are called by one function of the class, as torch's modules are."""

    def __init__(self, forward: Callable[..., object]) -> None:
        self.forward = forward

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.forward(*args, **kwargs)


def test_what_a_guard_raises_at_the_end_of_a_call_comes_out_of_it() -> None:
    inner = Module(lambda: 1)

    def ended(module: object) -> None:
        assert inner() == 1  # a call within this one is a part of it
        raise memtools.HostMemoryPressure("full")

    assert _core._watch_calls(Module.__call__, ended, threading.main_thread().ident or 0)
    for _ in range(2):
        with pytest.raises(memtools.HostMemoryPressure, match="full"):
            Module(lambda: 2)()


def test_calls_of_threads_side_by_side_count_each() -> None:
    ended: list[object] = []
    assert _core._watch_calls(Module.__call__, ended.append, threading.main_thread().ident or 0)
    meet = threading.Barrier(4)
    modules = [Module(meet.wait) for _ in range(4)]
    threads = [threading.Thread(target=module) for module in modules]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(id, ended)) == sorted(map(id, modules))


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
    "replicas on threads of one call": (
        "import threading\n"
        "class Whole(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        thread = threading.Thread(target=model, args=(x,))\n"
        "        thread.start()\n"
        "        thread.join()\n"
        "whole = Whole()\n"
        "for _ in range(20): whole(batch)", 20
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
    counter.watch_modules(sys.modules["torch.nn.modules.module"])
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
    if name == "scripted and traced modules":
        assert 40 <= found <= 50  # what is traced is computed, too
    else:
        assert found == expected


#: In a process of its own it is known that the optimizer was made.
SAMPLES = """
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    for _ in range(200): model(batch)
    model(batch).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inference", "a fork inside a forward", "sampling"])
def test_the_steps_of_an_unchanged_script(name: str, tmp_path: Path) -> None:
    program, expected = PROGRAMS.get(name, (SAMPLES, 3))
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
    write_training(tmp_path, "held = []\n" + textwrap.dedent(leaking.replace("STEPS", "5000")))
    found = run(tmp_path, "--limit", "1 GiB", "--guard", "0.6", "train.py")
    assert found.returncode == 1
    errors = found.stderr.decode()
    assert "memtools.errors.HostMemoryPressure: host memory runs out at step" in errors
    assert "It ended by exception HostMemoryPressure: host memory runs out" in errors
    assert errors.count(", watermark 60%") == 2  # the traceback's and the end's, not a third
    record = memtools.read_record(tmp_path / "run.mem")
    assert "guard" in [event.kind for event in record.events]
    assert max(record.buckets.most["rss"]) < 1 << 30


# In place of transformers, whose import takes seconds.
TRAINER = "class TrainerCallback: pass\nDEFAULT_CALLBACKS = []"
TRAINING = """
    import sys
    import torch
    import torch.optim.optimizer as module
    import lightning.pytorch.trainer.call
    import pytorch_lightning.trainer.call
    import transformers.trainer  # the last of the modules that are waited for
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert type(module.__loader__) is type(module.__spec__.loader) is type(torch.__loader__)
    kinds = {type(finder).__module__ for finder in sys.meta_path}
    assert "memtools._monitor.inprocess" not in kinds
    assert len(transformers.trainer.DEFAULT_CALLBACKS) == 1
    print(step, bool(model.weight.isfinite().all()))
"""


def write_training(folder: Path, text: str) -> None:
    """A script, and the modules of libraries that it imports."""
    for library in ("transformers", "lightning/pytorch/trainer", "pytorch_lightning/trainer"):
        package = folder / library
        package.mkdir(parents=True)
        for each in (package, *package.parents):
            if each == folder:
                break
            (each / "__init__.py").touch()
        (package / "call.py").touch()
    (folder / "transformers" / "trainer.py").write_text(TRAINER)
    write(folder, text)


@pytest.mark.slow
def test_steps_of_an_unchanged_script_are_those_of_its_optimizer(tmp_path: Path) -> None:
    write_training(tmp_path, TRAINING.replace("STEPS", "37"))
    found = run(tmp_path, "--json", "train.py")
    assert found.returncode == 0, found.stderr
    assert found.stdout == b"36 True\n"
    assert json.loads(found.stderr)["steps"] == 37
