"""A run.mem: what it holds, its events, and the figures of a run."""
