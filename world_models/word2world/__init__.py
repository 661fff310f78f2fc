"""Word2World (arXiv 2512.18832): a language model in place of the environment.

README.md says which file has what, and in which order to read them.
"""

from world_models.word2world.commands import main
from world_models.word2world.measures import (
    exact_match,
    measure_consistency,
    measure_fidelity,
    rates,
    replay_actions,
)

__all__ = [
    "exact_match", "main", "measure_consistency", "measure_fidelity", "rates", "replay_actions",
]
