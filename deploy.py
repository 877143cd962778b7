"""pyinfra INVENTORY deploy.py: every host becomes what this commit says. Groups to roles, nothing else."""

from pyinfra import host

from connectors.keepalive import watch_connections
from roles.box import box
from roles.container import container
from roles.cuda_toolkit import cuda_toolkit
from roles.nodes_come_first import nodes_come_first
from roles.nvidia_userland import nvidia_userland
from roles.preflight import preflight
from roles.proxmox_node import preflight_node, proxmox_node
from roles.serve import releases, serve
from roles.stacks import stacks
from roles.tools import tools

watch_connections()

if "proxmox_nodes" in host.groups:
    proxmox_node(preflight_node())
    container()

nodes_come_first()

if "gpu_boxes" in host.groups:
    plan = preflight()
    box(plan)
    nvidia_userland(plan)
    cuda_toolkit(plan)
    tools(plan)
    stacks(plan)
    releases(plan)
    serve(plan)
