"""Write the data of configs/smollm2_dpo.yaml: pairs of answers that say a day in two ways.

    python examples/dates/make.py

The chosen answer of a pair says 3 May 2027, the rejected one May 3, 2027; they are the same
otherwise. The files are beside this script; the same seed writes the same bytes. train.jsonl has
pairs. held_out.jsonl asks which of the two answers is likelier, written.jsonl has the model write
its own and looks for the day; neither has an event of train.jsonl.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

SEED, TRAIN, HELD_OUT, WRITTEN = 0, 400, 48, 32
SYSTEM = "Answer in one short sentence."
MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August"]
MONTHS += ["September", "October", "November", "December"]
EVENTS = [
    "concert", "exam", "wedding", "deadline", "match", "meeting", "flight", "workshop", "party",
    "interview", "lecture", "market", "marathon", "dinner", "audit", "launch", "opening", "auction",
    "rehearsal", "appointment",
]  # fmt: skip
OTHER_EVENTS = ["picnic", "election", "hearing", "festival", "harvest", "reunion"]
FRAMES = [
    ("When is the {event}? It is planned for {iso}.", "The {event} is on {day}."),
    ("{iso}: {event}. When is it?", "It is on {day}."),
    ("The date of the {event} is {iso}. Please say it in words.", "The date is {day}."),
    ("On which day is the {event} ({iso})?", "The {event} takes place on {day}."),
    ("My calendar has {event} at {iso}. What day is that?", "That is {day}."),
    ("Tell my team when the {event} is: {iso}.", "Please note: the {event} is on {day}."),
]

Pair = tuple[str, str, str, str]


def pairs(rng: random.Random, events: Sequence[str]) -> Iterator[Pair]:
    """Yield (question, chosen, rejected, chosen day) without end."""
    while True:
        day = date(rng.randint(2024, 2029), rng.randint(1, 12), rng.randint(1, 28))
        month, event = MONTHS[day.month - 1], rng.choice(events)
        british, american = f"{day.day} {month} {day.year}", f"{month} {day.day}, {day.year}"
        question, answer = rng.choice(FRAMES)
        asked = question.format(event=event, iso=day.isoformat())
        chosen, rejected = (answer.format(event=event, day=each) for each in (british, american))
        yield asked[0].upper() + asked[1:], chosen, rejected, british


def drawn(rng: random.Random, events: Sequence[str], count: int) -> list[Pair]:
    """Return pairs with questions of their own."""
    found: dict[str, Pair] = {}
    for pair in pairs(rng, events):
        found.setdefault(pair[0], pair)
        if len(found) == count:
            break
    return list(found.values())


def item(question: str, answer: str, **more: object) -> str:
    """Return a line of JSONL: a question with its answer."""
    return json.dumps({"question": question, "answer": answer, "system": SYSTEM, **more}) + "\n"


def main() -> None:
    """Write train.jsonl, held_out.jsonl and written.jsonl."""
    rng, folder = random.Random(SEED), Path(__file__).parent
    train, held_out = drawn(rng, EVENTS, TRAIN), drawn(rng, OTHER_EVENTS, HELD_OUT)
    rows = [
        {"question": question, "chosen": chosen, "rejected": rejected, "system": SYSTEM}
        for question, chosen, rejected, _ in train
    ]
    choices = [item(asked, good, choices=[good, other]) for asked, good, other, _ in held_out]
    written = [item(asked, day) for asked, _, _, day in held_out[:WRITTEN]]
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "held_out.jsonl").write_text("".join(choices))
    (folder / "written.jsonl").write_text("".join(written))


if __name__ == "__main__":
    main()
