"""pyinfra INVENTORY deploy.py: every host becomes what this commit says. Groups to roles, nothing else."""

from pyinfra import host

from roles.box import box
from roles.preflight import preflight
from roles.serve import releases, serve
from roles.stacks import stacks
from roles.tools import tools

if "gpu_boxes" in host.groups:
    plan = preflight()
    box(plan)
    tools(plan)
    stacks(plan)
    releases(plan)
    serve(plan)
