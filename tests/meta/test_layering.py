"""Which file may reach what. Each rule is a function, so that it can be shown to fail.

Layers are the first level of csrc: core, os, cuda, torch, py. Rooms are the second level, and the
first of memtools: one concept each, by the same word in every tree. ARROWS says which room may use
which.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import memtools

PROJECT = Path(__file__).resolve().parents[2]
PUBLIC = {"BudgetError", "DeviceError", "DeviceMemoryPressure", "HostMemoryPressure",
          "MemoryPressure", "MemtoolsError", "__version__"}  # fmt: skip
LAYERS = {"core", "os", "cuda", "py", "torch"}
THE_CPP_FILE = "csrc/torch/torch_shim.cpp"
IMPORTED_IN = {"torch": "memtools/_base/torch.py", "matplotlib": "nowhere",
               "numpy": "nowhere", "h5py": "memtools/data/",
               "transformers": "memtools/integrations/",
               "lightning": "memtools/integrations/",
               "prometheus_client": "nowhere",
               "tensordict": "memtools/_trajectory/exchange.py"}  # fmt: skip

# Our own headers: which layer may include which.
MAY_REACH = {
    "core": {"core"},
    "os": {"core", "os"},
    "cuda": {"core", "cuda"},
    "py": {"core", "os", "cuda", "torch", "py", "third_party"},
    "torch": {"core", "torch", "third_party"},
}
# The one header of core that names the system's threads: all others of core lock by it.
NAMES_THREADS = "csrc/core/base/lock.h"
# Everybody else's headers, by kind.
MAY_USE = {
    "core": {"iso", "simd"},  # intrinsics are instructions: they call nothing
    "os": {"iso", "host", "threads"},  # what a fork does to memory is the system's matter
    "cuda": {"iso", "host", "cuda"},
    "py": {"iso", "host", "python"},
    "torch": {"iso", "host", "python", "c++", "torch"},
}
KINDS = {
    "torch": r"(torch|ATen|c10|caffe2)/.*",
    "cuda": r"(cu|nvml|nvrtc|nvtx)[\w/]*\.h|(driver|vector|host)_(types|defines)\.h",
    "python": r"(Python|structmember)\.h|(cpython|internal)/.*",
    "iso": r"(assert|complex|ctype|errno|fenv|float|inttypes|iso646|limits|locale|math|setjmp"
    r"|signal|stdalign|stdarg|stdatomic|stdbool|stddef|stdint|stdio|stdlib|stdnoreturn|string|tgmath"
    r"|threads|time|uchar|wchar|wctype)\.h",
    "simd": r"(emmintrin|immintrin|arm_neon)\.h",
    "threads": r"pthread\.h",
    "host": r"(dirent|dlfcn|endian|fcntl|features|link|malloc|poll|sched|semaphore|spawn|strings"
    r"|syscall|ucontext|unistd)\.h|(sys|linux|asm)/.*",
    "c++": r"[a-z_]+",
}


# --- the rooms ------------------------------------------------------------------------------------

# What the rooms of csrc/core may include, beside themselves.
CORE_ARROWS = {
    "base": set(),
    "port": {"base"},
    "budget": {"base", "port"},
    "gate": {"base", "port", "budget"},
    "kv": {"base", "port", "budget"},
    "record": {"base"},
    "monitor": {"base", "port", "record", "blocks"},
    "cleanup": {"base", "port", "record", "monitor"},
    "census": {"base"},
    "grad": {"base", "port"},
    "blocks": {"base"},
}
# csrc/py and csrc/os go along the arrows of csrc/core, by rooms of core and of their own, and use
# besides what serves all: csrc/py may also use every room of csrc/os.
SERVES_ALL = {"os": {"base", "port"}, "py": {"base", "port", "tensor"}}
ROOMS = {"core": set(CORE_ARROWS), "os": set(CORE_ARROWS), "py": {*CORE_ARROWS, "tensor"}}
# These make the extension module of all its parts.
USES_ALL = {"csrc/py/module.c"}

# What the rooms of memtools may import when they run, at any depth of a function, beside themselves
# and what is EVERYBODYS. The room of memtools/x.py is x; "*" is every room.
EVERYBODYS = {"_core", "_version", "_build_info", "_torch", "errors"}
ARROWS: dict[str, set[str]] = {
    "__init__": {"*"},
    "__main__": {"_cli"},
    "_base": set(),
    "_census": {"_base"},
    "_build_info": set(),
    "_version": set(),
    "_allocators": {"_base"},
    "_blocks": {"_base"},
    "_budget": {"_base"},
    "_cleanup": {"_base", "_census"},
    "_cli": {"*"},
    "data": {"_base", "_budget"},
    "distributed": {"_base"},
    "errors": set(),
    "export": {"_base"},
    "_gate": {"_base", "_budget"},
    "grad": {"_base"},
    "_grad": {"_base", "_census"},  # who holds the graphs of passes before one that failed
    # Of the rooms public names only, but for the passes of a trainer's batches.
    "integrations": {"_base", "_grad", "__init__", "grad"},
    "_kv": {"_base", "_budget"},
    "_leak": {"_base"},
    "_monitor": {"_base", "_record", "_leak", "_census", "_blocks"},
    "_oom": {"_base"},
    "_plan": {"_base", "_blocks"},
    "_record": {"_base", "_leak"},  # the growth of a record is judged by the leak test
    "report": {"_base", "_record", "_leak", "_blocks"},  # a traced step is replayed with changes
    "_trajectory": {"_base", "_census", "_budget"},  # what a graph that came along holds
    "testing": {"_base", "_monitor", "_leak", "_census", "_record", "_blocks"},
    "types": {"*"},  # for annotations in programs: no room imports it
}

# --- the rules: C ---------------------------------------------------------------------------------


def without_comments(text: str, strings: bool = True) -> str:
    """The code, line by line; with strings=False literals are emptied too."""

    def blank(match: re.Match[str]) -> str:
        found = match[0]
        if found[0] in "\"'":
            return found if strings else found[0] * 2
        return " " + "\n" * found.count("\n")

    literal = r"\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'"
    return re.sub(rf"//[^\n]*|/\*.*?\*/|{literal}", blank, text, flags=re.S)


def kind_of_header(name: str) -> str:
    return next((kind for kind, form in KINDS.items() if re.fullmatch(form, name)), "unlisted")


def includes(path: str, text: str, own: set[str]) -> Iterator[tuple[str, str | None]]:
    """Each included name, with the project's file that it means, if it means one."""
    for mark, name in re.findall(
        r'^\s*#\s*include\s*([<"])([^>"\n]+)', without_comments(text), re.M
    ):
        beside = posixpath.normpath(posixpath.join(posixpath.dirname(path), name))
        candidates = [beside, f"csrc/{name}", f"csrc/core/{name}"] if mark == '"' else []
        yield name, next((found for found in candidates if found in own), None)


