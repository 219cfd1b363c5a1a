"""The marker `memory` of pytest: growth, peaks, bad markers, and tests of other kinds."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from memtools.testing import _peak as peak
from memtools.testing._flat import Allowed
from memtools.testing._marker import OptimizerSteps

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.usefixtures("frozen")

Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester) -> Run:
    """Runs a file of tests by the plugin, as a session of its own in this process."""

    def go(code: str, *arguments: str) -> pytest.RunResult:
        pytester.makepyfile(f"import pytest\nmemory = pytest.mark.memory\n{code}")
        return pytester.runpytest_inprocess("-q", "-p", "no:cacheprovider", *arguments)

    return go


LEAKS = """
class Trainer:
    losses = []

@memory(growth="1 KiB/step")
def test_leaks():
    Trainer.losses.append(bytes(4000))
"""


def test_a_test_that_leaks_from_call_to_call_fails_with_the_holder(run: Run) -> None:
    result = run(LEAKS)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            # A session within this one notes each call of a hook, some 250 bytes each time: too
            # small a share of the growth to be a holder of its own.
            "memory grows by 4.? KiB a step (allowed: 1 KiB): list Trainer.losses "
            "+4.? KiB/step (1 new bytes object a step); kept at *.py:9 in test_leaks",
            "  fix: clear it after use, *",
            "  seen over 44 calls of the test, after 6 of warm-up",
        ]
    )


def test_a_failure_shows_the_callers_lines_and_the_message_alone(run: Run) -> None:
    """pytest printed 75 lines, most of them source of memtools."""
    result = run(
        """
from memtools.testing import assert_flat

def test_leaks():
    kept = []
    assert_flat(lambda: kept.append(bytes(4200)), steps=40)

def test_raises():
    assert_flat([].pop)

@memory(growth="1 KiB/step")
def test_marked_raises():
    [].pop()

def test_too_few():
    assert_flat(list, steps=3)
"""
    )
    result.assert_outcomes(failed=4)
    text = result.stdout.str()
    assert "memtools/testing" not in text
    assert "def assert_flat" not in text
    assert len(text.splitlines()) <= 60
    lines = [
        ">       assert_flat(lambda: kept.append(bytes(4200)), steps=40)",
        "E       AssertionError: memory grows by 4.* KiB a step *",
        ">       assert_flat([[]].pop)",
        "E       IndexError: pop from empty list",
        ">       assert_flat(list, steps=3)",
        "E       ValueError: steps must be at least 20, got 3",
    ]
    for line in lines:
        result.stdout.fnmatch_lines([line])


def test_calls_are_as_many_as_asked_for_and_fixtures_are_set_up_once(run: Run) -> None:
    result = run(
        """
calls = []

@pytest.fixture
def buffer():
    calls.append("set up")
    yield bytearray(20 << 20)
    calls.append("torn down")

@memory(growth="1 KiB", steps=30)
@pytest.mark.parametrize("size", [1, 2])
def test_flat(buffer, size, tmp_path):
    assert len(buffer) == 20 << 20
    calls.append(size)

def test_calls():
    assert calls == ["set up"] + [1] * 30 + ["torn down", "set up"] + [2] * 30 + ["torn down"]
"""
    )
    result.assert_outcomes(passed=3)


def test_what_a_fixture_holds_is_named(run: Run) -> None:
    result = run(
        """
class Store:
    def __init__(self):
        self.rows = []

@pytest.fixture
def store():
    return Store()

@memory(growth="1 KiB")
def test_fills(store):
    store.rows.append(bytearray(5000))
"""
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["memory grows by * list Store.rows +*"])


def test_warnings_and_logs_of_a_test_are_not_its_growth(run: Run) -> None:
    result = run(
        """
import logging, warnings

@memory(growth="700 B")  # a session within this one notes 250 bytes of each call
def test_talks(caplog):
    logging.getLogger("x").warning("of a call: %s", "y" * 500)
    warnings.warn("old", DeprecationWarning)
    print("z" * 500)
    assert len(caplog.records) == 1
"""
    )
    result.assert_outcomes(passed=1, warnings=1)


STEPS = """
import torch

