"""RL alone."""

from examples.one_file import Arm

ARM = Arm(scale=0.0)
