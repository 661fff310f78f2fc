"""The paper's tables and figures: sweeps of the run scripts, tables, figures, analyses of rollouts.

Nothing in the core imports this folder.
"""
