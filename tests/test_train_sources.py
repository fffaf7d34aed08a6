"""The loss of each source of a mixture: against transformers, and for any number of workers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from rayapp.config import from_dict
from rayapp.data import preparation as prepare
from rayapp.data import sources, tokens
from rayapp.data.prepared import Prepared, mixed
from rayapp.data.recipe import RowRecipe
from rayapp.data.token_rows import StepRows, local_steps, sequential_batches, step_rows
from rayapp.observe import figures, trackers, words
from rayapp.observe import status as statuses
from rayapp.order import Order
from rayapp.report import folder as report
from rayapp.report import tables
from rayapp.report.charts import charts_of
from rayapp.storage import open_storage
from rayapp.train.rank import RankContext, train_rank
from rayapp.train.schedule import LeaveWatcher
from rayapp.train.spec import LanguageSpec
from rayapp.train.step_sync import STOP

STEPS, SEQ_LEN, ROWS, MICRO_BATCH = 4, 32, 8, 2
SHARES = {"digits.txt": 1.0, "rare.txt": 0.01, "words.txt": 3.0}
TEXTS = {
    "digits.txt": "".join(f"{i * i} {i}\n" for i in range(700)),
    "rare.txt": "".join(f"{'xyz'[i % 3]}\n" for i in range(40)),
    "words.txt": "".join(f"the {'abcdefgh'[i % 8] * (i % 5 + 1)} says no\n" for i in range(600)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three texts, and a model folder with its byte tokenizer."""
    folder = tmp_path_factory.mktemp("sources")
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=259,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        dtype="float32",
    )
    LlamaForCausalLM(shape).save_pretrained(folder / "model")
    tokens.byte_tokenizer().save_pretrained(folder / "model")
    return folder


def prepared_of(folder: Path, path: str, values: tuple[str, ...] = ()) -> Prepared:
    """Prepare in this process, without Ray."""
    source = sources.find(path)
    held_out = 0.0 if "rare" in path else 0.1
    recipe = RowRecipe(
        source=source,
        eval_source=None,
        kind="text",
        tokenizer_url=str(folder / "model"),
        tokenizer_digest="bytes",
        pad_id=0,
        seq_len=SEQ_LEN,
        pack=True,
        truncate=False,
        eval_fraction=held_out,
        values=values,
    )
    root = open_storage(str(folder / "prepared"))
    for index, unit in enumerate(sources.units(source, held_out)):
        prepare.UnitTask(index, "train", unit).run(recipe, root.url, recipe.fingerprint)
    return prepare.prepare(recipe, root)


def spec_of(
    folder: Path,
    name: str,
    shares: dict[str, float] = SHARES,
    values: tuple[str, ...] = (),
    **more: Any,
) -> Any:
    weights = {str(folder / path): share for path, share in shares.items()}
    parts = {path: prepared_of(folder, path, values) for path in weights}
    data = mixed(open_storage(str(folder / "prepared")), parts, weights)
    config = from_dict(
        {
            "run": {"name": name, "storage": str(folder / "runs"), "seed": 3},
            "model": {"path": str(folder / "model")},
            "data": {"mixture": weights, "seq_len": SEQ_LEN, "eval_fraction": 0.1},
            "train": {
                "tokens_per_step": ROWS * SEQ_LEN,
                "micro_batch": MICRO_BATCH,
                "max_steps": STEPS,
                "lr": 3e-3,
                "precision": "fp32",
                "loss_chunk": 50,
                **more,
            },
            "eval": {"every_steps": 2},
        }
    )
    order = Order.for_mixture(data.sizes, data.weights, ROWS, MICRO_BATCH, 3, STEPS)
    url = str(folder / "runs" / name)
    return LanguageSpec("rayapp.finetune", config, data, order, url, str(folder / "model"))


def worker(rank: int, world: int, spec: LanguageSpec, summary: str) -> None:
    rows = spec.data.rows("train")
    found = train_rank(
        spec,
        RankContext(
            torch.device("cpu"), lambda step: local_steps(rows, spec.order, rank, world, step)
        ),
    )
    if rank == 0:
        Path(summary).write_text(json.dumps(found))


def stopped_worker(rank: int, world: int, spec: LanguageSpec, summary: str) -> None:
    LeaveWatcher.due = lambda self: STOP  # type: ignore[method-assign]
    worker(rank, world, spec, summary)


