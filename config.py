"""pyinfra's own settings; read from the current directory."""

from pyinfra import config

config.REQUIRE_PYINFRA_VERSION = "~=3.10"
config.FAIL_PERCENT = 0  # stop at the first host that fails: the others go on serving what they serve
