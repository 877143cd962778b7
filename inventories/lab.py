"""The lab's hosts. GPUBOX_LAB_BOXES names them, separated by spaces; `python -m lab up` brings them up."""

import os

from lab.settings import KNOWN_HOSTS, SSH_KEY, address

gpu_boxes = [
    (
        name,
        {
            "ssh_hostname": str(address(name)),
            "ssh_user": "root",
            "ssh_key": str(SSH_KEY),
            "ssh_known_hosts_file": str(KNOWN_HOSTS),
            "ssh_strict_host_key_checking": "yes",
            "ssh_allow_agent": False,
            "ssh_look_for_keys": False,
        },
    )
    for name in os.environ.get("GPUBOX_LAB_BOXES", "box1").split()
]
