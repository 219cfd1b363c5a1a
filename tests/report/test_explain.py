"""`memtools explain`: what it says of real and made-up records, and of files that are none."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import memtools
from memtools import _cli as cli
from memtools import _core
from memtools._base.peak import TracedPeak
from memtools._record.events import ending
from memtools._record.figures import figures_of
from memtools._record.kinds import Cleanup, End, Event, GuardAct, OutOfMemory, Start
from memtools.report._advice import advise
from tests.report.reportcases import LEAK, MIB, SIGKILLED, event, recorded, traced, write


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "run.mem")


def explain(capsys, *args: str) -> str:
    assert cli.main(["explain", *args]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_a_killed_leak_is_told_with_its_limit_holder_and_what_to_do(path, capsys):
    events = [Start(), replace(LEAK, rate_bytes=256.0 * 1024)]
    write(path, grows=256 * 1024, limit=1024 * MIB, events=events, steps=2890, close=False)
    out = explain(capsys, path)
    assert out.startswith("It was ended by SIGKILL or os._exit() (no end mark); at")
    assert "; the control group 1022.4 MiB of 1.00 GiB (cgroup limit, 99.8 %), 1.98 s after" in out
    assert "out-of-memory killer most likely ended it" in out
    assert "fix: clear it after use, or use deque(maxlen" in out
    held = r"  leak  list MoEBlock\.gate_history  \+256\.0 KiB/step.*limit reached\n"
    assert re.search(held, out)
    assert "monitor.guard(0.90" in out


def test_the_moment_of_passing_95_percent_is_that_of_the_series(path):
    write(path, grows=256 * 1024, limit=1024 * MIB, steps=2890, close=False)
    facts = figures_of(memtools.read_record(path))
    used = [300 * MIB + 262144 * s + (s * 7919 % 64) * 4096 for s in range(2890)]
    below = max(s for s in range(2890) if used[s] < 0.95 * 1024 * MIB)
    assert facts.used is not None
    assert facts.used.near_since_seconds == pytest.approx((2889 - below - 1) * 0.01)
    assert facts.used.peak_bytes == max(used)
    assert facts.used.last_bytes == used[-1]


@pytest.mark.parametrize("counted", [True, False])
def test_growth_is_judged_from_the_series_where_the_record_has_no_verdict(path, capsys, counted):
    write(path, grows=65536, limit=1024 * MIB, steps=6000, counted=counted)
    out = explain(capsys, path)
    rate, per = (65536, "step") if counted else (65536 * 100, "s")
    assert re.search(rf"leak  memory in use  \+[\d.]+ [KM]iB/{per}  limit in ", out)
    left = (1024 - 300 - 375) * MIB / 65536 / 100
    (growth,) = figures_of(memtools.read_record(path)).verdict.findings
    assert growth.seconds_left is not None
    assert growth.rate_bytes == pytest.approx(rate, rel=0.05)
    assert growth.seconds_left[0] <= left <= growth.seconds_left[1]


ENDS: dict[End, tuple[str, str]] = {
    End("normal"): ("clean", "finished"),
    End("stop()"): ("clean", "finished"),
    End(code=0): ("clean", "finished (exit code 0)"),
    End("the program ended without stop()"): (
        "clean",
        "finished: the program ended without stop()",
    ),
    End(code=3): ("failed", "it ended with exit code 3"),
    End(exception="ValueError", text="exit 0"): (
        "failed",
        "it ended by exception ValueError: exit 0",
    ),
    End("not started", "No such file"): ("failed", "it was not started, No such file"),
    SIGKILLED: ("killed", "it was killed by SIGKILL"),
    End(code=137): ("killed", "it ended with exit code 137"),
}


@pytest.mark.parametrize("end", ENDS, ids=End.clause)
def test_the_end_mark_says_how_it_ended(end, path):
    write(path, steps=3, events=[End(code=7), end])
    found = ending(memtools.read_record(path))
    assert (found.kind, found.text) == ENDS[end]


def test_without_an_end_mark_the_file_itself_says_it(path, tmp_path):
    write(path, steps=3)
    assert ending(memtools.read_record(path)).kind == "clean"
    other = str(tmp_path / "other.mem")
    write(other, steps=3, close=False)
    lost = ending(memtools.read_record(other))
    assert lost.kind == "gone"
    assert "killed" not in lost.text  # it may have left by os._exit()
    with _core.RecordWriter(str(tmp_path / "now.mem"), ["x"]):
        assert ending(memtools.read_record(tmp_path / "now.mem")).kind == "running"


def falling(path: str, *events: Event) -> str:
    """A command watched from outside: 2 s at 297 MiB of 300 (once 299), then it ends in 0.2 s."""
    with _core.RecordWriter(path, [("rss", "B"), ("cgroup_used", "B")]) as writer:
        writer.event(*event(Start(command="x", given_bytes=300 * MIB)))
        for i in range(220):
            used = 5 * (219 - i) if i >= 200 else 299 if i == 5 else 297
            writer.append(10**15 + i * 10**7, [used * MIB, 7])
        for one in events:
            writer.event(*event(one))
    return path


def test_memory_that_falls_while_a_command_ends_does_not_hide_the_limit(path, capsys):
    falling(path, SIGKILLED)
    out = explain(capsys, path)
    assert out.startswith(
        "It was killed by SIGKILL; in its last second: the process tree 297.0 MiB of 300.0 MiB "
        "(given limit, 99 %), 1.99 s after passing 95 %.\n"
    )
    assert "by whatever enforces that limit" in out


def test_what_the_guard_did_is_the_reason_of_the_end(path, capsys):
    falling(path, GuardAct("SIGTERM", 0.9, 297 * MIB, 300 * MIB, "given"), End(signal="SIGTERM"))
    out = explain(capsys, path)
    did = "297.0 MiB of 300.0 MiB (given) used, 99 % (guard: 90 %): sent SIGTERM"
    assert f"- the guard acted before the limit did: {did}\n" in out
    assert "set monitor.guard" not in out


def test_cleanups_are_added_up_by_what_was_done(path):
    both = Cleanup(("gc", "malloc_trim"), (3.0, 0.5), ("12 objects",), 4 * MIB)
    one = Cleanup(("gc",), (3.0,), (), 0, 2**30)
    write(path, steps=3, events=[both, both, one])
    rows = figures_of(memtools.read_record(path)).cleanups
    assert [(r.what, r.count, r.freed_bytes) for r in rows] == [
        ("gc", 1, 2**30),
        ("gc, malloc_trim", 2, 8 * MIB),
    ]
    assert rows[1].seconds == pytest.approx(0.007)


def test_json_has_the_same_figures(path, capsys):
    write(path, grows=65536, steps=6000, device=True, events=[LEAK])
    found = json.loads(explain(capsys, path, "--json"))
    facts = figures_of(memtools.read_record(path))
    assert found["headline"] == facts.headline()
    assert found["steps"] == 5999
    assert found["used"]["limit_bytes"] == 2**30
    assert found["used"]["peak_bytes"] == facts.used.peak_bytes  # type: ignore[union-attr]
    assert found["leaks"] == json.loads(json.dumps([f.as_json() for f in facts.verdict.findings]))
    assert [phase["name"] for phase in found["phases"]] == ["train", "eval"]
    assert found["phases"][0]["peak_bytes"] == 302 * MIB
    held = {"grade": "leak", "holder": "list MoEBlock.gate_history", "per": "step"}
    assert held.items() <= found["leaks"][0].items()
    assert [growth["signal"] for growth in found["leaks"]] == ["heap"]


# --- files that are no record ---------------------------------------------------------------------


def refused(capsys, command: str, *args: str) -> str:
    assert cli.main([command, *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"memtools {command}: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("command", ["explain", "report"])
def test_no_file_and_a_folder_get_one_sentence_too(command, tmp_path, capsys):
    error = refused(capsys, command, str(tmp_path / "none.mem"))
    assert f"there is no record {tmp_path / 'none.mem'}; memtools run writes one" in error
    assert "is a directory; give the run.mem file" in refused(capsys, command, str(tmp_path))
    odd = str(tmp_path / "a\x1b[31m\n.mem")
    assert "\x1b" not in refused(capsys, command, odd)
    refused(capsys, command, "a\0b")


def test_after_a_device_ran_out_a_guard_of_it_is_advised(tmp_path: Path) -> None:
    advised = 'monitor.guard(0.90, device="cuda")'
    out = OutOfMemory(0, 3 << 30, 70 << 30, 75 << 30, 1 << 30, 79 << 30, 2 << 30)
    act = GuardAct("raise", 0.9, 72 << 30, 79 << 30, "cuda:0", device=0)
    cases: list[tuple[list[Event], bool]] = [([out], True), ([act, out], False)]
    for events, is_advised in cases:
        path = str(tmp_path / "run.mem")
        write(path, steps=40, events=events)
        lines = advise(figures_of(memtools.read_record(path)))
        assert any("device ran out of memory" in line for line in lines)
        assert any(advised in line for line in lines) == is_advised


# --- changes that are replayed --------------------------------------------------------------------

UNTRACED = "memtools explain: --with needs two traced steps: "


def test_changes_are_replayed_together_in_text_and_json(path, capsys):
    write(path, events=[recorded(3, MIB, traced=traced())])
    assert explain(capsys, path, "--with", "fused, zero_grad") == (
        "With these changes together, the peak of 60.0 MiB becomes 40.0 MiB, in the forward pass "
        "(aten.mm):\n"
        "  fused      an optimizer with fused=True\n"
        "  zero_grad  nothing\n"
    )
    facts = json.loads(explain(capsys, path, "--json", "--with", "fused"))
    assert facts == {
        "with": {
            "changes": [{"name": "fused", "change": "an optimizer with fused=True"}],
            "traced_peak_bytes": 60 * MIB,
            "peak_bytes": 40 * MIB,
            "phase": "forward",
            "operator": "aten.mm",
        }
    }


@pytest.mark.parametrize(
    ("found", "given", "says"),
    [
        (
            traced(), "fused,del",
            "memtools explain: there is no change 'del' of this step: the names are zero_grad, ",
        ),
        (traced()._replace(kept=("x",)), "fused", "memtools explain: its trace cannot be read: "),
        (
            traced()._replace(kept=()), "fused",
            UNTRACED + "their storages do not fit into the 40,000 characters of a record",
        ),
        (
            TracedPeak(why="a profiler of torch is on"), "fused",
            UNTRACED + "they were not traced: a profiler of torch is on",
        ),
        (None, "fused", UNTRACED + "nothing was traced after the step with the highest peak"),
    ],
)  # fmt: skip
def test_what_cannot_be_replayed_is_refused_in_a_sentence(path, capsys, found, given, says):
    write(path, events=[recorded(3, MIB, **({} if found is None else {"traced": found}))])
    assert cli.main(["explain", path, "--with", given]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(says)
    assert err.count("\n") == 1


def test_changes_need_a_record(path, tmp_path, capsys):
    (tmp_path / "log.txt").write_text("CUDA out of memory. Tried to allocate 2.00 GiB")
    write(path)
    for args in ([str(tmp_path / "log.txt")], ["--exit-code", "137"], [path]):
        assert cli.main(["explain", *args, "--with", "fused"]) == 2
        assert "--with" in capsys.readouterr().err