def layer_of(path: str) -> str:
    parts = path.split("/")
    return parts[1] if len(parts) > 2 else ""


def include_breaches(path: str, text: str, own: set[str]) -> list[str]:
    layer = layer_of(path)
    if layer not in LAYERS:
        return [f"{path}: lies in no layer"]
    breaches = []
    for name, target in includes(path, text, own):
        may_use = MAY_USE[layer] | ({"threads"} if path == NAMES_THREADS else set())
        if target is None and kind_of_header(name) not in may_use:
            breaches.append(f"{path}: {layer} may not include {name} ({kind_of_header(name)})")
        elif target is not None and layer_of(target) not in MAY_REACH[layer]:
            breaches.append(f"{path}: {layer} may not reach {target}")
    return breaches


def room_of(path: str) -> str:
    """The folder below the layer; empty for a file of the layer itself."""
    parts = path.split("/")
    return parts[2] if len(parts) > 3 else ""


def room_breaches(path: str, text: str, own: set[str]) -> list[tuple[str, str]]:
    """What a file of csrc includes that lies in a room which its own may not use."""
    layer, room = layer_of(path), room_of(path)
    if layer not in ROOMS or path in USES_ALL:
        return []
    if room not in ROOMS[layer]:
        return [(path, "lies in no room")]
    may = {room} | CORE_ARROWS.get(room, set()) | SERVES_ALL.get(layer, set())
    breaches = []
    for _, target in includes(path, text, own):
        if target is None or layer_of(target) not in (layer, "core"):
            continue  # another layer than core has no rooms for this one
        if room_of(target) not in may:
            breaches.append((path, target))
    return breaches


