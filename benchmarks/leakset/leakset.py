"""How many real leaks a run reports, and what it reports of growth that is not a leak.

    python -m benchmarks.leakset.leakset                  # 21 loops, 5 to 10 minutes
    python -m benchmarks.leakset.leakset --only l02_lightning_val_outputs --keep /tmp/leakset
    python -m benchmarks.leakset.leakset --ours           # 28 loops of our own
    python -m benchmarks.leakset.leakset --real           # 33 programs with libraries of others
    python -m benchmarks.leakset.leakset --traced --memray   # what others blame: 30 minutes

The loops (scripts/) are rewritten from public threads, 13 leak and 8 do not. index.json has the
truth of each: the rate, the holder, and a pattern of its name. It is never changed to fit a result.
ours.json has 28 more that we wrote after such threads, of kinds which the others lack or where
memtools was wrong once: 60 to 500 steps each, 22 leak. memtools was changed for them, so they show
only what became worse.
real.json has 33 programs of 200 to 620 steps in which a library of others makes, keeps or runs what
grows: containers that a library owns, C memory behind small objects of an extension, buffers that
double, servers, threads and workers, and caches and buffers that fill; 22 leak. Their truth was
written before memtools saw them. A program is left out, with a line, where a library of it is not
installed: pip install what its `needs` names, with --no-deps where that would bring another torch.

The score is of what a user sees: `leaks` of `memtools explain --json`, the steps of the run's first
reports, and whether its own last lines agree.

- called: a finding is growing, likely or leak at the end;
- holder: a finding names the true holder (of C code: says that its holder is not known);
- rate: the rate of that finding, or of all that name that holder, is within 20 % of the truth;
- first: the step of the first report, suspect or above;
- made: `made_at` of that finding, at most two lines, has one where the leak is made; of the leaks
  that Python objects, tensors or arrays of this process make. Of tracemalloc and memray the first
  two lines count in the same way;
- kept: `kept_at` of that finding has a line where the leak is kept, in the same way, of the leaks
  that a line keeps;
- same: the sentence of each finding is among the run's own last lines;
- wrong: names at the end, suspect or above, of objects that hold nothing that leaks;
- forecast: the interval at the end contains the truth, by the rate at which what the limit counts
  grew in the run, and its highest by its lowest; in the JSON also those that the run reported on
  its way. A run without an interval says that it is not known, and does not count.

Beside it: what two points say that lie a fifth of the run from its start and at its end (as
`check_memory_leak` has it: more than 10 % or 50 MiB), the slope of a thread that reads psutil, and
with --traced and --memray the lines that tracemalloc and memray blame (peers.py). These do not
change with memtools, so a run without the two keeps the lines of the results that it replaces.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import memtools
from benchmarks.kit.harness import RESULTS, Json, environment, table, write_json
from benchmarks.leakset import peers, running
from memtools._base.size import format_bytes
from memtools._leak.finding import RANK, is_call

HERE = Path(__file__).resolve().parent
THREADS: Json = json.loads((HERE / "index.json").read_text())
OURS: Json = json.loads((HERE / "ours.json").read_text())
REAL: Json = json.loads((HERE / "real.json").read_text())
TRUTHS: Json = THREADS | OURS | REAL
NEAR = 0.2  # how far a rate may be from the truth
SUSPECT = RANK["suspect"]


@dataclass
class Score:
    """One loop: what was reported of it, and how much of that is right."""

    name: str
    leaks: bool
    steps: int | None = None
    seconds: float = 0.0
    grade: str = "quiet"
    best: str = "quiet"
    called: bool = False
    holder_ok: bool = False
    rate_ok: bool = False
    rate_ratio: float | None = None
    first_step: int | None = None
    made: bool | None = None
    made_at: str = ""
    kept: bool | None = None
    kept_at: str = ""
    same: bool = False
    wrong: list[str] = field(default_factory=list)
    forecast_ok: bool | None = None
    forecast_ratio: float | None = None
    on_the_way: list[tuple[int, bool, float]] = field(default_factory=list)
    true_rate: float | None = None
    limit_rate: float | None = None
    lines: list[str] = field(default_factory=list)
    last_lines: list[str] = field(default_factory=list)
    history: list[str] = field(default_factory=list)
    two_points: bool = False
    thread_ratio: float | None = None
    traced: str | None = None
    memray: str | None = None

    @property
    def all_right(self) -> bool:
        return self.called and self.holder_ok and self.rate_ok


def score(name: str, out: Path) -> Score:
    truth = TRUTHS[name]
    found = Score(name, truth["leaks"])
    explained = json.loads((out / f"{name}.json").read_text())
    if "error" in explained:
        found.lines = [explained["error"]]
        return found
    record = memtools.read_record(out / f"{name}.mem")
    polls, times = running.polls_of(name, out), running.step_times(record)
    # What other processes put into shared memory meanwhile is not this one's.
    if not {"children", "shm"}.intersection(truth["signal"] or ()):
        polls = [one._replace(children=0, shared=0) for one in polls]
    by_step, by_second = running.rate_by_steps(polls, times), running.rate_by_seconds(polls)
    found.steps, found.seconds = explained["steps"], explained["seconds"]
    found.true_rate = truth["true_rate"] or by_step
    found.limit_rate = by_step or found.true_rate
    leaks = explained["leaks"]
    _said(found, record, leaks)
    _ends_alike(found, (out / f"{name}.log").read_text(errors="replace"), leaks)
    right = _right_one(truth, leaks)
    found.holder_ok = found.leaks and right is not None
    _made(found, truth, right, leaks)
    standing = [one for one in leaks if RANK[one["grade"]] >= SUSPECT and one["holder"]]
    pattern = truth["holder_re"] or "(?!)"
    found.wrong = [one["holder"] for one in standing if not re.search(pattern, one["text"])]
    rated = right or next(iter(leaks), None)
    if found.leaks and rated is not None:
        true = found.true_rate if rated["per"] == "step" else by_second
        found.rate_ratio = _rate_of(truth, rated, leaks) / true if true else None
        found.rate_ok = found.rate_ratio is not None and abs(found.rate_ratio - 1) <= NEAR
        _forecast(found, rated, explained)
        _forecasts_on_the_way(found, record)
    _peers(found, polls, by_step, by_second)
    return found


def _said(found: Score, record: memtools.Record, leaks: Sequence[Json]) -> None:
    """The grades at the end, and the reports of the run on its way."""
    found.lines = [one["text"] for one in leaks]
    grades = [one["grade"] for one in leaks]
    found.grade = max(grades, key=RANK.__getitem__, default="quiet")
    found.called = is_call(found.grade)
    found.best = found.grade
    for event in record.events:
        if event.kind != "finding":
            continue
        found.history.append(f"{event.step}: {event.text}")
        grade = getattr(event.data, "grade", "quiet")
        if getattr(event.data, "over", True) or RANK.get(grade, 0) < SUSPECT:
            continue
        found.best = max(found.best, grade, key=RANK.__getitem__)
        if found.first_step is None:
            found.first_step = event.step


def _right_one(truth: Json, leaks: Sequence[Json]) -> Json | None:
    """The worst finding that names the true holder."""
    for one in leaks:
        if RANK[one["grade"]] < SUSPECT:
            continue
        if truth["holder_re"] is None:
            if not one["holder"] and one["kind"] == "C heap":
                return one
        elif re.search(truth["holder_re"], one["text"]):
            return one
    return None


def _rate_of(truth: Json, rated: Json, leaks: Sequence[Json]) -> float:
    """Of all findings that name the true holder, which may be in several workers or places."""
    if truth["holder_re"] is None or not re.search(truth["holder_re"], rated["text"]):
        return float(rated["rate_bytes"])
    alike = (one for one in leaks if re.search(truth["holder_re"], one["text"]))
    return float(sum(one["rate_bytes"] for one in alike if one["per"] == rated["per"]))


#: kinds of leaks that no line of this process's Python makes
ELSEWHERE = re.compile("child process|/dev/shm|C heap|processes")


def _made(found: Score, truth: Json, right: Json | None, leaks: Sequence[Json]) -> None:
    """Whether a line where the leak is made is reported: by the finding of its holder, if there is
    one."""
    if not found.leaks or ELSEWHERE.search(truth["kind"]):
        return
    said = [one["made_at"] for one in ([right] if right else leaks) if one["made_at"]]
    found.made_at = next(iter(said), "")
    found.made = _has_line(found.made_at, truth["made"])
    if truth["kept"]:
        found.kept_at = (right["kept_at"] or "") if right else ""
        found.kept = _has_line(found.kept_at, truth["kept"])


def _has_line(said: str, lines: Sequence[str]) -> bool:
    return any(part.partition(" in ")[0].endswith(tuple(lines)) for part in said.split(" and "))


def _ends_alike(found: Score, log: str, leaks: Sequence[Json]) -> None:
    """The last lines of a run begin with how long it took. Only the first has a forecast."""
    lines = [line for line in log.splitlines() if line.startswith("memtools: ")]
    begin = max((i for i, line in enumerate(lines) if "; peak" in line), default=len(lines))
    found.last_lines = [line.removeprefix("memtools: ") for line in lines[begin:]]
    found.last_lines = [line for line in found.last_lines if not line.startswith("Wrote ")]
    wanted = [one["text"].partition("; limit")[0] for one in leaks]
    found.same = all(any(line.startswith(text) for line in found.last_lines) for text in wanted)


def _forecast(found: Score, rated: Json, explained: Json) -> None:
    """Of the steps that are left, by the true rate and what was in use at the end."""
    left, used = rated["steps_left"], explained["used"]
    if not left or None in left or not found.limit_rate or not used or left[0] <= 0:
        return
    truth = (used["limit_bytes"] - used["last_bytes"]) / found.limit_rate
    found.forecast_ok = left[0] <= truth <= left[1]
    found.forecast_ratio = left[1] / left[0]


def _forecasts_on_the_way(found: Score, record: memtools.Record) -> None:
    """(step, whether it contains the truth, highest by lowest) of each forecast on the way."""
    for event in record.events:
        left = getattr(event.data, "steps_left", None)
        over = getattr(event.data, "over", True)
        if event.kind != "finding" or over or event.step is None or not left or not left[0]:
            continue
        used = running.used_at(record, event.time_ns)
        if used and found.limit_rate:
            truth = (running.LIMIT_BYTES - used) / found.limit_rate
            inside = bool(left[0] <= truth <= left[1])
            found.on_the_way.append((event.step, inside, left[1] / left[0]))


def _peers(
    found: Score, polls: Sequence[running.Poll], by_step: float | None, by_second: float | None
) -> None:
    known = [one.own for one in polls if one.own]
    if len(known) > 5:
        early, late = known[len(known) // 5], known[-3]
        found.two_points = late - early > min(0.1 * early, 50 * 2**20)
    true, rate = found.true_rate, by_step
    if true and rate:
        found.thread_ratio = rate / true


# --- the table ------------------------------------------------------------------------------------


def rows(scores: Sequence[Score]) -> list[list[str]]:
    def ratio(number: float | None) -> str:
        return "-" if number is None else f"{number:.2f}"

    def yes(value: bool | None) -> str:
        return "-" if value is None else "yes" if value else "no"

    found = []
    for one in scores:
        true = "-" if not one.true_rate else format_bytes(one.true_rate)
        found.append(
            [
                one.name,
                f"{one.steps or '-'}",
                f"{one.seconds:.0f} s",
                one.best,
                one.grade,
                f"{one.first_step if one.first_step is not None else '-'}",
                true,
                ratio(one.rate_ratio),
                yes(one.holder_ok) if one.leaks else "-",
                yes(one.all_right) if one.leaks else "-",
                yes(one.made),
                yes(one.kept),
                yes(one.same),
                f"{yes(one.forecast_ok)} {ratio(one.forecast_ratio)}",
                ", ".join(one.wrong) or "-",
                yes(one.two_points),
                ratio(one.thread_ratio),
                one.traced or "-",
                one.memray or "-",
            ]
        )
    return found


HEADER = ("loop", "steps", "took", "best", "end", "first", "true", "rate", "holder", "all", "made",
          "kept", "same", "forecast", "wrong names", "two points", "thread", "tracemalloc",
          "memray")  # fmt: skip


def summary(scores: Sequence[Score]) -> Json:
    leaks = [one for one in scores if one.leaks]
    free = [one for one in scores if not one.leaks]
    known = [one for one in leaks if one.forecast_ok is not None]
    way = [told for one in leaks for told in one.on_the_way]

    made = [one for one in leaks if one.made is not None]

    def blame(tool: str) -> str:
        """How many loops a tool blames a right line for."""
        said = {one.name: getattr(one, tool) for one in made if getattr(one, tool) is not None}
        if not said or peers.NOT_INSTALLED in said.values():
            return peers.NOT_INSTALLED if said else "not run"
        right = sum(
            not set(TRUTHS[name]["made"]).isdisjoint(lines.split()) for name, lines in said.items()
        )
        return f"{right} of {len(said)}"

    return {
        "leaks": len(leaks),
        "called": sum(one.called for one in leaks),
        "holder": sum(one.holder_ok for one in leaks),
        "rate": sum(one.rate_ok for one in leaks),
        "all three": sum(one.all_right for one in leaks),
        "all three, in the run's own last lines": sum(one.all_right and one.same for one in leaks),
        "made right": f"{sum(bool(one.made) for one in made)} of {len(made)}",
        "kept right": f"{sum(bool(one.kept) for one in leaks)} of "
        f"{sum(one.kept is not None for one in leaks)}",
        "made right by tracemalloc": blame("traced"),
        "made right by memray": blame("memray"),
        "first word by step 64": sum((one.first_step or 10**9) <= 64 for one in leaks),
        "forecast right": f"{sum(bool(one.forecast_ok) for one in known)} of {len(known)}",
        "forecasts on the way right": f"{sum(told[1] for told in way)} of {len(way)}",
        "highest by lowest, at most": f"{max((told[2] for told in way), default=0):.2f}",
        "no leak": len(free),
        "leak said of those": sum(one.best == "leak" for one in free),
        "likely or leak said of those on the way": sum(
            RANK[one.best] >= RANK["likely"] for one in free
        ),
        "called at the end of those": sum(one.called for one in free),
        "wrong names": sum(bool(one.wrong) for one in scores),
        "explain and the run say the same": sum(one.same for one in scores),
        "two points say leak of leaks": sum(one.two_points for one in leaks),
        "two points say leak of the others": sum(one.two_points for one in free),
        "slope of a thread within 20 %": sum(
            one.thread_ratio is not None and abs(one.thread_ratio - 1) <= NEAR for one in leaks
        ),
    }


def keep_blamed(scores: Sequence[Score], path: Path | None) -> str:
    """Give each loop that was not run under tracemalloc or memray the lines of the results that are
    replaced; returns the revision at which they were blamed, "" for none."""
    if path is None or not path.exists():
        return ""
    before = json.loads(path.read_text())
    loops = {loop["name"]: loop for loop in before["loops"]}
    for one in scores:
        old = loops.get(one.name, {})
        one.traced = one.traced or old.get("traced")
        one.memray = one.memray or old.get("memray")
    facts = before["environment"]
    return str(facts.get("blamed_at", facts["revision"]))


def is_complete(name: str) -> bool:
    """Whether the libraries of a program are installed; says which one is not."""
    for library in TRUTHS[name].get("needs", ()):
        if importlib.util.find_spec(library) is None:
            print(f"{name:28} left out: {library} is not installed", file=sys.stderr)
            return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="*", choices=sorted(TRUTHS), metavar="NAME")
    parser.add_argument("--ours", action="store_true", help="the loops of our own")
    parser.add_argument("--real", action="store_true", help="those with libraries of others")
    parser.add_argument("--keep", type=Path, help="a folder for records and logs")
    parser.add_argument("--traced", action="store_true", help="run each under tracemalloc, too")
    parser.add_argument("--memray", action="store_true", help="and under memray (pip install it)")
    parser.add_argument("--out", type=Path, help="where the JSON goes; by default results/")
    options = parser.parse_args()
    kind = "_ours" if options.ours else "_real" if options.real else ""
    names = options.only or list({"": THREADS, "_ours": OURS, "_real": REAL}[kind])
    names = [name for name in names if is_complete(name)]
    with tempfile.TemporaryDirectory() as folder:
        out: Path = options.keep or Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        facts = environment(1)  # when they ran
        for name in names:
            print(f"{name:28} {running.run(name, out):6.1f} s", file=sys.stderr, flush=True)
        scores = [score(name, out) for name in names]
        for one in scores:
            if one.leaks and options.traced:
                one.traced = peers.traced(one.name, one.steps or 0, out)
            if one.leaks and options.memray:
                one.memray = peers.memray(one.name, out)
    path = options.out or (None if options.only else RESULTS / f"leakset{kind}.json")
    if not (options.traced and options.memray):
        facts["blamed_at"] = keep_blamed(scores, path)
    print(table(HEADER, rows(scores)))
    total = summary(scores)
    print(table(("of all", "loops"), [[name, str(number)] for name, number in total.items()]))
    if path:
        content: dict[str, Any] = {"environment": facts, "summary": total}
        write_json(path, {**content, "loops": [asdict(one) for one in scores]})


if __name__ == "__main__":
    main()
