"""Which line keeps a container: the search through bytecode, and whose name is searched."""

from __future__ import annotations

import collections
import functools
import json
import logging.handlers
import os
import re
import sys
import textwrap
import time
import types
import weakref
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from memtools._census import keepers, names
from memtools._census.holders import Local
from memtools._census.keepers import Keepers, Kept, Source, Ways, users_sources
from memtools._census.lines import PUT, Value, acts_of
from memtools._census.names import names_on


def source_of(text: str, module: str) -> Source:
    return Source(f"{module}.py", textwrap.dedent(text).lstrip("\n"), {"__name__": module})


def shown(value: Value | None) -> str:
    """A value as it is written in the program."""
    if value is None:
        return ""
    base = shown(value.base)
    return {"attribute": f"{base}.{value.name}", "entry": f"{base}[]", "result": f"{base}()"}.get(
        value.sort, value.name or "?"
    )


@pytest.mark.parametrize(
    ("line", "container"),
    [
        ("rows.append(x)", "rows"),
        ("self.rows.append(x)", "self.rows"),
        ("cache[key] = make(x)", "cache"),
        ("cache[key][other] = x", "cache[]"),
        ("self.cache.setdefault(key, []).append(x)", "self.cache, self.cache[]"),
        ("history['weights'].append(copy(x) if x else None)", "history[]"),
        ("heapq.heappush(frontier, (x, 1))", "frontier"),
        ("kept = self.values; kept.add(x)", "self.values"),
        ("kept = self.values; kept = other(); kept.add(x)", "kept"),
        ("rows[2:4] = x", "rows"),
        ("get(x).queue.put(x)", "get().queue"),
        ("self.frames.append(np.stack([f(a) for a in x if a]))", "self.frames"),
        ("rows.extend(a or b for a in x)", "rows"),
        ("rows.append(x and y or z)", "rows"),
        ("rows.append(f(*x, **y))", "rows"),
        ("rows.append(key=x)", "rows"),
        ("rows.sort(); rows.pop(); print(rows[0], rows)", ""),
    ],
)
def test_what_a_line_puts_something_into(line: str, container: str) -> None:
    puts = [shown(act.value) for act in acts_of(line) if act.what == PUT]
    assert ", ".join(puts) == container


class Owner:
    """A class of this module."""


