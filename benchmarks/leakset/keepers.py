"""Of how many kinds of small keepers that leak the finding names the keeper.

    python -m benchmarks.leakset.keepers            # 56 programs of 200 steps, a minute
    python -m benchmarks.leakset.keepers --only tee # and what was said of it

Each program keeps some 20,000 bytes a step. scripts/keepers.txt has its name, the pattern that the
name in a finding at the end must match, what it sets up, and its step.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from textwrap import indent

from benchmarks.kit.harness import RESULTS, environment, table, write_json
from benchmarks.leakset.running import SCRIPTS

#: name, pattern, what is set up, one step
BLOCK = re.compile(r"^== (.+?): (.+)\n([\s\S]*?)^--\n((?:.+\n)+)", re.M)
TEXT = (SCRIPTS / "keepers.txt").read_text()
KEEPERS = {name: tuple(rest) for name, *rest in BLOCK.findall(TEXT)}

PROGRAM = """
import json, logging, memtools
logging.getLogger("memtools").setLevel(logging.CRITICAL)
BIG = 20_000
def big(): return bytearray(BIG)
{setup}
with memtools.MemoryMonitor(limit="8 GiB") as monitor:
    for i in range(200):
        {step}
        monitor.step()
    print(json.dumps([one.as_json() for one in monitor.findings()]))
"""


def said_of(name: str) -> tuple[bool, str]:
    """Whether the keeper is named, and all that is said."""
    pattern, setup, step = KEEPERS[name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.py"
        path.write_text(PROGRAM.format(setup=setup, step=indent(step, 8 * " ").strip()))
        done = subprocess.run(
            [sys.executable, str(path)], capture_output=True, text=True, check=False
        )
    found = json.loads(done.stdout.partition("\n")[0]) if done.returncode == 0 else []
    named = any(re.search(pattern, one["text"].partition(": +")[0]) for one in found)
    return named, " // ".join(one["text"] for one in found) or done.stderr.strip()[-200:] or "quiet"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="*", choices=list(KEEPERS), metavar="NAME")
    options = parser.parse_args()
    facts = environment(1)
    said = {name: said_of(name) for name in options.only or KEEPERS}
    print(table(("keeper", "named", "said"), [[n, "yes" if ok else "no", text[:160]]
                                              for n, (ok, text) in said.items()]))  # fmt: skip
    print(f"{sum(ok for ok, _ in said.values())} of {len(said)} are named")
    if not options.only:
        named = {name: ok for name, (ok, _) in said.items()}
        write_json(RESULTS / "keepers.json", {"environment": facts, "named": named})


if __name__ == "__main__":
    main()
