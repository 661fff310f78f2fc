"""Text to tokens and back: chat format, control tokens, end tokens.

Families write their turns differently, so these functions ask the chat template itself, with
messages of one word. A control token is one that the tokenizer calls special, or an added one that
the template writes around messages or that ends a response. Only the template writes them: in any
other text, such as an observation, they become plain text.
"""

import re
from collections.abc import Iterable
from contextlib import suppress
from datetime import date
from functools import cached_property

from paw_min.base.errors import UserError
from paw_min.base.files import reason_of

THOUGHT = "<think>"
# Tags that prompts ask for or show. A supervised stage may have made them special tokens: they are
# text all the same, which decoding keeps and which ends no turn.
TAGS = {
    f"<{slash}{name}>"
    for name in ("think", "action", "search", "answer", "information", "prediction", "next_state")
    for slash in ("", "/")
}
TURNS = [
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": "second"},
    {"role": "user", "content": "third"},
]


class ChatTokenizer:
    """Text to token ids and back, with a tokenizer of transformers that has a chat template.

    eos_ids: the tokens that end a response, the template's, those of generation_config.json
    (`published`) and the tokenizer's. A model may list one of them only. Training targets end with
    the first.
    """

    def __init__(self, tokenizer, published: Iterable[int] = ()):
        self.tokenizer = tokenizer
        # What closes a turn whose end token the template does not write.
        end = turn_end(tokenizer)
        self.role = next_role(tokenizer) if end is None else []
        ends = dict.fromkeys([end, *self.role[-1:], *published, tokenizer.eos_token_id])
        ends.pop(None, None)
        self.eos_ids = list(ends)
        self.pad_id = tokenizer.pad_token_id
        if self.pad_id is None and self.eos_ids:
            self.pad_id = self.eos_ids[0]

    @cached_property
    def control_ids(self) -> set[int]:
        return control_ids(self.tokenizer, self.eos_ids)

    @cached_property
    def opened_thought(self) -> str:
        """What the template itself writes at the beginning of a response: "<think>" or nothing."""
        prompt = render(self.tokenizer, TURNS[:1])
        return THOUGHT if prompt.rstrip().endswith(THOUGHT) else ""

    @cached_property
    def turn_ids(self) -> list[int]:
        """What the template writes between an assistant's message and the next user's."""
        return self.encode_rendered(turn_text(self.tokenizer))

    def separator(self, response_ids: list[int]) -> list[int]:
        """The tokens between this response and the next user message.

        In Qwen's format: <|im_end|>, a newline, <|im_start|>, user, a newline. The end token is
        left out if the response has it. A response that reached the token limit has not.
        """
        between = self.turn_ids
        if self.role:  # The role stands before o' once, whatever else has ended the response.
            return between[len(self.role) :] if response_ids[-1] == self.role[-1] else between
        ends = [place for place, token in enumerate(between) if token in self.eos_ids]
        if ends and response_ids[-1] in self.eos_ids:
            return between[ends[0] + 1 :]  # Llama 2 writes a space before it
        return between

    def render(self, messages: list[dict[str, str]]) -> str:
        """Messages in the model's chat format, up to the next response."""
        plain = [
            message | {"content": self.without_control_tokens(message["content"])}
            for message in messages
        ]
        return render(self.tokenizer, plain)

    def without_control_tokens(self, text: str) -> str:
        """The text without control tokens: <|im_end|> becomes < |im_end|>.

        So no page, passage or command can end a turn or begin another. Other text stays as it is.
        """
        if self.has_no_control_string(text):
            return text
        # The space may expose another control token that overlapped this one, so the text is read
        # again, at most once per character.
        for _ in text:
            found = self.tokenized(text, return_offsets_mapping=True)
            spans = zip(found["input_ids"], found["offset_mapping"], strict=True)
            starts = [start for token, (start, end) in spans if self.forged(token, text[start:end])]
            if not starts:
                break
            for start in reversed(starts):
                # Some tokens take the spaces around them, too.
                start += len(text[start:]) - len(text[start:].lstrip())
                text = f"{text[: start + 1]} {text[start + 1 :]}"
        return text

    def has_no_control_string(self, text: str) -> bool:
        """Can no control token be found in this text? It is not tokenized, which takes longer.

        A token is found where its string is, in the text or in what the normalizer makes of it, so
        a text that the normalizer would change is left to the tokenizer.
        """
        normalizer = self.tokenizer.backend_tokenizer.normalizer
        if normalizer and normalizer.normalize_str(text) != text:
            return False
        return not any(string in text for string in self.control_strings)

    @cached_property
    def control_strings(self) -> set[str]:
        """The strings of the control tokens, as they are and normalized."""
        added = self.tokenizer.added_tokens_decoder
        if not self.control_ids <= added.keys():
            return {""}  # A piece of the model's own vocabulary is found by the tokenizer alone.
        strings = {added[token].content for token in self.control_ids}
        normalizer = self.tokenizer.backend_tokenizer.normalizer
        return strings | {normalizer.normalize_str(one) for one in strings if normalizer}

    def forged(self, token: int, text: str) -> bool:
        """Is this text a control token? Unknown words become one as well, <unk>."""
        if token not in self.control_ids:
            return False
        return token != self.tokenizer.unk_token_id or self.tokenizer.unk_token in text

    def encode_chat(self, message: str) -> list[int]:
        """Token ids of one user message in the model's chat format, up to the response."""
        return self.encode_rendered(self.render([{"role": "user", "content": message}]))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text from anywhere: no control token is among them."""
        return self.encode_rendered(self.without_control_tokens(text))

    def encode_response(self, text: str) -> list[int]:
        """Token ids of a response to learn from, with its end token and no second <think>."""
        return [
            *self.encode(text.removeprefix(self.opened_thought)), *(self.role or self.eos_ids[:1])
        ]

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of what the chat template has written, control tokens included."""
        return self.tokenized(text)["input_ids"]

    def tokenized(self, text: str, **options):
        """UserError for a word that the model of a small world does not have (standins.py)."""
        try:
            return self.tokenizer(text, add_special_tokens=False, **options)
        except Exception as error:  # tokenizers has no class for it, and does not name the word
            known = self.tokenizer.get_vocab()
            words = re.findall(r"\w+|[^\w\s]+", text.lower())
            word = next((word for word in words if word not in known), text)
            raise UserError(f"the model has no token for {word!r}: if its world has changed, "
                            "delete the model's folder, so that it is made again.") from error

    def decode(self, ids: list[int]) -> str:
        """The text of a response, without control tokens."""
        return self.tokenizer.decode([token for token in ids if token not in self.control_ids])


