"""Who holds what: counts of objects and tensors, holders, paths, graphs, cycles."""
