"""Adapters to the libraries people use. Each module imports its library; `memtools` imports none of
them, and a module is loaded when you import it or first name it."""

from importlib import import_module as _import_module

_MODULES = ("accelerate", "lightning", "transformers")


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _import_module(f"{__name__}.{name}")
