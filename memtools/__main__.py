"""`python -m memtools` is the command line."""

import sys

from memtools._cli import main

if __name__ == "__main__":
    sys.exit(main())
