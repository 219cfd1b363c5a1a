"""Types in signatures that autodoc does not find by itself.

    _core.pyi ──ast──► properties in C ──► annotations of the Python class that extends the C type
                 └───► methods in C ─────► the signature, as autodoc asks for it
    `if TYPE_CHECKING:` of a module ─────► imported, so that each name in a signature has a meaning
    memtools._gate.stats.GateStats ───────► memtools.GateStats, as people import it

An object that only memtools makes has no use for the signature of its constructor: it is not shown.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
from dataclasses import is_dataclass
from pathlib import Path
from types import MethodDescriptorType, ModuleType
from typing import Any

import memtools
import memtools.data

#: A class of memtools in a signature, by the module where it is defined.
DEFINED = re.compile(r"memtools\.(?:\w+\.)+(\w+)")
#: Each public class and the module that it is imported from.
PUBLIC = dict.fromkeys(memtools.data.__all__, "memtools.data") | dict.fromkeys(
    memtools.__all__, "memtools"
)
STUB = Path(memtools.__file__).with_name("_core.pyi")


@functools.cache
def stub_classes() -> dict[str, ast.ClassDef]:
    """The classes of the stub, by name."""
    body = ast.parse(STUB.read_text(encoding="utf-8")).body
    return {node.name: node for node in body if isinstance(node, ast.ClassDef)}


def is_property(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(one) == "property" for one in node.decorator_list)


def properties(kind: str) -> dict[str, str]:
    """The type of each property of a C type, as it is written in the stub."""
    return {
        node.name: ast.unparse(node.returns)
        for node in stub_classes()[kind].body
        if isinstance(node, ast.FunctionDef) and is_property(node) and node.returns
    }


def method(kind: str, name: str) -> tuple[str, str] | None:
    """The signature of a method of a C type without `self`, and what it returns; None if the stub
    has no such method, or several forms of it."""
    found = [
        node
        for node in stub_classes()[kind].body
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    if len(found) != 1 or found[0].returns is None:
        return None
    arguments = ast.unparse(found[0].args).removeprefix("self").removeprefix(", ")
    return f"({arguments.removeprefix('/').removeprefix(', ')})", ast.unparse(found[0].returns)


def annotate_properties() -> None:
    """Give the Python classes that extend a C type annotations for the properties of that type."""
    for name, module in PUBLIC.items():
        public = getattr(sys.modules[module], name)
        for base in getattr(public, "__mro__", ())[1:]:
            if base.__module__ == "memtools._core" and base.__name__ in stub_classes():
                types = properties(base.__name__)
                public.__annotations__ = {**types, **inspect.get_annotations(public)}


def import_for_types(module: ModuleType) -> None:
    """Run the imports that a module makes for type checkers only."""
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            imports = [n for n in node.body if isinstance(n, ast.Import | ast.ImportFrom)]
            exec(compile(ast.Module([*imports], []), str(module.__file__), "exec"), vars(module))


def is_made_by_memtools(kind: type, arguments: str) -> bool:
    """Whether programs only read objects of a class: its constructor takes private objects, or
    fields that no "Args:" describe."""
    if set(DEFINED.findall(arguments)) - set(PUBLIC):
        return True
    is_record = is_dataclass(kind) or issubclass(kind, tuple)
    return is_record and "Args:" not in (inspect.getdoc(kind) or "")


def signature_of(
    app: Any, what: str, name: str, found: Any, options: Any, arguments: str, returned: str
) -> tuple[str, str] | None:
    """autodoc-process-signature: a method that is written in C takes the stub's."""
    if what == "class" and is_made_by_memtools(found, arguments or ""):
        return "", ""
    if not isinstance(found, MethodDescriptorType):
        return None
    kind = found.__objclass__
    if kind.__module__ != "memtools._core" or kind.__name__ not in stub_classes():
        return None
    return method(kind.__name__, found.__name__)


def public_target(app: Any, env: Any, node: Any, content: Any) -> Any:
    """missing-reference: a class of the module that defines it is the public one of its name."""
    name = str(node.get("reftarget", "")).rpartition(".")[2]
    if node.get("refdomain") != "py" or name not in PUBLIC:
        return None
    domain = env.get_domain("py")
    here = node.get("refdoc")
    return domain.resolve_xref(
        env, here, app.builder, "obj", f"{PUBLIC[name]}.{name}", node, content
    )


def setup(app: Any) -> dict[str, Any]:
    for name, module in PUBLIC.items():
        getattr(sys.modules[module], name)  # imports the module where it is defined
    annotate_properties()
    for name, module in list(sys.modules.items()):
        if name.startswith("memtools.") and str(module.__file__).endswith(".py"):
            import_for_types(module)
    app.connect("autodoc-process-signature", signature_of)
    app.connect("missing-reference", public_target)
    return {"parallel_read_safe": True}
