"""What one traced step says of the peak, beside the peak after really making the change.

    python -m benchmarks.blocks.lifetimes    # about six minutes; writes results/lifetimes.json

Each loop of benchmarks/blocks/loops runs some steps, of which two are traced. What is said to be
held in vain is then deleted in a copy of the loop's source, where the sentence says, and each other
change that is offered is made in one (edits.py). The peak of a copy is measured by the reports of
torch's host allocator, without a trace. With the `del` its losses must be equal to the bit. The
cost is that of the traced steps, in CPU time of the process.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

from benchmarks.blocks.edits import edited
from benchmarks.kit.harness import Json, arguments, environment, repeated, table, write_json
from benchmarks.kit.limits import Limit, finish, number_limit
from memtools import _core
from memtools._base.libraries import library_paths
from memtools._base.peak import Lowered, TracedPeak
from memtools._blocks.changes import DEL, changes_of
from memtools._blocks.invain import held_in_vain
from memtools._blocks.lifetimes import Trace, Tracer

LOOPS = (
    "gpt", "causal_lm", "encoder", "seq2seq", "grpo", "ppo", "conv", "unet", "graph", "lstm", "moe",
    "autoencoder",
)  # fmt: skip
STEPS, TRACED = 8, 4  # Steps 5 and 6 are traced.
OFF = 0.01  # A predicted peak may differ by this share from the measured one,
OFF_AGAIN = 0.03  # and by this one where parts of the forward pass run again.
OFF_ABOUT = 0.10  # and by this one in another precision.
AGAIN, ABOUT = ("checkpoint", "chunks"), ("autocast",)
MOST = 2.0  # A traced step may take so many times as long as a plain one.


class Run(NamedTuple):
    """A run of a loop: its losses, the CPU time of its steps in ms, and what was traced."""

    losses: list[float]
    ms: list[float]
    trace: Trace | None = None


def run(module: ModuleType, *, traced: bool) -> Run:
    blocks = _core.Blocks()
    blocks.start(library_paths())
    tracer, begun, ms = Tracer(blocks=blocks), [time.process_time()], list[float]()

    def ended() -> None:
        now = time.process_time()
        ms.append(1e3 * (now - begun[0]))
        if traced and len(ms) == TRACED:
            tracer.begin()
        elif traced and len(ms) == TRACED + 1:
            tracer.step_ended(look=True)
        elif traced and len(ms) == TRACED + 2:
            tracer.end()
        begun[0] = time.process_time() if len(ms) != TRACED + 1 else now

    with contextlib.redirect_stderr(io.StringIO()):
        losses = module.train(STEPS, ended)
    blocks.stop()
    return Run(losses, ms, tracer.trace() if traced else None)


def measured(module: ModuleType) -> int:
    """The peak of a step in bytes above what lives before it, by torch's allocator."""
    blocks = _core.Blocks()
    blocks.start(library_paths())
    count, found = [0], list[int]()

    def ended() -> None:
        count[0] += 1
        if count[0] == TRACED + 1:
            blocks.record(True)
        elif count[0] == TRACED + 2:
            blocks.record(False)
            contents = blocks.contents()
            assert contents is not None
            found.append(contents.peak_bytes)

    with contextlib.redirect_stderr(io.StringIO()):
        module.train(STEPS, ended)
    blocks.stop()
    return found[0]


def with_remedies(module: ModuleType, found: TracedPeak, folder: Path) -> ModuleType:
    """A copy of the loop with the lines that are to be written."""
    lines = Path(str(module.__file__)).read_text().splitlines()
    added: dict[int, list[str]] = {}
    for remedy in found.remedies:
        place = re.fullmatch(r"(before|after) (.*) \(.*:(\d+)\)( \(.*\))?", remedy.place)
        assert place is not None, remedy
        at = int(place[3]) - 1
        indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        for line in remedy.text.split("; "):
            if " = " in line:  # `loss = out.loss`: read the name from here on
                name, expression = line.split(" = ")
                lines = [one.replace(expression, name) if i >= at else one
                         for i, one in enumerate(lines)]  # fmt: skip
            added.setdefault(at + (place[1] == "after"), []).append(indent + line)
    text = "".join(
        f"{line}\n"
        for i in range(len(lines) + 1)
        for line in (*added.get(i, ()), *lines[i : i + 1])
    )
    return imported(text, folder)


