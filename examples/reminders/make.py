"""Write the data of configs/reminders.yaml: messages to a calendar, and their JSON.

    python examples/reminders/make.py

The files are beside this script; the same seed writes the same bytes. No message of held_out.jsonl
is in train.jsonl, and neither are its errands and names.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

SEED, TRAIN, HELD_OUT = 0, 600, 48
SYSTEM = "Write the reminder as JSON with the keys errand, date and time."
MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August"]
MONTHS += ["September", "October", "November", "December"]
NAMES = ["Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Hugo", "Ivy", "Jonas"]
NAMES += ["Kim", "Leo", "Mona", "Nils", "Oscar", "Paula", "Quinn", "Ruth", "Tom", "Vera"]
OTHER_NAMES = ["Maya", "Noah", "Olga", "Pedro", "Rosa", "Sam"]
ERRANDS = [
    "call {name}", "email {name}", "pay the rent", "water the plants", "pick up the laundry",
    "book a table", "return the library books", "send {name} the contract", "take out the bins",
    "buy milk", "meet {name} at the station", "renew the insurance", "back up the laptop",
    "feed the cat", "order new tyres", "review the slides with {name}", "thank {name}",
    "walk the dog", "mow the lawn", "fix the bike", "have lunch with {name}", "cancel the gym",
    "drive {name} home", "wash the windows", "paint the fence", "invite {name}", "post the letter",
    "play tennis with {name}", "vote", "see the dentist",
]  # fmt: skip
OTHER_ERRANDS = [
    "visit {name}", "buy flowers", "clean the oven", "collect the parcel", "phone the bank",
    "print the tickets", "ask {name} about the keys", "charge the car",
]  # fmt: skip
FRAMES = [
    "Remind me to {errand} on {day} at {time}.",
    "On {day} at {time} I have to {errand}.",
    "Could you put this down: {errand}, {day}, {time}?",
    "I must not forget to {errand} at {time} on {day}.",
    "{day}, {time}: {errand}. Please note it.",
    "Please remember for me that I want to {errand} at {time}, {day}.",
]
GENERAL = [  # what a small chat model knows, in other words than the task's
    ("What is the capital of France?", "The capital of France is Paris."),
    ("Name three primary colors.", "The three primary colors are red, blue, and yellow."),
    (
        "Why is the sky blue?",
        "The sky appears blue because molecules in the air scatter blue light more than "
        "they scatter red light.",
    ),
    (
        "Explain what a computer program is in one sentence.",
        "A computer program is a set of instructions that tells a computer how to perform a task.",
    ),
    ("How many days are there in a leap year?", "There are 366 days in a leap year."),
    (
        "Give me a tip for sleeping better.",
        "Try to go to bed and wake up at the same time every day, even on weekends.",
    ),
    ("Who wrote Romeo and Juliet?", "Romeo and Juliet was written by William Shakespeare."),
    (
        "What do plants need to grow?",
        "Plants need sunlight, water, air, and nutrients from the soil to grow.",
    ),
    ("Translate 'good morning' into Spanish.", "'Good morning' in Spanish is 'buenos días'."),
    (
        "What is the difference between weather and climate?",
        "Weather is the state of the atmosphere at a given time and place, while climate is the "
        "average of the weather over a long period of time.",
    ),
    ("What is the largest planet in our solar system?", "Jupiter is the largest planet."),
    (
        "Write a short sentence about a dog.",
        "The happy dog ran across the green field to greet its owner.",
    ),
]


def said(day: date, rng: random.Random) -> str:
    """Say a day: 3 May 2027, May 3, 2027 or the 3rd of May 2027."""
    month = MONTHS[day.month - 1]
    ending = {1: "st", 2: "nd", 3: "rd"}.get(0 if day.day in (11, 12, 13) else day.day % 10, "th")
    forms = ["{day} {month} {year}", "{month} {day}, {year}", "the {day}{ending} of {month} {year}"]
    return rng.choice(forms).format(day=day.day, month=month, year=day.year, ending=ending)


def items(
    rng: random.Random, names: Sequence[str], errands: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yield (message, JSON) without end."""
    while True:
        errand = rng.choice(errands).format(name=rng.choice(names))
        number = rng.choice([rng.randint(1, 9), rng.randint(10, 28)])  # 3 May is the hard kind
        day = date(rng.choice([2027, 2028]), rng.randint(1, 12), number)
        hour, minute = rng.randrange(6, 23), rng.choice([0, 15, 30, 45])
        message = rng.choice(FRAMES).format(
            errand=errand, day=said(day, rng), time=f"{hour}:{minute:02}"
        )
        answer = {"errand": errand, "date": day.isoformat(), "time": f"{hour:02}:{minute:02}"}
        yield message[0].upper() + message[1:], json.dumps(answer)


def chat(asked: str, answer: str, system: str = "") -> str:
    """Return a line of JSONL."""
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    first = [{"role": "system", "content": system}] if system else []
    return json.dumps({"messages": [*first, *messages]}) + "\n"


def main() -> None:
    """Write train.jsonl, held_out.jsonl and general.jsonl."""
    rng, folder = random.Random(SEED), Path(__file__).parent
    for name, count, source in (
        ("train", TRAIN, items(rng, NAMES, ERRANDS)),
        ("held_out", HELD_OUT, items(rng, OTHER_NAMES, OTHER_ERRANDS)),
    ):
        chosen: dict[str, str] = {}
        while len(chosen) < count:
            chosen |= [next(source)]
        lines = (chat(*each, SYSTEM) for each in chosen.items())
        (folder / f"{name}.jsonl").write_text("".join(lines))
    (folder / "general.jsonl").write_text("".join(chat(*each) for each in GENERAL))


if __name__ == "__main__":
    main()
