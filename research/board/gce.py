"""Generalized cross entropy (arXiv 1805.07836), between cross entropy (q -> 0) and MAE (q = 1)."""

Q = 0.5


def clipped_mae(logp, rho):
    """(B, O) -> (B,). The gradient of a token is p^q times that of cross entropy."""
    return ((1 - (Q * logp).exp()) / Q).mean(-1)
