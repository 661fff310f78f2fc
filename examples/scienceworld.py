"""ScienceWorld (arXiv 2203.07540): its own engine, as an environment from outside of the package.

    pip install scienceworld==1.2.3 && apt-get install default-jre-headless
    python -m examples.scienceworld                    PaW
    python -m examples.scienceworld --no-paw           GRPO
    python -m examples.scienceworld --data find-plant,boil --model MODEL

Copy this file for an environment of your own. It has three parts: the environment with its prompts,
a start model for a CPU (with --model: leave it out), and the presets.

Two of the 30 tasks are chosen by what the next observation says of the fact that the reward needs
and the prompt does not show:

    task                                     fact                   the next observation
    inclined-plane-friction-named-surfaces   which surface is       "look at" a plane says how far a
                                             rougher                block has come: of each surface,
                                                                    the same number in all tasks
    lifespan-longest-lived                   which animal lives     never says it: here, a world
                                             longest                model should not help

Both can be won without an experiment by an agent that knows the fact. The start model imitates the
procedure, with chance where the fact decides. It is trained at the first run, in data/scienceworld.
Rerun a command to resume it. GRPO learns lifespan in ten minutes, from 26 to 73 % on held-out
variations; no effect of PaW was seen (research/scienceworld).
"""

import logging
import random
import re
from pathlib import Path

import torch

from paw_min.base.errors import UserError, user_errors
from paw_min.base.files import made_once
from paw_min.cli import checked, main
from paw_min.config import Config
from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.envs.interface import Benchmark, Command, Context, Step, Tasks, Turn, recent
from paw_min.envs.pool import EnvPool
from paw_min.model.policy import Policy
from paw_min.toy.standins import Demonstration, imitate, make_model, make_tokenizer

FRICTION = "inclined-plane-friction-named-surfaces"
LIFESPAN = "lifespan-longest-lived"
CHOSEN = (FRICTION, LIFESPAN)
TRAIN, HELD_OUT = 128, 32  # most variations per task; a task has from 10 to 1,386
R_MAX = 10.0  # the return of a score of 100


# ---- the environment ----

_java = None  # the gateway to this process's engine


def engine():
    """The Java process of this process, started at its first use, and again if it has died.

    It serves all environments of the process, 12 MB each. It ends with this process, however that
    ends: its standard input is a pipe from here, which then closes.
    """
    global _java
    if _java is None or _java.java_process.poll() is not None:
        try:
            from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway
            from scienceworld.constants import BASEPATH, JAR_PATH
        except ImportError as error:
            raise UserError(f"{error}: pip install scienceworld==1.2.3") from error
        try:
            port, process = launch_gateway(
                classpath=JAR_PATH, javaopts=["-XX:+UseSerialGC", "-Xmx3g"], die_on_exit=True,
                return_proc=True, cwd=BASEPATH,  # it writes a file there
                # Ctrl-C is for this process. An engine that it ends looks like a failed episode.
                create_new_process_group=True,
            )
        except FileNotFoundError as error:
            raise UserError("ScienceWorld's engine needs Java, and there is no program java: "
                            "apt-get install default-jre-headless") from error
        except ValueError as error:  # it has ended without the number of its port
            raise UserError("Java does not start, or is older than version 8: `java -Xmx3g "
                            "-version` says why.") from error
        # py4j logs a page for each forgotten object of an engine that has died.
        logging.getLogger("py4j").setLevel(logging.CRITICAL)
        port = GatewayParameters(port=port)
        _java = JavaGateway(gateway_parameters=port, java_process=process)
    return _java


