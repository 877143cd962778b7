"""A stand-in for the SGLang server; see launch_server."""

__version__ = "0.1.0"