def train(
    spec: LanguageSpec, folder: Path, world: int, worker: Callable[..., None] = worker
) -> tuple[list[Any], Any]:
    """Run `world` processes; return the lines of metrics.jsonl and the summary."""
    name = spec.config.run.name
    summary = folder / f"{name}.json"
    meet = folder / f"{name}-{worker.__name__}"
    processes.spawn(worker, world, str(meet), spec, str(summary))
    text = Path(spec.run_url, "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()], json.loads(summary.read_text())


@pytest.fixture(scope="module")
def one_and_two(folder: Path) -> list[tuple[list[Any], Any]]:
    return [train(spec_of(folder, f"of-{world}"), folder, world) for world in (1, 2)]


def doubled(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return 2.0 * F.cross_entropy(logits, labels, reduction="none")


def test_the_value_of_ones_own_loss_is_shown(folder: Path) -> None:
    """Of each step and of the held-out rows, for any number of workers."""
    loss = "test_train_sources:doubled"
    specs = [spec_of(folder, f"own-{n}", loss=loss) for n in (1, 2)]
    runs = [train(spec, folder, n) for n, spec in enumerate(specs, 1)]
    for lines, summary in runs:
        assert [line["own_loss"] for line in lines] == pytest.approx(
            [2.0 * line["loss"] for line in lines], rel=1e-6
        )
        for held in (summary, lines[1]):
            assert held["eval_metrics"] == {"doubled": pytest.approx(2.0 * held["eval_loss"])}
        assert dict(trackers.scalars(lines[0]))["loss/own_loss"] == lines[0]["own_loss"]
    alone, both = (lines for lines, _ in runs)
    for one, two in zip(alone, both, strict=True):
        assert one["own_loss"] == pytest.approx(two["own_loss"], rel=1e-5)
    Path(specs[0].run_url, "config.yaml").write_text(specs[0].config.to_yaml())
    run = report.read(open_storage(specs[0].run_url))
    shown = {each.label: each.value for each in tables.headline(run)}
    assert shown["doubled"] == words.formed(run.recent("own_loss"), ",.4f") != words.UNKNOWN
    charts = {each.id: each for each in charts_of([run])}
    assert charts["own-loss"].title == "train.loss, doubled" and "metric-0" in charts


def weighed(
    logits: torch.Tensor, labels: torch.Tensor, reward: torch.Tensor, margin: torch.Tensor
) -> torch.Tensor:
    return reward * F.cross_entropy(logits, labels, reduction="none") + margin


def reward_alone(logits: torch.Tensor, labels: torch.Tensor, reward: torch.Tensor) -> torch.Tensor:
    return reward + 1e-7 * logits.sum(-1)


def of_record(number: int) -> dict[str, float]:
    """Return the numbers of a record, which bfloat16 would round."""
    return {"reward": 1 + number / 512, "margin": -number / 7}


def documents_of(batch: StepRows) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Yield tokens, labels and the record's number of each document of each row."""
    for place, documents in np.ndenumerate(batch.segments.max(-1)):
        for document in range(1, int(documents) + 1):
            here = batch.segments[place] == document
            ids, labels = (
                torch.from_numpy(each[place][here].astype("int64"))
                for each in (batch.input_ids, batch.labels)
            )
            yield ids, labels, int(tokens.byte_tokenizer().decode(ids.tolist()).split()[0])


@pytest.fixture(scope="module")
def rewarded(folder: Path) -> dict[str, float]:
    """Write records with numbers; return the shares of their files."""
    for name, count in {"few.jsonl": 60, "many.jsonl": 300}.items():
        texts = ({"text": f"{n} is {'xyz' * (n % 7)}."} | of_record(n) for n in range(count))
        (folder / name).write_text("".join(json.dumps(each) + "\n" for each in texts))
    return {"few.jsonl": 1.0, "many.jsonl": 1.0}


def test_a_loss_is_given_the_numbers_of_each_tokens_record(
    folder: Path, rewarded: dict[str, float]
) -> None:
    """By a plain formula on each document alone; the same where 2 workers go on after 1 stopped."""
    values, loss = ("margin", "reward"), "test_train_sources:weighed"
    specs = [spec_of(folder, f"weighed-{n}", rewarded, values, loss=loss) for n in (1, 2)]
    first, _ = train(specs[1], folder, 1, stopped_worker)
    assert 0 < len(first) < STEPS
    (alone, last), (both, also_last) = (train(spec, folder, n) for n, spec in enumerate(specs, 1))
    assert [line["workers"] for line in both] == [1] * len(first) + [2] * (STEPS - len(first))
    for one, two in zip(alone, both, strict=True):
        for name in ("own_loss", "loss", "grad_norm"):
            assert one[name] == pytest.approx(two[name], rel=1e-5)
    assert last["eval_metrics"] == pytest.approx(also_last["eval_metrics"], rel=1e-5)
    lm = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    sums = []
    for ids, labels, record in documents_of(
        step_rows(specs[0].data.rows("train"), specs[0].order, 0, 0, 1)
    ):
        numbers = map(torch.tensor, of_record(record).values())
        sums.append(weighed(lm(input_ids=ids[None]).logits[0], labels, *numbers).sum())
    assert len(sums) > 2 * ROWS - 4, "no row holds several documents"
    wanted = torch.stack(sums).sum() / alone[0]["tokens"]
    assert alone[0]["own_loss"] == pytest.approx(float(wanted.detach()), rel=1e-5)
    wanted.backward()
    norm = torch.stack([p.grad.norm() for p in lm.parameters()]).norm()
    assert alone[0]["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def test_the_numbers_of_records_are_not_rounded_to_bfloat16(
    folder: Path, rewarded: dict[str, float]
) -> None:
    loss = "test_train_sources:reward_alone"
    spec = spec_of(folder, "exact", rewarded, ("reward",), loss=loss, precision="bf16")
    lines, _ = train(spec, folder, 1)
    for step, line in enumerate(lines):
        wanted = sum(
            of_record(record)["reward"] * len(labels)
            for _, labels, record in documents_of(
                step_rows(spec.data.rows("train"), spec.order, step, 0, 1)
            )
        )
        assert line["own_loss"] == pytest.approx(wanted / line["tokens"], rel=1e-5)


def whole(losses: dict[str, float | None], counts: dict[str, int]) -> float:
    """Return the mean of the sources' losses, weighted by their tokens."""
    nats = [(losses[name] or 0.0) * count for name, count in counts.items()]
    return sum(nats) / sum(counts.values())


def test_losses_by_source_add_up_to_the_loss(
    folder: Path, one_and_two: list[tuple[list[Any], Any]]
) -> None:
    names = {str(folder / name) for name in SHARES}
    for lines, _ in one_and_two:
        for line in lines:
            losses, counts = line["loss_by_source"], line["tokens_by_source"]
            assert set(losses) == set(counts) == names
            assert sum(counts.values()) == line["tokens"]
            assert whole(losses, counts) == pytest.approx(line["loss"], rel=1e-6)
            assert {name for name in names if losses[name] is None} == {
                name for name in names if counts[name] == 0
            }
        # Some source has no row in some step, and differs from the others where it has.
        assert any(loss is None for line in lines for loss in line["loss_by_source"].values())
        assert abs(whole(losses, counts) - losses[str(folder / "digits.txt")]) > 0.01


def test_losses_by_source_are_the_same_for_any_number_of_workers(
    one_and_two: list[tuple[list[Any], Any]],
) -> None:
    (alone, last), (both, also_last) = one_and_two
    for one, two in zip(alone, both, strict=True):
        assert one["tokens_by_source"] == two["tokens_by_source"]
        for name in ("loss_by_source", "eval_loss_by_source"):
            assert one[name] == (None if two[name] is None else pytest.approx(two[name], rel=1e-5))
    name = "eval_loss_by_source"
    assert last[name] == pytest.approx(also_last[name], rel=1e-5)


@torch.no_grad()
def test_losses_by_source_are_those_of_transformers(
    folder: Path, one_and_two: list[tuple[list[Any], Any]]
) -> None:
    """Of the first step's rows, by the model as it starts."""
    spec = spec_of(folder, "oracle")
    lm = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    batch = step_rows(spec.data.rows("train"), spec.order, 0, 0, 1)
    nats, counts = dict.fromkeys(spec.data.sources, 0.0), dict.fromkeys(spec.data.sources, 0)
    for i, row in enumerate(batch.rows.ravel().tolist()):
        name = list(spec.data.sources)[sum(row >= end for end in spec.order.source_ends)]
        ids, labels, documents = (
            torch.from_numpy(each.reshape(-1, SEQ_LEN)[i].astype("int64"))
            for each in (batch.input_ids, batch.labels, batch.segments)
        )
        for document in documents[documents > 0].unique():  # one by one: none sees another
            here = documents == document
            logits = lm(input_ids=ids[here][None]).logits[0]
            loss = F.cross_entropy(logits, labels[here], ignore_index=-100, reduction="sum")
            nats[name] += float(loss)
        counts[name] += int((labels != -100).sum())
    line = one_and_two[0][0][0]
    assert line["tokens_by_source"] == counts
    expected = {name: nats[name] / n if n else None for name, n in counts.items()}
    assert line["loss_by_source"] == pytest.approx(expected, rel=1e-5)


def test_held_out_losses_by_source_add_up(
    folder: Path, one_and_two: list[tuple[list[Any], Any]]
) -> None:
    spec = spec_of(folder, "oracle")
    sums = [
        b.counts().weight_by_source
        for b in sequential_batches(
            spec.data.rows("eval"), MICRO_BATCH, 0, 1, spec.data.held_out_ends
        )
    ]
    counts = dict(zip(spec.data.sources, map(sum, zip(*sums, strict=True)), strict=True))
    assert counts[str(folder / "rare.txt")] == 0 and sum(map(bool, counts.values())) == 2
    for lines, summary in one_and_two:
        for found in (lines[1], summary):
            losses = found["eval_loss_by_source"]
            assert losses[str(folder / "rare.txt")] is None
            assert whole(losses, counts) == pytest.approx(found["eval_loss"], rel=1e-6)
        assert lines[0]["eval_loss_by_source"] is None


def test_an_own_loss_has_the_same_losses_by_source(
    folder: Path, one_and_two: list[tuple[list[Any], Any]]
) -> None:
    lines, _ = train(spec_of(folder, "own", loss="test_train_own_code:nats"), folder, 1)
    first = one_and_two[0][0][0]
    assert lines[0]["loss_by_source"] == pytest.approx(first["loss_by_source"], rel=1e-5)


def test_the_report_and_status_show_each_source(
    folder: Path, one_and_two: list[tuple[list[Any], Any]]
) -> None:
    lines, _ = one_and_two[0]
    spec = spec_of(folder, "of-1")
    run = open_storage(spec.run_url)
    run.write("config.yaml", spec.config.to_yaml().encode())
    run.write("plan.json", json.dumps({"steps": STEPS, "data": spec.data.report()}).encode())
    shown = {row[0]: row[-3:] for row in tables.sources(report.read(run))}
    assert set(shown) == {str(folder / name) for name in SHARES}
    for name, (counted, loss, held_out) in shown.items():
        counts = [line["tokens_by_source"][name] for line in lines]
        nats = [
            (line["loss_by_source"][name] or 0.0) * count
            for line, count in zip(lines, counts, strict=True)
        ]
        assert counted == words.amount(sum(counts))
        assert loss == words.formed(sum(nats) / sum(counts) if sum(counts) else None, ",.4f")
        assert held_out == words.formed(lines[1]["eval_loss_by_source"][name], ",.4f")
    now = statuses.read(run)
    told = figures.lines_below(now)
    words_name = str(folder / "words.txt")
    share = lines[-1]["tokens_by_source"][words_name] / lines[-1]["tokens"]
    (mine,) = [text for text in told if text.startswith(f"{words_name}: ")]
    assert f"loss {lines[-1]['loss_by_source'][words_name]:.4f}, " in mine
    assert mine.endswith(f" tokens ({share:.1%}) of the step")


def test_trackers_show_each_source(folder: Path, one_and_two: list[tuple[list[Any], Any]]) -> None:
    line = one_and_two[0][0][1]
    shown = dict(trackers.scalars(line))
    for path in map(str, (folder / name for name in SHARES)):
        name = path.removeprefix("/")
        assert shown[f"tokens_by_source/{name}"] == line["tokens_by_source"][path]
        for figure in ("loss_by_source", "eval_loss_by_source"):
            assert shown.get(f"{figure}/{name}") == line[figure][path]


def test_a_mixture_of_one_source_has_no_losses_by_source(folder: Path) -> None:
    lines, summary = train(spec_of(folder, "single", {"words.txt": 1.0}), folder, 1)
    assert lines[0]["loss_by_source"] is lines[0]["tokens_by_source"] is None
    assert "eval_loss_by_source" not in summary
