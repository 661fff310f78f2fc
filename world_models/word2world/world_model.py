"""A language model as an environment (Word2World, arXiv 2512.18832, sections 3 and 4): its chats.

    predict   chats -> the environment's answers, by greedy decoding
    answers   the same for all steps of a recorded episode, in one forward pass
    row       a recorded episode as one training row

Full fine-tuning of one is in training.py; prompted.py has one that is not trained.
"""

from collections import deque

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from paw_min.base.errors import UserError
from paw_min.model.policy import Policy, autocast
from paw_min.model.sampler import HFSampler, Request
from paw_min.rows import TokenRow
from paw_min.toy.standins import SPECIAL, chat_tokenizer
from world_models.word2world.trajectories import (
    ACTIONS,
    MARKER,
    Message,
    Trajectory,
    observation_of,
    said,
)

BETWEEN = "\ue000"  # stands for an answer in a rendered chat; some templates strip white space
# A model from scratch has this template. Its end token keeps <user> from ending an answer.
CHAT = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<user>{{ m['content'] }}<agent>"
    "{% else %}{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endif %}{% endfor %}"
)


class WorldModel:
    """A policy's language model, asked for observations.

    context: most tokens of a chat with its answer (12,288 in the released configuration).
    answer_tokens: most tokens of an answer.
    """

    def __init__(self, policy: Policy, context: int, answer_tokens: int = 512):
        if context > policy.positions:
            # transformers accepts longer rows, but the model was not trained on such positions.
            raise UserError(f"a context of {context} tokens is more than the model's "
                            f"{policy.positions} positions: train it with --context "
                            f"{policy.positions} or less.")
        self.policy = policy
        self.context = context
        self.answer_tokens = answer_tokens
        self.end = policy.eos_ids[0]
        self._turns: dict[str, list[int]] = {}  # command -> tokens; commands recur

    def predict(self, chats: list[list[Message]]) -> list[str | None]:
        """The greedy answer to each chat."""
        answers: list[str | None] = [None] * len(chats)
        by_limit: dict[int, list[Request]] = {}  # most tokens of an answer -> its requests
        for number, chat in enumerate(chats):
            ids, _ = self.tokens(chat)
            limit = min(self.answer_tokens, self.context - len(ids))
            if limit > 0:
                by_limit.setdefault(limit, []).append(Request(number, ids, seed=0))
        sampler = HFSampler()
        with sampler.sync(self.policy):
            for limit, requests in by_limit.items():
                # Chats of similar length share a batch.
                requests.sort(key=lambda request: len(request.prompt_ids))
                for finished in sampler.generate(deque(requests), 0.0, limit):
                    for response in finished:
                        answers[response.slot] = self.policy.decode(response.ids).strip()
        return answers

    @torch.no_grad()
    def answers(self, trajectory: Trajectory) -> list[str | None]:
        """The greedy answer to each command after the real chat.

        None: too long for the context, or its beginning differs from the target's observation.

        One forward pass over the trajectory: greedy decoding writes the target iff each of its
        tokens is the most likely one after those before it. Other answers are generated, but only
        where the text up to the first other token leaves open what is measured.
        """
        found: list[str | None] = [None] * len(trajectory.answers)
        ids, spans = self._within_context(trajectory)
        if not spans:
            return found
        inputs = torch.tensor([ids], device=self.policy.device)  # (1, L)
        with autocast(self.policy.device, self.policy.precision):
            hidden = self.policy.model.get_decoder()(inputs, use_cache=False).last_hidden_state
            # Position t - 1 predicts token t.
            logits = self.policy.model.get_output_embeddings()(hidden[0, :-1])  # (L - 1, V)
        likely = [None, *logits.argmax(-1).tolist()]  # L, the first token is given
        unfinished = []
        for number, span in enumerate(spans):
            span = span[: self.answer_tokens]
            wrong = [k for k in span if likely[k] != ids[k]]
            last = wrong[0] if wrong else span[-1]
            text = self.policy.decode([likely[k] for k in range(span[0], last + 1)])
            if not wrong or likely[last] in self.policy.eos_ids:
                found[number] = text.strip()
            elif may_match(text, self._written(trajectory.answers[number])):
                unfinished.append(number)
        chats = [trajectory.messages[: 2 * number + 2] for number in unfinished]
        for number, answer in zip(unfinished, self.predict(chats), strict=True):
            found[number] = answer
        pairs = zip(found, trajectory.answers, strict=True)
        return [answer and self._respelled(answer, target) for answer, target in pairs]

    def _written(self, text: str) -> str:
        """A text as this model writes it: some tokenizers change letters, Qwen2.5's to NFC."""
        ids = self.policy.encode(text)
        if self.policy.tokenizer.unk_token_id in ids:  # it cannot write this
            return text
        return self.policy.decode(ids).strip()

    def _respelled(self, answer: str, target: str) -> str:
        """An answer in the letters of the target, or of its observation, if it begins so."""
        for text in (target.strip(), target.partition(ACTIONS.strip())[0].strip()):
            written = self._written(text)
            if answer.startswith(written):
                return text + answer[len(written) :]
        return answer

    def row(self, trajectory: Trajectory) -> TokenRow | None:
        """A chat as one training row; its targets are the answers, each with its end token.

        None: not even one answer fits into the context.
        """
        ids, spans = self._within_context(trajectory)
        if not spans:
            return None
        first = spans[0].start
        targets = {k for span in spans for k in span}
        context = [k - first for k in range(first, len(ids)) if k not in targets]
        return TokenRow(ids[:first], [], ids[first:], context_positions=context)

    def _within_context(self, trajectory: Trajectory) -> tuple[list[int], list[range]]:
        """`tokens` of a trajectory, up to its last whole answer within the context."""
        ids, spans = self.tokens(trajectory.messages)
        spans = [span for span in spans if span.stop <= self.context]
        end = spans[-1].stop if spans else 0
        return ids[:end], spans

    def tokens(self, chat: list[Message]) -> tuple[list[int], list[range]]:
        """The tokens of a chat, and the positions of each answer with its end token."""
        ids = []
        spans = []
        for number, message in enumerate(chat):
            if message["role"] == "assistant":
                answer = [*self.policy.encode(message["content"]), self.end]
                spans.append(range(len(ids), len(ids) + len(answer)))
                ids += answer
            elif number == 1:
                ids += self.policy.encode_rendered(self.policy.render(chat[:2]))
            elif number > 1:
                ids += self._turn(message)
        return ids, spans

    def _turn(self, command: Message) -> list[int]:
        """What stands between two answers: the command in the model's chat format.

        Not taken from the rendered chat: some templates change earlier turns, and a conversation
        would not begin with what was said before.
        """
        text = command["content"]
        if text not in self._turns:
            chat = [said("system", ""), said("user", ""), said("assistant", BETWEEN), command]
            _, between, after = self.policy.render(chat).partition(BETWEEN)
            if not between:
                raise UserError("the chat template leaves out messages of a second turn: use "
                                "another model.")
            # The end token of the answer is a target of its own. Llama 2 writes a space before it.
            before, _, rest = after.partition(self.policy.tokenizer.decode([self.end]))
            if not before.strip():
                after = rest
            self._turns[text] = self.policy.encode_rendered(after)
        return self._turns[text]


