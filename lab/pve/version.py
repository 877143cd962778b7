"""Which Proxmox VE the lab's node says it is: 8.4, since the node's system is Debian 12."""

VERSION = "8.4.14"
RELEASE = "8.4"
REPOSITORY_ID = "b502d23c55afcba1"
