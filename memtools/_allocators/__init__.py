"""How torch's CUDA allocator and malloc are set, and what to set."""
