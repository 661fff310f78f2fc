"""Other uses of next observations, on the rows, models and environments of PaW.

    rwml         reinforcement world-model learning before RL (arXiv 2602.05842); WM-SFT; placebos
      answers    predictions and their reward
      filtering  which triplets are too easy
      triplets   what is collected, the prompts and labels; start: the model that all begin with
      job        settings and command line
    early_experience    prediction of other actions, then imitation (arXiv 2510.08558)

    word2world   a language model in place of the environment, judged by an agent's plans in it
                 (arXiv 2512.18832): measures and commands
      trajectories  episodes as chats; dream: the model as an environment; players: who acts in it
      training      of world models and agents
      options       the command line; records: what the commands write
      scaling       its accuracy by the size of the model and the number of trajectories

    supervised   cross entropy on given targets, the training loop that both need besides RL
"""
