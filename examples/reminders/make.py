"""Write the data of configs/reminders.yaml: messages to a calendar, and their JSON.

    python examples/reminders/make.py

The files are beside this script; the same seed writes the same bytes. No message of held_out.jsonl
is in train.jsonl, and neither are its errands and names.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

SEED, TRAIN, HELD_OUT = 0, 600, 64
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
HOURS = "twelve one two three four five six seven eight nine ten eleven".split()
PARTS = [
    ("in the morning", range(6, 12)),
    ("in the afternoon", range(12, 18)),
    ("in the evening", range(18, 24)),
]
NAMES = [
    "Anna",
    "Ben",
    "Carla",
    "David",
    "Emma",
    "Felix",
    "Grace",
    "Hugo",
    "Ivy",
    "Jonas",
    "Kim",
    "Leo",
]
OTHER_NAMES = ["Maya", "Noah", "Olga", "Pedro", "Rosa", "Sam"]
ERRANDS = [
    "call {name}", "email {name}", "pay the rent", "water the plants", "pick up the laundry",
    "book a table for dinner", "return the library books", "send {name} the contract",
    "take out the bins", "buy milk", "meet {name} at the station", "renew the insurance",
    "back up the laptop", "feed the cat", "order new tyres", "review the slides with {name}",
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


def spoken(hour: int, minute: int, rng: random.Random) -> str:
    """Say a time: 20:45 is 8:45 pm, 20:45 or a quarter to nine in the evening."""
    style = rng.choice(["words", "words", "pm", "digits"])
    if style == "digits":
        return f"{hour}:{minute:02}"
    if style == "pm":
        half = "am" if hour < 12 else "pm"
        return f"{(hour - 1) % 12 + 1}{f':{minute:02}' if minute else ''} {half}"
    part = next(name for name, hours in PARTS if hour in hours)
    this, following = HOURS[hour % 12], HOURS[(hour + 1) % 12]
    said = {
        0: f"{this} o'clock",
        15: f"a quarter past {this}",
        30: f"half past {this}",
        45: f"a quarter to {following}",
    }[minute]
    return f"{said} {part}"


def items(
    rng: random.Random, names: Sequence[str], errands: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yield (message, JSON) without end."""
    while True:
        errand = rng.choice(errands).format(name=rng.choice(names))
        day, hour, minute = rng.choice(DAYS), rng.randrange(6, 23), rng.choice([0, 15, 30, 45])
        message = rng.choice(FRAMES).format(errand=errand, day=day, time=spoken(hour, minute, rng))
        answer = {"errand": errand, "day": day, "time": f"{hour:02}:{minute:02}"}
        yield message[0].upper() + message[1:], json.dumps(answer)


def main() -> None:
    """Write train.jsonl and held_out.jsonl."""
    rng = random.Random(SEED)
    for name, count, source in (
        ("train", TRAIN, items(rng, NAMES, ERRANDS)),
        ("held_out", HELD_OUT, items(rng, OTHER_NAMES, OTHER_ERRANDS)),
    ):
        chosen: dict[str, str] = {}
        while len(chosen) < count:
            chosen |= [next(source)]
        lines = (
            json.dumps(
                {
                    "messages": [
                        {"role": "user", "content": message},
                        {"role": "assistant", "content": answer},
                    ]
                }
            )
            for message, answer in chosen.items()
        )
        Path(__file__).with_name(f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
