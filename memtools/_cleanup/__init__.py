"""When to clean up and what that brings: policy, cadence, actions, gc, managed."""
