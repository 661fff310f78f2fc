"""Other uses of next observations, on the rows, models and environments of PaW: two papers.

Reinforcement World Model Learning (RWML, arXiv 2602.05842), before RL:
    rwml               the method: predictions, reward, filter, thresholds, GRPO on answers
    triplets           (history, action, next observation): collected, as prompts and labels
    early_experience   labels of other actions, then imitation (arXiv 2510.08558)
    rwml_stages        the command: collect, filter, train by a method, measure
    rwml_options       its settings and flags

Word2World (arXiv 2512.18832), in place of the environment:
    word2world           the measures, and the commands
    trajectories         episodes as chats
    players              who acts: a language model, the rule-based teacher, chance
    world_model          a language model that answers as the environment
    prompted             an instruct model that does, without training
    dream                pools that it answers: an agent plays in it, a purchase is verified
    training             of world models, and of agents on trajectories
    word2world_options   settings and flags

supervised: cross entropy on given targets, for both.
"""
