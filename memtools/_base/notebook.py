"""Notebooks and IPython: what they and their cells are called, and whether a terminal is a
notebook's cell.

IPython is never imported here: where it runs, the program has imported it.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Mapping
from typing import Any

#: The beginning of a cell's file name if no kernel gives it the name of a file.
CELL = "<ipython-input-"
#: Variables that kernels set for the commands of cells; no other program sets all of them.
_OF_A_KERNEL = {"TERM": "xterm-color", "CLICOLOR": "1", "GIT_PAGER": "cat"}


def cell_of(file: str) -> str | None:
    """`In[3]` if the code of this name is that of a cell, as IPython's own tracebacks call it; None
    if it is not, and outside of IPython."""
    ipython: Any = sys.modules.get("IPython")
    try:
        name = ipython.get_ipython().compile.format_code_name(file)
        return None if name is None else str(name[1])
    except Exception:  # no IPython, another shell, or another version of it
        return None


def file_of(cell: str) -> str | None:
    """The file name of the code of a cell that cell_of() calls by this name; None for others."""
    if not cell.startswith(("In[", "In [", "Cell In")):
        return None
    return next((file for file in reversed(list(linecache.cache)) if cell_of(file) == cell), None)


def file_name(environment: Mapping[str, str] = os.environ) -> str:
    """The file name of the notebook whose kernel this process is, such as `train.ipynb`; "" if it
    is not one, or the kernel does not know the name.

    Jupyter's server passes it in a variable, which commands of a cell inherit, and Visual Studio
    Code by a name in the first module.
    """
    if "ipykernel" not in sys.modules:
        return ""
    given = getattr(sys.modules.get("__main__"), "__vsc_ipynb_file__", None)
    for path in (given, environment.get("JPY_SESSION_NAME")):
        if isinstance(path, str) and path.endswith(".ipynb"):
            return os.path.basename(path.replace("\\", "/"))
    return ""


def source_of(file: str) -> str | None:
    """The code of a cell, which no file has; None for others."""
    entry: Any = linecache.cache.get(file)
    return None if cell_of(file) is None or entry is None else "".join(entry[2])


def is_in_cell(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process was started by a cell, as `!command`: its terminal understands colours,
    but not a cursor that moves."""
    return "JPY_PARENT_PID" in environment or all(
        environment.get(name) == value for name, value in _OF_A_KERNEL.items()
    )
