"""Tasks made on the spot, for train_t5.py: a source and its answer.

Numbers in words, words in numbers, dates from one form to another, sentences of a made-up language
of some 150 rules (words, endings, their order), and the names that a report mentions, in which
most of the answer stands in the source.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

_ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
    "nineteen",
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July", "August", "September"),
    *("October", "November", "December"),
)
_NOUNS = (
    *("dog", "cat", "house", "river", "king", "book", "tree", "ship", "child", "bird", "stone"),
    *("road", "horse", "friend", "garden", "window", "letter", "farmer", "teacher", "doctor"),
    *("island", "mountain", "village", "picture", "basket", "hammer", "candle", "bridge"),
)
_ADJECTIVES = (
    *("small", "big", "old", "young", "red", "green", "quiet", "strong", "cold", "warm", "bright"),
    *("dark", "happy", "sad", "clever", "broken"),
)
_VERBS = (
    *("see", "find", "help", "follow", "carry", "paint", "watch", "answer", "visit", "count"),
    *("remember", "need", "open", "clean", "move", "mend"),
)
_ADVERBS = ("today", "often", "never", "slowly", "again", "together", "outside", "gladly")
_SYLLABLES = (
    *("ba", "do", "ki", "lu", "ma", "ne", "po", "ra", "si", "tu", "va", "ze", "gor", "lin", "mek"),
    *("nos", "pal", "ris", "tan", "vul"),
)
_EVENTS = (
    *("met", "wrote to", "was seen with", "worked beside", "sang for", "travelled with"),
    *("was paid by", "argued with"),
)


def in_words(number: int) -> str:
    """A number below a million."""
    if number < 20:
        return _ONES[number]
    if number < 100:
        rest = "" if number % 10 == 0 else f"-{_ONES[number % 10]}"
        return _TENS[number // 10 - 2] + rest
    size, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    rest = "" if number % size == 0 else f" and {in_words(number % size)}"
    return f"{in_words(number // size)} {name}{rest}"


def _made_up(count: int, seed: int) -> list[str]:
    """Different words of two or three syllables."""
    draw, found = random.Random(seed), dict[str, None]()
    while len(found) < count:
        found["".join(draw.choices(_SYLLABLES, k=draw.randint(2, 3)))] = None
    return list(found)


_ENGLISH = (*_NOUNS, *_ADJECTIVES, *_VERBS, *_ADVERBS)
LEXICON = dict(zip(_ENGLISH, _made_up(len(_ENGLISH), 11), strict=True))


def _words(draw: random.Random) -> tuple[str, str]:
    numbers = [draw.randrange(10 ** draw.randint(2, 6)) for _ in range(draw.randint(1, 3))]
    said = "; ".join(map(in_words, numbers))
    return f"say the numbers: {'; '.join(map(str, numbers))}", said


def _numbers(draw: random.Random) -> tuple[str, str]:
    prompt, said = _words(draw)
    return f"write in digits: {said}", prompt.partition(": ")[2]


def _dates(draw: random.Random) -> tuple[str, str]:
    count = draw.randint(2, 3)
    days = [
        (draw.randint(1, 28), draw.randint(1, 12), draw.randint(1800, 2099)) for _ in range(count)
    ]
    short = "; ".join(f"{year}-{month:02}-{day:02}" for day, month, year in days)
    long = "; ".join(f"{_MONTHS[month - 1]} {day}, {year}" for day, month, year in days)
    return f"write out the dates: {short}", long


def _noun_phrase(draw: random.Random) -> tuple[str, str]:
    """An adjective follows its noun and has its ending; "the" is a suffix."""
    noun, many, definite = draw.choice(_NOUNS), draw.random() < 0.4, draw.random() < 0.6
    ending = "im" if many else ""
    source = f"{noun}s" if many else noun
    answer = LEXICON[noun] + ending + ("-el" if definite else "")
    if draw.random() < 0.6:
        adjective = draw.choice(_ADJECTIVES)
        source, answer = f"{adjective} {source}", f"{answer} {LEXICON[adjective]}{ending}"
    article = "the " if definite else "some " if many else "one "
    return article + source, answer


def _sentence(draw: random.Random) -> tuple[str, str]:
    """The verb goes to the end, and what has been is a prefix of it."""
    (who, subject), (whom, what) = _noun_phrase(draw), _noun_phrase(draw)
    verb, was = draw.choice(_VERBS), draw.random() < 0.5
    adverb = draw.choice(_ADVERBS) if draw.random() < 0.4 else ""
    said = f"did {verb}" if was else f"will {verb}"
    acts = ("se" if was else "fo") + LEXICON[verb]
    source = " ".join(filter(None, (who, said, whom, adverb)))
    answer = " ".join(filter(None, (LEXICON.get(adverb, ""), subject, what, acts)))
    return f"{source}.", f"{answer}."


def _language(draw: random.Random) -> tuple[str, str]:
    pairs = [_sentence(draw) for _ in range(draw.randint(1, 2))]
    source, answer = (" ".join(each) for each in zip(*pairs, strict=True))
    return f"translate: {source}", answer


def _name(draw: random.Random) -> str:
    parts = ("".join(draw.choices(_SYLLABLES, k=draw.randint(2, 3))) for _ in range(2))
    return " ".join(part.capitalize() for part in parts)


def _names(draw: random.Random) -> tuple[str, str]:
    """Who is mentioned, in the order of the report."""
    pairs = [(_name(draw), _name(draw)) for _ in range(draw.randint(1, 2))]
    told = " ".join(
        f"In {draw.choice(_MONTHS)} {first} {draw.choice(_EVENTS)} {second}."
        for first, second in pairs
    )
    return f"list the names: {told}", ", ".join(name for pair in pairs for name in pair)


TASKS = {
    "words": _words,
    "numbers": _numbers,
    "dates": _dates,
    "language": _language,
    "names": _names,
}


def pairs(seed: int) -> Iterator[tuple[str, str, str]]:
    """Endlessly: a task, a source and its answer."""
    draw = random.Random(seed)
    while True:
        for name, task in TASKS.items():
            yield name, *task(draw)
