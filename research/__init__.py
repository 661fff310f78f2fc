import paw_min  # noqa: F401 - before torch, and before what may be missing
