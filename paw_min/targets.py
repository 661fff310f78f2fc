"""What the world model predicts: the next observation (the paper), a control, extensions, TAPO.

    --wm-target shuffled   the observations of other rows: the placebo. If a gain survives it, the
                           gain did not come from learning what actions do
    --wm-steps K           the next K observations, given the actions in between (the first limit
                           that section 7 of the paper leaves open)
    --dedup                equal transitions count once in Eq. 4 (the second)
    --wm-rows tapo         the same observations, in rows of their own: TAPO (transition_rows)

Off by default. The first two only replace `obs_ids` (and `given`) of the rows that learn() gets.

Legend: N rows.
"""

from dataclasses import replace

from paw_min.base.seeds import generator
from paw_min.config import Config
from paw_min.model.policy import Policy
from paw_min.rows import Rows, TokenRow

# The facts of TAPO's Fig. 7 and 9 (arXiv 2607.27973) in our words. Neither the task nor the history
# nor a thought is among them.
TRANSITION = """
You are modeling the transitions of an environment.
Its current observation is: {observation}
{admissible}The action that is executed now: {command}
Predict the next observation, and present it within <prediction> </prediction> tags.
"""
ADMISSIBLE = "Its admissible actions are: [{commands}].\n"
TAGS = ("<prediction>", "</prediction>")


def world_model_targets(
    cfg: Config, rows: list[TokenRow], trajectory: list[int]
) -> list[TokenRow]:
    """N rows with the targets that the settings ask for; `trajectory` labels each row."""
    if cfg.wm_steps > 1:
        rows = multi_step(rows, trajectory, cfg.wm_steps)
    if cfg.wm_target == "shuffled":
        rows = shuffled(rows, cfg.seed)
    return rows


def multi_step(rows: list[TokenRow], trajectory: list[int], k: int) -> list[TokenRow]:
    """Append a_{t+1} o_{t+2} ... o_{t+k} to each o_{t+1}, until the trajectory ends.

    rows: in time order within each trajectory. The actions in between are context, not targets.
    An empty observation ends the chain: after a purchase, or an invalid or the last turn of search.
    """
    # From the end to the start, so that the later rows of each trajectory are known.
    following: dict[int, list[TokenRow]] = {}  # trajectory -> its later rows, the nearest first
    longer = []
    for row, label in zip(reversed(rows), reversed(trajectory), strict=True):
        later = following.setdefault(label, [])
        ids = list(row.obs_ids)
        given = []
        for step in later:
            if not step.obs_ids or not ids:
                break
            between = step.response_ids + step.separator_ids
            given += range(len(ids), len(ids) + len(between))
            ids += between + step.obs_ids
        longer.append(replace(row, obs_ids=ids, given=given))
        later.insert(0, row)
        del later[k - 1 :]  # the row before this one reaches no further
    longer.reverse()
    return longer


def shuffled(rows: list[TokenRow], seed: int) -> list[TokenRow]:
    """Give each row with an observation that of another such row, by a random cycle from `seed`.

    A cycle over all rows leaves no row its own. Texts that occur several times may still coincide.
    A lone row with an observation gets none.
    """
    observed = [i for i, row in enumerate(rows) if row.obs_ids]
    result = list(rows)
    for i, source in random_cycle(observed, "shuffled", seed, len(observed)).items():
        if source == i:
            result[i] = replace(rows[i], obs_ids=[], given=[])
        else:
            result[i] = replace(rows[i], obs_ids=rows[source].obs_ids, given=rows[source].given)
    return result


def random_cycle(positions: list[int], *key) -> dict[int, int]:
    """Each position -> another one, along one cycle through all; a lone one -> itself."""
    order = list(positions)
    generator(*key).shuffle(order)
    return dict(zip(order, order[1:] + order[:1]))


def first_occurrences(rows: list[TokenRow]) -> list[bool]:
    """Whether (h, a, o') is the first of its kind among the rows."""
    seen = set()
    first = []
    for row in rows:
        key = (tuple(row.prompt_ids), tuple(row.response_ids), tuple(row.obs_ids))
        first.append(key not in seen)
        seen.add(key)
    return first


def transition_rows(cfg: Config, policy: Policy, rows: Rows) -> list[TokenRow]:
    """TAPO's row of each transition: o_t and the executed command -> o_{t+1}, as a chat.

    An answer of the assistant that nobody has sampled: the row has no response, and its `obs_ids`
    are <prediction>, the row's own, </prediction> and the end token. `--prompt compact` is for the
    stand-ins, which have words for neither the instructions nor the tags: it leaves both out. A row
    without an observation has no target. Limits: a prompt loses its beginning beyond
    `--max-prompt-tokens`, an answer its end beyond the model's positions.
    """
    opening, closing = [], []
    if cfg.prompt != "compact":
        opening, closing = map(policy.encode, TAGS)
    found = []
    for i, row in enumerate(rows.tokens):
        text = transition_prompt(cfg, rows.anchor[i], rows.admissible[i], rows.command[i])
        prompt = policy.encode_chat(text)[-cfg.max_prompt_tokens :]
        answer = []
        if row.obs_ids:
            answer = [*opening, *row.obs_ids, *closing, policy.eos_ids[0]]
        found.append(TokenRow(prompt, [], answer[: policy.positions - len(prompt)]))
    return found


def transition_prompt(cfg: Config, observation: str, admissible: list[str], command: str) -> str:
    """The user's message of such a row. Search admits any text and lists no commands."""
    if cfg.prompt == "compact":
        listed = ["| " + " | ".join(admissible)] if admissible else []
        return "\n".join([observation, *listed, f"> {command}"])
    shown = ""
    if admissible:
        shown = ADMISSIBLE.format(commands=", ".join(f"'{one}'" for one in admissible))
    return TRANSITION.format(observation=observation, admissible=shown, command=command)
