"""Training loops as people write them, for benchmarks/blocks/lifetimes.py. Each has
`train(steps, ended)`, which calls `ended` at the end of each step, and returns the losses."""