class ScienceWorld:
    """A task is "NAME VARIATION", played with the engine's simplification `easy`: all doors are
    open, and "teleport to" reaches every room.

    The score is 0 to 100; the reward is how much it rises, so that the return of a solved task is
    R_MAX. A wrong object in focus ends the episode with the score -100. This has the reward 0: a
    return is never negative, and lambda_g of Eq. 10 stays in [0, 1]. If it took back what was
    collected, RL would learn not to focus at all (research/scienceworld/README.md).
    """

    def __init__(self):
        self.java = None

    def reset(self, task: str) -> Step:
        java = engine()
        if self.java is not java:  # the first call, or the engine has ended
            self.simulator = java.jvm.scienceworld.runtime.pythonapi.PythonInterface()
            self.java = java  # last: if the line above fails, the next reset tries again
        # The methods of scienceworld.ScienceWorldEnv, without the list of all valid commands that
        # it makes in each step: 0.1 s.
        self.name, variation = task.split()
        self.simulator.load(self.name, int(variation), "easy", False)
        self.task = self.simulator.freeActionTaskDesc().removeprefix("Task Description:\n").strip()
        self.score = 0.0
        return self._step("look around")

    def step(self, command: str) -> Step:
        return self._step(command)

    def _step(self, command: str) -> Step:
        observation = self.simulator.step(command)
        score = self.simulator.getScore()  # -1 to 1
        done = score < 0 or self.simulator.getCompleted()
        reward = R_MAX * max(0.0, score - self.score)
        self.score = max(0.0, score)
        return Step(
            observation, self.task, self.name, admissible=[], done=done, won=score == 1,
            reward=reward, score=self.score,
        )


def load(cfg: Config, data: str) -> Tasks:
    """data: names of tasks, with commas between them. The variations are ScienceWorld's."""
    lists = {"dev": "getVariationsDev", "test": "getVariationsTest"}
    if cfg.eval_split not in lists:
        raise UserError(f"--eval-split {cfg.eval_split} is not ScienceWorld's: use dev or test.")
    engine()  # Where a package or Java is missing, this says so before the next line needs it.
    from py4j.protocol import Py4JError

    try:
        return list_tasks(cfg, data, lists[cfg.eval_split])
    except Py4JError as error:
        raise UserError("ScienceWorld's engine ended while it listed the tasks: rerun the same "
                        "command.") from error


