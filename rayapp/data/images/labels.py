"""Find the classes of a flat folder of images, e.g. ImageNet's validation set, in a label file.

    labels = read_labels(open("LOC_val_solution.csv").read())
    folders_of(labels, names, synsets=None)         # {"ILSVRC2012_val_00000001.JPEG": "n01751748"}

Two formats are read: a name and its label per line, separated by commas, semicolons or blanks
(Kaggle's LOC_val_solution.csv, whose further words are boxes, and lists such as val.txt); or one
label per line, in the order of the images' names (ILSVRC2012_validation_ground_truth.txt,
TensorFlow's imagenet_2012_validation_synset_labels.txt). Numeric labels need the list of class
names in their order, because the training folders have names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rayapp.data.images.sources import IMAGE_SUFFIXES, hidden
from rayapp.storage.inputs import open_input

MAX_NAMED = 3


class LabelError(ValueError):
    """A label file is invalid or does not match; the message says what to do."""


@dataclass(frozen=True)
class Labels:
    """The content of a label file: labels by image name, or in the order of the names."""

    named: dict[str, str]
    """Label by image name without suffix; empty if the labels are in order."""
    ordered: tuple[str, ...]

    @property
    def values(self) -> list[str]:
        """All labels."""
        return list(self.ordered) or list(self.named.values())


def read_labels(text: str, where: str = "labels") -> Labels:
    """Read a file of labels.

    Raises:
        LabelError: it is empty, mixed, or says two things of one image.
    """
    rows = [re.split(r"[,;\s]+", line.strip()) for line in text.splitlines() if line.strip()]
    rows = [row for row in rows if not _is_header(row)]
    if not rows:
        raise LabelError(f"labels={where} is empty: it has no line. Give the file of the labels")
    if all(len(row) == 1 for row in rows):
        return Labels({}, tuple(row[0] for row in rows))
    named: dict[str, str] = {}
    for number, row in enumerate(rows, 1):
        if len(row) < 2:
            raise LabelError(
                f"labels={where} is mixed: line {number} has no label, others have. "
                "Give a name and a label on each line, or a label alone"
            )
        key = _stem(row[0])
        if named.setdefault(key, row[1]) != row[1]:
            raise LabelError(f"labels={where} contradicts itself: {key} has two. Correct it")
    return Labels(named, ())


def folders_of(
    labels: Labels, names: Sequence[str], synsets: Sequence[str] | None = None
) -> dict[str, str | None]:
    """Return the class of each image; None for one that has none.

    Raises:
        LabelError: labels and images, or labels and classes, are not of one another.
    """
    if labels.ordered:
        images = sorted(name for name in names if name.lower().endswith(IMAGE_SUFFIXES))
        if len(labels.ordered) != len(images):
            raise LabelError(
                f"labels are {len(labels.ordered):,} in order, and images {len(images):,}: each "
                "must have one. Complete the images, or give a file with their names"
            )
        label_of: dict[str, str | None] = dict.fromkeys(names)
        label_of.update(zip(images, labels.ordered, strict=True))
    else:
        label_of = {name: labels.named.get(_stem(name)) for name in names}
        absent = sorted(labels.named.keys() - {_stem(name) for name in names})
        if absent:
            shown = ", ".join(absent[:MAX_NAMED])
            raise LabelError(
                f"labels name {len(absent):,} images that are not there: e.g. {shown}. Complete "
                "the source, or give the labels of what is there"
            )
    if all(label.isdecimal() for label in labels.values):
        label_of = _numbered(label_of, synsets)
    for label in {label for label in label_of.values() if label is not None}:
        if "/" in label or hidden(label):
            raise LabelError(
                f"label {label} is no name of a class: folders are not named so. Give names "
                "without a slash that do not begin with a dot or a _"
            )
    return label_of


def read_synsets(text: str) -> tuple[str, ...]:
    """Return the first word of each line: the class names in the order of their numbers."""
    return tuple(
        re.split(r"[,;\s]+", line.strip())[0] for line in text.splitlines() if line.strip()
    )


def labels_at(path: str) -> Labels:
    """Read a file of labels, by path or URL; raises FileNotFoundError, else as `read_labels`."""
    return read_labels(_text_of(path), path)


def synsets_at(path: str) -> tuple[str, ...]:
    """Read a file of class names, by path or URL; raises FileNotFoundError."""
    return read_synsets(_text_of(path))


def _text_of(path: str) -> str:
    folder, _, name = path.rpartition("/")
    return open_input(folder or ("/" if path.startswith("/") else ".")).read(name).decode()


def _numbered(
    label_of: dict[str, str | None], synsets: Sequence[str] | None
) -> dict[str, str | None]:
    """Replace numeric labels by class names; numbers start at 1, unless there is a 0."""
    numbers = {name: int(label) for name, label in label_of.items() if label is not None}
    if synsets is None:
        raise LabelError(
            "labels are numbers, and the folders of the training images names: nothing says which "
            "is which. Give --synsets=FILE with a name on each line, in the order of the numbers"
        )
    first = 0 if 0 in numbers.values() else 1
    highest = max(numbers.values(), default=0)
    if highest - first >= len(synsets):
        raise LabelError(
            f"synsets are {len(synsets):,}, and a label is {highest}: there is none of that "
            "number. Give the list that belongs to the labels"
        )
    named = {name: synsets[number - first] for name, number in numbers.items()}
    return {name: named.get(name) for name in label_of}


def _stem(name: str) -> str:
    last = name.rpartition("/")[2]
    return last.rpartition(".")[0] if last.lower().endswith(IMAGE_SUFFIXES) else last


def _is_header(row: Sequence[str]) -> bool:
    return row[0].casefold() in ("imageid", "image", "filename", "file", "name", "id")