LIBRARY = types.ModuleType("keeperslibrary")


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A library with a class, whose code lies where libraries do."""
    text = """
    CALLS = []

    class Archive:
        def __init__(self):
            self.members = []
        def add(self, member):
            self.members.append(member)
        def add_file(self, name):
            self.add(open(name))
        def close(self):
            self.members = []
        def reset(self):
            self.members = []
        def names(self):
            return [one.name for one in self.members]

    def note(call):
        CALLS.append(call)
    """
    file = f"{sys.prefix}/lib/python3.11/site-packages/keeperslibrary.py"
    LIBRARY.__file__ = file
    exec(compile(textwrap.dedent(text), file, "exec"), LIBRARY.__dict__)
    texts = {file: textwrap.dedent(text)}
    monkeypatch.setattr(names, "text_of", lambda file: texts.get(file, ""))
    sys.modules["keeperslibrary"] = LIBRARY
    yield
    del sys.modules["keeperslibrary"]


def found_of(text: str, way: str, *, changes: bool = False, packed: bool = False) -> Kept:
    """What is found for a way, which is written as an expression on the names of the program; with
    `packed`, by its names as another process writes them."""
    module = types.ModuleType("keepersprogram")
    module.__file__ = "/home/user/train.py"
    sys.modules["keepersprogram"] = module
    try:
        source = Source(module.__file__, textwrap.dedent(text).lstrip("\n"), module.__dict__)
        exec(compile(source.text, source.file, "exec"), module.__dict__)
        objects = eval(way, module.__dict__, {"space": module.__dict__, "Local": Local})
        finder, ways = Keepers(lambda near: [source]), Ways()
        if not packed:
            return finder.find("it", objects, changes=changes)
        assert ways.find("it", objects, changes=changes)._replace(may_fill=False) == Kept()
        return finder.find_packed("it", json.loads(json.dumps(ways.known["it"])))
    finally:
        del sys.modules["keepersprogram"]


def lines_of(text: str, way: str, *, changes: bool = False) -> list[int]:
    """The lines that are found."""
    kept = found_of(text, way, changes=changes).kept_at
    return [int(line) for line in re.findall(r"train\.py:(\d+)", kept)]


@pytest.mark.parametrize(
    ("way", "lines", "text"),
    [
        pytest.param("[t.losses, t.__dict__, t, space]", [5], """
            class Trainer:
                def __init__(self):
                    self.losses = []
                def step(self, x):
                    self.losses.append(x)
            class Other:
                def step(self, x):
                    self.losses.append(x)  # of another class
            t = Trainer()
            """, id="an attribute: in a method of its class"),
        pytest.param("[t.losses, t.__dict__, t, space]", [3], """
            class Base:
                def step(self, x):
                    self.losses.append(x)
            class Trainer(Base):
                def __init__(self):
                    self.losses = [0]
                    self.losses.append(1)
            t = Trainer()
            """, id="in a class that it inherits from, and not in the constructor"),
        pytest.param("[t.losses, t.__dict__, t, space]", [5], """
            class Trainer: pass
            t = Trainer()
            t.losses = []
            def step(x):
                t.losses.append(x)
            """, id="from outside"),
        pytest.param("[t.losses, t.__dict__, t]", [6], """
            def make():
                class Trainer:
                    def __init__(self): self.losses = []
                    def fit(self, x):
                        def step():
                            self.losses.append(x)
                return Trainer()
            def elsewhere(other):
                other.losses.append(1)
            t = make()
            """, id="in an inner function, of a class in a function"),
        pytest.param("[CACHE, space]", [4], """
            CACHE = {}
            def features(x):
                if x not in CACHE:
                    CACHE[x] = x
                return CACHE[x]
            """, id="a global"),
        pytest.param("[CACHE, space]", [1], """
            CACHE = {}
            fill(CACHE) if 0 else None
            """, id="the line that makes it where none puts something into it"),
        pytest.param("[history['a'], history, space]", [3], """
            history = {"a": []}
            history["b"] = []
            history["a"].append(1)
            """, id="as deep as it lies"),
        pytest.param("[Meter.seen, Meter.__dict__['seen'], Meter, space][1:]", [4], """
            class Meter:
                seen = []
                def update(self, x):
                    self.seen.append(x)
            """, id="an attribute of a class"),
        pytest.param("[rows, space]", [4], """
            rows = []
            def main(x):
                global rows
                rows.append(x); rows = rows[-9:]
            def other():
                rows = []
                rows.append(1)
            """, id="a variable that a function declares as global"),
        pytest.param("[o.rows, o.__dict__, o]", [4], """
            class Owner:
                def __init__(self): self.rows = []
                def step(self, x):
                    kept = lambda row: self.rows.append(row)
                    kept(x)
            o = Owner()
            """, id="in a lambda of a method"),
        pytest.param("[f.__defaults__[0], f.__defaults__, f, space]", [2], """
            def f(x, seen=[]):
                seen.append(x)
            """, id="the default of an argument"),
        pytest.param("[cell.cell_contents, cell, f.__closure__, f]", [4], """
            def make():
                rows = []
                def inner(x):
                    rows.append(x)
                return inner
            f = make()
            (cell,) = f.__closure__
            """, id="a closure"),
        pytest.param("[rows, Local(main.__code__, 'rows')]", [4], """
            def main():
                rows = []
                for x in y:
                    rows.append(x)
            def other():
                rows = []
                rows.append(1)
            rows = []
            """, id="a variable of a function that runs"),
        pytest.param("[Local(send.__code__, 'x')]", [4], """
            import threading
            def send(x): pass
            def main():
                threading.Thread(target=send).start()
            """, id="calls that do not end: where the function is used"),
        pytest.param("[f, space]", [3], """
            import functools

            @functools.lru_cache(None)
            def f(x):
                return x
            """, id="a cache: the function with its decorator"),
        pytest.param("[a.members, a.__dict__, a, Local(main.__code__, 'archive')]", [3], """
            import keeperslibrary
            def main():
                archive = keeperslibrary.open()
                archive.names()
            def other():
                out = keeperslibrary.Writer()
                out.add_file(1)
            a = vars(keeperslibrary)["Archive"]()
            """, id="a library's object: the line that gives it a name"),
        pytest.param("[a.members, a.__dict__, a, Local(main.__code__, 'archive')]", [3], """
            import keeperslibrary
            def main(archive):
                archive.add_file("x")
            a = keeperslibrary.Archive()
            """, id="the call that puts something into it"),
        pytest.param("[a.members, a.__dict__, a]", [3], """
            import keeperslibrary
            def main():
                log.register(keeperslibrary.Archive())
            a = vars(keeperslibrary)["Archive"]()
            """, id="the line that makes it"),
        pytest.param("[a.mine, a.__dict__, a]", [4], """
            import keeperslibrary
            a = vars(keeperslibrary)["Archive"]()
            a.mine = []
            for _ in range(20): a.mine.append(1)
            """, id="an attribute that the program gives to a library's object"),
        pytest.param("[keeperslibrary.CALLS, keeperslibrary.__dict__]", [3], """
            import keeperslibrary
            def main():
                keeperslibrary.note(3)
            """, id="a global of a library"),
        pytest.param("[m.members, m.__dict__, m, space]", [5], """
            import keeperslibrary
            class Mine(keeperslibrary.Archive):
                pass
            def fill(one):
                one.add_file(3)
            m = Mine()
            """, id="an attribute that a base class of a library has"),
    ],
)  # fmt: skip
def test_the_line_that_keeps_a_container(way: str, lines: list[int], text: str) -> None:
    assert lines_of(text, way) == lines
    kept = found_of(text, way, packed=True)
    is_local = "return Trainer()" in text  # a class that is not found by its name
    assert kept.kept_at == ("" if is_local else found_of(text, way).kept_at)


@pytest.mark.parametrize(
    ("way", "lines", "text"),
    [
        pytest.param("[hidden, space]", [4], """
            hidden = 0
            def agent(h): return h
            while hidden is None:
                hidden = agent(hidden)
            """, id="made of the one before"),
        pytest.param("[t.total, t.__dict__, t]", [5], """
            class Trainer:
                def __init__(self):
                    self.total = 0.0
                def step(self, loss):
                    self.total += loss
            t = Trainer()
            """, id="summed up"),
        pytest.param("[r.stream, r.__dict__, r]", [6], """
            import io
            class Recorder:
                def __init__(self):
                    self.stream = io.BytesIO()
                def note(self, x):
                    self.stream.write(x)
            r = Recorder()
            """, id="written to"),
        pytest.param("[l.table.members, l.table.__dict__, l.table, l.__dict__, l]", [6], """
            import keeperslibrary
            class Log:
                def __init__(self):
                    self.table = keeperslibrary.Archive()
                def add(self, rows):
                    self.table = keeperslibrary.note([self.table, keeperslibrary.Archive()])
            l = Log()
            """, id="a library's object made of the one before"),
        pytest.param("[c.past.members, c.past.__dict__, c.past, c.__dict__, c]", [6], """
            import keeperslibrary
            class Chat:
                def __init__(self):
                    self.past = None
                def turn(self, model):
                    self.past = model.past
            c = Chat()
            c.__dict__["past"] = vars(keeperslibrary)["Archive"]()
            """, id="a library's object: not the line that says None"),
    ],
)  # fmt: skip
def test_the_line_that_replaces_what_grows(way: str, lines: list[int], text: str) -> None:
    assert lines_of(text, way, changes=True) == lines
    found = (found_of(text, way, changes=True, packed=packed) for packed in (False, True))
    assert next(found).kept_at == next(found).kept_at


@pytest.mark.parametrize(
    ("way", "has_it"),
    [
        ("[a.members, a.__dict__, a, space]", ("keeperslibrary.Archive", "reset()")),
        ("[a.mine, a.__dict__, a, space]", ("", "")),
        ("[m.members, m.__dict__, m, space]", ("", "")),
        ("[rows, space]", ("", "")),
        ("[keeperslibrary.CALLS, keeperslibrary.__dict__]", ("the module keeperslibrary", "")),
    ],
)
def test_what_of_a_library_has_the_container(way: str, has_it: tuple[str, str]) -> None:
    text = """
    import keeperslibrary
    class Mine(keeperslibrary.Archive): pass
    a, m, rows = keeperslibrary.Archive(), Mine(), []
    a.mine = []
    for i in range(20): a.mine.append(i)
    """
    assert found_of(text, way)[2:4] == has_it


@pytest.mark.parametrize(("lines", "found"), [(1, "other.py:2 in fill"), (2, "")])
def test_an_attribute_in_another_module_counts_if_there_is_one_such_line(
    lines: int, found: str
) -> None:
    """Another class of that module may have an attribute of the same name."""
    other = source_of("def fill(one):\n" + "    one.rows.append(x)\n" * lines, "other")
    owner: Any = Owner()
    owner.rows = []
    way = [owner.rows, owner.__dict__, owner]
    assert Keepers(lambda near: [other]).find("it", way, changes=False).kept_at == found


def test_a_large_program_is_not_read_to_its_end() -> None:
    """The module of the class comes first, and what it shows is enough."""
    text = "class Owner:\n    def step(self, x):\n        self.rows.append(x)"
    taken = list[Source]()

    def sources(near: Collection[str]) -> Iterator[Source]:
        assert __name__ in near
        for module in [__name__, *(f"other{i}" for i in range(1000))]:
            taken.append(source_of(text, module))
            yield taken[-1]

    owner: Any = Owner()
    owner.rows = []
    found = Keepers(sources).find("it", [owner.rows, owner.__dict__, owner], changes=False)
    assert found.kept_at == f"{__name__}.py:3 in step"
    assert len(taken) < 20


def test_what_is_put_in_many_places_is_not_guessed() -> None:
    text = "rows = []\n" + "rows.append(1)\n" * 4
    assert lines_of(text, "[rows, space]") == [1]


def test_wrappers_are_their_names() -> None:
    patches: Any = weakref.WeakKeyDictionary()
    way = [patches.data, patches.__dict__, patches, vars(Owner)]
    assert names_on(way) == []
    owner = Owner()
    owner.patches = patches  # type: ignore[attr-defined]
    way = [patches.data, patches.__dict__, patches, owner.__dict__, owner]
    assert [(one.name, one.owner) for one in names_on(way)] == [("patches", Owner)]


def test_names_are_those_of_the_way() -> None:
    handler = logging.handlers.MemoryHandler(10)
    rows: Any = collections.deque()

    def run() -> Iterator[None]:
        kept = [handler]
        yield
        assert kept

    running = run()
    next(running)
    kept = running.gi_frame.f_locals["kept"]
    way = [handler.buffer, handler.__dict__, handler, kept, running]
    names = [(one.name, one.depth) for one in names_on(way)]
    assert names == [("buffer", 0), ("kept", 1)]
    assert names_on([functools.lru_cache(print), rows])[0].owner is print
    running.close()
    handler.close()


def test_each_holder_is_looked_for_once_and_never_raises() -> None:
    searched = list[int]()

    def sources(near: Collection[str]) -> list[Source]:
        searched.append(1)
        return [source_of("CACHE = {}\nCACHE[1] = 2\n", "nowhere")]

    module = types.ModuleType("nowhere")
    module.__file__ = "/home/user/nowhere.py"
    module.__dict__["CACHE"] = {}
    sys.modules["nowhere"] = module
    try:
        found = Keepers(sources)
        for _ in range(3):
            way = [module.__dict__["CACHE"], module.__dict__]
            assert found.find("CACHE", way, changes=False) == Kept("nowhere.py:2", may_fill=True)
        assert searched == [1]
        assert found.find("broken", [], changes=False) == Kept()
    finally:
        del sys.modules["nowhere"]


@pytest.mark.parametrize(
    ("age", "written", "is_read"),
    [
        (-60, "# a line more\n", True),  # before the program began: it is what runs
        (60, "", True),  # only touched
        (60, "# a line more\n", False),
    ],
)
def test_a_file_that_was_edited_while_it_ran_is_not_read(
    age: int, written: str, is_read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "@print\ndef a(): pass\nkeep = lambda: 0\nasync def step(): pass\n"
    module, file = types.ModuleType("edited"), tmp_path / "edited.py"
    module.__file__ = str(file)
    exec(compile(text, str(file), "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "edited", module)
    file.write_text(written + text)
    os.utime(file, (time.time() + age,) * 2)
    monkeypatch.setattr(keepers, "_BEGIN", time.time())
    assert any(source.file == str(file) for source in users_sources(["edited"])) is is_read


@pytest.mark.parametrize(
    ("way", "until", "text"),
    [
        pytest.param("[t.rows, t.__dict__, t, space]", "train.py:7 in end empties it", """
            class Trainer:
                def __init__(self):
                    self.rows = []
                def step(self, x):
                    self.rows.append(x)
                def end(self):
                    self.rows.clear()
            t = Trainer()
            """, id="an attribute that is cleared"),
        pytest.param("[t.rows, t.__dict__, t, space]", "train.py:5 in end empties it", """
            class Trainer:
                def __init__(self):
                    self.rows = []
                def end(self):
                    self.rows = []
                def step(self, x):
                    self.rows.append(x)
            t = Trainer()
            """, id="an attribute that is made anew"),
        pytest.param("[t.rows, t.__dict__, t, space]", "", """
            class Trainer:
                def set_up(self):
                    self.rows, self.other = [], []
                def step(self, x):
                    self.rows.append(x)
                    self.other.clear()
            class Other:
                def end(self):
                    self.rows.clear()
            t = Trainer()
            t.set_up()
            """, id="one that another class clears"),
        pytest.param("[rows, space]", "train.py:2 empties it", """
            for epoch in range(2):
                rows = []
                for step in range(2):
                    rows.append(step)
            """, id="a variable that is made anew in a loop"),
        pytest.param("[rows, space]", "", """
            rows = []
            for epoch in range(2):
                rows = rows + [epoch]
                kept = rows
            """, id="a variable that is made of itself"),
        pytest.param("[a.members, a.__dict__, a, space]", "train.py:5 empties it", """
            import keeperslibrary
            a = keeperslibrary.Archive()
            for epoch in range(2):
                a.add(epoch)
                a.reset()
            """, id="a library's object that is reset"),
        pytest.param("[a.members, a.__dict__, a, space]", "", """
            import keeperslibrary
            a, b = keeperslibrary.Archive(), keeperslibrary.Archive()
            a.add(1)
            b.reset()
            a.close()
            """, id="a library's object that is closed"),
    ],
)  # fmt: skip
def test_until_when_the_program_keeps_it(way: str, until: str, text: str) -> None:
    assert found_of(text, way).kept_until.rpartition("/")[2] == until


class Alive:
    """What a weak reference can refer to."""


def test_what_a_function_has_is_kept_until_it_returns_and_no_longer() -> None:
    living = []

    def epoch() -> str:
        rows: list[int] = []
        here = Alive()
        living.append(weakref.ref(here))
        way = [rows, Local(sys._getframe().f_code, "rows")]
        return Keepers(lambda near: []).find("it", way, changes=False).kept_until

    found = [epoch() for _ in range(1)]
    once = epoch()
    for _ in range(1):
        found.append(epoch())
    assert (found[-1], once) == ("epoch() returns", "")
    # A frame that a search has kept would wait for the collector, with all its variables.
    assert [one() for one in living] == [None] * 3
