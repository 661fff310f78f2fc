"""A guessing game as an OpenEnv server, for openenv_paw.py.

    python -m examples.guess_server [--port 8000]

The number is from 0 to 9 and comes from the seed. The answers tell whether it is higher or lower,
and, as a rule worth modeling, every second answer is a lie.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter

import uvicorn
from openenv.core import Action, Environment, Observation, State, create_app


class Say(Action):
    words: str


class Hear(Observation):
    answer: str


class Guess(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed=0, episode_id=None) -> Hear:
        self.number = seed % 10
        self.tries = 0
        return Hear(answer="I have chosen a number from 0 to 9. Every second answer is a lie.")

    def step(self, action: Say) -> Hear:
        self.tries += 1
        if action.words == str(self.number):
            return Hear(answer="", reward=10.0, done=True)
        is_lie = self.tries % 2 == 0
        higher = (action.words < str(self.number)) != is_lie
        return Hear(answer="Higher." if higher else "Lower.", reward=0.0)


app = create_app(Guess, Say, Hear, max_concurrent_envs=256)

if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000, help="where it answers (default 8000)")
    uvicorn.run(app, host="127.0.0.1", port=parser.parse_args().port, log_level="warning")