def render(tokenizer, messages: list[dict[str, str]]) -> str:
    """Messages in the model's chat format, up to the next response.

    Qwen3 without its own thinking, as in verl-agent; templates that state today's date, such as
    Llama 3.2's, with a fixed one. Other templates ignore these two arguments.
    """
    return tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, enable_thinking=False,
        strftime_now=date(2024, 7, 26).strftime,
    )


def turn_text(tokenizer) -> str:
    """What the chat template writes between an assistant's message and the next user's.

    UserError for a template that refuses such a conversation, or that changes its messages.
    """
    remedy = "use --wm-separator none"
    try:
        text = tokenizer.apply_chat_template(TURNS, tokenize=False)
    except Exception as error:  # whatever the template raises
        raise UserError(
            f"the chat template refuses a second turn ({reason_of(error)}): {remedy}"
        ) from error
    before = text.rpartition(TURNS[2]["content"])[0]
    _, found, between = before.rpartition(TURNS[1]["content"])
    if not found:
        raise UserError(f"the chat template leaves out messages of a second turn: {remedy}")
    return between


def turn_end(tokenizer) -> int | None:
    """The control token with which the chat template ends an assistant's turn; None without one.

    This token follows an earlier message and the last one, maybe after a space. A token that
    follows only one of them begins the next turn.
    """
    try:
        between = turn_text(tokenizer)
        last = tokenizer.apply_chat_template(TURNS[:2], tokenize=False)
    except Exception:  # a template for one turn, whatever it raises
        return None
    last = last.rpartition(TURNS[1]["content"])[2]
    ends = [
        tokenizer(text.lstrip(" "), add_special_tokens=False)["input_ids"][:1]
        for text in (between, last)
    ]
    if ends[0] != ends[1] or not ends[0]:
        return None
    return ends[0][0] if ends[0][0] in control_ids(tokenizer) else None


def next_role(tokenizer) -> list[int]:
    """What ends a turn of a template without an end token, as GLM-4's: the next role's token.

    [] without one, or if the template writes all roles alike. Nemotron-Mini has a newline before.
    """
    try:
        between = turn_text(tokenizer)
        text = tokenizer.apply_chat_template(TURNS, tokenize=False)
    except Exception:  # a template for one turn, whatever it raises
        return []
    first, second = (turn["content"] for turn in TURNS[:2])
    if text.partition(first)[2].partition(second)[0] == between:
        return []
    ids = tokenizer(between, add_special_tokens=False)["input_ids"]
    control = control_ids(tokenizer)
    places = [place for place, token in enumerate(ids) if token in control]
    return ids[: places[0] + 1] if places else []


def control_ids(tokenizer, ends: Iterable[int] = ()) -> set[int]:
    """The control tokens: special ones, and added ones that the template writes or `ends` lists.

    Not the tags of the prompts, special or not, and no single character, which is text.
    """
    added = tokenizer.added_tokens_decoder  # {id: token}
    special = {token for token, known in added.items() if known.special}
    special |= set(tokenizer.all_special_ids)
    written = set()
    # Some templates know no system message, or one turn only.
    for messages in (TURNS[:1], TURNS, [TURNS[0] | {"role": "system"}, *TURNS]):
        with suppress(Exception):  # whatever the template raises
            text = render(tokenizer, messages)
            written.update(tokenizer(text, add_special_tokens=False)["input_ids"])
    # The rest is plain text: the names of the roles, or a word of a small world that is a whole
    # response and so ends it (examples/boxes.py).
    found = special | ((written | set(ends)) & added.keys())
    words = {token: tokenizer.decode([token]).strip() for token in found}
    return {token for token, word in words.items() if len(word) > 1 and word not in TAGS}
