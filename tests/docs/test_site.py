"""The site of the docs builds without a warning, its links lead somewhere, and its reference has
every public name."""

from __future__ import annotations

import ast
import dataclasses
import functools
import html
import importlib
import inspect
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import memtools
import memtools.types
from memtools._base.environment import KEYS
from memtools._cli import COMMANDS
from memtools.testing._marker import KEYWORDS
from tests.docs.markdown import dead_links, figures_without_source, sections, source_of, sources
from tests.meta.test_public import PARTS

PROJECT = Path(__file__).resolve().parents[2]
DOCS = PROJECT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
FILES = [*PAGES, *sorted(PROJECT.glob("*.md")), *sorted(PROJECT.glob("examples/*.md"))]

#: Public modules beside memtools itself.
MODULES = (
    "memtools.data",
    "memtools.distributed",
    "memtools.errors",
    "memtools.export",
    "memtools.grad",
    "memtools.integrations.accelerate",
    "memtools.integrations.lightning",
    "memtools.integrations.transformers",
    "memtools.report",
    "memtools.testing",
    "memtools.types",
)
#: Those whose import takes seconds, or a package that is not there everywhere.
HEAVY = ("memtools.integrations.lightning",)


def offered(module: str) -> set[str]:
    """The names that a public module offers: its __all__, or what it defines without an underscore.
    Read from its source, because the libraries of the integrations take seconds to import."""
    path = PROJECT / module.replace(".", "/")
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    found = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            found.add(node.name)
    return found


def public_names() -> set[str]:
    errors = offered("memtools.errors")  # memtools offers them itself
    inner = {f"{m}.{name}" for m in MODULES for name in offered(m) if name not in errors}
    return inner | {f"memtools.{name}" for name in memtools.__all__}


@functools.cache
def public(name: str) -> Any:
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def members(kind: type) -> dict[str, object]:
    """The public members that a class has from memtools, those in C included, without fields that
    only instances have."""
    found: dict[str, object] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("memtools"):
            found |= dict.fromkeys(inspect.get_annotations(base))
            found |= vars(base)
    return {name: member for name, member in found.items() if not name.startswith("_")}


def foreign_members(kind: type) -> set[str]:
    """What a class has, or had it not its own, from Python or another library."""
    foreign = [base for base in kind.__mro__ if not base.__module__.startswith("memtools")]
    return {name for base in foreign for name in dir(base)}


def is_made_by_memtools(value: object) -> bool:
    """Whether it is a type that memtools returns or raises, which no program makes."""
    made = (tuple, Exception, memtools.types.BudgetReport)
    return isinstance(value, type) and (dataclasses.is_dataclass(value) or issubclass(value, made))


# --- as files ------------------------------------------------------------------------------------


def test_the_reference_has_every_public_name_once() -> None:
    text = "\n".join(path.read_text() for path in DOCS.glob("reference/*.md"))
    names = re.findall(r"^\.\. (?:auto(?:class|function)|py:data):: (\S+)$", text, re.MULTILINE)
    assert len(names) == len(set(names))
    assert sorted(set(names) ^ public_names()) == []


def table(page: str, heading: str) -> set[str]:
    """What is code in the first column of the table under a heading."""
    return set(re.findall(r"^\| `(\w+)`", sections((DOCS / page).read_text())[heading], re.M))


def test_the_settings_are_all_there() -> None:
    ours = "\n".join(path.read_text() for path in PROJECT.glob("csrc/**/*.c"))
    wanted = {*KEYS, *re.findall(r'getenv\("(MEMTOOLS\w+)"\)', ours)}
    assert table("reference/settings.md", "when-a-program-runs") == wanted
    build = re.findall(r'environ(?:\.get\(|\[)"(MEMTOOLS_\w+)"', (PROJECT / "setup.py").read_text())
    assert table("reference/settings.md", "when-memtools-is-built") == set(build)


def test_the_markers_keywords_are_all_there() -> None:
    assert table("reference/testing.md", "the-marker-memory") == set(KEYWORDS)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(PROJECT).as_posix())
def test_links_between_files_lead_somewhere(file: Path) -> None:
    assert dead_links(file) == []


def test_the_decision_table_leads_to_every_symptom() -> None:
    rows = sections((DOCS / "index.md").read_text())["what-is-happening-to-your-run"]
    linked = set(re.findall(r"\]\(symptoms/(\w+)\.md\)", rows))
    assert linked == {page.stem for page in DOCS.glob("symptoms/*.md")}


def test_every_figure_of_the_claims_stands_where_its_row_leads() -> None:
    claims = (DOCS / "performance.md").read_text()
    assert "**no**" in claims
    rows = [line for line in claims.splitlines() if line.startswith("| ")]
    told = [row for row in rows if not row.startswith(("| what |", "| --- |"))]
    assert [row for row in told if not sources(row.rpartition(" | ")[2])] == []
    assert figures_without_source(claims, source_of, slice(1, 4)) == []


