"""Reader of WebShop's files: scraped records of about 3 kB each become `Product`s.

Products keep the order of the file and are cleaned by the rules of the official `load_products`.

Deviations: records are read one at a time, and only what the pages, the search and the score use is
kept. Records that crash the official code (no images, a price without "$", a missing field) raise
an error that names the product. A missing description or feature list, which also crashes it, is
read as empty.
"""

import json
import math
import random
import re
from dataclasses import dataclass
from pathlib import Path
from sys import intern

from paw_min.base.files import damaged, expanded

SMALL = 1000  # products in the official small files
CHUNK = 1 << 20  # characters per read
REMEDY = ("get the official files as in RUNNING.md, \"WebShop\", or use --preset tiny "
          "without --data for a small invented shop")
FIX = "fix or remove the row, or get the official file again"


@dataclass(slots=True)
class Product:
    """The used part of a record. Texts are as in the file; options are cleaned."""

    asin: str
    name: str
    category: str  # beauty, electronics, ...
    query: str  # the search that it was scraped with
    product_category: str  # a path, joined by " › "
    description: str
    bullets: list[str]
    options: dict[str, list[str]]  # name -> values, both lower case
    attributes: list[str]
    price_tag: str  # "$12.99" or "$9.99 to $19.99"
    price: float  # The score uses it; drawn from the range if there is one.


def read_products(
    items: Path, annotations: dict, rng: random.Random, limit: int | None
) -> list[Product]:
    """Read the products in the first `limit` rows (None: all).

    annotations: content of items_ins_v2.json
    rng: draws a price for each price range, in file order
    """
    products = []
    seen = set()  # asins
    for row, record in enumerate(_read_list(items, limit)):
        with damaged(f"Row {row} of {items}", FIX):
            asin = record["asin"]
        if asin == "nan" or len(asin) > 10 or asin in seen:  # The official code skips these, too.
            continue
        seen.add(asin)
        with damaged(f"The record of {asin} in items_ins_v2", FIX):
            attributes = texts_of(annotations.get(asin, {}).get("attributes", ["DUMMY_ATTR"]))
        with damaged(f"Product {asin} of {items}", FIX):
            products.append(_product(record, attributes, rng))
    if not products:
        raise ValueError(f"{items} has no usable product; {REMEDY}.")
    return products


def find_file(folder, stem: str, small: bool) -> Path:
    """Find stem.json or stem_1000.json; `small` prefers the latter. Raises FileNotFoundError."""
    folder = expanded(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{str(folder)!r} is not a folder with a shop; {REMEDY}.")
    names = [f"{stem}.json", f"{stem}_{SMALL}.json"]
    preferred_first = names
    if small:
        preferred_first = names[::-1]
    for name in preferred_first:
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"{folder} has no {' or '.join(names)}; {REMEDY}.")


def _read_list(path, limit):
    """Yield the first `limit` elements of a JSON list.

    Decoding the whole list would take ten times as much memory as the products.
    """
    decoder = json.JSONDecoder()
    gap = re.compile(r"[\s,]*")  # what separates two elements
    with damaged(str(path), REMEDY), open(path, encoding="utf-8-sig") as file:
        text = file.read(CHUNK).lstrip()  # what was read and is not decoded, from `at` on
        if text[:1] != "[":
            raise ValueError("it is not a JSON list")
        at = 1
        count = 0
        while count != limit:  # a limit of None is never reached
            at = gap.match(text, at).end()
            if text[at : at + 1] == "]":
                return
            try:
                record, at = decoder.raw_decode(text, at)
            except ValueError:
                # The record continues in the next chunk, or the file is broken. A chunk is at least
                # as long as what is left over: reading a record of any size by doubling takes
                # linear time.
                more = file.read(max(CHUNK, len(text) - at))
                if not more:
                    raise
                text = text[at:] + more
                at = 0
                continue
            count += 1
            yield record


def _options(record) -> dict[str, list[str]]:
    """Clean the options. The last of two equal names wins; null groups are skipped.

    Texts are interned, since many products have the same ones.
    """
    groups = record.get("customization_options") or {}
    options = {}
    for name, values in groups.items():
        if values is None:
            continue
        texts = [each["value"].strip().replace("/", " | ").lower() for each in values]
        options[intern(name.lower())] = [intern(text) for text in texts]
    return options


def _price(pricing, rng) -> tuple[float, str]:
    """Return (price, tag). Each "$" starts a price, and two prices are a range; default $100."""
    if not pricing:
        return 100.0, "$100.0"
    prices = [float(re.sub(r"[^\d.]", "", part)) for part in pricing.split("$")[1:]][:2]
    if not prices or not all(map(math.isfinite, prices)):
        raise ValueError(f"the price {pricing!r:.99} is not a number after a '$'")
    tag = " to ".join(f"${price}" for price in prices)
    if len(prices) == 1:
        return prices[0], tag
    low, high = prices
    # Draw for ranges only: one draw more would change all later prices and limits.
    return rng.uniform(low, high), tag


def texts_of(value) -> list:
    """A list as it is. A text would be a list of its letters."""
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.80} is not a list")
    return value


def check_texts(*values) -> None:
    for value in values:
        if not isinstance(value, str):
            raise TypeError(f"{value!r:.80} is not a text")


def _product(record, attributes, rng) -> Product:
    if not record.get("images"):
        raise ValueError("it has no images, and WebShop requires one")
    price, tag = _price(record.get("pricing"), rng)
    description = record.get("full_description") or ""
    bullets = record.get("small_description") or []
    if isinstance(bullets, str):
        bullets = [bullets]
    check_texts(record["asin"], record["name"], description, *texts_of(bullets))
    product = Product(
        asin=record["asin"],
        name=record["name"],
        category=intern(record["category"]),
        query=intern(record["query"].lower().strip()),
        product_category=intern(record["product_category"]),
        description=description,
        bullets=bullets,
        options=_options(record),
        attributes=[intern(text) for text in attributes],
        price_tag=tag,
        price=price,
    )
    # UnicodeEncodeError for half of a surrogate pair.
    fields = [getattr(product, name) for name in Product.__slots__]
    json.dumps(fields, ensure_ascii=False).encode()
    return product
