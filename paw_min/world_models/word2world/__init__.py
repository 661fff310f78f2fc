"""Word2World (arXiv 2512.18832): a language model in place of the environment.

README.md says what to read, and in which order.

    measures       fidelity and consistency, by hand-sized functions
    trajectories   episodes as chats
    world_model    a language model that answers as the environment
    prompted       an instruct model that does, without training
    dream          pools that it answers: an agent plays in it, a purchase is verified
    players        who acts: a language model, the rule-based teacher, chance
    training       of world models, and of agents on trajectories
    settings       what the command line asks for
    commands       collect, train, fidelity, consistency, verify, imitate
"""

from paw_min.world_models.word2world.commands import main
from paw_min.world_models.word2world.measures import (
    exact_match,
    measure_consistency,
    measure_fidelity,
    rates,
    replay_actions,
)

__all__ = [
    "exact_match", "main", "measure_consistency", "measure_fidelity", "rates", "replay_actions",
]
