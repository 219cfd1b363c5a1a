"""A bounded history of gate tensors, their statistics, and the auxiliary loss."""
