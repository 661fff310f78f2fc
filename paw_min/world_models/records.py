"""What the commands of word2world.py write: the fields of their JSON files.

Each file also has `command`, the command line, and `seconds`. consistency.json has a Consistency
per agent, verify.json a Verified per agent and budget; the others are one record.
"""

from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict  # pydantic needs it on Python 3.11

from paw_min.running.untrusted import open_ended

Rate = Annotated[float, Field(ge=0, le=1)]


@open_ended
class Written(TypedDict):
    """What all files have."""

    command: str


class Collected(TypedDict):
    episodes: int
    turns: int
    failed: int  # episodes that were lost
    won: dict[str, Rate]  # by agent
    # In a world model: of these wins, the share that the same actions win in the environment. An
    # agent that wins nothing is left out; empty for episodes in the environment.
    confirmed: dict[str, Rate]


class Imitated(TypedDict):
    trajectories: int  # that were used
    rows: int
    parameters: int
    steps: int
    loss: list[float]  # nats per token: means of successive parts, a tenth of the steps or less


class Trained(Imitated):
    """The marker and the context are needed to use the world model."""

    marker: str
    context: int


@open_ended
class TrainFile(Trained, Written):
    """train.json."""


class Share(TypedDict):
    em: Rate
    n: int


@open_ended
class Fidelity(TypedDict):
    """Exact match of single steps."""

    em: Rate  # over the turns of all trajectories
    n: int
    em_observation: Rate  # without the list of available actions, as in Word2World's ALFWorld
    by_kind: dict[str, Share]  # the first word of the action
    by_turn: dict[str, Share]  # from 1
    by_success: dict[str, Share]


class Rates(TypedDict):
    """Section 4; the ratios are None where nothing is won in Real."""

    real: Rate
    wm: Rate
    w2r: Rate
    cr: float | None
    pairwise_cr: Rate | None


class Episode(TypedDict):
    task: str
    real: bool
    wm: bool
    w2r: bool
    real_steps: int
    wm_steps: int
    failed: str  # why it was lost, if it was


class Consistency(Rates):
    n: int
    episodes: list[Episode]


class Verified(TypedDict):
    won: Rate
    n: int
    checks: int
    vetoes: int
