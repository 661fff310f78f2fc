"""Two related papers, on the rows, models and environments of PaW. paw_min imports none of this.

    rwml         before RL: predict what actions do (arXiv 2602.05842)
    word2world   in place of the environment: play in a learned one (arXiv 2512.18832)
    teachers     rule-based players of the generated data, and the stand-ins that imitated them
    supervised   cross entropy on given targets, for both
    stage        what the long commands share: a rerun skips what is complete

Their random draws, as in paw_min/base/seeds.py. Outside an update, its number is 0:

    draw                         key                                    function
    ---------------------------  -------------------------------------  ----------------------------
    tokens of answers            seed, update, number of the answer     rwml.predict
    triplets of an update        "rwml", seed, epoch                    rwml.batch_of_update
    held-out triplets            "held out", seed                       rwml.stages.make_triplets
    triplets of the filter       "validation", seed                     rwml.stages.split
    rehearsed responses          "rehearsal", seed                      rwml.stages.make_start
    easy triplets that stay      "too easy", seed                       rwml.stages.make_filter
    embeddings of new tags       seed                                   rwml.stages.add_tags
    mistakes of a teacher        "demonstrations", seed, haste          teachers.*.demonstrations
    other commands of a state    "branches", seed, number of the state  early_experience.branches
    order of rows in an epoch    ("rwml" or "word2world", seed), epoch  supervised.fit
    commands of a player         its name, seed, number of the episode  players.play_rules
    examples in a prompt         "shots", seed                          prompted.draw_examples
    trajectories that are used   "limit", seed                          training.train
    weights of a world model     seed                                   training.train
"""

import paw_min  # noqa: F401 - sets variables that torch reads when it is imported
