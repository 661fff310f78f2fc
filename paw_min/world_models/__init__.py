"""Other uses of next observations, on the rows, models and environments of PaW: two papers.

Reinforcement World Model Learning, before RL (arXiv 2602.05842):
    rwml               the method: reward, filter, thresholds, GRPO on predictions
    triplets           (history, action, next observation): collected, as prompts and labels
    early_experience   another use of triplets (arXiv 2510.08558): other actions, then imitation
    rwml_options       its settings and command line
    rwml_stages        its command: collect, filter, train; WM-SFT, early experience, placebos

Word2World, in place of the environment (arXiv 2512.18832):
    word2world           its measures and commands
    trajectories         episodes as chats
    players              who acts: a model, the rule-based teacher, chance
    dream                the model as an environment
    prompted             an instruct model as such a model, without training
    training             of world models, and of agents on trajectories
    options              its command line

supervised: cross entropy on given targets, for both.
"""
