"""What all tests share: property tests run without a deadline, because a busy machine is not a fault."""

from hypothesis import settings

settings.register_profile("telescope", deadline=None)
settings.load_profile("telescope")
