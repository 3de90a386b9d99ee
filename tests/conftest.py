"""One hypothesis profile for all tests: the same examples on every run."""

from hypothesis import settings

settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")