def reached_breaches(start: str, files: dict[str, str]) -> list[str]:
    """csrc/py may include our headers of csrc/cuda and csrc/torch as long as these are plain C:
    nothing of the toolkit or of torch may come in through them either."""
    seen, todo, breaches = {start}, [start], []
    while todo:
        path = todo.pop()
        for name, target in includes(path, files[path], set(files)):
            if target is None and kind_of_header(name) in ("cuda", "torch"):
                breaches.append(f"{start}: reaches {name} through {path}")
            elif target is not None and target not in seen:
                seen.add(target)
                todo.append(target)
    return breaches


def rounds_in_a_room(files: dict[str, str]) -> list[str]:
    """Files of one room that use each other in a round. x.c and x.h are one: what they include, and
    whose functions x.c calls."""
    code = {path: without_comments(text, strings=False) for path, text in files.items()}
    stem = {path: posixpath.splitext(path)[0] for path in files}
    sources = [path for path in files if path.endswith(".c")]
    made = {n: stem[path] for path in sources for n in re.findall(r"^(mt_\w+)\(", code[path], re.M)}
    uses: dict[str, set[str]] = {name: set() for name in stem.values()}
    for path, text in files.items():
        uses[stem[path]] |= {stem[found] for _, found in includes(path, text, set(files)) if found}
    for path in sources:
        uses[stem[path]] |= {made[n] for n in re.findall(r"\b(mt_\w+)\(", code[path]) if n in made}
    uses = {name: used - {name} for name, used in uses.items()}
    while free := {name for name in uses if not uses[name]}:  # they use nobody that is left
        uses = {name: used - free for name, used in uses.items() if name not in free}
    return sorted(f"{name} uses {', '.join(sorted(used))}" for name, used in uses.items())


def cpp_breaches(paths: list[str]) -> list[str]:
    suffixes = (".cpp", ".cc", ".cxx", ".hpp", ".hh", ".cu", ".cuh")
    found = sorted(path for path in paths if path.endswith(suffixes))
    return [] if found == [THE_CPP_FILE] else [f"C++ files {found}, not [{THE_CPP_FILE!r}]"]


def call_breaches(path: str, text: str) -> list[str]:
    """A library never ends or prints for its host program. snprintf writes to memory: fine."""
    calls = r"\b(_?exit|_Exit|quick_exit|abort|v?[fd]?printf|f?puts|putchar|perror)\s*\("
    found = re.findall(calls, without_comments(text, strings=False))
    return [f"{path}: calls {name}()" for name in found]


def condition_breaches(path: str, text: str) -> list[str]:
    """A macro with arguments that is not known is an error even behind `defined(...) &&`: other C
    libraries than glibc have no __GLIBC_PREREQ, so what asks for glibc stands in its own line."""
    lines = without_comments(text, strings=False).replace("\\\n", " ")
    conditions = re.findall(r"^\s*#\s*(?:el)?if\b(.*\bdefined\b.*)$", lines, re.M)
    asked = [name for line in conditions for name in re.findall(r"(\w+)\s*\(", line)]
    return [f"{path}: {name}() beside defined()" for name in asked if name != "defined"]


def is_function(declaration: str) -> bool:
    """The first parenthesis opens parameters, or else the (*name) of a function pointer."""
    opened = re.search(r"\(\s*(\*?)", declaration)
    return opened is not None and not opened[1]


