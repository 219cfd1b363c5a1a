"""What the memory monitor can do on this machine, for `memtools doctor`: each part is tried."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from memtools._base.size import format_bytes
from memtools._cli.facts import SHIM, Fact, Section, guarded, no, why, yes
from memtools._cli.system import ROOT

INTERVAL_NS = 10_000_000  # the default of a MemoryMonitor


def monitor_facts(root: Path = ROOT) -> Section:
    """What can be read, and whether the thread, the record and the census work. Raises ImportError
    without _core."""
    from memtools import _core
    from memtools._base import torch as bridge

    probe = _core.Probe(str(root), True)

    def peak() -> Fact:
        exact = probe.reset_peak()
        return yes() if exact else no("/proc/self/clear_refs cannot be written: peaks are at least")

    def sampler() -> Fact:
        thread = _core.Sampler(INTERVAL_NS, root=str(root))
        try:
            thread.start()
        except RuntimeError as error:
            return no(str(error))
        thread.stop()
        return yes(f"{thread.samples} samples taken")

    def record() -> Fact:
        """Make a record in the folder in which a script would make it, and remove it."""
        try:
            with tempfile.TemporaryDirectory(prefix=".memtools-", dir=os.getcwd()) as folder:
                writer = _core.RecordWriter(Path(folder, "run.mem"), ["rss"])
                writer.close()
        except OSError as error:
            return no(f"not in this folder: {why(error)}; name another place by log=")
        return yes(f"in this folder, {format_bytes(writer.nbytes)} and more")

    def leak_test() -> Fact:
        read = probe.read(_core.READ_RSS | _core.READ_HEAP | _core.READ_CHILDREN)
        found = {"heap": read.heap_used, "children": read.children_private, "rss": read.rss}
        names = ["python", *(name for name, value in found.items() if value is not None)]
        remark = f"reads {', '.join(names)}"
        return yes(remark) if read.rss is not None else no(f"{remark}, but no rss")

    def census() -> Fact:
        if bridge.loaded() is None:
            return yes("torch is not installed: objects only, no tensors")
        shim, reason = bridge.shim_status()
        return yes(f"by the {SHIM}" if shim else f"by torch's own getters, slower: {reason}")

    return {
        "peak_reset": guarded(peak),
        "sampler": guarded(sampler),
        "record": guarded(record),
        "leak_test": guarded(leak_test),
        "census": guarded(census),
    }
