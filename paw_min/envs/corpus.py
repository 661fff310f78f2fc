"""An invented world to search in: passages, and questions that only they can answer.

What it computes: a folder with
    corpus.jsonl             {"id": "0", "contents": "\\"Title\\"\\ntext"}, as wiki-18 is published
    train.jsonl, test.jsonl  {"question", "golden_answers", "data_source", "id"}
    manifest.json            what was asked for
The first half of the questions is of the source `single`, where one fact is the answer ("Who wrote
Galado Toresk?"), the second of `two_hop`, where one fact names what to look up for the other
("Where was the author of Galado Toresk born?"): a panel of equal stretches has its share of both.

Source: none in the paper, which searches Wikipedia with questions of NQ and HotpotQA. Here: a small
stand-in for both, which a model of a million parameters can learn on a CPU. A name is any two of
576 invented words, so that the words are few (the vocabulary of a word tokenizer stays below 1,000)
and the names many: an answer cannot be known, but it can be copied from a passage. Each relation
has its own words before the name. Sentences start with "The": in the JSON of an observation the
line end before them reads as the letter n: a tokenizer meets `nthe` and `ndoc`, and that is all.

The world consists of two parts that know nothing of each other, and test questions ask about the
smaller one: no fact behind them is one behind a training question. Their names are mixed, since
both draw from the same words. The same arguments give the same bytes everywhere.

    python -m paw_min.envs.corpus --out DIR
"""

import argparse
import json
import os
import random
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from tqdm import tqdm

VERSION = 1  # raise it with every change that changes the bytes
N_TRAIN = 2000  # training questions of the default world
TEST_SHARE = 0.2  # of the entities

# kind: (share of the entities, its passage)
KINDS = {
    "country": (0.02, "The country {name} has its capital in the town {capital}."),
    "river": (0.06, "The river {name} rises in the country {source}."),
    "town": (0.20, "The town {name} lies in the country {country} on the river {river}."),
    "citizen": (0.40, "The citizen {name} was born in the town {birthplace} and has the spouse "
                      "{spouse}."),
    "book": (0.16, "The book {name} is by the author {author}."),
    "company": (0.16, "The company {name} is by the founder {founder} and sits in the town "
                      "{seat}."),
}

# relation: (kind it is told of, kind it leads to, question, how a second question refers to it)
RELATIONS = {
    "capital": ("country", "town", "Which town is the capital of {}?", "the capital of {}"),
    "source": ("river", "country", "In which country does {} rise?", "the country where {} rises"),
    "country": ("town", "country", "In which country lies {}?", "the country of {}"),
    "river": ("town", "river", "Which river runs through {}?", "the river at {}"),
    "birthplace": ("citizen", "town", "Where was {} born?", "the town where {} was born"),
    "spouse": ("citizen", "citizen", "Whom did {} marry?", "the spouse of {}"),
    "author": ("book", "citizen", "Who wrote {}?", "the author of {}"),
    "founder": ("company", "citizen", "Who founded {}?", "the founder of {}"),
    "seat": ("company", "town", "In which town sits {}?", "the seat of {}"),
}

# 24 beginnings with 12 endings each for first words, and 12 others for last words. Each ending
# holds a vowel and none is one that a stemmer would take off.
BEGINNINGS = """bar bel brin dal dren fal fen gal gor hal jor kel kor lun mar mel nar nor pel quin
                sar tor val wen""".split()
FIRST = "ado ago amo ano avo elo enka ibo ilo imo oka uko".split()
LAST = "adum agor akov arn elk emund enth esk imur odrin olt unk".split()
FIRST_WORDS = [(b + e).capitalize() for b in BEGINNINGS for e in FIRST]
LAST_WORDS = [(b + e).capitalize() for b in BEGINNINGS for e in LAST]
NAME = r"[A-Z][a-z]+ [A-Z][a-z]+"


@dataclass
class Entity:
    kind: str
    name: str
    facts: dict[str, "Entity"] = field(default_factory=dict)  # relation -> the entity it leads to

    def passage(self) -> str:
        names = {relation: entity.name for relation, entity in self.facts.items()}
        return f'"{self.name}"\n{KINDS[self.kind][1].format(name=self.name, **names)}'


def make_part(names: list[str], rng: random.Random) -> list[Entity]:
    """Entities with these names and the facts that join them, and only them."""
    counts = {kind: int(share * len(names)) for kind, (share, _) in KINDS.items()}
    counts["town"] += len(names) - sum(counts.values())  # what the rounding left over
    if counts["citizen"] % 2:  # all of them are married
        counts["citizen"] -= 1
        counts["town"] += 1
    names, of = iter(names), {}  # of: kind -> its entities
    for kind, count in counts.items():
        of[kind] = [Entity(kind, next(names)) for _ in range(count)]
    for i, town in enumerate(of["town"]):
        country = of["country"][i % len(of["country"])]  # each country has a town
        town.facts = {"country": country, "river": rng.choice(of["river"])}
    for country in of["country"]:
        towns = [town for town in of["town"] if town.facts["country"] is country]
        country.facts = {"capital": rng.choice(towns)}
    for river in of["river"]:
        river.facts = {"source": rng.choice(of["country"])}
    couples = zip(of["citizen"][::2], of["citizen"][1::2])
    for one, other in couples:
        one.facts = {"birthplace": rng.choice(of["town"]), "spouse": other}
        other.facts = {"birthplace": rng.choice(of["town"]), "spouse": one}
    for book in of["book"]:
        book.facts = {"author": rng.choice(of["citizen"])}
    for company in of["company"]:
        company.facts = {"founder": rng.choice(of["citizen"]), "seat": rng.choice(of["town"])}
    return [entity for entities in of.values() for entity in entities]