def is_constant(declaration: str) -> bool:
    """Is what the declaration names itself const? `const char *p` is not."""
    pointer = re.search(r"\(\s*\*([^()]*)\)", declaration)
    last = pointer[1] if pointer else declaration.rpartition("*")[2]
    return re.search(r"\bconst\b", last) is not None


def at_file_scope(code: str) -> Iterator[str]:
    """Declarations and definitions, each with its {...} body as {}."""
    depth, chunk = 0, ""
    for char in code:
        depth -= char == "}" and depth > 0
        if depth == 0:
            chunk += char
            ends_function = char == "}" and re.search(r"\)\s*\{\}$", chunk)
            if char == ";" or ends_function:
                yield chunk.strip()
                chunk = ""
        depth += char == "{"


def static_breaches(path: str, text: str) -> list[str]:
    """Mutable variables that outlive a call: static ones anywhere, and any at file scope."""
    code = re.sub(r"^\s*#(?:.*\\\n)*.*$", "", without_comments(text, strings=False), flags=re.M)
    code = re.sub(r"__attribute__\s*\(\((?:[^()]|\([^()]*\))*\)\)|_Alignas\s*\([^()]*\)", "", code)
    found = re.findall(r"(?<!\[)\bstatic\b[^;={]*", code)
    types_only = (
        r"(typedef|extern|_Static_assert|static)\b|(struct|union|enum)\b[\s\w]*(\{\})?\s*;|;"
    )
    for chunk in at_file_scope(code):
        if not re.match(types_only, chunk):
            found.append(re.split(r"[=;]|\{\}$", chunk)[0])
    names = (" ".join(part.split()) for part in found if not is_function(part))
    return [f"{path}: mutable: {name}" for name in names if not is_constant(name)]


# --- the rules: Python ----------------------------------------------------------------------------


def is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imported(text: str) -> set[str]:
    """Top-level names of everything imported at run time, at any depth and by any call."""
    names: set[str] = set()
    todo: list[ast.AST] = [ast.parse(text)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and is_type_checking(node.test):
            todo += node.orelse
            continue
        todo += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module or "")
        elif isinstance(node, ast.Call) and node.args:
            called, first = ast.unparse(node.func).rpartition(".")[2], node.args[0]
            if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
                names.add(str(first.value))
    return {name.partition(".")[0] for name in names}