def check_template(world_model: WorldModel) -> int:
    """UserError for a chat template without a system message or a second turn.

    -> the number of tokens of a short chat.
    """
    chat = [said("system", "s"), said("user", "u"), said("assistant", "a"), said("user", "u")]
    try:
        ids, _ = world_model.tokens(chat)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever the template raises
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"the chat template refuses the chat of a world model ({reason}): use "
                        "another model.") from error
    return len(ids)


def may_match(beginning: str, target: str) -> bool:
    """Could an answer that begins so have the observation of the target?

    It may differ in outer white space and be written with other tokens, and a marker may follow.
    """
    shown = observation_of(target).partition(MARKER.strip())[0].strip()
    text = beginning.strip().rstrip("\ufffd")  # the bytes of a character that is not complete
    return shown.startswith(text) or text.startswith(shown)


def word_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A word-level tokenizer that gives back the same text: a space belongs to the word after it.

    That of the stand-ins (toy/standins.py) writes lower case, and no answer would match exactly.
    """
    splitter = pre_tokenizers.Split(Regex(r" ?\w+| ?[^\w\s]|\s"), "isolated")
    words = set()
    for text in texts:
        words.update(word for word, _ in splitter.pre_tokenize_str(text))
    vocab = {word: i for i, word in enumerate(SPECIAL + sorted(words - set(SPECIAL)))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.Fuse()
    return chat_tokenizer(tokenizer, CHAT)
