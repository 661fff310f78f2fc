"""How much of LoRA's training arrives in a bf16 engine?

    python -m research.bench.lora --out FILE

Trains adapters of SmolLM2-135M by cross entropy on 16 short rows, with the rank and the learning
rate of the presets 24gb and 80gb, in bf16 passes. After some of the steps, the merged weights go to
vLLM, rounded to the nearest bf16 number and at random (lora.round_bf16):

    gain       mean log-probability of the rows' tokens, minus that at the start, in nats: in the
               trainer's passes, in passes of the same adapters as peft adds them, and in vLLM
    arrives    the part of s B A that is in vLLM's weights: the projection of (theirs - W) on
               s B A, over all adapted weights as one vector
    gap        mean |log pi - log mu| of the rows' tokens, in nats; mu is vLLM's policy
"""

import argparse
import json
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from paw_min.base.errors import user_errors
from paw_min.model.batches import micro_batches
from paw_min.model.lora import SCALE, adapted_layers, attach, full_weights
from paw_min.model.policy import Policy, load_policy
from paw_min.model.scoring import score_responses
from paw_min.model.vllm_sampler import VLLMSampler
from paw_min.rows import TokenRow
from paw_min.toy import smollm2

RANK = 16
LR = 1e-5
STEPS = (0, 1, 5, 25)  # after which it is measured
ENGINE = {"nearest": "fp32", "random": "bf16"}  # rounding: what full_weights is asked for
PLACES = "cabinet", "drawer", "shelf", "desk"
THINGS = "mug", "plate", "book", "apple"


@dataclass
class Arrival:
    gain: float  # in the engine
    arrives: float
    gap: float
    gap_of_peft: float  # with passes as peft adds


def make_rows(policy: Policy) -> list[TokenRow]:
    """16 rows: a place, a thing in it, and how to take it."""
    rows = []
    for place in PLACES:
        for thing in THINGS:
            prompt = f"On the {place} 1, you see a {thing} 2, and a lamp 1. What is next?"
            response = (f"<think>The {thing} 2 is on the {place} 1, so I can take it.</think>"
                        f"<action>take {thing} 2 from {place} 1</action>")
            rows.append(TokenRow(policy.encode_chat(prompt), policy.encode_response(response), []))
    return rows


def train_step(policy: Policy, optimizer, rows: list[TokenRow]) -> None:
    """A step on the cross entropy of the responses."""
    everything = list(range(len(rows)))
    for batch in micro_batches(policy, rows, everything, [False] * len(rows), 10**6):
        loss = -policy(batch).logp[batch.response_mask].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def share_that_arrives(policy: Policy, precision: str) -> float:
    """precision: of full_weights; what it yields is then rounded to bf16, as vLLM's loader does."""
    theirs = dict(full_weights(policy.model, precision))
    names = {layer: name for name, layer in policy.model.named_modules()}
    along = length = 0.0
    for layer in adapted_layers(policy.model):
        before = layer.base_layer.weight.float()
        after = theirs[f"{names[layer]}.weight"].bfloat16().float()
        learned = SCALE * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        along += ((after - before) * learned).sum().item()
        length += learned.square().sum().item()
    return along / length if length else 1.0


@contextmanager
def as_peft_adds(policy: Policy):
    """In this block, passes round W x before they add s B A x."""
    ours = {layer: vars(layer).pop("forward") for layer in adapted_layers(policy.model)}
    yield
    for layer, forward in ours.items():
        layer.forward = forward


def trainer_logp(policy: Policy, rows: list[TokenRow]) -> Tensor:
    """log pi of all response tokens, one after another."""
    return torch.tensor(sum(score_responses(policy, rows, 10**6).logp, []))


def engine_logp(sampler: VLLMSampler, policy: Policy, rows: list[TokenRow]) -> Tensor:
    """log mu of all response tokens, one after another."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": row.prompt_ids + row.response_ids} for row in rows]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    with sampler.sync(policy):
        answers = sampler.llm.generate(prompts, params, use_tqdm=False)
    logps = []
    for row, answer in zip(rows, answers, strict=True):
        for at in range(len(row.prompt_ids), len(row.prompt_ids) + len(row.response_ids)):
            token = answer.prompt_token_ids[at]
            logps.append(answer.prompt_logprobs[at][token].logprob)
    return torch.tensor(logps)


def study(folder: str, steps: tuple[int, ...] = STEPS, lr: float = LR) -> list[dict]:
    """An entry per number of steps: the trainer's gains, and an Arrival per rounding."""
    with closing(VLLMSampler(folder, 256, "bf16", 0.4, seed=0, slots=16)) as sampler:
        policy = load_policy(folder, precision="bf16")
        attach(policy.model, RANK, "bf16", 0, None)
        trained = [p for p in policy.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=lr)
        rows = make_rows(policy)
        start = {}
        found = []
        for step in range(max(steps) + 1):
            if step:
                train_step(policy, optimizer, rows)
            if step not in steps:
                continue
            ours = trainer_logp(policy, rows)
            with as_peft_adds(policy):
                of_peft = trainer_logp(policy, rows)
            start = start or {"trainer": ours.mean(), "peft": of_peft.mean()}
            entry = {
                "steps": step,
                "gain": (ours.mean() - start["trainer"]).item(),
                "gain of peft": (of_peft.mean() - start["peft"]).item(),
            }
            for rounding, precision in ENGINE.items():
                sampler.precision = precision
                theirs = engine_logp(sampler, policy, rows)
                first = start.setdefault(rounding, theirs.mean())
                entry[rounding] = asdict(Arrival(
                    gain=(theirs.mean() - first).item(),
                    arrives=share_that_arrives(policy, precision),
                    gap=(ours - theirs).abs().mean().item(),
                    gap_of_peft=(of_peft - theirs).abs().mean().item(),
                ))
            print(json.dumps(entry), flush=True)
            found.append(entry)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    args = parser.parse_args()
    folder = str(smollm2.write())
    args.out.write_text(json.dumps(study(folder), indent=1) + "\n")


if __name__ == "__main__":
    with user_errors():
        main()
