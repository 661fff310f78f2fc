"""PaW with other random numbers: how far apart two runs of one method are."""

import torch

from examples import one_file

original = one_file.top_alpha


def top_alpha(entropy, alpha):
    """The function of one_file.py. The draw changes what is sampled afterwards."""
    torch.rand(1)
    return original(entropy, alpha)