def imported(text: str, folder: Path) -> ModuleType:
    path = folder / "changed.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def with_changes(module: ModuleType, name: str, offered: list[Lowered]) -> list[Json]:
    """What was offered: the peak that is said, and that of a copy of the loop with the change."""
    found, source = list[Json](), Path(str(module.__file__)).read_text()
    for one in offered:
        if one.name != DEL:
            with tempfile.TemporaryDirectory() as folder:
                peak = measured(imported(edited(source, name, one.name), Path(folder)))
            found.append({"change": one.name, "predicted": one.peak_bytes, "changed": peak})
    return found


def measure(name: str) -> Json:
    module = importlib.import_module(f"benchmarks.blocks.loops.{name}")
    plain, traced = run(module, traced=False), run(module, traced=True)
    assert traced.trace is not None
    found, deaths = held_in_vain(traced.trace)
    as_it_is = measured(module)
    begin = traced.trace.steps[1]
    row: Json = {
        "loop": name,
        "same": plain.losses == traced.losses,
        "operators": len(traced.trace.ops) - begin,
        "plain_ms": statistics.median(plain.ms[2:]),
        "traced_ms": max(traced.ms[TRACED : TRACED + 2]),
        "traced_peak": traced.trace.peak(begin)[1],
        "peak": as_it_is,
        "says": found.sentence(),
        "changes": with_changes(module, name, changes_of(traced.trace, found, deaths)),
    }
    if found.held:
        with tempfile.TemporaryDirectory() as folder:
            changed = with_remedies(module, found, Path(folder))
            row |= {
                "held": found.bytes,
                "predicted": found.lowered_bytes,
                "changed": measured(changed),
                "same_changed": run(changed, traced=False).losses == plain.losses,
            }
    return row


def mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.1f}"


def limits(rows: list[Json]) -> list[Limit]:
    changed = [row for row in rows if "changed" in row]
    off = max(
        *(abs(row["traced_peak"] / row["peak"] - 1) for row in rows),
        *(abs(row["predicted"] / row["changed"] - 1) for row in changed),
    )
    others = {AGAIN: 0.0, ABOUT: 0.0, (): 0.0}
    for one in (one for row in rows for one in row["changes"]):
        kind = one["change"].partition(":")[0]
        kinds = next((kinds for kinds in others if kind in kinds), ())
        others[kinds] = max(others[kinds], abs(one["predicted"] / one["changed"] - 1))
    cost = max(row["traced_ms"] / row["plain_ms"] for row in rows)
    wrong = sum(not row["same"] or not row.get("same_changed", True) for row in rows)
    return [
        number_limit("peaks, and peaks after a del", 100 * OFF, "%", 100 * off, 100 * off),
        number_limit("other changes", 100 * OFF, "%", *[100 * others[()]] * 2),
        number_limit("what runs again", 100 * OFF_AGAIN, "%", *[100 * others[AGAIN]] * 2),
        number_limit("another precision", 100 * OFF_ABOUT, "%", *[100 * others[ABOUT]] * 2),
        number_limit("a traced step", MOST, "x", cost, cost),
        number_limit("loops with other losses", 0, "", wrong, wrong),
    ]


def main() -> None:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(options.threads)
    if options.child:
        write_json(options.out, measure(options.child))
        return
    given = ["--threads", str(options.threads)]
    rows = [row for name in LOOPS for row in repeated(__file__, name, given, 1)]
    print(
        table(
            ("loop", "peak MiB", "traced", "in vain", "predicted", "after the del", "cost"),
            (
                (
                    row["loop"],
                    mib(row["peak"]),
                    mib(row["traced_peak"]),
                    *(mib(row[key]) if key in row else "-"
                      for key in ("held", "predicted", "changed")),
                    f"x{row['traced_ms'] / row['plain_ms']:.2f}",
                )
                for row in rows
            ),
        )
    )  # fmt: skip
    print(
        table(
            ("loop", "change", "predicted", "measured"),
            (
                (
                    row["loop"],
                    one["change"].partition(":")[0],
                    mib(one["predicted"]),
                    mib(one["changed"]),
                )
                for row in rows
                for one in row["changes"]
            ),
        )
    )
    print("\n".join(f"{row['loop']}: {row['says']}" for row in rows), file=sys.stderr)
    finish("lifetimes", options, environment(options.threads), {"rows": rows}, limits(rows))


if __name__ == "__main__":
    main()
