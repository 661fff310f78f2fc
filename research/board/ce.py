"""PaW with cross entropy in place of Eq. 7 and 8."""

from examples.one_file import Arm

ARM = Arm(loss="ce")
