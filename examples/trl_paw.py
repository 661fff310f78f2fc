"""PaW in TRL: GRPOTrainer with the world-model loss, playing ALFWorld with a stand-in on a CPU.

    pip install trl==1.16.0 && python -m examples.trl_paw --output_dir runs/trl [--wm_scale 0]

A row of TRL is an episode, h_0 a_0 o_1 h_1 a_1 o_2 ..., not a step: an action is predicted from
everything before it. TRL scores all tokens after h_0; its loss masks those that the model did not
generate. PaW uses their log-probabilities, so a step scores nothing else; Eq. 4 adds a pass before.
Legend: N rows, C tokens of the longest completion, K steps of the longest episode.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import HfArgumentParser
from trl import GRPOConfig, GRPOTrainer

from paw_min import balance, cmae, losses, select, toy
from paw_min.base.errors import UserError, user_errors
from paw_min.envs.alfworld import AlfworldEnv, list_games, prompts
from paw_min.envs.interface import Context, Turn
from paw_min.model.chat import ChatTokenizer


@dataclass
class PaWConfig(GRPOConfig):
    wm_scale: float = 1.0  # factor of the world-model loss; 0: TRL's GRPO
    alpha: float = 0.75  # Eq. 4
    rho: float = 0.2  # Eq. 7
    r_max: float = 10.0  # highest possible return of an episode, Eq. 10

    def __post_init__(self):
        super().__post_init__()
        if self.temperature != 1:  # TRL divides the logits of observations by it, too
            raise ValueError(f"temperature {self.temperature} is not supported: use 1")
        if self.mask_truncated_completions:  # to TRL, an episode that ends with o_T is truncated
            raise ValueError("mask_truncated_completions would mask every episode: omit it")
        for name, high in (("alpha", 1), ("rho", 1), ("r_max", math.inf)):
            value = getattr(self, name)
            if not 0 < value <= high:
                raise ValueError(f"{name} {value} is out of range (0, {high}]")
        if not 0 <= self.wm_scale < math.inf:
            raise ValueError(f"wm_scale {self.wm_scale} is out of range: use 0 or more")


class PaWTrainer(GRPOTrainer):
    """GRPOTrainer with Eq. 11; its rollout_func returns env_mask, obs_mask and episode_return."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        batch["obs_mask"] = torch.zeros_like(batch["completion_ids"])  # (N, C)
        for row, episode in zip(batch["obs_mask"], inputs):
            row[: len(episode["obs_mask"])] = torch.tensor(episode["obs_mask"])
        return batch | {"row_weight": self._transition_weights(batch, inputs)}  # (N, K)

    @torch.no_grad()
    def _transition_weights(self, batch, inputs) -> torch.Tensor:
        """lambda_g / (G |S_g|) of each selected transition of all processes, else 0 -> (N, K)."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        present = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        size = self.args.per_device_train_batch_size
        width = batch["completion_ids"].shape[1]
        _, entropy, _ = self._get_per_token_logps_and_entropies(
            self.model, ids, present, width, batch_size=size, compute_entropy=True
        )  # (N, C)
        actions, targets = transitions(batch)  # (N, K, C) each
        entropy = select.action_entropy(entropy[:, None].expand(actions.shape), actions)  # (N, K)
        exists = targets.any(-1)  # (N, K)
        rank = self.accelerator.process_index
        group = [(rank * len(inputs) + n) // self.num_generations for n in range(len(inputs))]
        returns = gather_object([episode["episode_return"] for episode in inputs])
        means = balance.group_mean_return(returns, gather_object(group))
        r_max = self.args.r_max
        lambdas = {g: balance.lambda_g(mean, r_max) for g, mean in means.items()}  # Eq. 10
        pool = [(rank, group[n], entropy[n, k].item()) for n, k in exists.nonzero().tolist()]
        pool = gather_object(pool)  # all processes
        ranks = torch.tensor([entry[0] for entry in pool])
        groups = [entry[1] for entry in pool]
        entropies = torch.tensor([entry[2] for entry in pool])
        selected = select.top_alpha(entropies, self.args.alpha)  # Eq. 4
        weights = losses.row_weights(groups, selected, lambdas)  # Eq. 9 and 11
        mine = weights[ranks == rank].to(entropy)
        return torch.zeros_like(entropy).masked_scatter(exists, mine)

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        self._scores = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        return self._scores

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        _, targets = transitions(inputs)  # (N, K, C), of a micro-batch
        logp = self._scores[0][:, None].expand(targets.shape)  # TRL just made this pass
        row_loss = cmae.clipped_mae(logp.flatten(0, 1), targets.flatten(0, 1), self.args.rho)
        # TRL makes `steps` optimizer steps per generation batch and averages over the processes.
        steps = self.args.steps_per_generation / self.current_gradient_accumulation_steps
        wm = self.accelerator.num_processes * steps * (inputs["row_weight"].flatten() @ row_loss)
        self._metrics["train"]["wm_loss"].append(wm.item() * self.args.gradient_accumulation_steps)
        return loss + self.args.wm_scale * wm


def transitions(batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Masks of the action and of the next observation of each step -> (N, K, C) each."""
    generated = (batch["completion_mask"] * batch["tool_mask"]).bool()  # (N, C), from env_mask
    begins = generated & ~torch.nn.functional.pad(generated, (1, 0))[:, :-1]
    step = begins.cumsum(-1)[:, None]  # (N, 1, C): 1 at a_0, o_1 and h_1, 2 at a_1 ...
    last = batch["row_weight"].shape[1] if "row_weight" in batch else int(step.max())  # K
    own = step == torch.arange(1, last + 1, device=step.device)[:, None]  # (N, K, C)
    return own & generated[:, None], own & batch["obs_mask"][:, None].bool()


