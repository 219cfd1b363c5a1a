"""Runs the programs of the docs, each in a forked child: torch is imported once, here, and all
else by the program itself. Reads a line of JSON for each, (program, folder), and answers with a
line: what its process ended with. What it wrote is in the folder's file "output"."""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys

import torch  # noqa: F401


def next_program() -> tuple[str, str] | None:
    """In a child, what it is to run; None in the parent when there is nothing more."""
    while line := sys.stdin.readline():
        child = os.fork()
        if child == 0:
            program, folder = json.loads(line)
            return program, folder
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return None


if __name__ == "__main__":
    found = next_program()
    if found is not None:  # at the top level: the interpreter ends after it as after any program
        source, where = found
        os.chdir(where)
        output = os.open("output", os.O_CREAT | os.O_WRONLY)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, file in enumerate((nothing, output, output)):
            os.dup2(file, number)
        sys.argv = ["-c"]
        atexit.register(gc.freeze)  # comes last; to collect all of torch takes half a second
        exec(compile(source, "<string>", "exec"), {"__name__": "__main__"})
