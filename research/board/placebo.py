"""PaW on the observations of other transitions."""

from examples.one_file import Arm

ARM = Arm(placebo=True)