ENVS = []  # all rollouts share them: an engine's memory is never freed (envs/alfworld/env.py)


def play(games: list[str], trainer: GRPOTrainer, max_turns: int = 8) -> dict[str, list]:
    """rollout_func: an episode per entry of `games`, with the prompts of run_alfworld.py."""
    while len(ENVS) < len(games):
        ENVS.append(AlfworldEnv())
    contexts = []
    for env, game in zip(ENVS, games):
        step = env.reset(game)
        contexts.append(Context(step.task, step.observation, step.admissible))
    completion_ids = [[] for _ in games]
    env_mask = [[] for _ in games]
    obs_mask = [[] for _ in games]
    playing = list(range(len(games)))
    returns = [0.0] * len(games)

    chat = ChatTokenizer(trainer.processing_class)  # no text of a game becomes a control token

    def prompt(context: Context) -> list[int]:
        return chat.encode_chat(prompts.compact(context, 1))

    def add(n: int, ids: list[int], generated: int = 0, observed: int = 0) -> None:
        completion_ids[n] += ids
        env_mask[n] += [generated] * len(ids)
        obs_mask[n] += [observed] * len(ids)

    prompt_ids = [prompt(context) for context in contexts]  # h_0
    while playing:
        so_far = [prompt_ids[n] + completion_ids[n] for n in playing]
        responses, _ = trainer._generate_single_turn(so_far, None, {}, num_generations=1)
        for n, ids in list(zip(playing, responses)):
            command = prompts.parse(chat.decode(ids)).text
            step = ENVS[n].step(command)
            context = contexts[n]
            context.history.append(Turn(context.observation, command))
            context.observation = step.observation
            context.admissible = step.admissible
            returns[n] += step.reward
            add(n, ids, generated=1)  # a_t
            add(n, chat.separator(ids))  # no loss counts it
            add(n, chat.encode(step.observation), observed=1)  # o_{t+1}
            if step.done or len(context.history) == max_turns:
                playing.remove(n)
            else:
                add(n, prompt(context))  # h_{t+1}: neither generated nor a target
    return dict(prompt_ids=prompt_ids, completion_ids=completion_ids, env_mask=env_mask,
                obs_mask=obs_mask, episode_return=returns, logprobs=None)


def reward(episode_return: list[float], **_) -> list[float]:
    return episode_return


if __name__ == "__main__":
    parser = HfArgumentParser(PaWConfig)
    parser.set_defaults(use_cpu=True, bf16=False, per_device_train_batch_size=8, max_steps=8,
                        gradient_accumulation_steps=4, max_completion_length=16,
                        learning_rate=2e-4, logging_steps=1)
    parser.print_usage = lambda *_: None  # it would fill the screen
    with user_errors():
        try:
            (config,) = parser.parse_args_into_dataclasses()
        except ValueError as error:  # PaWConfig refused a value, or a flag is unknown
            raise UserError(str(error)) from error
        print(f"checkpoints: {Path(config.output_dir).resolve()} (--output_dir)")
        games = Dataset.from_dict({"prompt": list_games(toy.default_data("alfworld"), "train")})
        model = toy.default_model("alfworld")
        PaWTrainer(model, reward, config, train_dataset=games, rollout_func=play).train()
