"""Your values for every GPU box; docs/settings.md explains each. A host's own value in the inventory wins."""

ssh_user = "root"

stack = "cuda130-next"
standby_stacks = ["cuda128"]  # built and proved by every deploy: a rollback to it needs no network
server = "smollm2"