def single_questions(part: list[Entity]) -> Iterable[list[tuple[str, str]]]:
    """For each relation, all (question, answer)."""
    for relation, (kind, _, question, _) in RELATIONS.items():
        yield [(question.format(entity.name), entity.facts[relation].name)
               for entity in part if entity.kind == kind]


def two_hop_questions(part: list[Entity]) -> Iterable[list[tuple[str, str]]]:
    """For each pair of relations that fit together, all (question, answer).

    Not asked: what leads back to where one began, as the country of the capital of a country.
    """
    for first, (kind, middle, _, reference) in RELATIONS.items():
        for second, (start, _, question, _) in RELATIONS.items():
            if middle == start:
                pairs = [(entity, entity.facts[first].facts[second])
                         for entity in part if entity.kind == kind]
                yield [(question.format(reference.format(entity.name)), answer.name)
                       for entity, answer in pairs if answer is not entity]


def draw(kinds: Iterable[list], n: int, rng: random.Random) -> list:
    """n entries, as many from each of the lists as from every other, while they last."""
    kinds = [rng.sample(entries, len(entries)) for entries in kinds]
    turns = [entry for turn in zip_longest(*kinds) for entry in turn if entry]
    if len(turns) < n:
        raise ValueError(f"{n} questions of a kind were asked for and there are {len(turns)}: "
                         "choose more entities or fewer questions.")
    return turns[:n]


def generate(folder, n_entities: int = 3000, n_train: int = N_TRAIN, n_test: int = 300,
             seed: int = 0, progress: bool = False) -> Path:
    """Make the corpus and its questions, or find them made; returns the folder.

    n_entities is the number of passages. The folder appears when it is complete. One that holds
    something else, or what other arguments made, is a ValueError.
    """
    n_names = len(FIRST_WORDS) * len(LAST_WORDS)
    if not 500 <= n_entities <= n_names or min(n_train, n_test) < 2 or n_train % 2 or n_test % 2:
        raise ValueError(f"n_entities is {n_entities}, n_train {n_train} and n_test {n_test}; "
                         f"choose from 500 to {n_names} entities, and even numbers of questions.")
    asked = {"generator": VERSION, "n_entities": n_entities, "n_train": n_train, "n_test": n_test,
             "seed": seed}
    folder = Path(folder).expanduser()
    if folder.is_file() or folder.is_dir() and any(folder.iterdir()):
        return _found(folder, asked)

    rng = random.Random(f"corpus {VERSION} {seed}")  # str seeds: independent of PYTHONHASHSEED
    numbers = [divmod(n, len(LAST_WORDS)) for n in rng.sample(range(n_names), n_entities)]
    names = [f"{FIRST_WORDS[first]} {LAST_WORDS[last]}" for first, last in numbers]
    n_of_test = int(TEST_SHARE * n_entities)
    parts = {"test": (names[:n_of_test], n_test), "train": (names[n_of_test:], n_train)}
    entities, files = [], {}
    for split, (part_names, n) in parts.items():
        part = make_part(part_names, rng)
        entities += part
        rows = [(*row, "single") for row in draw(single_questions(part), n // 2, rng)]
        rows += [(*row, "two_hop") for row in draw(two_hop_questions(part), n // 2, rng)]
        files[f"{split}.jsonl"] = [
            {"id": f"{split}-{i}", "question": question, "golden_answers": [answer],
             "data_source": source}
            for i, (question, answer, source) in enumerate(rows)]
    rng.shuffle(entities)
    passages = tqdm(entities, "passages", unit="passage", disable=None if progress else True)
    files["corpus.jsonl"] = [{"id": str(i), "contents": entity.passage()}
                             for i, entity in enumerate(passages)]
    files["manifest.json"] = [asked]

    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name, rows in files.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (partial / name).write_bytes(text.encode("ascii"))
    try:
        os.replace(partial, folder)
    except OSError:
        shutil.rmtree(partial)
        if not folder.exists():
            raise
        return _found(folder, asked)  # another process was faster
    return folder


def _found(folder: Path, asked: dict) -> Path:
    names = ("corpus.jsonl", "train.jsonl", "test.jsonl")
    try:
        found = json.loads((folder / "manifest.json").read_text("ascii"))
    except (OSError, ValueError):
        found = "something else"
    if found != asked or not all((folder / name).is_file() for name in names):
        raise ValueError(f"{folder} holds {found}, and a corpus with {asked} was asked for; choose "
                         "another folder or delete this one.")
    return folder


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="folder to make")
    parser.add_argument("--n-entities", type=int, default=3000, help="passages")
    parser.add_argument("--n-train", type=int, default=N_TRAIN, help="training questions")
    parser.add_argument("--n-test", type=int, default=300, help="test questions")
    parser.add_argument("--seed", type=int, default=0)
    args = vars(parser.parse_args())
    print(f"{generate(args.pop('out'), **args, progress=True)}: {args['n_entities']} passages, "
          f"{args['n_train']} training and {args['n_test']} test questions")


if __name__ == "__main__":
    main()
