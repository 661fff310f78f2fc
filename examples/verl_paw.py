"""PaW in verl 0.9.1: its trainer with the world-model loss, for agent loops that mark o'.

An agent loop of verl may return several rows, here one per step, as in the paper. verl scores all
tokens after the prompt; its loss masks those that the model did not generate. PaW uses their
log-probabilities, and the entropies of the pass for pi_old: it adds none. To run it: README.md.
Legend: N rows of the update, T tokens after the prompt, B rows of a micro-batch.
"""

import importlib.util
from dataclasses import dataclass
from functools import partial

if importlib.util.find_spec("verl") is None:
    raise SystemExit("error: verl is not installed: pip install 'verl[vllm]==0.9.1'")

import hydra
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf, errors
from tensordict import TensorDict
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
from verl.trainer.ppo.v1 import PPOTrainerSync, trainer_base
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from paw_min import balance, cmae, losses, select
from paw_min.envs.alfworld import AlfworldEnv, prompts
from paw_min.envs.interface import Context, Turn
from paw_min.model.chat import ChatTokenizer


@dataclass
class PaWConfig:
    wm_scale: float = 1.0  # factor of the world-model loss
    alpha: float = 0.75  # Eq. 4
    rho: float = 0.2  # Eq. 7
    r_max: float = 10.0  # highest possible return of an episode, Eq. 10


class PaWOutput(AgentLoopOutput):
    """A row of the update: verl's, and which of its T tokens are o', without chat template."""

    obs_mask: list[int]  # T

    def as_dict(self) -> dict:
        return super().as_dict() | {"obs_mask": torch.tensor(self.obs_mask)}


class AlfworldLoop(AgentLoopBase):
    """An episode of ALFWorld -> a row per step. `game` is a column of the data set."""

    idle = []  # environments between two episodes: an engine's memory is never freed

    async def run(self, sampling_params, game, uid, session_id, **_) -> list[PaWOutput]:
        chat = ChatTokenizer(self.tokenizer)  # no text of a game becomes a control token
        env = self.idle.pop() if self.idle else AlfworldEnv()
        history, rows, total = [], [], 0.0
        step = env.reset(game)  # without `await`: the engine knows one thread only
        while not step.done and len(rows) < (self.rollout_config.multi_turn.max_user_turns or 50):
            context = Context(step.task, step.observation, step.admissible, history)
            prompt = chat.encode_chat(prompts.paper(context, 2))  # h_t
            said = await self.server_manager.generate(
                f"{uid}_{session_id}", prompt_ids=prompt, sampling_params=dict(sampling_params)
            )
            command = prompts.parse(chat.decode(said.token_ids)).text
            history.append(Turn(step.observation, command))
            step = env.step(command)
            total += step.reward
            ids = [said.token_ids, chat.separator(said.token_ids), chat.encode(step.observation)]
            part = [k for k in range(3) for _ in ids[k]]  # T: 0 on a_t, 2 on o_{t+1}
            rows.append(PaWOutput(
                prompt_ids=prompt, response_ids=sum(ids, []), metrics=AgentLoopMetrics(),
                response_mask=[int(k == 0) for k in part], obs_mask=[int(k == 2) for k in part],
                response_logprobs=said.log_probs and said.log_probs + [0.0] * sum(map(bool, part)),
                # verl copies this entry from the last row to the others, and has no default.
                extra_fields=said.extra_fields | {"reward_extra_info": {}}, num_turns=len(rows) + 1,
            ))
        rows[-1].reward_score = total  # R(tau), without penalties; verl copies it to all rows
        self.idle.append(env)
        return rows


def token_weights(keys, padding, generated, observed, entropy, scores, paw) -> list[torch.Tensor]:
    """lambda_g / (G |S_g| |o'|) on the tokens of each selected o', else 0 -> N x (T,).

    keys: N x "{task}_{episode}_{row}"; a group is a task. padding: N, is it a row that verl added?
    generated, observed, entropy, scores: N x (T,); a row of scores sums up to R(tau).
    """
    real = [n for n in range(len(keys)) if not padding[n]]
    episodes = {keys[n].rsplit("_", 1)[0]: scores[n].sum().item() for n in real}
    means = balance.group_mean_return(episodes.values(), [e.rsplit("_", 1)[0] for e in episodes])
    lambdas = {g: balance.lambda_g(mean, paw.r_max) for g, mean in means.items()}  # Eq. 10
    pool = []  # of transitions: row, mask of o', group, H(a | h)
    for n in real:
        own = generated[n].bool()  # (T,)
        step = (own & ~torch.nn.functional.pad(own, (1, 0))[:-1]).cumsum(0)  # 1 at a_0, o_1, h_1
        for k in range(1, int(step.max()) + 1):
            target = (step == k) & observed[n].bool()
            if target.any():
                h = select.action_entropy(entropy[n][None], (own & (step == k))[None])
                pool.append((n, target, keys[n].rsplit("_", 2)[0], h.item()))
    selected = select.top_alpha(torch.tensor([h for *_, h in pool]), paw.alpha)  # Eq. 4
    row_weights = losses.row_weights([g for _, _, g, _ in pool], selected, lambdas)
    weights = [torch.zeros(len(mask)) for mask in generated]
    for (n, target, *_), weight in zip(pool, row_weights):
        weights[n][target] = weight / target.sum()  # Eq. 9 and 11
    return weights