def test_the_figures_beside_other_tools_are_those_of_the_loops() -> None:
    results = json.loads((PROJECT / "benchmarks" / "results" / "leakset.json").read_text())
    found, loops = results["summary"], results["loops"]
    text = (DOCS / "background" / "other_tools.md").read_text()
    rows = {
        cells[0]: cells[1:]
        for line in text.splitlines()
        if len(cells := [cell.strip() for cell in line.strip("|").split(" |")]) == 5
    }
    leaks, others = found["leaks"], found["no leak"]
    steps = [loop["steps"] for loop in loops]
    assert f"{leaks} training loops that leak and {others} that do not" in text
    assert f"of {min(steps)} to {max(steps):,} steps" in text
    assert rows["loops that leak: says so"][0] == f"{found['called']} of {leaks}"
    called = found["called at the end of those"]
    assert rows["loops that do not: says that they leak"][0] == f"{called} of {others}"
    rates = rows["rate within 20 %"]
    assert rates[0] == f"{found['rate']} of {leaks}"
    assert rates[3].startswith(f"{found['slope of a thread within 20 %']} of {leaks}")
    assert rows["names who holds it"][0] == f"{found['holder']} of {leaks}"
    ways = ("made right", "made right by memray", "made right by tracemalloc")
    made = rows["a right line, of the 9 that Python, tensors or arrays make"]
    assert [f"{cell} of 9" for cell in made[:3]] == [found[way] for way in ways]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(PROJECT).as_posix())
def test_the_make_targets_that_a_page_names_exist(file: Path) -> None:
    makefile = (PROJECT / "Makefile").read_text()
    for target in re.findall(r"`make ([a-z-]+)", file.read_text()):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_the_pages_show_everything_that_a_program_calls() -> None:
    text = "".join(file.read_text() for file in FILES)
    called = {
        name
        for name in set(memtools.__all__) - {"__version__"}
        if not is_made_by_memtools(getattr(memtools, name))
    }
    assert len(called) > 15
    assert {name for name in called if not re.search(rf"\b{name}\b", text)} == set()