def imported_of_memtools(
    text: str, modules: set[str], later: dict[str, str]
) -> Iterator[tuple[str, str]]:
    """What a file imports of memtools when it runs: the module, and the name in it or "". A name
    that `memtools` itself hands on counts as one of the module that has it."""
    todo: list[ast.AST] = [ast.parse(text)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and is_type_checking(node.test):
            todo += node.orelse
            continue
        todo += ast.iter_child_nodes(node)
        found: list[tuple[str, str]] = []
        if isinstance(node, ast.Import):
            found = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found = [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Call) and node.args:
            called, first = ast.unparse(node.func).rpartition(".")[2], node.args[0]
            if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
                found = [(str(first.value), "")]
        for module, name in found:
            if module.partition(".")[0] != "memtools":
                continue
            if f"{module}.{name}" in modules:
                yield f"{module}.{name}", ""
            elif module == "memtools" and name in later:
                yield f"memtools.{later[name]}", name
            else:
                yield module, name


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def room_of_module(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def arrow_breaches(
    path: str, text: str, modules: set[str], later: dict[str, str]
) -> list[tuple[str, str]]:
    """Modules of rooms that a file's own room may not use, and private names of other rooms."""
    room = room_of_module(module_of(path))
    if room not in ARROWS:
        return [(path, "lies in no room")]
    may, breaches = ARROWS[room], set()
    for module, name in imported_of_memtools(text, modules, later):
        target = room_of_module(module)
        if target == room or target in EVERYBODYS or (target == "__init__" and "." not in module
                                                      and name in (*PUBLIC, "")):  # fmt: skip
            continue
        by_public_name = module == f"memtools.{later.get(name)}"
        if room == "integrations" and (by_public_name or (module, name) == ("memtools", "")):
            continue
        if target not in may and "*" not in may:
            breaches.add((path, module))
        if re.match(r"_(?!_)", name) and room not in ("__init__", "_cli"):
            breaches.add((path, f"{module}.{name}"))
    return sorted(breaches)


def handler_breaches(path: str, text: str) -> list[tuple[str, str]]:
    """Handlers of a fork and of the process's end are registered in one file, and threads that
    `threading` does not know are started there, with all signals blocked."""
    calls = {ast.unparse(n.func) for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call)}
    found = calls & {"atexit.register", "os.register_at_fork", "_thread.start_new_thread"}
    return [] if path == "memtools/_base/process.py" else [(path, name) for name in sorted(found)]


def import_breaches(path: str, text: str) -> list[str]:
    bad = [name for name in imported(text) if not path.startswith(IMPORTED_IN.get(name, path))]
    return [f"{path}: may not import {name}" for name in sorted(bad)]


# --- each rule can fail ---------------------------------------------------------------------------

OWN = {"csrc/core/a.h", "csrc/os/b.h", "csrc/cuda/c.h", "csrc/torch/torch_shim.h", "csrc/py/d.h",
       "csrc/third_party/dlpack/dlpack.h"}  # fmt: skip
REFUSED = {
    "csrc/core/x.c": "<Python.h> <pthread.h> <unistd.h> <cuda.h> <ATen/ATen.h> <vector> "
    '"os/b.h" "../os/b.h" "third_party/dlpack/dlpack.h" "not_ours.h"',
    "csrc/os/x.c": '<cuda_runtime_api.h> <immintrin.h> <Python.h> <c10/util/Half.h> "cuda/c.h"',
    "csrc/cuda/x.c": '<Python.h> <pthread.h> <c10/cuda/CUDAStream.h> "../os/b.h" "py/d.h"',
    "csrc/py/x.c": "<torch/extension.h> <immintrin.h> <cuda_runtime_api.h>",
    "csrc/torch/x.cpp": '<cuda.h> "../py/d.h" "cuda/c.h"',
}
ALLOWED = {
    "csrc/core/x.c": '"a.h" <stdlib.h> <immintrin.h>',
    "csrc/core/base/lock.h": "<pthread.h>",
    "csrc/os/x.c": '"../core/a.h" "b.h" <sys/mman.h> <pthread.h>',
    "csrc/cuda/x.c": '"core/a.h" <cuda.h> <dlfcn.h>',
    "csrc/py/x.c": '<Python.h> "torch/torch_shim.h" "cuda/c.h" "third_party/dlpack/dlpack.h"',
    "csrc/torch/x.cpp": '"torch_shim.h" <ATen/core/Tensor.h> <new> <Python.h>',
}
OWN_ROOMS = {"csrc/core/base/a.h", "csrc/core/kv/k.h", "csrc/core/gate/g.h", "csrc/py/gate/g.h",
             "csrc/py/kv/k.h", "csrc/py/tensor/t.h", "csrc/os/record/f.h"}  # fmt: skip
ROOM_REFUSED = {
    "csrc/core/base/x.c": "kv/k.h",
    "csrc/core/kv/x.c": "../gate/g.h",
    "csrc/py/kv/x.c": "core/gate/g.h py/gate/g.h",
    "csrc/os/monitor/x.c": "core/kv/k.h",
    "csrc/core/x.c": "base/a.h",
    "csrc/py/rest/x.c": "core/base/a.h",
}
ROOM_ALLOWED = {
    "csrc/core/kv/x.c": "base/a.h k.h",
    "csrc/py/kv/x.c": "core/kv/k.h",
    "csrc/py/gate/x.c": "py/tensor/t.h os/record/f.h",
    "csrc/py/module.c": "py/kv/k.h",
}
MODULES = {"memtools", "memtools._core", "memtools._kv", "memtools._kv.pool", "memtools._cli.run",
           "memtools._base.size", "memtools._gate.history", "memtools.errors"}  # fmt: skip
MUTABLE = [
    "static int count;",
    'static const char *name = "x";',
    "static int (*hook)(void);",
    "static __attribute__((aligned(64))) int slot;",
    "static struct { int a; } state;",
    "struct pool *first = 0;",
    "const char *names[] = {0};",
    "int\nf(void)\n{\n    static int calls;\n    return ++calls;\n}",
]
CONSTANT = [
    'static const char *const names[] = {"a", "b"};',
    "static int (*const hook)(void) = f;",
    "static const struct row { int a; } rows[] = {{1}, {2}};",
    "static inline int f(int x) { int y = x; return y; }",
    "static __attribute__((noinline)) int f(int a[static 3]) { return a[0]; }",
    "typedef struct a { int x; } a;\nstruct b { int y; };\nenum { A, B };\nstruct c;",
    'extern const int seen;\n_Static_assert(1, "x");\nint f(void);',
    "#define ONE(x) \\\n    static int x;\n/* static int y; */",
]


def breaches(rule: str, path: str, text: str) -> int:
    """How many breaches a rule finds in one file of a made-up project."""
    later = {"KVPool": "_kv.pool"}
    found: dict[str, Callable[[], list[Any]]] = {
        "layers": lambda: include_breaches(path, f"#include {text}", OWN),
        "rooms": lambda: room_breaches(path, f'#include "{text}"', OWN_ROOMS),
        "calls": lambda: call_breaches(path, f"void f(void) {{ {text}; }}"),
        "conditions": lambda: condition_breaches(path, text),
        "variables": lambda: static_breaches(path, text),
        "imports": lambda: import_breaches(path, text),
        "arrows": lambda: arrow_breaches(path, text, MODULES, later),
        "handlers": lambda: handler_breaches(path, text),
        "C++": lambda: cpp_breaches(text.split()),
    }
    return len(found[rule]())


def rows(rule: str, table: dict[str, str], count: int) -> list[tuple[str, str, str, int]]:
    return [(rule, path, header, count) for path, text in table.items() for header in text.split()]


EXAMPLES = [
    *rows("layers", REFUSED, 1),
    *rows("layers", ALLOWED, 0),
    ("layers", "csrc/util/x.c", "<stdio.h>", 1),
    *rows("rooms", ROOM_REFUSED, 1),
    *rows("rooms", ROOM_ALLOWED, 0),
    *(("calls", "csrc/os/x.c", call, 1) for call in
      ("exit(1)", "_exit (1)", "abort()", 'printf("x")', 'fprintf(stderr, "x")', "puts(s)")),
    ("calls", "csrc/os/x.c", 'snprintf(b, n, "exit(%d)", 1); atexit(f); /* abort() */', 0),
    ("conditions", "csrc/os/x.c", "#if defined(A) && \\\n    __GLIBC_PREREQ(2, 33)\n#endif", 1),
    ("conditions", "csrc/os/x.c", "#if defined(A) || !defined(B)\n#if PREREQ(2)\n#endif", 0),
    *(("variables", "csrc/core/x.c", text, 1) for text in MUTABLE),
    *(("variables", "csrc/core/x.c", text, 0) for text in CONSTANT),
    ("imports", "memtools/_cli/x.py", "import torch", 1),
    ("imports", "memtools/integrations/x.py", "import os, torch.nn as nn", 1),
    ("imports", "memtools/x.py", "import importlib\nimportlib.import_module('torch')", 1),
    ("imports", "memtools/x.py", "t = __import__('torch.cuda')", 1),
    ("imports", "memtools/x.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import torch", 1),
    ("imports", "memtools/_gate/stats.py", "def f():\n    import numpy", 1),
    ("imports", "memtools/_kv/pool.py", "from transformers import Cache", 1),
    ("imports", "memtools/_base/torch.py", "def f():\n    import torch", 0),
    ("imports", "memtools/integrations/x.py", "from transformers.cache_utils import Cache", 0),
    ("imports", "memtools/x.py", "if TYPE_CHECKING:\n    import torch, numpy", 0),
    ("imports", "memtools/x.py", "from .torch import a\nimport torchlike\n'import torch'", 0),
    ("arrows", "memtools/_gate/x.py", "from memtools._kv import pool", 1),
    ("arrows", "memtools/_gate/x.py", "from memtools import KVPool", 1),
    ("arrows", "memtools/_gate/x.py", "def f():\n    import memtools._kv.pool", 1),
    ("arrows", "memtools/_gate/x.py", "from memtools._base.size import _private", 1),
    ("arrows", "memtools/_base/x.py", "from memtools._gate.history import GateHistory", 1),
    ("arrows", "memtools/report/x.py", "from memtools._cli.run import Run", 1),
    ("arrows", "memtools/integrations/x.py", "from memtools._kv.pool import Rows", 1),
    ("arrows", "memtools/rest/x.py", "", 1),
    ("arrows", "memtools/_gate/x.py", "from memtools import BudgetError, _core, errors", 0),
    ("arrows", "memtools/_gate/x.py", "from memtools._gate.history import _own", 0),
    ("arrows", "memtools/_gate/x.py", "if TYPE_CHECKING:\n    from memtools._kv.pool import A", 0),
    ("arrows", "memtools/_cli/x.py", "from memtools._kv.pool import KVPool", 0),
    ("arrows", "memtools/integrations/x.py", "import memtools\nfrom memtools import KVPool", 0),
    ("handlers", "memtools/_kv/x.py", "atexit.register(f)\nos.register_at_fork()", 2),
    ("handlers", "memtools/_kv/x.py", "_thread.start_new_thread(f, ())", 1),
    ("handlers", "memtools/_base/process.py", "atexit.register(f)", 0),
    ("C++", "", f"{THE_CPP_FILE} csrc/core/a.c", 0),
    ("C++", "", f"{THE_CPP_FILE} csrc/py/x.cc", 1),
    ("C++", "", "csrc/core/a.c", 1),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "path", "text", "count"), EXAMPLES)
