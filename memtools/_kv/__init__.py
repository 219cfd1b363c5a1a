"""The KV cache: pools of pages, and leases of them."""
