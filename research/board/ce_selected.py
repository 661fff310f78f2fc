"""Cross entropy on the transitions of Eq. 4."""

from examples.one_file import Arm

ARM = Arm(lambda_g="constant", loss="ce")
