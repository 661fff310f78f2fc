"""PaW: policy and world-model co-training for language agents (arXiv 2606.02388)."""

import os

# Must be set before torch is imported. OpenMP threads spin while they wait by default, which makes
# torch 10 to 30 times slower as soon as the cores have anything else to do.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
