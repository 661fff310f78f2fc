"""WebShop's score of a purchase: type x (attributes + options + price) / everything asked for.

What it computes: `reward`, for a product bought with options at a price, against a goal. The score
is a float in [0, 1]; 1.0 is the only success.

    reward = (attributes met + options met + [price <= limit]) / (attributes + options + 1) * type

Source: the official `goal.py`. Text is compared by thefuzz's token_set_ratio, here rapidfuzz's,
rounded as there: above 85 of 100 counts as met. That is lenient ("7.5" meets "7.5 wide") where
words are added and strict where they are inflected ("wash" does not meet "washable"). Options are
reduced to a color they contain first, so a synthetic goal that asks for "aquamarine" cannot be won:
"aqua" does not meet it. This is kept.

Deviation: the nouns of a title, which tell lookalikes from strangers, come from spaCy's
en_core_web_sm if that is installed, and else from a word rule. Buying the goal's own product never
depends on the tagger.
"""

import importlib.util
import re

from rapidfuzz.fuzz import token_set_ratio
from rapidfuzz.utils import default_process

# The first of these, in this order, that occurs in an option stands for it: "dark navy" is "dark".
COLORS = """
    alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown
    burgundy camel camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee
    cognac copper coral cranberry cream crystal dark denim eggplant elephant espresso fuchsia gold
    granite grape graphite grass gray green grey heather indigo ivory ivy khaki lavender lemon
    leopard light lilac lime magenta maroon mauve merlot midnight mint mocha multicolor mushroom
    mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal
    rust sand sapphire seashell silver skull slate steel stone stonewash sunflower tan taupe teal
    tiger turquoise violet walnut wheat white wine yellow
""".split()

STOP_WORDS = frozenset(
    "a an and are as at by for from in is it my of on or our that the this to with your".split()
)
_LATIN_1 = dict.fromkeys(range(128, 256))  # thefuzz deletes these, and only these, before comparing


def matches(a, b) -> bool:
    """Do two texts say the same, to within added words? Anything but a string counts as its str."""
    a, b = (str(text).translate(_LATIN_1) for text in (a, b))
    return round(token_set_ratio(a, b, processor=default_process)) > 85


def normalize_color(option):
    """The color that an option names, else the option itself.

    option: a string, or a (name, value) pair of a synthetic goal. `in` means "contains" for the
    one and "is one of" for the other: in a pair, only a plain color word is recognised.
    """
    return next((color for color in COLORS if color in option), option)


def attributes_met(product, attributes) -> int:
    """How many of the goal's attributes the product has: as attributes, or anywhere in its text."""
    texts = [t.lower() for t in (product.name, " ".join(product.bullets), product.description)]
    return sum(
        any(matches(own, wanted) for own in product.attributes) or any(wanted in t for t in texts)
        for wanted in attributes
    )


def options_met(chosen, wanted) -> int:
    """How many wanted options some chosen value meets; names play no part for human goals."""
    chosen = [normalize_color(value) for value in chosen]
    return sum(any(matches(c, w) for c in chosen) for w in map(normalize_color, wanted))


def type_factor(product, goal: dict, bought_nouns: list, wanted_nouns: list) -> float:
    """1.0 for the same kind of product, 0.5 or 0.1 for a doubtful one, 0.0 for another.

    Nothing in common between the titles is 0.0 even if query and category agree.
    """
    common = len(set(bought_nouns) & set(wanted_nouns))
    title_score = common / len(wanted_nouns) if wanted_nouns else 0.2
    if title_score == 0.0:
        return 0.0
    if title_score < 0.1:
        return 0.1
    same_query = product.query == goal["query"]
    paths = [{part.strip() for part in path.split("›")}
             for path in (product.product_category, goal["product_category"])]
    return 1.0 if same_query or len(paths[0] & paths[1]) >= 2 or title_score > 0.2 else 0.5


def reward(product, goal: dict, price: float, options: dict, nouns) -> float:
    """Score of buying `product` at `price` with `options` (name -> value) for `goal`.

    nouns: title -> list of nouns.
    """
    wanted = goal["goal_options"]
    pairs = wanted.items() if isinstance(wanted, dict) else wanted  # synthetic or human goal
    met = attributes_met(product, goal["attributes"]) + options_met(options.values(), pairs)
    met += price <= goal["price_upper"]
    share = met / (len(goal["attributes"]) + len(wanted) + 1)
    return share * type_factor(product, goal, nouns(product.name), nouns(goal["name"]))


def word_nouns(text: str) -> list[str]:
    """The tagger without a model: each run of letters and digits that is no stop word or number."""
    words = re.findall("[A-Za-z0-9]+", text)
    return [w.lower() for w in words if w.lower() not in STOP_WORDS and not w.isdigit()]


def default_tagger():
    """text -> its nouns, lower case, with repeats: by en_core_web_sm if installed, else by rule."""
    if importlib.util.find_spec("en_core_web_sm") is None:  # spacy itself takes seconds to import
        return word_nouns
    import en_core_web_sm

    model = en_core_web_sm.load()
    return lambda text: [t.text.lower() for t in model(text) if t.pos_ in ("NOUN", "PROPN")]
