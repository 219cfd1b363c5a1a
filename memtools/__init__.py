"""memtools keeps a PyTorch training loop inside its memory, and shows that it does.

`import memtools` needs neither torch nor numpy; torch is connected when the first tensor comes.
"""

import sys as _sys
from importlib import import_module as _import_module

if "t" in _sys.abiflags:
    raise ImportError(
        "memtools does not run on free-threaded Python: its C code relies on the global "
        "interpreter lock; use the standard build of Python"
    )
# Each public name and the module that it is of, out of the lines of __init__.pyi. They are loaded
# at first use: where memtools._core does not load, `memtools doctor` must still say so.
with open(f"{__path__[0]}/__init__.pyi", encoding="utf-8") as _stub:
    _HOMES = {line.split()[-1]: line.split()[1] for line in _stub if line.startswith("from ")}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'memtools' has no attribute {name!r}")
    value = getattr(_import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
