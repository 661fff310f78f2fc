"""GRPO, and cross entropy on all next observations (Eq. 5)."""

from examples.one_file import Arm

ARM = Arm(alpha=1.0, lambda_g="constant", loss="ce")
