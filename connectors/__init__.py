"""Ways for pyinfra to reach hosts, installed through the entry points in pyproject.toml."""
