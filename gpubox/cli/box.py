"""The box that a verb acts on."""

from __future__ import annotations

from gpubox.health.prober import HttpProber
from gpubox.layout import Layout
from gpubox.rollout.activation import Box
from gpubox.rollout.drill import pause_if_asked
from gpubox.rollout.gates import ReleaseGates
from gpubox.rollout.service import SystemdService


def open_box() -> Box:
    layout = Layout()
    return Box(layout, SystemdService(), HttpProber(), ReleaseGates(layout), pause_if_asked)