def test_each_rule_finds_its_breaches_and_no_others(
    rule: str, path: str, text: str, count: int
) -> None:
    assert breaches(rule, path, text) == count


@pytest.mark.parametrize("header", ["cuda_runtime_api.h", "ATen/core/Tensor.h"])
def test_a_forbidden_header_is_found_through_our_own_headers(header: str) -> None:
    files = {
        "csrc/py/x.c": '#include "d.h"\n',
        "csrc/py/d.h": '#include "cuda/c.h"\n',
        "csrc/cuda/c.h": '#include "deep.h"\n#include "c.h"\n',
        "csrc/cuda/deep.h": "#include <stddef.h>\n",
    }
    assert reached_breaches("csrc/py/x.c", files) == []
    files["csrc/cuda/deep.h"] = f"#include <{header}>\n"
    assert reached_breaches("csrc/py/x.c", files) == [
        f"csrc/py/x.c: reaches {header} through csrc/cuda/deep.h"
    ]


def test_files_of_a_room_that_use_each_other_in_a_round_are_found() -> None:
    files = {
        "csrc/core/kv/low.h": "void mt_low(void);\n",
        "csrc/core/kv/low.c": '#include "kv/low.h"\nvoid\nmt_low(void)\n{\n}\n',
        "csrc/core/kv/high.c": '#include "kv/low.h"\nvoid\nmt_high(void)\n{ mt_low(); }\n',
        "csrc/core/kv/high.h": "",
    }
    assert rounds_in_a_room(files) == []
    for more in ("void f(void) { mt_high(); }", '#include "kv/high.h"\n'):
        low = files["csrc/core/kv/low.c"] + more
        assert len(rounds_in_a_room(files | {"csrc/core/kv/low.c": low})) == 2


