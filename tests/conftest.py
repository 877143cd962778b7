"""Property tests look for new cases on a developer's machine and repeat the same ones where CI has to be repeatable."""

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
