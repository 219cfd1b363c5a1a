"""`memtools demo`: the loop is really killed, and nothing is left behind however the demo ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import util
from pathlib import Path

import pytest

import memtools
from memtools import _cli as cli
from memtools._base import limits
from memtools._cli import demo, limited

DEMO = [sys.executable, "-m", "memtools", "demo"]
HOLD = "held = bytearray(16 << 20); print('16 MiB', flush=True); held = bytearray(256 << 20)"


@pytest.fixture
def without_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited, "GROUPS", Path("/nonexistent"))


# --- the limit ------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_group", [True, False])
def test_a_program_that_goes_beyond_the_limit_ends(
    in_group: bool, request: pytest.FixtureRequest
) -> None:
    if not in_group:
        request.getfixturevalue("without_groups")
    elif limited.enforced_by() != limited.GROUP:
        pytest.skip("no control group can be made here")
    pipe, command = subprocess.PIPE, [sys.executable, "-c", HOLD]
    with limited.limited(command, 128 << 20, stdout=pipe, stderr=pipe) as process:
        out, err = process.communicate(timeout=60)
    assert out == "16 MiB\n"
    ended = (-signal.SIGKILL, "") if in_group else (1, "MemoryError")
    assert (process.returncode, err.strip().rpartition("\n")[2]) == ended
    assert limited.enforced_by() == (limited.GROUP if in_group else limited.RLIMIT)
    assert not [*limited.GROUPS.rglob(f"memtools-demo-{os.getpid()}")]


@pytest.mark.parametrize(
    ("said", "where", "limits"),
    [
        ("4:memory:/job\n1:cpu:/\n0::/\n", "memory/job", {"memory.limit_in_bytes": "1024"}),
        ("0::/user/job\n", "user", {"memory.max": "1024"}),
    ],
)
def test_a_control_group_is_made_where_its_version_allows(
    said: str, where: str, limits: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "said").write_text(said)
    (tmp_path / where / "job").mkdir(parents=True)
    monkeypatch.setattr(limited, "OWN_GROUPS", tmp_path / "said")
    monkeypatch.setattr(limited, "GROUPS", tmp_path)
    group = limited._make_group(1024)
    assert group == tmp_path / where / f"memtools-demo-{os.getpid()}"
    found = {file.name: file.read_text() for file in group.iterdir()}
    assert found.pop("cgroup.procs").strip().isdecimal()
    assert found == limits


# --- the demo -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_loop_is_killed_after_a_finding_and_lives_with_the_fix(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = subprocess.run(
        [*DEMO, "-o", "made"], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    end = re.search(
        r"(Killed|Out of memory) after step (\d+), (\d+) steps after memtools named "
        r"list Trainer.outputs \(step (\d+)\)",
        said,
    )
    assert end is not None, done.stdout
    last, before, first = map(int, end.groups()[1:])
    assert before == last - first > 30
    assert "enforced by a control group" in said or end[1] == "Out of memory"
    assert re.search(r"Finished all 250 steps under the same limit", said)
    assert "both printed are the same to the last digit" in said
    leaky, fixed = (memtools.read_record(tmp_path / f"made/{n}.mem") for n in ("leaky", "fixed"))
    assert leaky.samples.values["step"][-1] == last
    assert fixed.events[-1].text == "exit: code 0"
    findings = [one.data for one in leaky.events if isinstance(one.data, memtools.LeakFinding)]
    assert "Trainer.outputs" in findings[-1].holder
    assert "leaky.py" in str(findings[-1])
    page = (tmp_path / "made/demo.html").read_text()
    assert "leaky.mem" in page
    assert "fixed.mem" in page
    assert sorted(os.listdir(tmp_path)) == ["made"]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["Ctrl-C", "a closed pipe"])
def test_nothing_is_left_behind(way: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pipe = subprocess.PIPE
    with subprocess.Popen(DEMO, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            if line.startswith("$ memtools run"):
                break
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 1
        if way == "a closed pipe":
            process.stdout.close()
        else:
            process.send_signal(signal.SIGINT)
        assert process.wait(60) == 1
        last = process.stderr.read().splitlines()[-1:]
    assert "Traceback" not in "".join(last)
    if way != "a closed pipe":
        assert last == ["memtools demo: interrupted"]
    assert not Path(f"/proc/{children[0]}").exists()
    assert not [*limited.GROUPS.rglob(f"memtools-demo-{process.pid}")]


def without_torch(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(demo.util, "find_spec", lambda name: None)
    return "the demo trains with torch, which is not installed; run pip install 'torch>=2.11'"


def with_a_broken_torch(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(demo, "IMPORT", "raise ImportError('libcudart.so.13: not found')")
    return "torch cannot be imported: ImportError: libcudart.so.13: not found"


def with_little_memory(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(demo, "IMPORT", "print('2.13.0', 160 << 20, 160 << 20)")
    monkeypatch.setattr(limits, "nearest_limit", lambda now: (512 << 20, 200 << 20))
    return "the demo needs 384.0 MiB of memory, only 312.0 MiB are left"


def in_a_folder_of_a_file(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(demo, "IMPORT", "print('2.13.0', 160 << 20, 160 << 20)")
    Path("taken").write_text("")
    monkeypatch.setattr(sys, "argv", ["memtools", "demo", "-o", "taken/made"])
    return "taken/made cannot be written: Not a directory; name another folder: memtools demo -o"


@pytest.mark.parametrize(
    "arrange", [without_torch, with_a_broken_torch, with_little_memory, in_a_folder_of_a_file]
)
def test_what_is_missing_is_said_in_one_sentence(
    arrange: Callable[[pytest.MonkeyPatch], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    if util.find_spec("torch") is None and arrange is not without_torch:
        pytest.skip("torch is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["memtools", "demo"])
    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)}
    sentence = arrange(monkeypatch)
    try:
        assert cli.main() == 1
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith(f"memtools demo: {sentence}")


def test_the_table_of_rescues_fits_in_60_columns() -> None:
    run = json.loads(demo.rescues())
    lines = [line for text in demo.table(run) for line in text.split("\n")]
    assert max(map(len, lines)) <= 60, lines
    for rescue in run["rescues"]:
        assert re.match(r"finished(, same losses)?$", rescue["ways"][-1]["ended"])
        assert re.search(r"update \d+$", rescue["ways"][0]["ended"])


def test_the_fix_is_one_line() -> None:
    assert demo.LOOP.count(demo.LEAKY) == 1
    compile(demo.LOOP.replace(demo.LEAKY, demo.FIXED), "fixed.py", "exec")
