"""Adapters to the libraries people use. Each module imports its library; `memtools` imports none of
them, and nothing here is loaded before you import it."""