# --- the project keeps them -----------------------------------------------------------------------


def read(*patterns: str) -> dict[str, str]:
    found = {path for pattern in patterns for path in PROJECT.glob(pattern) if path.is_file()}
    return {path.relative_to(PROJECT).as_posix(): path.read_text("utf-8") for path in sorted(found)}


ALL_C = read("csrc/**/*.[ch]", "csrc/**/*.c*", "csrc/**/*.h*")
C = {path: text for path, text in ALL_C.items() if layer_of(path) != "third_party"}
PACKAGE = read("memtools/**/*.py")
MODULES_OF_PACKAGE = {module_of(path) for path in PACKAGE} | {
    f"memtools.{name}" for name in EVERYBODYS
}


def test_the_project_has_files_in_every_layer() -> None:
    assert {layer_of(path) for path in C} == LAYERS


HOMES = {name: home.removeprefix("memtools.") for name, home in memtools._HOMES.items()}


def breaches_of_rooms() -> Iterator[tuple[str, str]]:
    for path, text in C.items():
        yield from room_breaches(path, text, set(ALL_C))
    for path, text in PACKAGE.items():
        if path != "memtools/_cli/boot/sitecustomize.py":  # is no module of the package
            yield from arrow_breaches(path, text, MODULES_OF_PACKAGE, HOMES)
            yield from handler_breaches(path, text)


