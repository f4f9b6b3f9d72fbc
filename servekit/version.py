"""The version, read by the build and by `servekit --version`."""

__version__ = "0.1.0"
