"""Start the monitor of `memtools run` in an interpreter, before the program itself.

    memtools run train.py ──► exec python train.py, this folder first on PYTHONPATH
                                   │
                                   └─ site ──► this file: puts the environment back, runs the
                                               user's sitecustomize, starts the monitor

The interpreter then runs the program by itself, so that `__main__`, tracebacks and exit codes are
its own, and the program's first frame is the lowest. If the user has no sitecustomize, this ends as
if there were none: with the ImportError that site expects.
"""

import importlib
import json
import os
import sys
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


def _leave_the_path() -> None:
    """Remove this folder from sys.path, which is then that of the command line."""
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != _HERE]
    sys.path_importer_cache.pop(_HERE, None)


def _put_back(options: dict[str, Any]) -> None:
    """Restore the environment of the command line for the program and its children."""
    if options["pythonpath"] is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = options["pythonpath"]


def _import_the_users() -> bool:
    """Import the sitecustomize that Python would have found without this one. Return whether there
    is one."""
    sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        return False
    return True


def _start_monitor(options: dict[str, Any]) -> None:
    """Import memtools and start the monitor. The folder of memtools may not be on the program's
    sys.path, so it is there only during the import."""
    sys.path.insert(0, options["root"])
    try:
        started = importlib.import_module("memtools._monitor.inprocess")
    finally:
        sys.path.remove(options["root"])
    started.begin(options)


_given = os.environ.pop("MEMTOOLS_RUN", None)
_options = None if _given is None else json.loads(_given)
_leave_the_path()
if _options is not None:
    _put_back(_options)
_found = False
try:
    _found = _import_the_users()
finally:
    if _options is not None:
        _start_monitor(_options)
if not _found:
    raise ImportError("no sitecustomize", name="sitecustomize")
