"""Throw-away boxes with a real systemd and a real sshd on the developer's own machine (docs/lab.md)."""
