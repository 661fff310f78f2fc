"""Other uses of next observations, on the rows, models and environments of PaW.

    rwml         reinforcement world-model learning before RL (arXiv 2602.05842); WM-SFT; placebos
    early_experience   prediction of other actions, then imitation (arXiv 2510.08558)
    triplets, job      their data, prompts and files; their settings and command line
    word2world   a language model in place of the environment, judged by an agent's plans in it
                 (arXiv 2512.18832). It has trajectories as chats (trajectories.py), agents
                 (players.py), and the model as an environment (dream.py)
    supervised   cross entropy on given targets, the training loop that both need besides RL
"""