def test_no_line_of_the_project_names_this_machine() -> None:
    files = subprocess.run(
        ["git", "ls-files", "-z"], cwd=PROJECT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    common = PROJECT.parent in (Path("/"), Path(tempfile.gettempdir()))
    home = f"{PROJECT if common else PROJECT.parent}/"
    for path in (PROJECT / name for name in files if name):
        assert not path.is_file() or home not in path.read_text(errors="replace"), path


# --- built ---------------------------------------------------------------------------------------


def build(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """What `make docs` runs; doctrees apart from the site."""
    command = [sys.executable, "-m", "sphinx", "-q", "-n", "-W", "--keep-going", "-b", "html"]
    command += ["-d", str(out.with_suffix(".doctrees")), str(source), str(out)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sphinx")
    out = tmp_path_factory.mktemp("site") / "html"
    done = build(DOCS, out)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return out


@pytest.fixture(scope="module")
def reference(site: Path) -> str:
    return "\n".join(page.read_text() for page in sorted(site.glob("reference/*.html")))


def entry(reference: str, name: str) -> str:
    """The line of the reference that a name has, as text."""
    found = re.search(rf'<dt class="[^"]*" id="{re.escape(name)}">(.*?)</dt>', reference, re.S)
    assert found, f"{name} is not in the reference"
    text = re.sub(r"<a class=\"headerlink.*?</a>|<[^>]+>", "", found[1], flags=re.S)
    line = " ".join(html.unescape(text).split())
    return line.replace("( ", "(").replace(", )", ")")


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(site: Path) -> None:
    built = {page.relative_to(site).with_suffix("").as_posix() for page in site.rglob("*.html")}
    wanted = {page.relative_to(DOCS).with_suffix("").as_posix() for page in PAGES}
    if not (PROJECT / "CONTRIBUTING.md").exists():
        wanted.discard("project/contributing")
    assert sorted(wanted - built) == []


class Links:
    """Where the pages of a site lead, and what can be led to."""

    def __init__(self, site: Path) -> None:
        self.site = site
        self.texts = {page: page.read_text() for page in site.rglob("*.html")}
        self.ids = {p: set(re.findall(r'\bid="([^"]+)"', t)) for p, t in self.texts.items()}

    def dead(self) -> Iterator[str]:
        for page, text in self.texts.items():
            for link in re.findall(r'\b(?:href|src)="([^"]*)"', text):
                path, _, part = html.unescape(link).partition("#")
                if re.match(r"\w+:", path):
                    continue
                target = (page.parent / path.partition("?")[0]).resolve() if path else page
                missing = not target.exists() or (part and part not in self.ids.get(target, ()))
                if missing:
                    yield f"{page.relative_to(self.site)}: {link}"


@pytest.mark.slow
def test_links_between_pages_lead_somewhere(site: Path) -> None:
    links = Links(site.resolve())
    assert len(links.texts) > 40
    assert sorted(links.dead()) == []


@pytest.mark.slow
def test_no_page_loads_anything_from_the_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img)\b[^>]*(?:src|href)="(\w+:)?//', page.read_text())
        assert loaded == [], page


@pytest.mark.slow
def test_every_member_is_in_the_reference(reference: str) -> None:
    missing = []
    for name in sorted(public_names()):
        if name.startswith(HEAVY):
            assert f'id="{name}"' in reference
            continue
        value = public(name)
        assert f'id="{name}"' in reference, name
        if not inspect.isclass(value):
            continue
        attributes = set(re.findall(r"^    (\w+): ", inspect.getdoc(value) or "", re.M))
        hooks = foreign_members(value) if "Callback" in name else set()
        for member in set(members(value)) - hooks:
            short = f"{value.__name__}.{member}"
            has = f'id="{name}.{member}"' in reference or member in attributes
            if not has and short not in PARTS:
                missing.append(short)
    assert missing == []
    assert "Alias for field number" not in reference  # Python's own, for a field without a comment


@pytest.mark.slow
def test_signatures_name_every_parameter(reference: str) -> None:
    for name in sorted(public_names()):
        if name.startswith(HEAVY) or inspect.isclass(public(name)) or not callable(public(name)):
            continue
        line = entry(reference, name)
        for parameter in inspect.signature(public(name)).parameters.values():
            assert re.search(rf"\b{parameter.name}\b", line), f"{name}: {line}"


def callables() -> Iterator[tuple[str, Any]]:
    """What a program calls: public functions, classes and methods. Not what memtools returns and a
    program only reads, and no method of which another library sets the parameters."""
    for name in sorted(public_names()):
        value = None if name.startswith(HEAVY) else public(name)
        if not inspect.isclass(value):
            if callable(value):
                yield name, value
            continue
        if "Args:" in (inspect.getdoc(value) or ""):
            yield name, value
        for member in set(members(value)) - foreign_members(value):
            found = getattr(value, member, None)
            if inspect.isroutine(found):
                yield f"{name}.{member}", found


@pytest.mark.slow
def test_docstrings_tell_of_every_parameter() -> None:
    seen, missing = 0, []
    for name, value in callables():
        text = inspect.getdoc(value) or ""
        for parameter in inspect.signature(value).parameters.values():
            if parameter.name == "self" or parameter.kind is parameter.VAR_POSITIONAL:
                continue
            seen += 1
            if not re.search(rf"\b{parameter.name}\b", text):
                missing.append(f"{name}: {parameter.name}")
    assert seen > 250
    assert missing == []


@pytest.mark.slow
def test_members_in_c_are_all_typed(reference: str) -> None:
    seen = 0
    for name in memtools.__all__:
        value = getattr(memtools, name)
        if not inspect.isclass(value):
            continue
        for member, found in members(value).items():
            if inspect.isgetsetdescriptor(found) or inspect.ismethoddescriptor(found):
                line = entry(reference, f"memtools.{name}.{member}")
                seen += 1
                assert re.search(r": \S|→ ", line), f"{name}: {line}"
    assert seen > 50


@pytest.mark.slow
def test_the_commands_have_all_their_options(site: Path) -> None:
    page = html.unescape((site / "reference" / "commands.html").read_text())
    for kind in COMMANDS:
        text = page.partition(f'<section id="memtools-{kind.name}">')[2].partition("</section>")[0]
        command = [sys.executable, "-m", "memtools", kind.name, "--help"]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        options = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", printed)) - {"-h", "--help"}
        shown = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", re.sub(r"<[^>]+>", " ", text)))
        assert options, kind.name
        assert sorted(options - shown) == [], kind.name


@pytest.mark.slow
def test_no_first_line_of_a_member_has_a_colon() -> None:
    """napoleon takes the words before it for the type."""
    analyzer = pytest.importorskip("sphinx.pycode").ModuleAnalyzer
    found = set()
    for name in public_names():
        value = None if name.startswith(HEAVY) else public(name)
        for base in value.__mro__ if inspect.isclass(value) else ():
            if not base.__module__.startswith("memtools"):
                continue
            texts = {
                member: inspect.getdoc(one) or ""
                for member, one in vars(base).items()
                if isinstance(one, property) or inspect.isgetsetdescriptor(one)
            }
            if base.__module__ != "memtools._core":
                module = analyzer.for_module(base.__module__)
                module.analyze()
                for (of, member), lines in module.attr_docs.items():
                    if of == base.__qualname__:
                        texts[member] = "\n".join(lines)
            for member, text in texts.items():
                if ":" in text.partition("\n")[0].replace("::", ""):
                    found.add(f"{base.__module__}.{base.__qualname__}.{member}: {text}")
    assert sorted(found) == []
