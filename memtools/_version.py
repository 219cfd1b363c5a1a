"""The one version string; setup.py reads it and compiles it into the extension modules."""

__version__ = "0.1.0"
