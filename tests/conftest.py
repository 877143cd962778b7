"""Property tests look for new cases on a developer's machine and repeat the same ones where CI has to be repeatable.

No deadline: how long a case takes says more of what else the machine does.
"""

import os

from hypothesis import settings

settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")
