"""Find the chat template that data.chat_template names: a file, `chatml`, or `training`.

`training` is the variant of a published template that the package trl carries: it marks what the
assistant says, and renders a turn the same wherever it stands.
"""

from __future__ import annotations

from typing import Any

from rayapp.data.tokens import CHAT_TEMPLATE
from rayapp.storage import open_storage

CHATML, TRAINING = "chatml", "training"
NO_EXTRA = (
    "data.chat_template=training is not possible: the package trl is not installed. Run "
    "pip install 'rayapp[chat]'"
)


class TemplateError(ValueError):
    """There is no such template; the message is for the user."""


def template_of(name: str, tokenizer: Any) -> str:
    """Return the text of a template; empty if the tokenizer's own is right for training.

    `tokenizer` is None if it is still to be made.

    Raises:
        TemplateError: there is no such file, or no training variant.
        StorageError: it cannot be read.
    """
    if name == CHATML:
        return CHAT_TEMPLATE
    if name == TRAINING:
        return "" if tokenizer is None else _training(tokenizer)
    folder, _, file = open_storage(name).url.rpartition("/")
    storage = open_storage(folder or "/")
    if not storage.exists(file):
        raise TemplateError(
            f"data.chat_template={name} is missing: there is no such file. Give a file with a "
            f"Jinja template, {CHATML} or {TRAINING}"
        )
    return storage.read(file).decode("utf-8-sig")


def _training(tokenizer: Any) -> str:
    if not tokenizer.chat_template:
        raise TemplateError(
            "data.chat_template=training is not possible: the tokenizer has no template to take "
            f"the training variant of. Set it to {CHATML} or a file"
        )
    try:
        from trl.chat_template_utils import get_training_chat_template
    except ImportError as error:
        raise TemplateError(NO_EXTRA) from error
    try:
        return get_training_chat_template(tokenizer) or ""
    except ValueError as error:
        first = str(error).splitlines()[0]
        raise TemplateError(
            f"data.chat_template=training is not possible: trl knows no variant ({first}). Set it "
            "to a file"
        ) from error
