"""What does a chat template add to a text? Turns, control tokens, and tokens that end a response.

Families write their turns differently, so each function asks the template itself, with messages of
one word.
"""

import re
from datetime import date

from paw_min.base.errors import UserError

THOUGHT = "<think>"
# Tags that prompts ask for or show. A supervised stage may have made them special tokens: they are
# text all the same, which decoding keeps and which ends no turn.
TAGS = {
    f"<{slash}{name}>"
    for name in ("think", "action", "search", "answer", "information", "prediction", "next_state")
    for slash in ("", "/")
}


def render(tokenizer, chat: list[dict[str, str]]) -> str:
    """Messages in the model's chat format, up to the next response.

    Qwen3 without its own thinking, as in verl-agent; templates that state today's date, such as
    Llama 3.2's, with a fixed one. Other templates ignore these two arguments.
    """
    return tokenizer.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True, enable_thinking=False,
        strftime_now=date(2024, 7, 26).strftime,
    )


def turn_text(tokenizer) -> str:
    """What the chat template writes between an assistant's message and the next user's.

    UserError for a template that refuses such a conversation, or that changes its messages.
    """
    words = ("first", "second", "third")
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": word} for role, word in zip(roles, words, strict=True)]
    remedy = "use --wm-separator none"
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception as error:  # whatever the template raises
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"the chat template refuses a second turn ({reason}): {remedy}") from error
    start = text.rfind(words[1])
    end = text.rfind(words[2])
    if not 0 <= start < end:
        raise UserError(f"the chat template leaves out messages of a second turn: {remedy}")
    return text[start + len(words[1]) : end]


def end_tokens(model, tokenizer) -> list[int]:
    """The tokens that end a response: the template's, generation_config's and the tokenizer's.

    A model may list one of them only. The first is what training targets end with.
    """
    published = model.generation_config.eos_token_id
    if not isinstance(published, list):
        published = [published]
    ends = dict.fromkeys([turn_end(tokenizer), *published, tokenizer.eos_token_id])
    ends.pop(None, None)
    size = model.get_input_embeddings().num_embeddings
    if not ends or not all(0 <= token < size for token in ends):
        raise ValueError(f"it has the end tokens {list(ends)}: one or more of 0 to {size - 1}")
    return list(ends)


def turn_end(tokenizer) -> int | None:
    """The special token with which the chat template ends an assistant's turn; None without one.

    This token follows an earlier message and the last one, maybe after a space. A token that
    follows only one of them begins the next turn.
    """
    chat = [{"role": "user", "content": "first"}, {"role": "assistant", "content": "second"}]
    try:
        between = turn_text(tokenizer)
        last = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("second")[2]
    except Exception:  # a template for one turn, whatever it raises
        return None
    ends = [
        tokenizer(text.lstrip(" "), add_special_tokens=False)["input_ids"][:1]
        for text in (between, last)
    ]
    if ends[0] != ends[1] or not ends[0]:
        return None
    (token,) = ends[0]
    return token if tokenizer.convert_ids_to_tokens(token) in special_tokens(tokenizer) else None


def special_tokens(tokenizer) -> set[str]:
    """The control tokens, as text; not the tags of the prompts, special or not."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return (added | set(tokenizer.all_special_tokens)) - TAGS


def control_starts(tokenizer) -> re.Pattern:
    """Matches each character at which the text of a control token begins.

    Overlapping tokens have a match each, so a space behind the character breaks both.
    """
    words = [re.escape(word) for word in sorted(special_tokens(tokenizer)) if len(word) > 1]
    return re.compile(f"(?=(?:{'|'.join(words)})).", re.DOTALL) if words else re.compile("(?!)")
