"""Faults in the order of rows, and in the rows themselves."""

from __future__ import annotations

from mutated import Mutation

SEQUENCE, BIJECTION, SHARES, DIGEST = (
    f"rayapp/order/{name}.py" for name in ("sequence", "bijection", "shares", "digest")
)
PACKING, DATA_ROWS, STREAM = (
    f"rayapp/data/{name}.py" for name in ("packing", "token_rows", "stream")
)
CHAT, DOCUMENTS, PREPARE = (
    f"rayapp/data/{name}.py" for name in ("chat", "rendering", "preparation")
)
RECIPE, TOKENISING = "rayapp/data/recipe.py", "rayapp/data/tokenising.py"
SECTIONS, TOKEN_STORE = "rayapp/data/token_sections.py", "rayapp/data/token_store.py"
READING = "rayapp/data/sources/pieces.py"
S3 = "rayapp/storage/s3.py"
OF_INPUTS = "tests/test_storage_inputs.py -k 'moto and version'"
OF_ORDER = "tests/test_order.py -k 'not evenly and not well'"
OF_PREPARE = (
    "tests/test_data_preparation.py -k 'every_document or copies or each_part or truncated'"
)

ROWS = (
    # ---- Which row is where
    Mutation(
        "ranks-take-stretches",
        SEQUENCE,
        "index = rank + world * np.arange(count)",
        "index = rank * count + np.arange(count)",
        OF_ORDER,
    ),
    Mutation(
        "epochs-alike",
        BIJECTION,
        'round_keys("rows", seed, epoch))',
        'round_keys("rows", seed, 0))',
        OF_ORDER,
    ),
    Mutation(
        "epochs-of-a-mixture-alike",
        SEQUENCE,
        "ids[slots] = first + self._epoch_rows(source, places, size, epoch)",
        "ids[slots] = first + self._epoch_rows(source, places, size, 1)",
        OF_ORDER,
    ),
    Mutation(
        "rows-of-a-window-that-is-not-known",
        SEQUENCE,
        "if self.more and self.follow[source] and len(places) and places[-1] >= size:",
        "if False:",
        "tests/test_order_windows.py",
    ),
    Mutation(
        "sources-of-windows-numbered-by-what-is-known",
        SEQUENCE,
        "first += SOURCE_ROWS if self.windows else size",
        "first += size",
        "tests/test_order_mixture_windows.py",
    ),
    Mutation(
        "packings-in-the-same-order",
        "rayapp/order/windows.py",
        "turn * len(packings) + number",
        "turn",
        "tests/test_order_packings.py",
    ),
    Mutation(
        "windows-of-neighbours",
        "rayapp/order/windows.py",
        "count = max(1, min(len(sizes), -(-sum(sizes) // window_size)))",
        "count = 1",
        "tests/test_order_windows.py",
    ),
    Mutation(
        "last-step-is-filled-up",
        SEQUENCE,
        "positions = positions[: np.searchsorted(positions, limit)]",
        "pass",
        OF_ORDER,
    ),
    Mutation(
        "cursor-of-another-seed",
        SEQUENCE,
        "if cursor.seed != self.seed:",
        "if False:",
        OF_ORDER,
    ),
    Mutation(
        "mixture-skips-an-item",
        SHARES,
        "np.cumsum(mine)[offsets[slots]] - 1",
        "np.cumsum(mine)[offsets[slots]]",
        OF_ORDER,
    ),
    Mutation(
        "shares-drift",
        SHARES,
        "math.floor(share * (k + 1) * block) - math.floor(share * k * block)",
        "math.floor(share * block)",
        OF_ORDER,
    ),
    Mutation(
        "shares-in-binary",
        SHARES,
        "exact = [Fraction(repr(float(w))) for w in weights]",
        "exact = [Fraction(float(w)) for w in weights]",
        OF_ORDER,
    ),
    Mutation(
        "digest-without-places",
        DIGEST,
        'digest = blake2b(int(position).to_bytes(8, "little"), digest_size=8)',
        "digest = blake2b(digest_size=8)",
        OF_ORDER,
    ),
    # ---- What is in a row
    Mutation(
        "label-lost-at-a-cut",
        PACKING,
        "labels[row, here] = some[:-1], some[1:]",
        "labels[row, place : place + length - 1] = some[:-1], some[1:-1]",
        "tests/test_data_packing.py",
    ),
    Mutation(
        "bytes-of-inputs",
        PACKING,
        "= bears_loss[targets], num_bytes[targets]",
        "= bears_loss[targets], num_bytes[start : start + length]",
        "tests/test_data_packing.py",
    ),
    Mutation(
        "segments-without-end",
        PACKING,
        "if free and held[row] < most:",
        "if free:",
        "tests/test_data_packing.py",
    ),
    Mutation(
        "documents-of-a-row-are-one",
        PACKING,
        "numbers = np.arange(len(row_of)) - head + 1",
        "numbers = np.ones_like(row_of)",
        "tests/test_data_packing.py",
    ),
    Mutation(
        "positions-go-on",
        PACKING,
        "first[..., 1:] = segments[..., 1:] != segments[..., :-1]",
        "first[..., 1:] = segments[..., 1:] < segments[..., :-1]",
        "tests/test_data_packing.py",
    ),
    Mutation(
        "bounds-where-every-row-has-many",
        DATA_ROWS,
        "if not ((segments == segments[:, :1]) | (segments == 0)).all():",
        "if not ((segments == segments[:, :1]) | (segments == 0)).all(1).any():",
        "tests/test_data_stream.py -k bounds",
    ),
    Mutation(
        "first-row-of-a-shard-misread",
        DATA_ROWS,
        'np.searchsorted(self._firsts, ids[present], side="right")',
        'np.searchsorted(self._firsts, ids[present], side="left")',
        "tests/test_data_stream.py -k 'by_number or take_each'",
    ),
    Mutation(
        "held-out-rows-twice",
        DATA_ROWS,
        "ids = np.where(ids < among.stop, ids, EMPTY)",
        "ids = ids % max(len(rows), 1)",
        "tests/test_data_stream.py -k sequential",
    ),
    Mutation(
        "data-restart-at-a-resume",
        STREAM,
        "first = first_step + chunk * per_chunk",
        "first = chunk * per_chunk",
        "tests/test_data_stream.py -k stream_is",
    ),
    # ---- Which tokens bear loss, and which documents are held out
    Mutation(
        "answers-without-first-token",
        DOCUMENTS,
        "loss[start:spoken] = False",
        "loss[start : spoken + (prompt > 0)] = False",
        "tests/test_data_rendering.py",
    ),
    Mutation(
        "end-of-text-not-trained",
        DOCUMENTS,
        "num_bytes[start + last : start + size] = 0",
        "num_bytes[start + last : start + size] = loss[start + last : start + size] = 0",
        "tests/test_data_rendering.py",
    ),
    Mutation(
        "users-words-bear-loss",
        CHAT,
        'enumerate(messages) if message["role"] == "assistant"',
        'enumerate(messages) if message["role"] != "system"',
        "tests/test_data_chat.py",
    ),
    Mutation(
        "headers-bear-loss",
        CHAT,
        "yield self._render(before, given, prompted=True)[0], None",
        "yield self._render(before, given)[0], None",
        "tests/test_data_chat.py",
    ),
    Mutation(
        "end-of-turn-not-trained",
        CHAT,
        "end = len(stripped if stripped.endswith(self.turn_ends) else text)",
        "end = min(len(stripped.removesuffix(each)) for each in self.turn_ends)",
        "tests/test_data_chat.py",
    ),
    Mutation(
        "later-renderings-bear-loss",
        CHAT,
        "return [*spans, (first, end)] if whole else []",
        "return [*spans, (first, max(end, same))]",
        "tests/test_data_chat.py",
    ),
    Mutation(
        "held-out-by-process",
        READING,
        'return int.from_bytes(blake2b(content, digest_size=8).digest(), "little")',
        "return hash(content) % 2**64",
        "tests/test_data_sources.py -k held_out_share",
    ),
    Mutation(
        "copies-on-both-sides",
        TOKENISING,
        "sources.drawn_of(content_of(record.value, recipe.kind))",
        "sources.drawn_of(repr(record.value).encode())",
        OF_PREPARE,
    ),
    Mutation(
        "fingerprint-lacks-a-part",
        RECIPE,
        '            "truncate": self.truncate,\n',
        "",
        OF_PREPARE,
    ),
    Mutation(
        "torn-shards-are-used",
        PREPARE,
        'sizes.get(name) == summary["counts"][split]["rows"] * stored_bytes(seq_len, columns)',
        "name in sizes",
        OF_PREPARE,
    ),
    Mutation(
        "a-turn-is-forged",
        "rayapp/data/control.py",
        "return found.sub(lambda m: m[0][0] + MARK + m[0][1:], value) if found else value",
        "return value",
        "tests/test_data_control.py",
    ),
    Mutation(
        "rows-are-not-checked",
        DATA_ROWS,
        "if checksum_of(plain.data, *place) != checksum.view(CHECKSUM)[0]:",
        "if False:",
        "tests/test_data_stream.py -k 'changed_bit and folder'",
    ),
    Mutation(
        "rows-are-taken-from-another-place",
        DATA_ROWS,
        "return xxh3_64_intdigest(data, (seed + number) % 2**64)",
        "return xxh3_64_intdigest(data, seed)",
        "tests/test_data_stream.py -k where_another",
    ),
    # ---- Tokens
    Mutation(
        "tokens-of-another-tokenizer",
        RECIPE,
        '            "tokenizer": self.tokenizer_digest,\n            "version": [',
        '            "version": [',
        "tests/test_data_preparation.py -k other_tokens",
    ),
    Mutation(
        "a-unit-takes-whole-cells",
        PREPARE,
        "if not by_place or piece.start <= record.place < piece.end:",
        "if True:",
        "tests/test_data_preparation.py -k 'first_version and jsonl'",
    ),
    Mutation(
        "tokens-are-not-checked",
        SECTIONS,
        "if not packed or checksum_of(packed, seed, number) != checksum:",
        "if not packed:",
        "tests/test_data_token_sections.py -k bit",
    ),
    Mutation(
        "a-claim-is-not-waited-for",
        TOKEN_STORE,
        "            self._wait(name)\n            yield False",
        "            yield True",
        "tests/test_data_token_store.py -k 'folder and two_that_want'",
    ),
    Mutation(
        "prune-takes-blocks-in-use",
        "rayapp/cli/space.py",
        "if e.name not in needed and e.modified_s < before_s",
        "if e.modified_s < before_s",
        "tests/test_cli_space.py -k unfinished",
    ),
    # ---- Inputs on S3
    Mutation(
        "a-replaced-file-is-read",
        S3,
        'if etag not in (None, answer["ETag"]):',
        "if False:",
        OF_INPUTS,
    ),
)
