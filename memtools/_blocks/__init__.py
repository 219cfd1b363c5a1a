"""What torch's host allocator has given out: exact bytes, and the lines that asked for them."""
