"""WebShop's score of a purchase: a float in [0, 1], where only 1.0 is a success.

    reward = (attributes met + options met + [price <= limit]) / (attributes + options + 1) * type

Source: the official `goal.py`. Texts match if thefuzz's token_set_ratio (here rapidfuzz's, rounded
in the same way) is above 85 of 100. This is lenient about added words ("7.5" matches "7.5 wide")
and strict about inflections ("wash" does not match "washable"). An option that contains a color is
reduced to that color before the comparison. A synthetic goal that asks for "aquamarine" therefore
cannot be won, since "aqua" does not match it; this behavior is kept.

Deviation: the type factor compares the nouns of the titles. They come from spaCy's en_core_web_sm
if it is installed, and from a simple word rule otherwise. The score of the goal's own product does
not depend on the tagger.
"""

import importlib.util
import re

from rapidfuzz.fuzz import token_set_ratio
from rapidfuzz.utils import default_process

# An option is reduced to the first of these that it contains: "dark navy" becomes "dark".
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
_LATIN_1 = dict.fromkeys(range(128, 256))  # the characters that thefuzz deletes first


def matches(a, b) -> bool:
    """Compare two texts fuzzily; other objects are compared as their str."""
    a = str(a).translate(_LATIN_1)
    b = str(b).translate(_LATIN_1)
    similarity = token_set_ratio(a, b, processor=default_process)  # 0 to 100
    return round(similarity) > 85


def normalize_color(option):
    """Return the color in an option, or the option itself if there is none.

    option: a string, or a (name, value) pair of a synthetic goal. As in the official code, `in`
    searches the text of a string but the elements of a pair: there, only a value that is exactly
    a color is reduced.
    """
    for color in COLORS:
        if color in option:
            return color
    return option


def attributes_met(product, attributes) -> int:
    """Count the wanted attributes that the product has, as an attribute or in its text."""
    texts = [t.lower() for t in (product.name, " ".join(product.bullets), product.description)]
    count = 0
    for wanted in attributes:
        is_attribute = any(matches(own, wanted) for own in product.attributes)
        if is_attribute or any(wanted in text for text in texts):
            count += 1
    return count


def options_met(chosen, wanted) -> int:
    """Count the wanted options that a chosen value matches.

    wanted: values (human goals) or (name, value) pairs (synthetic goals)
    """
    chosen = [normalize_color(value) for value in chosen]
    count = 0
    for option in wanted:
        option = normalize_color(option)
        if any(matches(value, option) for value in chosen):
            count += 1
    return count


def type_factor(product, goal: dict, bought_nouns: list, wanted_nouns: list) -> float:
    """Return 1.0 for the same type of product, 0.5 or 0.1 for a similar one, 0.0 for another.

    Titles without a common noun give 0.0, even if query and category agree.
    """
    common = len(set(bought_nouns) & set(wanted_nouns))
    title_score = 0.2  # official, for a title without nouns
    if wanted_nouns:
        title_score = common / len(wanted_nouns)
    if title_score == 0.0:
        return 0.0
    if title_score < 0.1:
        return 0.1
    same_query = product.query == goal["query"]
    own_path = {part.strip() for part in product.product_category.split("›")}
    wanted_path = {part.strip() for part in goal["product_category"].split("›")}
    same_category = len(own_path & wanted_path) >= 2
    if same_query or same_category or title_score > 0.2:
        return 1.0
    return 0.5


def reward(product, goal: dict, price: float, options: dict, nouns) -> float:
    """Score the purchase of `product` at `price` with `options` (name -> value) for `goal`.

    nouns: function from a title to its list of nouns
    """
    wanted = goal["goal_options"]
    if isinstance(wanted, dict):  # a synthetic goal; a human goal has a list of values
        wanted = list(wanted.items())
    met = attributes_met(product, goal["attributes"])
    met += options_met(options.values(), wanted)
    if price <= goal["price_upper"]:
        met += 1
    share = met / (len(goal["attributes"]) + len(wanted) + 1)
    return share * type_factor(product, goal, nouns(product.name), nouns(goal["name"]))


def word_nouns(text: str) -> list[str]:
    """List the words that are neither stop words nor numbers: the tagger without a model."""
    words = re.findall("[A-Za-z0-9]+", text)
    return [w.lower() for w in words if w.lower() not in STOP_WORDS and not w.isdigit()]


def default_tagger():
    """Return a function from a text to its nouns: en_core_web_sm if installed, else word_nouns."""
    if importlib.util.find_spec("en_core_web_sm") is None:  # importing spaCy takes seconds
        return word_nouns
    import en_core_web_sm

    model = en_core_web_sm.load()

    def nouns(text: str) -> list[str]:
        return [token.text.lower() for token in model(text) if token.pos_ in ("NOUN", "PROPN")]

    return nouns
