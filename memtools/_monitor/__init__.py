"""What memory does while a program runs: readings, limits, phases, guards, the run."""
