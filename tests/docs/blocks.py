"""Runs the programs of the docs, each in a forked child: torch is imported once, here, and all
else by the program itself, which is train.py in its folder. Reads a line of JSON for each, (folder,
whether a warning is an error), and answers with a line: what its process ended with. What it wrote
is in the folder's files ".out" and ".err"."""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
import types
import warnings
from pathlib import Path

import torch  # noqa: F401


def next_program() -> tuple[str, bool] | None:
    """In a child, what it is to run; None in the parent when there is nothing more."""
    while line := sys.stdin.readline():
        child = os.fork()
        if child == 0:
            folder, is_strict = json.loads(line)
            return folder, is_strict
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return None


if __name__ == "__main__":
    found = next_program()
    if found is not None:  # at the top level: the interpreter ends after it as after any program
        os.chdir(found[0])
        for number, name in enumerate((os.devnull, ".out", ".err")):
            os.dup2(os.open(name, os.O_CREAT | os.O_RDWR), number)
        if found[1]:
            warnings.simplefilter("error")
        sys.argv, sys.path[0] = ["train.py"], found[0]
        program = types.ModuleType("__main__")
        program.__file__ = "train.py"
        sys.modules["__main__"] = program
        atexit.register(gc.freeze)  # comes last; to collect all of torch takes half a second
        exec(compile(Path("train.py").read_text(), "train.py", "exec"), vars(program))
