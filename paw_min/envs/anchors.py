"""Clusters of similar states for GiGPO: which observations count as one anchor.

GiGPO groups the steps of a task by the state that they acted in. In search, two result pages are
rarely equal, so states are compared by the similarity of their texts.

Source: verl-agent, which compares by difflib at a threshold of 0.9. Comparing each pair by difflib
takes a minute per update of 1,280 episodes. An upper bound by the longest common subsequence leaves
few pairs to compare, with the same clusters (bench/anchors.py).
"""

from collections import defaultdict
from collections.abc import Sequence
from difflib import SequenceMatcher

from rapidfuzz.distance import LCSseq


def similar_anchors(group: Sequence, anchor: Sequence[str], threshold: float) -> list[int]:
    """Greedy first-fit clusters of texts: the cluster number of each row within its group.

    A row joins the first cluster of its group whose first text is at least `threshold` similar by
    difflib's ratio (of characters, autojunk on), or opens a new cluster. Equal texts always join
    the same cluster, so each distinct text is compared once.
    """
    if not 0.0 < threshold <= 1.0:
        raise ValueError(f"similarity={threshold} must lie in (0, 1]")
    representatives = defaultdict(list)  # group -> first text of each cluster
    seen = defaultdict(dict)  # group -> text -> cluster
    clusters = []
    for g, text in zip(group, anchor):
        if text not in seen[g]:
            for number, other in enumerate(representatives[g]):
                # The cheap bound first. The order of the arguments of difflib matters: its ratio
                # is not symmetric.
                if may_reach(text, other, threshold):
                    if SequenceMatcher(None, text, other).ratio() >= threshold:
                        break
            else:  # no cluster is similar: open a new one
                number = len(representatives[g])
                representatives[g].append(text)
            seen[g][text] = number
        clusters.append(seen[g][text])
    return clusters


def may_reach(a: str, b: str, threshold: float) -> bool:
    """False only if difflib's ratio 2 M / (|a| + |b|) is certainly below `threshold`.

    difflib takes milliseconds for a page of text, and its own quick bound counts letters, in which
    any two pages of English are similar. The M characters that it matches are a common subsequence,
    so M is at most the length of the longest one, which rapidfuzz computes 64 characters at a time.
    """
    if not a and not b:
        return True
    bound = LCSseq.similarity(a, b)
    # The same operations as in difflib, so that both round in the same way.
    return 2.0 * bound / (len(a) + len(b)) >= threshold
