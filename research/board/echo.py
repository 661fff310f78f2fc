"""ECHO (arXiv 2605.24517): cross entropy on all next observations, with a small weight."""

from examples.one_file import Arm

ARM = Arm(scale=0.05, alpha=1.0, lambda_g="constant", loss="ce")
