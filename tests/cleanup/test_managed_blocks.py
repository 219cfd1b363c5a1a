"""`with managed(policy):` as an update, and what managed() needs of the program."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

import memtools
from tests.cleanup.managedcases import chain, policy
from tests.cleanup.managednotes import CLEARED, NOTE, manage, nothing_cleared  # noqa: F401 - a fixture
from tests.cleanup.test_managed import P, counted, function


def test_a_block_is_one_update():
    def block() -> None:
        with memtools.managed(P, clear=[NOTE]):
            function(1)
            with memtools.managed(P):
                function(1)

    assert counted(block) == 1
    assert CLEARED == ["cleared"]

    def raising() -> None:
        with pytest.raises(LookupError, match="x"), manage:
            raise LookupError("x")

    assert counted(raising) == 0
    assert CLEARED == ["cleared"] * 2
    assert counted(lambda: function(1)) == 1


def test_one_object_may_be_entered_inside_itself_and_on_threads():
    inside, go_on = threading.Barrier(2), threading.Event()

    seen: list[int] = []

    def other() -> None:
        with manage:
            inside.wait(20)
            go_on.wait(20)
            seen.append(counted(lambda: function(1)))

    thread = threading.Thread(target=other)

    def both() -> None:
        with manage:
            thread.start()
            inside.wait(20)
            with manage:
                function(1)
        go_on.set()
        thread.join(20)

    assert counted(both) == 2
    assert seen == [0], "each thread leaves its own"
    assert counted(lambda: function(1)) == 1


def test_what_an_action_raises_leaves_the_block():
    def act(mask: int, clock: int) -> None:
        raise memtools.HostMemoryPressure("full")

    with pytest.raises(memtools.HostMemoryPressure), memtools.managed(policy(act)):
        pass
    with pytest.raises(LookupError), memtools.managed(policy(act)):
        raise LookupError


def test_what_fails_to_clear_is_a_note_of_an_exception_that_passes():
    class Bad:
        def clear(self) -> None:
            raise OSError("disk")

    bad = memtools.managed(P, clear=[Bad()])
    own = LookupError("own")
    with pytest.raises(LookupError) as caught, bad:
        raise own
    assert caught.value is own
    assert own.__notes__ == ["while this exception propagated, clearing failed: OSError: disk"]
    with pytest.raises(OSError, match="disk"), bad:
        pass
    assert counted(lambda: function(1)) == 1


def test_a_block_has_no_arguments_to_find_names_at():
    with pytest.raises(TypeError, match=r"clear='x': a `with` block has no arguments"):
        memtools.managed(P, clear="x").__enter__()
    assert counted(lambda: function(1)) == 1, "nothing is open"


def test_it_needs_no_torch():
    code = (
        "import sys, memtools\n"
        "managed = memtools.managed(None, clear='x.clear_me')\n"
        "class X: clear_me = 3\n"
        "managed(lambda x: None)(X)\n"
        "assert X.clear_me is None and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- what Python itself calls ---------------------------------------------------------------------


class Special:
    @memtools.managed(P)
    def __call__(self, x: int) -> int:
        return x + 1

    @memtools.managed(P)
    def __len__(self) -> int:
        return 3

    @memtools.managed(P)
    def for_ever(self) -> None:
        self.for_ever()


def test_special_methods_are_methods_too():
    assert counted(lambda: Special()(1) + len(Special())) == 2


def test_recursion_without_end_is_an_error_and_leaves_nothing_open():
    with pytest.raises(RecursionError):
        Special().for_ever()
    assert counted(lambda: function(1)) == 1


@pytest.mark.slow
def test_a_function_that_is_managed_too_often_is_an_error_and_ends():
    """A chain of them is called, and freed, by C code."""
    long = chain(50_000)
    with pytest.raises(RecursionError, match="in a managed function"):
        long()
    del long
    assert counted(lambda: function(1)) == 1
