"""PaW."""

from examples.one_file import Arm

ARM = Arm()
