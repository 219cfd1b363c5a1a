"""What it costs to record what lived at the peak of a step, beside torch's own profiler.

    python -m benchmarks.blocks.peak           # about two minutes; writes results/peak.json
    python -m benchmarks.blocks.peak --quick

Each model of tests/blocks/peakmodels.py runs in four ways, in turn, in CPU time of the process:
plain; with a recording of memtools._core.Blocks; with the other work of a monitor, which is a pass
over the heap for modules and optimizers before the step, and the answer with its lines after it;
and under torch.profiler.profile(profile_memory=True, with_stack=True), without reading its result.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.kit.harness import Json, arguments, environment, repeated, table, write_json
from benchmarks.kit.limits import Limit, finish, number_limit
from memtools import _core
from memtools._base.libraries import library_paths
from memtools._blocks.recorder import Recording
from memtools._blocks.tensors import Tensors
from memtools._monitor.run import spot_of
from tests.blocks.peakmodels import MODELS, Step

MOST = 2.5  # A recorded step may take so many times as long as a plain one.


def plain(step: Step, blocks: _core.Blocks) -> None:
    step()


def recorded(step: Step, blocks: _core.Blocks) -> None:
    blocks.record(True)
    step()
    blocks.record(False)


def with_its_ends(step: Step, blocks: _core.Blocks) -> None:
    recording = Recording(blocks, Tensors())
    recording.begin(60.0)
    step()
    found = recording.end(3, spot_of)
    recording.close()
    assert found is not None


def profiled(step: Step, blocks: _core.Blocks) -> None:
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, with_stack=True
    ):
        step()


WAYS: dict[str, Callable[[Step, _core.Blocks], None]] = {
    "plain": plain,
    "recorded": recorded,
    "with its ends": with_its_ends,
    "torch.profiler": profiled,
}


def measure(name: str, rounds: int) -> Json:
    """Median and least CPU time of a step, in milliseconds, by the way in which it is run."""
    blocks = _core.Blocks()
    blocks.start(library_paths())
    torch.manual_seed(7)
    step = MODELS[name]()
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        for way, run in WAYS.items():
            gc.collect(1)  # the profiler leaves much garbage
            begun = time.process_time()
            run(step, blocks)
            if number:  # the first round warms up
                times[way].append(1e3 * (time.process_time() - begun))
    blocks.stop()
    return {
        "loop": name,
        "objects": len(gc.get_objects()),
        "median_ms": {way: statistics.median(values) for way, values in times.items()},
        "least_ms": {way: min(values) for way, values in times.items()},
    }


def limits(rows: list[Json]) -> list[Limit]:
    found = []
    for way in ("recorded", "with its ends"):
        least, middle = (
            max(row[kind][way] / row[kind]["plain"] for row in rows)
            for kind in ("least_ms", "median_ms")
        )
        found.append(
            number_limit(f"{way}: the most of {len(rows)} loops", MOST, "x", least, middle)
        )
    return found


def main() -> None:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(options.threads)
    if options.child:
        write_json(options.out, measure(options.child, int(options.seconds)))
        return
    given = ["--seconds", "3" if options.quick else "15", "--threads", str(options.threads)]
    rows = [row for name in MODELS for row in repeated(__file__, name, given, 1)]
    print(
        table(
            ("loop", "plain", "recorded", "with its ends", "torch.profiler"),
            (
                (
                    row["loop"],
                    f"{row['median_ms']['plain']:.1f} ms",
                    *(
                        f"x{row['median_ms'][way] / row['median_ms']['plain']:.2f}"
                        for way in list(WAYS)[1:]
                    ),
                )
                for row in rows
            ),
        )
    )
    finish("peak", options, environment(options.threads), {"rows": rows}, limits(rows))


if __name__ == "__main__":
    main()
