"""Settings of the lab's boxes; they win over group_data/ at the top, which holds the operator's own values."""

stack = "cuda130-next"
standby_stacks = ["cuda128"]
server = "smollm2"
overlay = "cpu"
python = "3.11"
listen_address = "0.0.0.0"
