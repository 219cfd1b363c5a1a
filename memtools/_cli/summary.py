"""Prints the summary of `memtools run script`: what the script's process starts when it has ended.

    python -I -S _cli/summary.py RECORD NAME [--json]

By its path, in an interpreter that sees no environment and no installed packages: whatever the
script made of its own, this imports the memtools that it lies in.
"""

import os
import sys


def main(path: str, name: str, *form: str) -> int:
    """Print the summary of the record at `path`, which it calls `name`. Returns 1 where that is not
    possible: the caller has a line for it."""
    here = os.path.abspath(__file__)
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(here))))
    try:
        from memtools._record.summary import print_summary

        print_summary(path, name, as_json="--json" in form)
    except Exception:  # there is no memory, for example, or the record was removed
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
