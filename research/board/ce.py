"""PaW with cross entropy instead of Eq. 7 and 8."""

from examples.one_file import Arm

ARM = Arm(loss="ce")
