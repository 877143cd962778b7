"""Settings of the lab's nodes. Their driver is the lab's stand-in for NVIDIA's file (docs/lab-node.md)."""

from lab import driver_run

driver = driver_run.settings()
