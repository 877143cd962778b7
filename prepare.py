"""pyinfra INVENTORY prepare.py: all of a deploy short of the switch. Build tonight, deploy in seconds tomorrow."""

from pyinfra import host

from connectors.keepalive import watch_connections
from roles.box import box
from roles.cuda_toolkit import cuda_toolkit
from roles.nvidia_userland import nvidia_userland
from roles.preflight import preflight
from roles.serve import releases
from roles.stacks import stacks
from roles.tools import tools

watch_connections()

if "gpu_boxes" in host.groups:
    plan = preflight(activates=False)
    box(plan)
    nvidia_userland(plan)
    cuda_toolkit(plan)
    tools(plan)
    stacks(plan)
    releases(plan)
