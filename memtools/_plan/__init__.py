"""What a training step will need, before anything runs."""
