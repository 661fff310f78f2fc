"""The clipped MAE on the transitions of Eq. 4; lambda_g is 1."""

from examples.one_file import Arm

ARM = Arm(lambda_g="constant")
