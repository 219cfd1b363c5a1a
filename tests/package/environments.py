"""Fresh environments, with a torch or without, and what stands in for a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import torch

#: Debug builds take a third of the time; a warning of next year's compiler is none of these tests'.
QUICK = {
    "MEMTOOLS_DEBUG": "1",
    "MEMTOOLS_WERROR": "",
    "MEMTOOLS_CUDA_HOME": "",
    "MEMTOOLS_TORCH_DIR": "",
}
SITE_PACKAGES = Path(torch.__file__).parents[1]


def run(*command: str | Path, cwd: Path, **environ: str) -> str:
    """What a command that must end well prints."""
    env = {**os.environ, **environ}
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def failure(*command: str | Path, cwd: Path, **environ: str) -> str:
    """What a command that must fail writes to stderr."""
    env = {**os.environ, **environ}
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, env=env)
    assert done.returncode != 0, done.stdout
    return done.stderr


def pip(python: str | Path, *arguments: str | Path, cwd: Path, **environ: str) -> str:
    """Run this environment's pip for another one, which needs none of its own."""
    command = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    return run(*command, "--python", str(python), *arguments, cwd=cwd, **environ)


class Environment:
    """A virtual environment with a wheel of memtools and nothing else.

    Its commands find nothing else by PATH: no compiler is there.
    """

    def __init__(self, folder: Path, wheel: Path) -> None:
        venv.create(folder / "env")
        self.folder, self.python = folder, folder / "env/bin/python"
        pip(self.python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
        (self.packages,) = (folder / "env/lib").glob("python*/site-packages")
        self.environ = {
            "PATH": str(folder / "env/bin"),
            "HOME": str(folder),
            "PYTHONSAFEPATH": "1",
        }

    def add_torch(self, version: str, commit: str) -> Path:
        """Make the torch of these tests importable here under another version, and all that it
        imports. Returns its file version.py."""
        for path in SITE_PACKAGES.iterdir():
            ours = path.name.lower().startswith(("memtools", "__editable__", "_memtools"))
            if not ours and path.suffix != ".pth" and path.name != "torch":
                (self.packages / path.name).symlink_to(path)
        folder = self.packages / "torch"
        folder.mkdir()
        for path in (SITE_PACKAGES / "torch").iterdir():
            if path.name != "version.py":
                (folder / path.name).symlink_to(path)
        self.upgrade_torch(version, commit)
        return folder / "version.py"

    def upgrade_torch(self, version: str, commit: str) -> None:
        text = (SITE_PACKAGES / "torch/version.py").read_text()
        text += f"\n__version__ = '{version}'\ngit_version = '{commit}'\n"
        # The first line of each name is the one that is read without an import.
        text = f"__version__ = '{version}'\ngit_version = '{commit}'\n{text}"
        (self.packages / "torch/version.py").write_text(text)

    def run(self, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
        program, *arguments = command
        line = [str(self.python.with_name(program)), *arguments]
        return subprocess.run(
            line, cwd=self.folder, env=self.environ | environ, capture_output=True, text=True
        )

    def uninstall(self, name: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pip", "-q", "--python", str(self.python)]
        return subprocess.run(
            [*command, "uninstall", "-y", name], cwd=self.folder, capture_output=True, text=True
        )
