"""held_in_vain: what lives at the peak of a traced step though nothing reads it again, by the
variable that holds it, and where its `del` belongs.

    logits = model(x)            made          the storage's birth
    loss = cross_entropy(logits) last use
    loss.backward()              the peak      `del logits` belongs in front of this statement

The trace knows the lives and the variables. The source says whether the variable is read later,
also where no operator showed it: by a branch that did not run, by a function within, after the
loop. Then nothing is said, nor of what a program cannot let go: parameters, what a list or a
library's function holds too. What autograd has saved for a value that is kept with its graph
(graphs.py) ends by `.detach()`, if all that reads the value wants its number only.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from memtools._base.libraries import PACKAGE, library_paths
from memtools._base.peak import Held, Remedy, TracedPeak
from memtools._base.place import Place, name_of, text_of
from memtools._base.text import shown
from memtools._blocks.dispatch import Frame, is_of_a_library
from memtools._blocks.graphs import held_by_graphs
from memtools._blocks.lifetimes import MARKED, Life, Trace
from memtools._blocks.replay import ended, replay
from memtools._blocks.variables import Variable

WORTH = 0.01  # What takes less than this share of the peak is not said, nor what lowers it less.
OF_A_STATEMENT = 60  # A statement is shown with up to so many characters.
BEFORE, AFTER, IN_PLACE = "before", "after", "in place of"
CACHE = "past_key_values"  # of models of transformers: use_cache=False makes none

ATTRIBUTE = "attribute"  # in place of the frame of a variable
GRAPH = "graph"  # in place of the frame of a variable, for what graphs hold
DEEPEST = 3  # Containers in containers are followed to this depth.
LEAST = 0.001  # What takes less than this share of the peak is not looked for in graphs.
_LAST = re.compile(r"\.([A-Za-z]\w*)(\['[^']*'\])?$")
#: attributes of a tensor, or of what contains it, that have no graph; and functions of that kind
_OF_VALUES = {
    "item", "detach", "tolist", "shape", "dtype", "size", "dim", "numel",
    "append", "clear", "popleft",
}  # fmt: skip
_TAKE_VALUES = {"float", "int", "bool", "len", "print", "str", "repr", "format"}
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)


def held_in_vain(trace: Trace) -> tuple[TracedPeak, dict[int, int]]:
    """What was held in vain at the peak of the last traced step, and where the remedies end which
    lives: positions by ids; nothing if it is too little, or if the trace has no variables.

    Args:
        trace: of two steps, the second with `step_ended(look=True)` before it. The first one shows
            what still happens to what lives at the end of the second.
    """
    begin = trace.steps[-1]
    position, peak_bytes = trace.peak(begin)
    twins = _twins(trace)
    sources = _Sources(trace.ops[position].frames if trace.ops else ())
    found: dict[tuple[str, str], list[_Case]] = defaultdict(list)  # by function and variable
    advice: dict[tuple[str, str], _Advice | None] = {}
    over = [life for life in trace.at(position) if _is_over(life, twins.get(life.id), position)]
    for life in over:
        variables = trace.variables.get(life.id, ())
        if not variables:
            continue
        # An attribute is set to None; a variable that has the tensor itself is deleted beside it.
        plain = [one for one in variables if not one.path and not one.is_outer]
        others = [one for one in variables if one not in plain]
        attribute, case = _attribute(others), _Case(life, others)
        one = sources.of_attribute(*attribute, case) if attribute else None
        if one is not None and len({other.frame for other in plain}) < 2:
            found[ATTRIBUTE, one.name].append(case)
            advice[ATTRIBUTE, one.name] = one
            variables = plain
        frames = {one.frame for one in variables}
        if len(frames) == 1:
            for name in dict.fromkeys(one.name for one in variables):
                paths = [one for one in variables if one.name == name]
                found[str(frames), name].append(_Case(life, paths))
    advice |= {key: sources.advice(cases) for key, cases in found.items() if key[0] != ATTRIBUTE}
    large = [life for life in over if life.bytes >= LEAST * peak_bytes]
    for number, values in held_by_graphs(trace, position, large, twins).items():
        for value in values:
            _add_graph(
                found, advice, sources, _Case(trace.lives[number], trace.variables[value.id], value)
            )
    return _said(trace, found, advice, peak_bytes, position)


class _Case(NamedTuple):
    """A storage that a variable holds, and the paths from it; or that the graph of a value holds,
    and the variables of that."""

    life: Life
    variables: Sequence[Variable]
    value: Life | None = None

    @property
    def path(self) -> str:
        """The first part of the way from the variable to the tensor: ".logits" of ".logits", an
        attribute rather than a key."""
        paths = sorted((one.path for one in self.variables), key=lambda path: path[:1] != ".")
        return _first(paths[0])


class _Advice(NamedTuple):
    """What to write, and where.

    Attributes:
        name: the variable, or the attribute: "self.hidden".
        kept: what of it is read later: (name, expression).
        file, function: of the place.
        first, end: the lines of the statement.
        where: "before" the statement, "after" it, or "in place of" it.
        text: the statement.
        entries: what of it is deleted, such as "['logits']"; () for all of it.
        written: the statement to write, such as "self.hidden = None"; "": it is deleted.
    """

    name: str
    kept: tuple[tuple[str, str], ...]
    file: str
    function: str
    first: int
    end: int
    where: str
    text: str
    entries: tuple[str, ...] = ()
    written: str = ""

    @property
    def deleted(self) -> tuple[str, ...]:
        """Such as ("out",) or ("out['logits']", "out['hidden']")."""
        return tuple(self.name + entry for entry in self.entries) or (self.name,)


def _said(
    trace: Trace,
    found: dict[tuple[str, str], list[_Case]],
    advice: dict[tuple[str, str], _Advice | None],
    peak_bytes: int,
    position: int,
) -> tuple[TracedPeak, dict[int, int]]:
    likes = defaultdict[tuple[object, ...], list[Life]](list)
    for life in trace.lives:
        likes[life.made, life.operator].append(life)
    at_peak = {life.id for life in trace.at(position)}
    # A storage with a variable that cannot be deleted stays.
    stuck = {case.life.id for key, cases in found.items() if advice[key] is None for case in cases}
    names, ends = dict[int, str](), dict[int, dict[int, int]]()
    used = dict[_Advice, set[int]]()
    made = dict[str, Frame]()
    for key, cases in found.items():
        one = advice[key]
        for case in () if one is None else cases:
            if case.life.id in stuck or one is None:
                continue
            used.setdefault(one, set()).add(case.life.id)
            own = ends.setdefault(case.life.id, {})
            shown_of = case.value or case.life
            # What is alive at the peak has variables of its own, or none.
            others = at_peak if case.value is None else at_peak & trace.variables.keys()
            for life in likes[case.life.made, case.life.operator]:
                if life.id in others and life is not case.life:
                    continue
                # A graph lasts until its value is made.
                begin = max(life.last_use, life.birth + shown_of.birth - case.life.birth) + 1
                own[life.id] = max(_death(trace, life, one, begin), own.get(life.id, 0))
            name = one.name + ("" if one.written else case.path)
            name = names.setdefault(case.life.id, f"the graph of {name}" if case.value else name)
            made.setdefault(name, _frame_in(shown_of.made, one.file, one.function) or ("", 0, ""))
    sizes = defaultdict[str, int](int)
    for life in trace.at(position):
        if life.id in names and ends[life.id][life.id] <= position:
            sizes[names[life.id]] += life.bytes
    held = [
        Held(shown(name), size, _line(made[name]))
        for name, size in sorted(sizes.items(), key=lambda one: -one[1])
        if size >= WORTH * peak_bytes
    ]
    worth = {one.name for one in held}
    needed = [one for one, ids in used.items() if any(shown(names[i]) in worth for i in ids)]
    # Only what is written ends lives, and all variables of a storage must be among it.
    kept = {number for one, ids in used.items() if one not in needed for number in ids}
    deaths = dict[int, int]()
    for number, own in ends.items():
        for one_id, death in () if number in kept else own.items():
            deaths[one_id] = max(death, deaths.get(one_id, 0))
    lowered = replay(trace, [ended(deaths)]).peak(trace.steps[-1])[1]
    total = sum(one.bytes for one in held)
    if total < WORTH * peak_bytes or peak_bytes - lowered < WORTH * peak_bytes:
        return TracedPeak(peak_bytes), {}
    remedies = tuple(_remedies(needed, worth))
    return TracedPeak(peak_bytes, total, lowered, tuple(held), remedies), deaths


def _remedies(used: Iterable[_Advice], worth: set[str]) -> Iterator[Remedy]:
    places: dict[tuple[str, int, str], list[_Advice]] = defaultdict(list)
    for one in used:
        places[one.file, one.first, one.where].append(one)
    for same in places.values():
        kept = dict.fromkeys(pair for one in same for pair in one.kept)
        lines = [f"{name} = {expression}" for name, expression in kept]
        lines += dict.fromkeys(one.written for one in same if one.written)
        names = dict.fromkeys(name for one in same if not one.written for name in one.deleted)
        text = "; ".join((*lines, f"del {', '.join(names)}") if names else lines)
        line = _line((same[0].file, same[0].first, ""))
        place = f"{same[0].where} {same[0].text} ({line})"
        caches = [one.name for one in same if f"{one.name}.{CACHE}" in worth]
        if caches:
            place += " (use_cache=False makes no past_key_values at all)"
        yield Remedy(shown(text), shown(place))


def _add_graph(
    found: dict[tuple[str, str], list[_Case]],
    advice: dict[tuple[str, str], _Advice | None],
    sources: _Sources,
    case: _Case,
) -> None:
    """Add what the graph of a value holds: it goes with the value if that can be let go."""
    keys = [key for key, cases in found.items() if any(one.life is case.value for one in cases)]
    if not keys or any(advice[key] is None for key in keys):
        key = GRAPH, str(case.value and case.value.id)
        if key not in advice:
            advice[key] = sources.detached(case)
        keys = [key]
    for key in keys:
        found[key].append(case)


def _attribute(variables: Sequence[Variable]) -> tuple[str, str] | None:
    """The attribute by which all variables have a tensor, and the key of its entry: ("hidden", "")
    of `self` in a method and of `model` in its caller, ("cache", "['x']"); None if they have it
    otherwise."""
    own = [_LAST.search(one.path) for one in variables if not one.is_outer]
    found = {(match[1], match[2] or "") if match else None for match in own}
    return found.pop() if len(found) == 1 else None


def _line(frame: Frame) -> str:
    return name_of(Place(frame[0], frame[1], ""))


# --- the trace ------------------------------------------------------------------------------------


def _twins(trace: Trace) -> dict[int, Life]:
    """For each life of the last step, the one of the step before that was made at the same place,
    in the same order."""
    begin = trace.steps[-1]
    before = trace.steps[-2] if len(trace.steps) > 1 else begin
    found: dict[int, Life] = {}
    earlier: dict[tuple[object, ...], list[Life]] = defaultdict(list)
    later: dict[tuple[object, ...], list[Life]] = defaultdict(list)
    for life in trace.lives:
        if life.birth >= before:
            by = later if life.birth >= begin else earlier
            by[life.made, life.operator].append(life)
    for key, lives in later.items():
        for life, twin in zip(lives, earlier[key], strict=False):
            found[life.id], found[twin.id] = twin, life
    return found


def _is_over(life: Life, twin: Life | None, position: int) -> bool:
    """Whether nothing reads a storage again after the operator at this position."""
    if life.birth < 0 or life.category in MARKED[:-1] or life.last_use >= position:
        return False
    if life.death is not None:
        return True
    # It lived when the trace ended: what came of the one of the step before?
    if twin is None or twin.birth > life.birth or twin.death is None:
        return False
    return twin.last_use - twin.birth <= life.last_use - life.birth


def _death(trace: Trace, life: Life, advice: _Advice, position: int) -> int:
    """The first operator from a position on that comes after the `del` of a life."""
    if advice.where == IN_PLACE:
        return position
    before = 0
    while position < len(trace.ops) and (life.death is None or position < life.death):
        frame = _frame_in(trace.ops[position].frames, advice.file, advice.function)
        if frame is not None:
            line = frame[1]
            is_before = advice.where == "before"
            if line >= advice.first if is_before else not line <= advice.end:
                break
            if not is_before and line < before:
                break  # the next step
            before = line
        position += 1
    return position


def _frame_in(frames: Iterable[Frame], file: str, function: str) -> Frame | None:
    return next((one for one in frames if one[0] == file and one[2] == function), None)


# --- the source -----------------------------------------------------------------------------------


#: finds all uses of an attribute, each with its source and function
_UsesOf = Callable[[str], "list[tuple[_Source, ast.AST, ast.AST]]"]


class _Sources:
    """The sources of the program, read once each."""

    def __init__(self, peak_frames: Sequence[Frame]) -> None:
        self._peak_frames = peak_frames
        self._read: dict[str, _Source | None] = {}
        self._uses: dict[str, list[tuple[_Source, ast.AST, ast.AST]]] = {}

    @cached_property
    def _files(self) -> list[str]:
        return _files_of_the_program(self._peak_frames)

    def of(self, file: str) -> _Source | None:
        if file not in self._read:
            self._read[file] = _source(file)
        return self._read[file]

    def uses_of(self, name: str) -> list[tuple[_Source, ast.AST, ast.AST]]:
        """All uses of an attribute in the program, each with its source and function."""
        if name not in self._uses:
            self._uses[name] = [
                (source, *use)
                for file in self._files
                if (source := self.of(file)) is not None
                for use in source.uses_of(name)
            ]
        return self._uses[name]

    def of_attribute(self, name: str, key: str, case: _Case) -> _Advice | None:
        """Where an attribute, or an entry of a dict that it is, may be set to None. One statement
        of the program must set it, and only the same function may read it, whatever object it is
        of."""
        uses = self.uses_of(name)
        if key:
            uses = [
                (source, node, scope)
                for source, use, scope in uses
                if (node := source.entry_of(use, key)) is not None
            ]
        scopes = {id(scope) for _, _, scope in uses}
        stores = [one for one in uses if isinstance(_context(one[1]), ast.Store)]
        if len(scopes) != 1 or len(stores) != 1:
            return None
        source, store, scope = stores[0]
        loads = [node for _, node, _ in uses if node is not store]
        return source.attribute(store, loads, scope, case.life, self._peak_frames)

    def detached(self, case: _Case) -> _Advice | None:
        """Where a value may be detached from its graph: where a running function gives it a name,
        else where it is put into what lives on. All that reads it must want its value only."""
        made = () if case.value is None else case.value.made
        plain = [one for one in case.variables if not one.path and not one.is_outer]
        for frame in reversed(made):
            source = self.of(frame[0])
            for variable in plain if source is not None else ():
                if source is not None and variable.frame[::2] == frame[::2]:
                    return source.detached(variable, frame[1], self.uses_of)
        for frame in () if plain else made:
            source = self.of(frame[0])
            found = None if source is None else source.put(case.variables, frame, self.uses_of)
            if found is not None:
                return found
        return None

    def advice(self, cases: list[_Case]) -> _Advice | None:
        variable = cases[0].variables[0]
        file, peak_line, function = variable.frame
        source = self.of(file)
        if source is None:
            return None
        found = set[_Advice | None]()
        for case in cases:
            made = _frame_in(case.life.made, file, function)
            used = _frame_in(case.life.used, file, function)
            if made is None or used is None:
                return None
            found.add(source.advice(
                variable, [one.path for one in case.variables], made[1], used[1], peak_line
            ))  # fmt: skip
        # Of several storages in one object, the `del` belongs after the last of them.
        places = [one for one in found if one is not None]
        if None in found or not places:
            return None
        place = max(places, key=lambda one: (one.where == AFTER, one.first))
        entries = tuple(dict.fromkeys(case.path for case in cases))
        if all(map(_is_entry, entries)) and (place.kept or place.entries):
            return place._replace(kept=(), entries=entries)
        return place


def _files_of_the_program(frames: Sequence[Frame]) -> list[str]:
    """The files of all modules that are loaded and not of a library, and those of frames."""
    libraries = (*library_paths(), PACKAGE, "<")
    files = [frame[0] for frame in frames]
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py"):
            files.append(file)
    return [one for one in dict.fromkeys(files) if not is_of_a_library(one, libraries)]


def _source(file: str) -> _Source | None:
    text = text_of(file)
    try:
        return _Source(file, text, ast.parse(text)) if text else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


class _Source:
    """The syntax tree of a file, with the parents of its nodes."""

    def __init__(self, file: str, text: str, tree: ast.Module) -> None:
        self.file, self.text, self.tree = file, text, tree
        self.parents: dict[ast.AST, ast.AST] = {}
        for node in ast.walk(tree):
            for inner in ast.iter_child_nodes(node):
                self.parents[inner] = node

    def advice(
        self, variable: Variable, paths: list[str], made: int, used: int, peak: int
    ) -> _Advice | None:
        """Where a variable may be deleted; None if it is read later, or cannot be.

        Args:
            variable: its name and frame.
            paths: from the variable to the storage.
            made, used, peak: the lines of its function at which the storage was made and used last,
                and that of the peak.
        """
        scope = self._scope(peak)
        name = variable.name
        names = [node for node in self._own(scope) if _name(node) == name]
        if scope is None or self._is_used_within(scope, name) or self._is_declared(scope, name):
            return None
        entries = set(map(_first, paths))
        own = self._entry(names, next(iter(entries))) if len(entries) == 1 else []
        stores = [
            one
            for node in own or names
            if isinstance(_context(node), ast.Store) and (one := self._statement(node)) is not None
        ]
        here = self._at(scope, peak)
        made_here = [one for one in stores if one.lineno <= made <= self._ends(one)]
        later = made_here or [one for one in stores if one.lineno >= made]
        if here is None or not later:
            return None
        binding = later[0]
        uses = own or names
        if any(isinstance(_context(node), ast.Del) for node in uses):
            return None
        loads = [node for node in uses if isinstance(_context(node), ast.Load)]
        loads = [node.value if isinstance(node, ast.Subscript) else node for node in loads]
        if self._ends(binding) < here.lineno:
            found = self._before(variable, paths, binding, here, loads, stores)
        else:
            found = self._after(variable, binding, used, loads)
        return found._replace(entries=tuple(entries)) if found is not None and own else found

    def _entry(self, names: list[ast.AST], entry: str) -> list[ast.AST]:
        """The uses of an entry of a dict that lives on, as in `cache["logits"] = model(x)`; [] if
        the function does not set it, or uses the dict in other ways than by its keys."""
        found, is_set = list[ast.AST](), False
        for name in names:
            node = self.parents.get(name)
            if isinstance(_context(name), ast.Store) and isinstance(node, ast.Assign):
                continue
            if not isinstance(node, ast.Subscript) or node.value is not name:
                return []
            if not isinstance(node.slice, ast.Constant):
                return []
            if f"[{node.slice.value!r}]" == entry:
                found.append(node)
                is_set = is_set or isinstance(node.ctx, ast.Store)
        return found if is_set and _is_entry(entry) else []

    def uses_of(self, name: str) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Everything that may be a use of an attribute, with the function that has it: attributes
        of this name of any object, and texts, as for getattr()."""
        for node in self.parents:
            is_text = isinstance(node, ast.Constant) and node.value == name
            if is_text or (isinstance(node, ast.Attribute) and node.attr == name):
                yield node, self._function(node)

    def entry_of(self, use: ast.AST, key: str) -> ast.AST | None:
        """The use of an entry of a dict that an attribute is, or of any of its entries; None for
        one of another entry, and where the dict is made empty."""
        node = self.parents.get(use)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and ast.unparse(node.value or use) in (
            "{}",
            "dict()",
        ):
            return None
        if isinstance(node, ast.Subscript) and node.value is use:
            is_known = isinstance(node.slice, ast.Constant)
            return None if is_known and f"[{ast.literal_eval(node.slice)!r}]" != key else node
        return use

    def _function(self, node: ast.AST) -> ast.AST:
        found = self.parents.get(node, self.tree)
        while not isinstance(found, (*_SCOPES, ast.Module)):
            found = self.parents.get(found, self.tree)
        return found

    def attribute(
        self, store: ast.AST, loads: list[ast.AST], scope: ast.AST, life: Life,
        peak_frames: Sequence[Frame],
    ) -> _Advice | None:  # fmt: skip
        """Where an attribute may be set to None that only one function uses; None if it cannot be.

        Args:
            store: where it is set.
            loads: where it is read.
            scope: the function.
            life: the storage that it has.
            peak_frames: the running functions at the peak.
        """
        statement, base = self.parents.get(store), store
        while isinstance(base, (ast.Attribute, ast.Subscript)):
            base = base.value
        if not isinstance(statement, ast.Assign) or (len(statement.targets) > 1 and not loads):
            return None
        if not isinstance(base, ast.Name) or not isinstance(scope, ast.FunctionDef):
            return None
        expression = ast.unparse(store)
        if any(ast.unparse(one) != expression for one in loads):
            return None
        function = next(
            (frame[2] for frame in (*life.made, *life.used)
             if frame[0] == self.file and frame[2].rpartition(".")[2] == scope.name), ""
        )  # fmt: skip
        variable = Variable(expression, "", (self.file, statement.lineno, function))
        if not function:
            return None
        written = f"{expression} = None"
        if not loads:
            return self._advice(variable, (), statement, IN_PLACE, written)
        here = _frame_in(peak_frames, self.file, function)
        peak = None if here is None else self._at(scope, here[1])
        if peak is None or self._loop(peak) is not self._loop(statement):
            return None
        is_read_before = all(
            self._ends(statement) < getattr(one, "lineno", 0) < peak.lineno for one in loads
        )
        is_over = is_read_before and self._comes_always(statement, peak)
        return self._advice(variable, (), peak, BEFORE, written) if is_over else None

    def _before(
        self, variable: Variable, paths: list[str], binding: ast.stmt, here: ast.stmt,
        loads: list[ast.AST], stores: list[ast.stmt],
    ) -> _Advice | None:  # fmt: skip
        """In front of the statement of the peak, or of the loop that has it."""
        anchor: ast.AST = here
        while self._loop(anchor) is not self._loop(binding):
            outer = self._loop(anchor)
            if outer is None:
                return None
            anchor = outer
        if not isinstance(anchor, ast.stmt) or not self._comes_always(binding, anchor):
            return None
        loop, kept = self._loop(binding), dict[str, str]()
        again = [one for one in stores if one.lineno > self._ends(here)]
        for load in loads:
            line = getattr(load, "lineno", 0)
            is_carried = loop is not None and loop.lineno <= line < binding.lineno
            if line < anchor.lineno and not is_carried:
                continue
            if any(self._ends(one) < line and self._comes_always(anchor, one) for one in again):
                continue
            path, expression = self._read_at(load)
            if is_carried or not path or any(_overlap(path, one) for one in paths):
                return None
            kept[path] = expression
        pairs = tuple((_tokens(path)[-1], text) for path, text in kept.items())
        if any(not name.isidentifier() for name, _ in pairs):
            pairs = tuple((f"kept{i}" if i else "kept", text) for i, (_, text) in enumerate(pairs))
        return self._advice(variable, pairs, anchor, BEFORE)

    def _after(
        self, variable: Variable, binding: ast.stmt, used: int, loads: list[ast.AST]
    ) -> _Advice | None:
        """After its last use: otherwise it lives until the next step gives the name a new value."""
        loop = self._loop(binding)
        if loop is None:
            return None
        end, last = self._ends(loop), max(used, binding.lineno)
        for load in loads:
            line = getattr(load, "lineno", 0)
            if line > end or loop.lineno <= line <= self._ends(binding):
                return None
            last = max(last, line) if line > binding.lineno else last
        anchor: ast.AST | None = self._at(self._scope(last), last)
        block = self.parents.get(self._out_of_with(binding))
        while anchor is not None and self.parents.get(anchor) is not block:
            anchor = self.parents.get(anchor)
        if not isinstance(anchor, ast.stmt):
            return None
        while isinstance(anchor, (ast.With, ast.AsyncWith)):
            anchor = anchor.body[-1]
        return self._advice(variable, (), anchor, AFTER)

    def _advice(
        self, variable: Variable, kept: tuple[tuple[str, str], ...], anchor: ast.stmt, where: str,
        written: str = "",
    ) -> _Advice:  # fmt: skip
        text = ast.get_source_segment(self.text, anchor) or ""
        text = " ".join(text.partition("\n")[0].split())
        if len(text) > OF_A_STATEMENT:
            text = f"{text[: OF_A_STATEMENT - 3]}..."
        if where == AFTER and text.endswith(":"):
            text = f"the block of {text}"
        return _Advice(
            variable.name, kept, self.file, variable.frame[2], anchor.lineno, self._ends(anchor),
            where, text, written=written,
        )  # fmt: skip

    # --- values with graphs ---

    def detached(self, variable: Variable, line: int, uses_of: _UsesOf) -> _Advice | None:
        """`name = name.detach()` after the statement that has this line."""
        name, scope = variable.name, self._scope(line)
        statement = self._at(scope, line)
        uses = [node for node in self._own(scope) if _name(node) == name]
        if scope is None or self._is_used_within(scope, name) or self._is_declared(scope, name):
            return None
        if not any(_is_stored(one) and self._statement(one) is statement for one in uses):
            return None
        loads = [one for one in uses if isinstance(_context(one), ast.Load)]
        if not isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            return None
        if not all(self._wants_value(one, uses_of) for one in loads):
            return None
        return self._advice(variable, (), statement, AFTER, f"{name} = {name}.detach()")

    def put(self, variables: Sequence[Variable], frame: Frame, uses_of: _UsesOf) -> _Advice | None:
        """The statement that puts a value into what lives on, with `.detach()`.

        Args:
            variables: that have the value.
            frame: of a function that was running when the value was made.
            uses_of: finds all uses of an attribute.
        """
        scope = self._scope(frame[1])
        here = self._at(scope, frame[1])
        names = {_name(one) for one in ast.walk(here) if _is_stored(one)} if here else set[str]()
        paths = [one.name + one.path for one in variables if not one.is_outer]
        for statement in self._own(scope):
            put = _put(statement)
            if put is None or not isinstance(statement, ast.stmt):
                continue
            is_it = statement is here or _name(put.value) in names
            if not is_it or not all(re.search(put.path, one) for one in paths):
                continue
            # A list that another variable has too may be read by that name.
            is_shared = isinstance(put.base, ast.Name) and not put.key
            if is_shared and any(one.is_outer and one.name != _name(put.base) for one in variables):
                continue
            if not self._gives_values(put, uses_of):
                continue
            old = ast.get_source_segment(self.text, put.value) or ""
            whole = ast.get_source_segment(self.text, statement) or ""
            is_simple = isinstance(put.value, (ast.Name, ast.Call, ast.Attribute, ast.Subscript))
            new = f"{old}.detach()" if is_simple else f"({old}).detach()"
            variable = Variable(_name(put.value) or ast.unparse(put.target), "", frame)
            written = " ".join(new.join(whole.rsplit(old, 1)).split())
            return self._advice(variable, (), statement, IN_PLACE, written)
        return None

    def _gives_values(self, put: _Put, uses_of: _UsesOf, depth: int = 0) -> bool:
        """Whether all that reads what a value is put into wants values only, in all of the
        program."""
        base = put.base
        name = base.attr if isinstance(base, ast.Attribute) else _name(base)
        uses = [(source, node) for source, node, _ in uses_of(name)]
        if isinstance(base, ast.Name):  # Attributes of this name in other files are others.
            uses = [one for one in uses if one[0] is self]
            uses += ((self, node) for node in self.parents if _name(node) == name)
        if put.key:
            uses += ((source, node) for source, node, _ in uses_of(put.key))
        return all(
            _is_stored(node)
            or isinstance(node, ast.arg)
            or source._wants_value(node, uses_of, depth)
            for source, node in uses
        )

    def _wants_value(self, node: ast.AST, uses_of: _UsesOf, depth: int = 0) -> bool:
        """Whether what reads a value, or what contains it, wants no graph."""
        outer = self.parents.get(node)
        if isinstance(outer, ast.Attribute):
            return outer.attr in _OF_VALUES
        if isinstance(outer, ast.Subscript):
            is_read = isinstance(outer.ctx, ast.Load)
            return not is_read or self._wants_value(outer, uses_of, depth)
        put = _put(self._statement(node))
        if put is not None and put.value is node and depth < DEEPEST:
            return self._gives_values(put, uses_of, depth + 1)
        if isinstance(outer, ast.Call):
            return _name(outer.func) in _TAKE_VALUES
        return isinstance(outer, (ast.FormattedValue, ast.Expr))

    # --- nodes ---

    def _scope(self, line: int) -> ast.AST | None:
        """The innermost function that has a line; the module."""
        found: ast.AST = self.tree
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                is_in = node.lineno <= line <= (node.end_lineno or 0)
                if is_in and node.lineno >= getattr(found, "lineno", 0):
                    found = node
        return found

    def _own(self, scope: ast.AST | None) -> Iterator[ast.AST]:
        """The nodes of a function, without those of functions and classes within it."""
        waiting = [] if scope is None else list(ast.iter_child_nodes(scope))
        while waiting:
            node = waiting.pop()
            yield node
            if not isinstance(node, _SCOPES):
                waiting += ast.iter_child_nodes(node)

    def _is_used_within(self, scope: ast.AST, name: str) -> bool:
        """Whether a function or class within uses this variable, and not one of its own."""
        for node in self._own(scope):
            if isinstance(node, _SCOPES):
                inner = [one for one in ast.walk(node) if _name(one) == name]
                is_own = any(
                    isinstance(one, ast.arg) or isinstance(_context(one), ast.Store)
                    for one in inner
                ) and not self._is_declared(node, name)
                if inner and not is_own:
                    return True
        return False

    def _is_declared(self, scope: ast.AST, name: str) -> bool:
        return any(
            isinstance(node, (ast.Global, ast.Nonlocal)) and name in node.names
            for node in ast.walk(scope)
        ) and not isinstance(scope, ast.Module)

    def _statement(self, node: ast.AST) -> ast.stmt | None:
        """The statement that a node belongs to."""
        found: ast.AST | None = node
        while found is not None and not isinstance(found, ast.stmt):
            found = self.parents.get(found)
        return found

    def _at(self, scope: ast.AST | None, line: int) -> ast.stmt | None:
        """The innermost statement of a function that has a line, the first of several in one line;
        None for the head of a loop."""
        there = [
            node
            for node in self._own(scope)
            if isinstance(node, ast.stmt) and node.lineno <= line <= self._ends(node)
        ]
        found = max(
            there,
            key=lambda node: (node.lineno, -self._ends(node), -node.col_offset),
            default=None,
        )
        return None if isinstance(found, _LOOPS) else found

    def _loop(self, node: ast.AST) -> ast.stmt | None:
        """The innermost loop around a statement."""
        found = self.parents.get(node)
        while found is not None and not isinstance(found, (*_LOOPS, *_SCOPES)):
            found = self.parents.get(found)
        return found if isinstance(found, _LOOPS) else None

    def _comes_always(self, first: ast.AST, second: ast.AST) -> bool:
        """Whether `first` has run wherever `second` runs: its block has it or what contains it."""
        first = self._out_of_with(first)
        outer, field = self.parents.get(first), self._field(first)
        found: ast.AST | None = second
        while found is not None and self.parents.get(found) is not outer:
            found = self.parents.get(found)
        return found is not None and self._field(found) == field

    def _out_of_with(self, node: ast.AST) -> ast.AST:
        """The outermost `with` whose body has a statement: what it has always runs."""
        while isinstance(outer := self.parents.get(node), (ast.With, ast.AsyncWith)):
            node = outer
        return node

    def _field(self, node: ast.AST) -> str:
        """The field of its parent that has a statement: "body", "orelse"."""
        parent = self.parents.get(node)
        for name, value in () if parent is None else ast.iter_fields(parent):
            if isinstance(value, list) and any(one is node for one in value):
                return name
        return ""

    def _read_at(self, load: ast.AST) -> tuple[str, str]:
        """What a line reads of a variable: (".loss", "out.loss"); ("", "out") for all of it."""
        node, path = load, ""
        while True:
            outer = self.parents.get(node)
            if isinstance(outer, ast.Attribute):
                is_call = isinstance(self.parents.get(outer), ast.Call) and (
                    getattr(self.parents.get(outer), "func", None) is outer
                )
                if is_call and path:  # a method of what it reads
                    break
                if is_call:
                    return "", ""
                path += f".{outer.attr}"
            elif (
                isinstance(outer, ast.Subscript)
                and outer.value is node
                and isinstance(outer.slice, ast.Constant)
                and type(outer.slice.value) in (str, int)
            ):
                path += f"[{outer.slice.value!r}]"
            else:
                break
            node = outer
        return path, ast.unparse(node)

    @staticmethod
    def _ends(node: ast.stmt) -> int:
        return node.end_lineno or node.lineno


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.arg if isinstance(node, ast.arg) else ""


