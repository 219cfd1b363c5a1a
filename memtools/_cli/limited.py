"""Run a program under a limit of memory that the kernel enforces.

A control group limits the program with all its workers, and shared memory counts as well: whoever
goes beyond is killed, as in a container. Where no group can be made, RLIMIT_DATA limits each
process: an allocation beyond it fails.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
GROUP, RLIMIT = "a control group", "RLIMIT_DATA"
JOIN = 'echo $$ >"$0"'
_PR_SET_PDEATHSIG = 1


def enforced_by() -> str:
    """Return what enforces limits here: GROUP or RLIMIT."""
    group = _make_group(1 << 30)
    if group is None:
        return RLIMIT
    _remove(group)
    return GROUP


def interrupt_on_signals() -> None:
    """Raise KeyboardInterrupt on SIGTERM and SIGHUP too, so that programs and groups go."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)


@contextmanager
def limited(
    command: Sequence[str], limit: int | None, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """Run a command under a limit; when the block ends, the command and all its children are gone.

    Args:
        command: the program and its arguments. It gets no input and no signals of the terminal.
        limit: in bytes, of all its processes or of each, as `enforced_by` says; None for no limit.
        options: more of Popen's.
    """
    group = None if limit is None else _make_group(limit)
    prctl = ctypes.CDLL(None).prctl

    def join() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))
        elif limit is not None:
            hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
            soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    process = None
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=join,
            text=True,
            **options,
        )
        yield process
    finally:
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        if group is not None:
            _remove(group)


def _make_group(limit: int) -> Path | None:
    """Make a control group with this limit; None where it may not be made."""
    lines = [line.split(":", 2) for line in OWN_GROUPS.read_text().splitlines()]
    own = {name: path for _, names, path in lines for name in names.split(",")}
    if "memory" in own:  # version 1
        parent = GROUPS / "memory" / own["memory"].lstrip("/")
        files = {"memory.limit_in_bytes": str(limit), "memory.memsw.limit_in_bytes": str(limit)}
    else:  # version 2: next to its own group, because a group with processes may not have groups
        parent = (GROUPS / own.get("", "").lstrip("/")).parent
        files = {"memory.max": str(limit), "memory.swap.max": "0"}
    group = parent / f"memtools-demo-{os.getpid()}"
    try:
        group.mkdir()
        for name, text in files.items():
            if "sw" not in name or (group / name).exists():  # not every kernel counts swap
                (group / name).write_text(text)
        # Whether a process may be moved into it is another permission.
        subprocess.run(
            ["sh", "-c", JOIN, group / "cgroup.procs"], check=True, stderr=subprocess.DEVNULL
        )
    except (OSError, subprocess.CalledProcessError):
        _remove(group)
        return None
    return group


def _remove(group: Path) -> None:
    """Remove a control group, if there is one; its last processes may take a moment to end."""
    for _ in range(100):
        with suppress(OSError):
            group.rmdir()
        if not group.exists():
            return
        time.sleep(0.05)
