"""Check what data.chat_template may name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rayapp.data.templates import TemplateError, template_of
from rayapp.data.tokens import CHAT_TEMPLATE, byte_tokenizer


def test_a_file_and_chatml(tmp_path: Path, s3_bucket: str) -> None:
    from rayapp.storage import open_storage

    (tmp_path / "a.jinja").write_text("\ufeff{{ messages }} é")
    open_storage(f"s3://{s3_bucket}/x").write("a.jinja", b"of s3")
    assert template_of(str(tmp_path / "a.jinja"), None) == "{{ messages }} é"
    assert template_of(f"s3://{s3_bucket}/x/a.jinja", None) == "of s3"
    assert template_of("chatml", None) == CHAT_TEMPLATE
    with pytest.raises(TemplateError, match=r"b\.jinja is missing: there is no such file\. Give"):
        template_of(str(tmp_path / "b.jinja"), None)


def test_a_training_variant_needs_a_template_and_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert template_of("training", None) == "", "that of a tokenizer yet to be made has its marks"
    tokenizer = byte_tokenizer()
    monkeypatch.setitem(sys.modules, "trl.chat_template_utils", None)
    with pytest.raises(TemplateError, match=r"pip install 'rayapp\[chat\]'"):
        template_of("training", tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(TemplateError, match="the tokenizer has no template to take"):
        template_of("training", tokenizer)