class _Put(NamedTuple):
    """A statement that puts a value into an attribute, into an entry of a dict, or at the end of a
    list.

    Attributes:
        value, target: what is put where.
        base: the attribute, or the variable that is the dict or list.
        key: of the entry; "" without one that is a text.
        path: a pattern of the way to the value.
    """

    value: ast.expr
    target: ast.expr
    base: ast.Attribute | ast.Name
    key: str
    path: str


def _put(statement: ast.AST | None) -> _Put | None:
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        value, target, path = statement.value, statement.targets[0], "$"
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        if not isinstance(call.func, ast.Attribute) or call.func.attr != "append":
            return None
        if len(call.args) != 1 or call.keywords:
            return None
        value, target, path = call.args[0], call.func.value, r"\[\d+\]$"
    else:
        return None
    base, key = target, ""
    if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
        base, key = target.value, str(target.slice.value)
        path = re.escape(f"[{target.slice.value!r}]") + path
    if isinstance(base, ast.Attribute):
        return _Put(value, target, base, key, rf"\.{base.attr}{path}")
    if isinstance(base, ast.Name) and path != "$":
        return _Put(value, target, base, key, f"^{base.id}{path}")
    return None


def _is_stored(node: ast.AST) -> bool:
    return isinstance(_context(node), ast.Store)


def _context(node: ast.AST) -> object:
    return getattr(node, "ctx", None)


def _is_entry(path: str) -> bool:
    """Whether this is how an entry of a dict is written that a text is the key of."""
    return path.startswith("['")


def _tokens(path: str) -> list[str]:
    """["past_key_values", "layers", "0"] of ".past_key_values.layers[0]"."""
    for char in "[]'\"":
        path = path.replace(char, ".")
    return [token for token in path.split(".") if token]


def _first(path: str) -> str:
    """ ".past_key_values" of ".past_key_values.layers[0]"."""
    ends = [at for mark in ".[" if (at := path.find(mark, 1)) > 0]
    return path[: min(ends)] if ends else path


def _overlap(one: str, other: str) -> bool:
    """Whether one of two paths leads through what the other one leads to. An index may stand for
    any attribute."""
    for first, second in zip(_tokens(one), _tokens(other), strict=False):
        if first != second:
            return first.isdigit() != second.isdigit()
    return True
