"""Clusters of similar texts: the states of GiGPO where observations are rarely equal.

Only search uses them (`similarity` of its Benchmark): two result pages differ nearly always. As in
verl-agent, with a threshold of 0.9.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from difflib import SequenceMatcher

from rapidfuzz.distance import LCSseq


def similar_anchors(
    group: Sequence[Hashable], anchor: Sequence[str], threshold: float
) -> list[int]:
    """Greedy first-fit clusters of texts: the cluster number of each row within its group.

    A row joins the first cluster of its group whose first text is similar, or opens a new cluster.
    """
    if not 0.0 < threshold <= 1.0:
        raise ValueError(f"similarity={threshold} must lie in (0, 1]")
    first_texts = defaultdict(list)  # group -> the first text of each of its clusters
    cluster_of = {}  # (group, text) -> cluster; each distinct text is compared once
    for g, text in zip(group, anchor):
        if (g, text) not in cluster_of:
            known = first_texts[g]
            fits = (k for k, first in enumerate(known) if is_similar(text, first, threshold))
            cluster_of[g, text] = next(fits, len(known))
            if cluster_of[g, text] == len(known):
                known.append(text)
    return [cluster_of[key] for key in zip(group, anchor)]


def is_similar(a: str, b: str, threshold: float) -> bool:
    """Is difflib's ratio 2 M / (|a| + |b|) of two different texts at least `threshold`?

    difflib (of characters, autojunk on) takes milliseconds for a page of text, a minute per update
    of 1,280 episodes. The M characters that it matches are a common subsequence, so M is at most
    the length of the longest one, which rapidfuzz computes 64 characters at a time. (difflib's own
    quick bound counts letters, in which any two pages of English are similar.)
    """
    longest = LCSseq.similarity(a, b)
    if 2.0 * longest / (len(a) + len(b)) < threshold:  # rounds as difflib does
        return False
    return SequenceMatcher(None, a, b).ratio() >= threshold
