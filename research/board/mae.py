"""PaW without the mask of Eq. 7."""

from examples.one_file import Arm

ARM = Arm(rho=1.0)
