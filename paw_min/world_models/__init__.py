"""Other uses of next observations, on the rows, models and environments of PaW: two papers.

    rwml         before RL (arXiv 2602.05842)
    word2world   in place of the environment (arXiv 2512.18832)
    supervised   cross entropy on given targets, for both
"""
