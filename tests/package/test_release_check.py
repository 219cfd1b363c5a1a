"""What `make release-check` finds before anything is built."""

from __future__ import annotations

import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.package import release_check
from tests.package.release_check import ReleaseError


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A checkout in which nothing is wrong."""
    files = {
        "memtools/_version.py": '__version__ = "1.2.3"\n',
        "memtools/other.py": 'LEAST = "1.2.30"\n',
        "CHANGELOG.md": "# Changes\n\n## 1.2.3\n\n- All.\n\n## 1.2.2\n\n- Some.\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def git(project: Path, *words: str) -> None:
    who = ["-c", "user.name=x", "-c", "user.email=x@y"]
    subprocess.run(["git", *who, *words], cwd=project, check=True)


def commit(project: Path) -> None:
    git(project, "add", ".")
    git(project, "commit", "-q", "-m", "x")


def test_a_checkout_with_changes_is_not_released(project: Path) -> None:
    assert release_check.check_clean(project).startswith("the checkout is ")
    (project / "new.py").touch()
    with pytest.raises(ReleaseError, match=r"1 files differ from the last commit, such as new\.py"):
        release_check.check_clean(project)


def test_the_version_stands_in_one_place(project: Path) -> None:
    assert release_check.check_version(project).startswith("version 1.2.3, ")
    (project / "setup.py").write_text("VERSION = '1.2.3'\n")
    commit(project)
    with pytest.raises(ReleaseError, match=r"1\.2\.3 stands in setup\.py too"):
        release_check.check_version(project)


@pytest.mark.parametrize("changes", ["# Changes\n", "## 1.2.3\n\n## 1.2.2\n\n- Some.\n"])
def test_the_changes_of_the_version_are_told(changes: str, project: Path) -> None:
    (project / "CHANGELOG.md").write_text(changes)
    with pytest.raises(ReleaseError, match=r"no section with text for version 1\.2\.3"):
        release_check.check_version(project)


def test_a_source_distribution_lacks_no_tracked_file(project: Path) -> None:
    archive = project / "memtools-1.2.3.tar.gz"
    with tarfile.open(archive, "w:gz") as files:
        files.add(project / "memtools", "memtools-1.2.3/memtools")
    names = ["memtools/_version.py", ".ci/run", "benchmarks/results/x.json"]
    assert "holds all files" in release_check.check_sdist(archive, names)
    with pytest.raises(ReleaseError, match=r"lacks 1 tracked files, such as CHANGELOG\.md"):
        release_check.check_sdist(archive, [*names, "CHANGELOG.md"])


@pytest.mark.parametrize(
    ("library", "text", "wrong"),
    [
        ("memtools/_core.so", "[a](https://x.org) [b](#c)", ""),
        ("memtools/_torch.so", "", r"holds _torch\.so and not _core alone"),
        ("memtools/_core.so", "[a](docs/a.md)", r"links to docs/a\.md, which is not there"),
        ("memtools/_core.so", '<img src="a.png">', r"links to a\.png"),
        ("memtools/_core.so", "```\n[a](docs/a.md)\n```\n", ""),
    ],
)
def test_a_wheel_has_no_shim_and_no_dead_link(
    library: str, text: str, wrong: str, tmp_path: Path
) -> None:
    wheel = tmp_path / "memtools-1.2.3.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(library, "")
        archive.writestr("memtools-1.2.3.dist-info/METADATA", f"Name: memtools\n\n{text}")
    if not wrong:
        assert "no library of torch" in release_check.check_wheel(wheel)
        return
    with pytest.raises(ReleaseError, match=wrong):
        release_check.check_wheel(wheel)


def test_a_command_that_fails_is_told_with_the_end_of_its_output(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match=r"(?s)^sh -c .* failed:\nhow$"):
        release_check.run("sh", "-c", "echo how >&2; exit 3", cwd=tmp_path)
