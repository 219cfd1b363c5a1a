"""Whose code a file is: by where the package that was imported lies, and by what runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from memtools._base import libraries
from memtools._base.libraries import LIBRARY, MEMTOOLS, USER, owner_of

SITE = libraries._PATHS["purelib"]
PACKAGE = libraries.PACKAGE


def install(site: Path, name: str, origin: object) -> None:
    """A package as pip leaves it."""
    (site / name).mkdir(parents=True)
    (site / name / "__init__.py").write_text("")
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "RECORD").write_text(f"{name}/__init__.py,sha256=x,0\n{name}.py,,\n../../bin/x.py,,\n")
    if origin is not None:
        text = origin if isinstance(origin, str) else json.dumps(origin)
        (info / "direct_url.json").write_text(text)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "lib" / "site-packages"
    folder.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/home/me/train.py", raising=False)
    libraries._users_paths.cache_clear()
    yield folder
    libraries._users_paths.cache_clear()


def test_a_package_that_was_installed_out_of_a_folder_is_the_users(
    site: Path, tmp_path: Path
) -> None:
    (tmp_path / "my fork").mkdir()
    here = {"url": f"file://{tmp_path}/my%20fork", "dir_info": {}}
    install(site, "mine", here)
    for name, origin in {
        "indexed": None,
        "gone": {"url": "file:///build/elsewhere", "dir_info": {}},
        "wheel": {"url": f"file://{tmp_path}/my%20fork", "archive_info": {}},
        "vcs": {"url": "https://example.com/x.git", "vcs_info": {}},
        "torn": "{",
        "odd": [1],
    }.items():
        install(site, name, origin)
    for file, owner in {
        f"{site}/mine/__init__.py": USER,
        f"{site}/mine.py": USER,
        f"{site}/mine_not.py": LIBRARY,
        f"{site}/indexed/__init__.py": LIBRARY,
        f"{site}/gone/__init__.py": LIBRARY,
        f"{site}/wheel/__init__.py": LIBRARY,
        f"{site}/vcs/__init__.py": LIBRARY,
        f"{site}/torn/__init__.py": LIBRARY,
        f"{site}/odd/__init__.py": LIBRARY,
        f"{SITE}/torch/nn/functional.py": LIBRARY,
        f"{PACKAGE}_grad/window.py": LIBRARY,
        f"{PACKAGE}_monitor/run.py": MEMTOOLS,
        f"{PACKAGE.rstrip('/')}_fork/_monitor/run.py": owner_of(f"{Path(PACKAGE).parent}/x.py"),
        "/home/me/train.py": USER,
        "/home/me/memtools/monitor/run.py": USER,
    }.items():
        assert owner_of(file) == owner, file


@pytest.mark.parametrize(
    ("script", "users"),
    [
        (f"{PACKAGE}examples/x.py", [f"{PACKAGE}examples/"]),
        (f"{PACKAGE}x.py", [f"{PACKAGE}x.py"]),
        (f"{SITE}/x.py", [f"{SITE}/x.py"]),
        (f"{SITE}/memtools_fork/train.py", [f"{SITE}/memtools_fork/"]),
        (str(Path(SITE).parents[4] / "train.py"), []),  # the environment lies below it
        ("", []),
    ],
)
def test_the_script_that_runs_is_the_users(
    script: str, users: list[str], site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(libraries.users_paths())
    monkeypatch.setattr(sys.modules["__main__"], "__file__", script)
    assert sorted(set(libraries.users_paths()) - before) == users
    assert not libraries.is_users(f"{PACKAGE}_monitor/run.py")
    assert libraries.is_own(f"{PACKAGE}_monitor/run.py")