def loop(kept):
    net = torch.nn.Linear(16, 16)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    losses = []
    for _ in range(100):
        loss = net(torch.ones(4, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(kept(loss))

@memory(growth="1 KiB/step", steps=10 ** 6)
def test_values():
    loop(torch.Tensor.item)

@memory(growth="512 B/step", steps=10 ** 6)
def test_losses():
    loop(lambda loss: loss)
"""


@pytest.mark.slow
def test_steps_of_an_optimizer_are_the_steps(pytester: pytest.Pytester) -> None:
    # A process of its own: torch loads parts of itself at the first step.
    pytester.makepyfile(f"import pytest\nmemory = pytest.mark.memory\n{STEPS}")
    result = pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    text = result.stdout.str()
    assert "autograd graphs in local 'losses' of loop()" in text
    assert "seen over 87 steps of an optimizer, after 12 of warm-up" in text


@pytest.mark.slow
def test_two_optimizers_make_one_step() -> None:
    import torch

    steps: list[int] = []
    nets = [torch.nn.Linear(2, 2) for _ in range(2)]
    both = [torch.optim.SGD(net.parameters(), 0.1) for net in nets]
    with OptimizerSteps(lambda: steps.append(1)):
        for _ in range(10):
            for optimizer in both:
                optimizer.step()
    assert len(steps) == 9  # the last one has not ended
    both[0].step()
    assert len(steps) == 9


@pytest.mark.slow
def test_a_step_that_calls_the_one_of_its_base_is_one_step() -> None:
    import torch

    class Own(torch.optim.SGD):
        def step(self, closure: object = None) -> None:
            super().step()

    steps: list[int] = []
    weights = [torch.nn.Parameter(torch.zeros(2))]
    torch.optim.SGD(weights, 0.1)  # so that torch calls the hooks of SGD's own step, too
    optimizer = Own(weights, 0.1)
    with OptimizerSteps(lambda: steps.append(1)):
        for _ in range(10):
            optimizer.step()
    assert len(steps) == 9


PEAK = """
import mmap

@pytest.fixture
def large():
    return b"x" * (64 << 20)

@memory(peak="{peak}")
def test_peak(large):
    kept = b"y" * (24 << 20)
    assert len(kept) < len(large)
"""


@pytest.mark.slow
def test_a_peak_above_the_limit_fails_and_a_fixture_is_not_blamed(run: Run) -> None:
    run(PEAK.format(peak="28 MiB")).assert_outcomes(passed=1)
    result = run(PEAK.format(peak="20 MiB"))
    result.assert_outcomes(failed=1)
    result.stdout.re_match_lines(
        [r"the test takes 2[45]\.\d MiB at its peak \(allowed: 20 MiB\), above "
         r"the [\d.]+ [MG]iB of resident memory when it began"]
    )  # fmt: skip


@pytest.mark.slow
def test_who_held_memory_at_the_peak_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[peak.Witness] = []
    start = peak.Witness.start

    def noted(witness: peak.Witness) -> None:
        begun.append(witness)
        start(witness)

    monkeypatch.setattr(peak.Witness, "start", noted)
    monkeypatch.setattr(peak, "begun", begun, raising=False)
    result = run(
        """
import torch
from memtools.testing import _peak as peak

class Net:
    def forward(self):
        self.saved = []
        for _ in range(8):
            self.saved.append(torch.ones(1 << 20))
        while peak.begun[-1]._looks < peak._LOOKS: pass

@pytest.fixture
def large():
    return b"x" * (64 << 20)

@memory(peak="16 MiB")
def test_tensors(large):
    net = Net()
    net.forward()
    del net.saved

@memory(peak="16 MiB")
def test_rows(large):
    rows = []
    for i in range(150):
        rows.append(b"z" * 4096 * i)
    while peak.begun[-1]._looks < peak._LOOKS: pass
"""
    )
    result.assert_outcomes(failed=2)
    text = result.stdout.str()
    tensors = (
        r"at \S+\.py:\d+ in Net.forward: .* \[1048576\] float32 tensors, held by list Net.saved"
    )
    assert re.search(tensors, text)
    rows = (
        r"at \S+\.py:\d+ in test_rows\S*: list local 'rows' of test_rows\(\) holds [1-4]\d\.\d MiB"
    )
    assert re.search(rows, text)
    assert re.search(r"the test takes 3[23]\.\d MiB at its peak", text)
    assert re.search(r"the test takes 4[345]\.\d MiB at its peak", text)


@pytest.mark.slow
def test_ctrl_c_within_a_look_ends_the_session(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(witness: peak.Witness) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(peak.Witness, "_of_tensors", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(
            """
@memory(peak="8 MiB")
def test_fills():
    kept = b"x" * (64 << 20)
    while True:
        pass
"""
        )


def test_a_kernel_without_marks_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak, "can_reset_peak", lambda: False)
    result = run(PEAK.format(peak="28 MiB"))
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["@pytest.mark.memory: peak= has to reset the kernel's peak * growth= *"]
    )


@pytest.mark.parametrize(
    ("marker", "said"),
    [
        ('peak="1 XB"', "peak must be a number of bytes or like \"64 MiB\", got '1 XB'"),
        ('growth="1 KiB/s"',
         "growth must be a number of bytes or like \"1 KiB/step\", got '1 KiB/s'"),
        ("growth=2.5", 'growth must be an int or like "1 KiB/step", got float'),
        ("peek=1", "memory() has no keyword 'peek'; the keywords are peak, growth, device, "
                   "steps, isolate and timeout"),
        ('"1 MiB"', "memory() takes keyword arguments only: peak, growth, device, steps, "
                    "isolate and timeout"),
        ("", "memory() checks nothing; pass peak or growth"),
        ("growth=1, steps=5", "steps must be at least 20, got 5"),
        ('growth=1, isolate="yes"', "isolate must be True or False, got str"),
        ("growth=1, timeout=5", "timeout needs isolate=True, because a test of this process cannot "
                                "be ended; without isolate=True use pytest-timeout"),
        ("growth=1, isolate=True, timeout=0", "timeout must be above 0 seconds, got 0"),
        ("growth=1, isolate=True, timeout='1'", "timeout must be a number of seconds, got str"),
        ('growth=1, device="tpu"', "device must be \"auto\", \"cpu\", \"cuda\" or \"cuda:N\", got "
                                   "'tpu'"),
    ],
)  # fmt: skip
def test_a_marker_that_means_nothing_is_an_error_in_one_sentence(
    run: Run, marker: str, said: str
) -> None:
    result = run(f"@pytest.mark.memory({marker})\ndef test_it(): assert False, 'was run'")
    result.assert_outcomes(errors=1)
    assert f"@pytest.mark.memory: {said}" in result.stdout.lines
    assert "was run" not in result.stdout.str()


def test_tests_of_other_kinds_are_refused(run: Run) -> None:
    result = run(
        """
import unittest

class TestOld(unittest.TestCase):
    @memory(peak="1 MiB")
    def test_it(self):
        pass

@memory(growth="1 KiB")
async def test_async():
    pass
"""
    )
    result.assert_outcomes(errors=1, failed=1)
    text = result.stdout.str()
    assert "@pytest.mark.memory: a method of unittest.TestCase cannot be measured" in text
    assert "async def functions are not natively supported" in text


@pytest.mark.slow
def test_outcomes_of_pytest_are_as_usual(run: Run) -> None:
    result = run(
        """
limit = memory(growth="1 KiB", peak="100 MiB", steps=20)
kept = []

@limit
def test_fails():
    assert 1 == 2

@limit
def test_raises():
    raise RuntimeError("of the test")

@limit
def test_skips():
    pytest.skip("no reason")

@limit
@pytest.mark.skip
def test_skipped():
    pass

@limit
@pytest.mark.xfail
def test_xfails():
    kept.append(bytes(5000))

@limit
@pytest.mark.xfail(raises=pytest.fail.Exception, strict=True)
def test_xfails_by_memory():
    kept.append(bytes(5000))

class TestClass:
    @limit
    def test_method(self, request):
        assert request.node.name == "test_method"
"""
    )
    result.assert_outcomes(passed=1, failed=2, skipped=2, xfailed=2)
    result.stdout.fnmatch_lines(["E *assert 1 == 2", "E *RuntimeError: of the test"])


def test_a_failed_test_is_not_measured_again(run: Run) -> None:
    result = run(LEAKS + "\ndef test_after(): assert len(Trainer.losses) == 50")
    result.assert_outcomes(failed=1, passed=1)


def test_the_marker_is_known_to_strict_sessions(run: Run) -> None:
    result = run("@memory(peak='50 MiB')\ndef test_it(): pass", "--strict-markers", "-Werror")
    result.assert_outcomes(passed=1)
    assert "@pytest.mark.memory(peak=None, growth=None" in run("", "--markers").stdout.str()


@pytest.mark.slow
def test_a_project_that_does_not_use_it_loads_nothing() -> None:
    code = (
        "import sys, pytest\n"
        "status = pytest.main(['-q', '--co', '-p', 'no:cacheprovider', '/nowhere'])\n"
        "ours = sorted(name for name in sys.modules if name.startswith('memtools'))\n"
        "assert ours == ['memtools', 'memtools.testing', 'memtools.testing._plugin'], ours\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_looks_take_nothing_of_the_peak() -> None:
    one = peak.Peak(Allowed(1 << 20, "1 MiB"), ())
    with one:
        with one.looking():
            look = b"x" * (32 << 20)
        filled = b"y" * (8 << 20)
    taken = re.search(r"^the test takes ([\d.]+) MiB at its peak \(allowed: 1 MiB\)", one.text)
    assert taken is not None, (one.text, one._top, one._first, one._looked_bytes)
    assert 8 <= float(taken[1]) < 9.5
    del look, filled


def test_the_peak_of_a_device_is_its_allocators(monkeypatch: pytest.MonkeyPatch) -> None:
    class Peaks:
        def __init__(self, devices: object) -> None:
            assert devices == [0]

        def enter(self, token: int) -> None:
            pass

        def leave(self, token: int) -> dict[int, int]:
            return {0: 90 << 20}

    monkeypatch.setattr(peak, "DevicePeaks", Peaks)
    monkeypatch.setattr(peak, "allocated", lambda devices: 50 << 20)
    for allowed, text in ((40, ""), (39, "the test takes 40.0 MiB at its peak (allowed: 39 MiB)")):
        one = peak.Peak(Allowed(allowed << 20, f"{allowed} MiB"), [0])
        with one, one.looking():
            pass
        assert one.text.startswith(text)
        assert bool(one.text) == bool(text)
    assert "above the 50.0 MiB on the device when it began" in one.text
