"""Exit codes: which signal they stand for, and whether memory can be the reason."""

from __future__ import annotations

import signal
from dataclasses import dataclass

#: answers to: did memory run out?
LIKELY, POSSIBLE, NO = "likely", "possible", "no"

_OF_SIGNALS = {
    "SIGKILL": (
        LIKELY,
        "host",
        "no program can catch it; usually the kernel sent it because the machine, the container "
        "or the Slurm job ran out of host memory, otherwise a scheduler, a time limit or kill -9",
    ),
    "SIGBUS": (
        POSSIBLE,
        "shm",
        "a mapped file had no room: check whether /dev/shm or the disk is full",
    ),
    "SIGABRT": (
        POSSIBLE,
        "host",
        "native code aborted, for example after an uncaught std::bad_alloc or by NCCL's watchdog: "
        "its last message is on stderr",
    ),
    "SIGSEGV": (NO, "", "a crash in native code: python -X faulthandler shows where"),
    "SIGTERM": (NO, "", "a request to exit, from a scheduler (time limit, preemption) or kill"),
    "SIGINT": (NO, "", "Ctrl-C, or a launcher that stops its ranks"),
    "SIGHUP": (NO, "", "its terminal was closed"),
    "SIGILL": (NO, "", "an instruction that this processor lacks"),
    "SIGFPE": (NO, "", "a division by zero in native code"),
    "SIGXCPU": (NO, "", "the processor time of RLIMIT_CPU is used up (ulimit -t)"),
    "SIGXFSZ": (NO, "", "a file grew beyond RLIMIT_FSIZE (ulimit -f)"),
}
_OTHERS = {
    0: "the program finished",
    1: "usually a Python exception: its message is in the log",
    2: "usually wrong usage of a command",
    124: "`timeout` ended it",
    125: "docker could not start the container",
    126: "the command cannot be executed",
    127: "the command was not found",
}
_NUMBERS = {one.value for one in signal.Signals if one.value < 32}
#: what is left of sys.exit(-9): other codes near 256 are programs' own
_OF_EXIT = {256 - n: signal.Signals(n).name for n in (6, 7, 9, 11, 15)}


@dataclass(frozen=True)
class ExitCode:
    """What an exit code stands for.

    Attributes:
        code: as it was given: 137, -9 or 247 for SIGKILL.
        signal: the signal's name; None if it stands for none.
        out_of_memory: LIKELY, POSSIBLE or NO.
        where: whose memory that would be, "host" or "shm"; "" if none.
        meaning: one clause.
    """

    code: int
    signal: str | None
    out_of_memory: str
    where: str
    meaning: str


def exit_code(code: int) -> ExitCode:
    """What `code` stands for: a shell reports a signal as 128 + its number, Python and torchrun as
    a negative number, and sys.exit(-9) as 256 - 9."""
    name = _signal_of(code)
    if name is None:
        return ExitCode(code, None, NO, "", _OTHERS.get(code, "chosen by the program"))
    found = _OF_SIGNALS.get(name, (NO, "", "the signal ended the program"))
    return ExitCode(code, name, *found)


def _signal_of(code: int) -> str | None:
    if code in _OF_EXIT:
        return _OF_EXIT[code]
    number = -code if code < 0 else code - 128
    return signal.Signals(number).name if number in _NUMBERS else None