def list_tasks(cfg: Config, data: str, held_out_list: str) -> Tasks:
    simulator = engine().jvm.scienceworld.runtime.pythonapi.PythonInterface()
    known = list(simulator.getTaskNames())
    train, held_out = [], []
    for name in data.split(","):
        if name not in known:
            raise UserError(f"--data {name} is not a task of ScienceWorld: use {', '.join(known)}.")
        simulator.load(name, 0, "", False)
        # Neighbors have nearly the same task: take some from everywhere.
        for tasks, numbers, most in (
            (train, simulator.getVariationsTrain(), TRAIN),
            (held_out, getattr(simulator, held_out_list)(), HELD_OUT),
        ):
            numbers = list(numbers)
            tasks += [f"{name} {number}" for number in numbers[:: -(-len(numbers) // most)]]

    def make_pool(n_envs: int) -> EnvPool:
        return EnvPool(ScienceWorld, n_envs, cfg.workers)

    return Tasks(train, held_out, make_pool)


ACTIONS = """activate OBJ, close OBJ, connect OBJ to OBJ, deactivate OBJ, disconnect OBJ, dunk OBJ \
in OBJ, eat OBJ, flush OBJ, focus on OBJ, go to LOC, inventory, look around, look at OBJ, look in \
OBJ, mix OBJ, move OBJ to OBJ, open OBJ, pick up OBJ, pour OBJ in OBJ, put down OBJ, read OBJ, \
teleport to LOC, use OBJ on OBJ, wait, wait1"""


def prompt(context: Context, history_length: int) -> str:
    """The prompt of an instruct model, without the commands that work now: 249 in one state."""
    shown = recent(context.history, history_length)
    lines = [f"{observation}\n> {command}" for observation, command in shown]
    situation = "\n".join([context.task, *lines, context.observation])
    return (
        f"{situation}\n\nOBJ is an object, LOC is a room. The actions: {ACTIONS}.\n"
        "Think about what to do next, then write one action in <action> </action>."
    )


def brief(context: Context, _) -> str:
    """The prompt of the start model: the commands of earlier steps, and the task last."""
    # Its words are then at the same distance from the response in all tasks, and a small model
    # soon learns to copy them.
    commands = [f"> {turn.command}" for turn in context.history]
    return "\n".join([*commands, context.observation, context.task]) + "\n"


def parse(response: str) -> Command:
    """The text in <action>; without this tag, as the start model answers, the whole response."""
    command = response.rpartition("<action>")[2].partition("</action>")[0].strip().lower()
    return Command(command, valid=bool(command) and "\n" not in command)


BENCHMARKS["scienceworld"] = Benchmark(
    load, {"paper": prompt, "compact": brief}, parse, r_max=R_MAX
)


# ---- the start model ----

START = Path("data/scienceworld")
WARM_EPISODES, WARM_STEPS = 300, 400
# What a look may say of the block on a plane.
ENDS = [*(f"approximately {i}% down the plane" for i in range(1, 8)), "at the top of the plane"]


def demonstrate(env: ScienceWorld, task: str, rng: random.Random) -> list[Demonstration]:
    """The steps of an episode: the gold path's procedure, with chance in place of the fact.

    The engine's own gold paths tell the fact, and take it 1 to 2 s each.
    """
    step = env.reset(task)
    rows, history = [], []

    def do(*choices: str) -> str:
        """Take one of the choices. Each becomes a row: a model would remember one alone by task."""
        nonlocal step
        shown = brief(Context(step.task, step.observation, [], history), 0)
        command = rng.choice(choices)
        history.append(Turn(step.observation, command))
        step = env.step(command)
        # A look names its surface: with the true number, it would teach the fact.
        seen = re.sub(r"(approximately|at the top).*", rng.choice(ENDS), step.observation)
        for choice in choices:
            # The long list of a room would outweigh the responses in the loss.
            is_seen = choice == command != "look around"
            rows.append(Demonstration(shown, choice, seen if is_seen else ""))
        return step.observation

    if env.name == FRICTION:
        surfaces = re.search(r"\((.*), (.*)\)", step.task).groups()
        planes = [f"inclined plane with a {surface} surface" for surface in surfaces]
        do("teleport to workshop")
        do(*(f"move block to {plane}" for plane in planes))
        do(history[-1].command.replace("move block to", "look at"))
        do(*(f"focus on {plane}" for plane in planes))
    elif env.name == LIFESPAN:
        do("teleport to outside")
        animals = re.findall(r"\ta (baby .*|.* egg)\n", do("look around"))
        do(*(f"focus on {animal}" for animal in animals))
    return rows


def warm_start(folder: Path) -> None:
    """Imitate the procedures. Observations are texts of their own: the model learns what the
    environment may answer, but not after which command.
    """
    print(f"training the start model in {START}: four minutes on one core", flush=True)
    rng = random.Random("scienceworld warm start")
    env, rows = ScienceWorld(), []
    tasks = load(Config(eval_split="dev"), ",".join(CHOSEN)).train
    for episode in range(WARM_EPISODES):  # each task equally often
        name = CHOSEN[episode % len(CHOSEN)]
        task = rng.choice([task for task in tasks if task.startswith(name)])
        rows += demonstrate(env, task, rng)
    percents = " ".join(f"{i}%" for i in range(101))  # no demonstration shows all of them
    tokenizer = make_tokenizer([percents, *(text for row in rows for text in row)])
    policy = Policy(make_model(tokenizer, seed=0), tokenizer)
    imitate(policy, rows, seed=0, steps=WARM_STEPS)
    policy.save(folder)


def prepare() -> None:
    """Train the start model, unless it is there."""
    made_once(START, warm_start)


# ---- a run ----

PRESETS = {
    "tiny": dict(
        model=str(START), data=",".join(CHOSEN), eval_split="dev", prompt="compact",
        max_prompt_tokens=400, max_response_tokens=16, max_obs_tokens=200,
        max_turns=7, groups=8, group_size=8, updates=15, eval_every=5, eval_tasks=0,
        eval_temperature=1.0, save_every=5, lr=1.5e-4, beta2=0.95, mini_batch=64, micro_tokens=4096,
        entropy_coef=0.0, wm_separator="none",
    ),
    # This preset is for one GPU of 80 GB, on which it was not tried.
    "instruct": dict(
        model="Qwen/Qwen2.5-1.5B-Instruct", data=",".join(CHOSEN), eval_split="dev",
        history_length=10, max_turns=30, sampler="vllm", workers=4, grad_checkpointing=True,
        save_every=5,
    ),
}


def needed(cfg: Config) -> Path | None:
    """The start model, unless --model is another one."""
    return START if Path(cfg.model) == START else None


def run(presets=PRESETS, doc=__doc__, learn=None, argv=None) -> None:
    """The command; cli.fork calls it with another `learn`."""
    torch.set_num_threads(1)  # more are not faster for a model of this size
    with user_errors():
        if needed(checked("scienceworld", presets, doc, needed, argv)):
            prepare()
    main("scienceworld", presets, doc, learn, argv)


if __name__ == "__main__":
    run()
