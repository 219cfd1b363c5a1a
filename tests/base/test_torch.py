"""The shim is optional and pinned; torch is imported late, and only when a tensor comes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import memtools
from memtools import GateHistory, _build_info, _core
from memtools._base import torch as bridge
from tests.kit.ownprocess import in_own_process


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_import_memtools_brings_in_neither_torch_nor_numpy():
    done = run(
        "import sys, memtools; memtools.GateHistory(); memtools.AuxLoss(); "
        "print([name for name in ('torch', 'numpy', 'matplotlib') if name in sys.modules])"
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_works_with_torch_absent_until_a_tensor_is_needed():
    done = run(
        "import sys; sys.modules['torch'] = None\n"
        "import memtools\n"
        "history = memtools.GateHistory()\n"
        "print(len(history), history.stats().tokens, history)\n"
        "try: history.append(object())\n"
        "except ImportError as error: print(error)\n"
        "try: memtools.AuxLoss().add(1)\n"
        "except ImportError as error: print('again', error)\n"
    )
    assert done.returncode == 0, done.stderr
    assert "memtools needs torch >= 2.11" in done.stdout
    assert "again memtools needs" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["torch.nn", "torch.autograd", "memtools._torch"])
def test_a_handler_in_the_first_connection_is_told_so_or_served(moment):
    """Signal handlers and finalizers may run at any moment of it."""
    said = in_own_process(
        f"""
        import sys
        import memtools
        from memtools._base import torch as _bridge

        class Handler:
            def find_spec(self, name, path=None, target=None):
                if name == {moment!r}:
                    sys.meta_path.remove(handler)
                    try:
                        print("served", memtools.AuxLoss().total().item())
                    except ImportError as error:
                        print("refused", "while torch is being imported" in str(error))

        handler = Handler()
        sys.meta_path.insert(0, handler)
        _bridge.connect()
        print(memtools.AuxLoss().total().item())
        """
    )
    assert said.split("\n")[0] in ("served 0.0", "refused True")
    assert said.split("\n")[1] == "0.0"


def test_one_version_everywhere():
    text = (Path(__file__).parents[2] / "memtools/_version.py").read_text()
    assert memtools.__version__ == _core.__version__ == re.search(r'__version__ = "(.+)"', text)[1]


def test_the_shim_is_loaded_here_and_was_built_for_this_torch():
    assert (
        torch.__version__,
        torch.version.git_version,
    ) == (_build_info.TORCH_VERSION, _build_info.TORCH_GIT_VERSION)
    assert bridge.shim_status() == (True, "")
    assert bridge.connect().shim.ops is not None


MISMATCH = """
import sys, warnings
import memtools
from memtools import _build_info; from memtools._base import torch as _bridge
{change}
import torch
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    history = memtools.GateHistory()
    for _ in range(3):
        history.append(torch.rand(4, 8))
    negated = torch.randn(4, 8, dtype=torch.complex64).conj().imag
    history.append(negated)
    assert torch.equal(history[-1], negated.clone())
    assert _bridge.in_backward() is False
for warning in caught:
    print("warning:", warning.category.__name__, warning.message)
print("entries", len(history), "shim", _bridge.shim_status()[0], "memtools._torch" in sys.modules)
print("reason:", _bridge.shim_status()[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        "_build_info.TORCH_VERSION = '2.12.0+cu130'",
        "_build_info.TORCH_GIT_VERSION = 'another commit of the same version'",
    ],
)
def test_a_shim_for_another_torch_is_not_loaded_warns_once_and_all_else_works(change):
    done = run(MISMATCH.format(change=change))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len([line for line in lines if line.startswith("warning:")]) == 1
    assert "memtools._torch was built for torch" in lines[0]
    assert lines[0].endswith("; run memtools build-shim")
    assert lines[1] == "entries 4 shim False False"
    assert lines[2].startswith("reason: memtools._torch was built for")


@pytest.mark.slow
def test_a_shim_that_was_not_built_is_no_reason_to_warn():
    done = run(MISMATCH.format(change="_build_info.TORCH_VERSION = None"))
    assert done.returncode == 0, done.stderr
    assert "warning:" not in done.stdout
    assert "reason: memtools._torch has not been built for torch " in done.stdout


@pytest.mark.slow
def test_a_shim_that_does_not_load_warns_once():
    done = run(MISMATCH.format(change="sys.modules['memtools._torch'] = None"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("warning:") == 1
    assert "memtools._torch does not load" in done.stdout


@pytest.mark.slow
def test_an_old_torch_is_refused_with_the_version_found(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.10.1+cpu")
    monkeypatch.setattr(bridge, "_connected", [])
    with pytest.raises(ImportError, match=r"torch >= 2\.11, found 2\.10\.1"):
        bridge.connect()


@pytest.mark.slow
def test_a_capsule_of_another_kind_or_major_version_is_refused(without_shim):
    parts = [torch.Tensor, torch.nn.Parameter, lambda: -1, torch.Tensor.is_neg, bridge.plain, None]
    with pytest.raises(ValueError, match="PyCapsule"):
        _core._connect(bridge.connect().shim.ops, *parts)
    with without_shim():
        history = GateHistory()
        history.append(torch.rand(2, 2))


@pytest.mark.slow
def test_a_second_interpreters_peaks_do_not_claim_to_be_exact():
    """The kernel has one high-water mark for both, and the first one sets it back."""
    peak = "from memtools import _core; p = _core.Probe(); print(p.reset_peak(), p.peak()[1])"
    said = in_own_process(
        f"""
        try:
            import _xxsubinterpreters as interpreters
        except ImportError:
            import _interpreters as interpreters
        from memtools import _core

        first = _core.Probe()
        print(first.reset_peak())
        other = interpreters.create()
        interpreters.run_string(other, {peak!r})
        interpreters.destroy(other)
        print(first.peak()[1])
        """
    )
    assert said == "True\nFalse False\nTrue\n"


@pytest.mark.slow
def test_the_core_works_in_a_second_interpreter():
    done = run(
        "import sys\n"
        "try: import _xxsubinterpreters as interpreters\n"
        "except ImportError: import _interpreters as interpreters\n"
        "import memtools\n"
        "other = interpreters.create()\n"
        "interpreters.run_string(other, 'import memtools; h = memtools.GateHistory(); '\n"
        "    'print(len(h), h.stats().tokens)')\n"
        "interpreters.destroy(other)\n"
        "print(memtools.GateHistory())\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("0 0\nGateHistory(0 of 1000 entries")
