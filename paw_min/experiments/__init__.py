"""The paper's tables and figures as sweeps of the run scripts: sweep, then table or figures.

Nothing in the core imports this folder.
"""
