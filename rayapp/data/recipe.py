"""What determines the rows of a data set, and the fingerprint of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from rayapp.config.fields import RecordKind
from rayapp.data import sources
from rayapp.data.kinds import KINDS
from rayapp.order import fingerprint

TOKENS_VERSION = 2  # of the blocks of tokens, and of how records are cut into them


@dataclass(frozen=True)
class RowRecipe:
    """Everything that determines the rows of a data set; see the fields of `data`."""

    source: sources.DataSource
    eval_source: sources.DataSource | None
    kind: RecordKind
    tokenizer_url: str
    tokenizer_digest: str
    pad_id: int
    seq_len: int
    pack: bool
    truncate: bool
    eval_fraction: float
    columns: Mapping[str, str] = field(default_factory=dict)
    template: str = ""
    """A chat template in place of the tokenizer's."""
    reasoning: str = "train"
    special_tokens: str = "control"
    window_bytes: int | None = None
    packing: int = 0
    """Which of several ways to pack: see data.packings."""
    values: tuple[str, ...] = ()
    """Columns whose numbers the rows carry, for a loss of the user's."""
    version: int | None = None
    """Of the rows, where not that of this rayapp."""

    def parts(self) -> dict[str, object]:
        """Return the named parts of the fingerprint: if any changes, the data set is another."""
        parts = self._rendering()
        parts |= {} if self.window_bytes is None else {"window_bytes": self.window_bytes}
        parts |= {"packing": self.packing} if self.packing else {}
        return parts | {
            "files": self.source.digest(),
            "eval_files": self.eval_source.digest() if self.eval_source else None,
            "format": self.source.format,
            "kind": self.kind,
            "tokenizer": self.tokenizer_digest,
            "pad_id": self.pad_id,
            "seq_len": self.seq_len,
            "pack": self.pack,
            "truncate": self.truncate,
            "eval_fraction": self.eval_fraction,
            "version": self.version or KINDS[self.kind].version,
        }

    def _rendering(self) -> dict[str, object]:
        template = hashlib.blake2b(self.template.encode(), digest_size=8).hexdigest()
        parts: dict[str, object] = {"columns": dict(self.columns)} if self.columns else {}
        parts |= {"chat_template": template} if self.template else {}
        parts |= {"values": list(self.values)} if self.values else {}
        parts |= {"special_tokens": "text"} if self.special_tokens == "text" else {}
        return parts | ({"reasoning": self.reasoning} if self.reasoning != "train" else {})

    def tokens_key(self, source: sources.DataSource) -> str:
        """16 hex digits of all that decides the tokens of given bytes of a source."""
        parts = self._rendering() | {
            "format": source.format,
            "reader": source.version if sources.is_own(source.format) else "",
            "kind": self.kind,
            "tokenizer": self.tokenizer_digest,
            "version": [TOKENS_VERSION, self.version or KINDS[self.kind].version],
        }
        return fingerprint(parts)

    @property
    def fingerprint(self) -> str:
        """16 hex digits of `parts()`."""
        return fingerprint(self.parts())