@pytest.mark.slow
def test_rooms_use_each_other_along_the_arrows_alone() -> None:
    assert sorted(set(breaches_of_rooms())) == []


@pytest.mark.parametrize("room", sorted(CORE_ARROWS))
def test_files_of_a_room_use_each_other_one_way(room: str) -> None:
    assert rounds_in_a_room(read(f"csrc/core/{room}/*")) == []


def test_core_has_every_room_and_memtools_has_no_module_beside_them() -> None:
    assert {room_of(path) for path in C if layer_of(path) == "core"} == set(CORE_ARROWS)
    flat = [path for path in PACKAGE if path.count("/") == 1 and path.startswith("memtools/_")]
    assert {*flat} - {"memtools/_build_info.py"} == {
        "memtools/__init__.py",
        "memtools/__main__.py",
        "memtools/_budget.py",
        "memtools/_version.py",
    }


def test_c_parses_no_file_and_judges_no_growth() -> None:
    """What C reads is the kernel's, and two words of a record that another would replace."""
    assert {room_of(path) for path in C} & {"leak", "data", "report", "testing", "export"} == set()
    reads = {
        path for path, text in C.items() if re.search(r"\b(?:p?read|fread|fgets)\(\w*fd\b", text)
    }
    kernels = {path for path in reads if path.startswith("csrc/os/monitor/")}
    assert reads - kernels == {"csrc/os/port/store.c", "csrc/os/record/file.c"}
    assert kernels


def test_no_file_includes_across_its_layer() -> None:
    own = set(ALL_C)
    assert [b for path, text in C.items() for b in include_breaches(path, text, own)] == []


def test_csrc_py_reaches_neither_torch_nor_the_toolkit() -> None:
    assert [b for p in C if layer_of(p) == "py" for b in reached_breaches(p, ALL_C)] == []


def test_csrc_has_one_cpp_file() -> None:
    assert cpp_breaches(list(C)) == []


def test_csrc_neither_exits_nor_prints() -> None:
    assert [b for path, text in C.items() for b in call_breaches(path, text)] == []


def test_csrc_compiles_with_c_libraries_other_than_glibc() -> None:
    assert [b for path, text in C.items() for b in condition_breaches(path, text)] == []


def test_core_has_no_mutable_state_of_its_own() -> None:
    core = [file for file in C.items() if layer_of(file[0]) == "core"]
    assert [b for file in core for b in static_breaches(*file)] == []


@pytest.mark.slow
def test_the_package_imports_torch_numpy_and_matplotlib_where_it_may() -> None:
    assert [b for path, text in PACKAGE.items() for b in import_breaches(path, text)] == []
    assert [p for p, text in PACKAGE.items() if "torch" in imported(text)] == [IMPORTED_IN["torch"]]