class PaWTrainer(PPOTrainerSync):
    """verl's synchronous trainer with Eq. 11. It has all rows of an update, as Eq. 4 needs."""

    def init(self):
        super().init()
        actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
        self.actor_rollout_wg.set_loss_fn(partial(paw_loss, config=actor, rho=self.config.paw.rho))

    def _compute_advantage(self, batch, metrics):
        batch = super()._compute_advantage(batch, metrics)
        where = dict(keys=batch.keys, partition_id=batch.partition_id)
        columns = ["loss_mask", "obs_mask", "entropy", "rm_scores"]  # loss_mask: 1 on all of a
        data = tq.kv_batch_get(**where, select_fields=columns)
        paw, config = self.config.paw, self.config.actor_rollout_ref
        padding = [tag.get("is_padding", False) for tag in batch.tags]
        weights = token_weights(batch.keys, padding, *(data[c].unbind() for c in columns), paw)
        # An update has len(batch) / (...) optimizer steps, and each sees its own rows only.
        scale = paw.wm_scale * len(batch) / (config.actor.ppo_mini_batch_size * config.rollout.n)
        nested = torch.nested.as_nested_tensor([scale * w for w in weights], layout=torch.jagged)
        # The actors get the columns that are listed in what this returns.
        return tq.kv_batch_put(**where, fields=TensorDict({"wm_weight": nested}, len(batch)))


def paw_loss(config, model_output, data, dp_group=None, *, rho):
    """verl's loss of a micro-batch, and the world model's part of Eq. 11 from the same pass."""
    loss, metrics = ppo_loss(config, model_output, data, dp_group)
    weight = data.select("wm_weight").to_padded_tensor()["wm_weight"]  # (B, T)
    logp = no_padding_2_padding(model_output["log_probs"], data).masked_fill(weight == 0, 0.0)
    wm = (weight * cmae.hard_tokens(logp, rho) * (1 - logp.exp())).sum()  # Eq. 7-8
    wm = data["dp_size"] * wm  # verl averages the gradients of its processes
    metrics["actor/wm_loss"] = Metric(value=wm.detach(), aggregation=AggregationType.SUM)
    return loss + wm, metrics


def check(config) -> None:
    """Complete config.paw; SystemExit, one sentence, for what PaW cannot do."""
    try:
        paw = OmegaConf.merge(OmegaConf.structured(PaWConfig), config.get("paw") or {})
    except errors.OmegaConfBaseException as error:
        raise SystemExit(f"error: +paw: {str(error).splitlines()[0]}") from None
    for name, high in (("alpha", 1), ("rho", 1), ("r_max", 1e9), ("wm_scale", 1e9)):
        if not 0 < paw[name] <= high:
            raise SystemExit(f"error: +paw.{name}={paw[name]} is out of range (0, {high:g}]")
    needed = {"actor_rollout_ref.rollout.temperature": 1,  # it divides the logits of o', too
              "algorithm.rollout_correction.bypass_mode": False,  # it has no entropies
              "trainer.v1.trainer_mode": "sync", "distillation.enabled": False}
    for name, value in needed.items():
        if (found := OmegaConf.select(config, name)) != value:
            raise SystemExit(f"error: {name}={found} is not supported: use {value}")
    OmegaConf.update(config, "paw", paw, force_add=True)


@ray.remote
class TaskRunner(TaskRunnerV1.__ray_actor_class__):
    def run(self, config):  # a name other than "sync" would get the asynchronous buffer
        trainer_base.TRAINER_REGISTRY["sync"] = PaWTrainer
        super().run(config)


@hydra.main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer", version_base=None)
def main(config):
    check(config)
    run_ppo(config, TaskRunner)


if __name__ == "__main__":
    main()
