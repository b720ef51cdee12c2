"""How many examples hypothesis tries: HYPOTHESIS_PROFILE=nightly for thousands of random ones, else a hundred fixed ones."""

import os

from hypothesis import settings

settings.register_profile("quick", max_examples=100, deadline=None, derandomize=True, database=None)
settings.register_profile("nightly", max_examples=2500, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
