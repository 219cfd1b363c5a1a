"""`make release-check`: the list that a release goes through, as a program.

It stops at the first thing that is wrong, with one sentence, and leaves the two archives in
build/release. Nothing is uploaded.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

from tests.kit.sdist import unpacked
from tests.package.wheels import PROJECT, repaired

#: Kept out of the source distribution: what tools of the checkout alone read, and recorded figures.
NOT_PACKED = (".", "benchmarks/results")
# No torch is looked for, so the wheel is one for every torch.
SETTINGS = {"MEMTOOLS_TORCH_DIR": "", "PYTHONSAFEPATH": "1"}


class ReleaseError(Exception):
    """What is wrong with the release, in one sentence."""


def run(*command: str | Path, cwd: Path, **environ: str) -> str:
    """What a command prints. Raises ReleaseError with the end of its output if it fails."""
    env = {**os.environ, **SETTINGS, **environ}
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, env=env)
    if done.returncode != 0:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise ReleaseError(f"{' '.join(map(str, command))} failed:\n{said}")
    return done.stdout


def tracked(project: Path) -> list[str]:
    return run("git", "ls-files", cwd=project).splitlines()


def check_clean(project: Path) -> str:
    changed = run("git", "status", "--porcelain", cwd=project).splitlines()
    if changed:
        raise ReleaseError(
            f"{len(changed)} files differ from the last commit, such as {changed[0][3:]}"
        )
    return f"the checkout is {run('git', 'rev-parse', '--short', 'HEAD', cwd=project).strip()}"


def check_version(project: Path) -> str:
    """One version, which stands in one place, and has a section in the list of changes."""
    home = "memtools/_version.py"
    version = re.findall(r'^__version__ = "(.+)"', (project / home).read_text(), re.M)[0]
    said = re.compile(rf"[\"']{re.escape(version)}[\"']")
    parts = ("memtools/", "csrc/", "setup.py", "pyproject.toml")
    for name in tracked(project):
        if name != home and name.startswith(parts) and said.search((project / name).read_text()):
            raise ReleaseError(f"the version {version} stands in {name} too, not in {home} alone")
    sections = re.split(r"^## (.+)\n", (project / "CHANGELOG.md").read_text(), flags=re.M)
    texts = dict(zip(sections[1::2], sections[2::2], strict=True))
    if not texts.get(version, "").strip():
        raise ReleaseError(f"CHANGELOG.md has no section with text for version {version}")
    return f"version {version}, and CHANGELOG.md tells of it"


def check_sdist(archive: Path, names: list[str]) -> str:
    with tarfile.open(archive) as files:
        held = {name.partition("/")[2] for name in files.getnames()}
    missing = [name for name in names if not name.startswith(NOT_PACKED) and name not in held]
    if missing:
        raise ReleaseError(
            f"{archive.name} lacks {len(missing)} tracked files, such as {missing[0]}"
        )
    return f"{archive.name} holds all files: {archive.stat().st_size / 1e6:.1f} MB"


def check_wheel(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode().partition("\n\n")[2]
    libraries = [Path(name).name for name in names if name.endswith(".so")]
    if len(libraries) != 1 or not libraries[0].startswith("_core."):
        raise ReleaseError(f"the wheel holds {', '.join(libraries)} and not _core alone")
    links = dead_links(text)
    if links:
        raise ReleaseError(
            f"the long description links to {links[0]}, which is not there for its reader"
        )
    return f"{wheel.name} holds _core and no library of torch: {wheel.stat().st_size / 1e6:.1f} MB"


def dead_links(text: str) -> list[str]:
    """The relative links and pictures of a page in Markdown, outside of its code."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    found = re.findall(r"\]\(([^)\s]+)|\b(?:src|srcset|href)=\"([^\"]+)", text)
    links = ["".join(pair) for pair in found]
    return [link for link in links if not re.match(r"[a-z]+:|#", link)]


def check_install(wheel: Path, folder: Path) -> str:
    """In an environment of its own, from a folder without memtools."""
    venv.create(folder / "env")
    python = folder / "env/bin/python"
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "--python", python]
    run(*pip, "install", "--no-index", wheel, cwd=folder)
    code = "import memtools; print(memtools.__file__, memtools.GateHistory())"
    shown = run(python, "-W", "error", "-c", code, cwd=folder)
    if not shown.startswith(str(folder / "env")):
        raise ReleaseError(f"another memtools was imported: {shown.split()[0]}")
    run(python.with_name("memtools"), "doctor", cwd=folder)
    return "installed in a fresh environment: it imports, and memtools doctor finds nothing broken"


def check_all(project: Path, folder: Path, out: Path) -> None:
    """All of the list, in order. The archives are left in `out`."""
    tell(check_clean(project))
    tell(check_version(project))
    run(sys.executable, "-m", "build", "--sdist", "-o", folder, project, cwd=folder)
    (sdist,) = folder.glob("*.tar.gz")
    tell(check_sdist(sdist, tracked(project)))
    source = unpacked(sdist, folder / "unpacked")
    run(sys.executable, "-m", "build", "--wheel", "-o", folder, source, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    tell(check_wheel(wheel))
    run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel, cwd=folder)
    tell("twine check --strict finds nothing")
    wheel = repaired(wheel, folder / "wheels")
    check_wheel(wheel)
    tell(f"auditwheel: {wheel.name}")
    tell(check_install(wheel, folder))
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for archive in (sdist, wheel):
        shutil.copy(archive, out)
    tell(f"both are in {out.relative_to(project)}")


def tell(line: str) -> None:
    print(f"ok  {line}", flush=True)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="memtools-release-") as folder:
        try:
            check_all(PROJECT, Path(folder), PROJECT / "build/release")
        except (ReleaseError, subprocess.CalledProcessError) as wrong:
            print(f"not ready: {wrong}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
