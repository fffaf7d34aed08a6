"""The Trainer of a language model on one rank.

    trainer = build(spec, device)

It builds and shards the model, makes the records of steps, evaluates, samples and exports.
rayapp.train.rank trains with it, with or without Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from typing import Any, cast

import torch
import torch.distributed as dist
from transformers import GenerationConfig

from rayapp import model
from rayapp.config import Config
from rayapp.config.fields import ANSWERS, PAIRS, TOKENS
from rayapp.config.lora import NEW_TOKENS, opened_by
from rayapp.data.kinds import takes_template
from rayapp.data.token_rows import StepRows, sequential_batches
from rayapp.data.tokens import prompt_ids
from rayapp.finetune.ends import ends_of_data, generation_config
from rayapp.finetune.exported import check_export
from rayapp.finetune.kto import Kto
from rayapp.finetune.model_parts import Parts, compile_gain, compute_dtype, exact_base, make_parts
from rayapp.finetune.references import References
from rayapp.finetune.samples import AT_END, AT_EVALUATION, generated
from rayapp.finetune.scoring import compared, leave_if_told, score_tasks
from rayapp.model.experts import why_not_grouped
from rayapp.model.mixers import keeps_documents_apart, split_documents
from rayapp.model.scans import missing_kernels
from rayapp.model.sharding import find_blocks, sum_over_replicas
from rayapp.model.source import processor_files
from rayapp.observe.metrics import HeldOut, MetricsLine, Sample, line_of
from rayapp.observe.records import FinalFigures, Gain
from rayapp.observe.run_folder import ADAPTER, MODEL
from rayapp.order import StepCounts
from rayapp.planner.flops import model_flops
from rayapp.planner.shape import Shape, UnknownShape, has_formula, shape_of
from rayapp.storage import Storage, open_storage
from rayapp.train import loop
from rayapp.train.checkpoint.marker import Amounts
from rayapp.train.engine import Engine
from rayapp.train.loss import IGNORE
from rayapp.train.model_reading import read
from rayapp.train.preference import means
from rayapp.train.spec import LanguageSpec
from rayapp.train.step_sums import Sums
from rayapp.train.trainer_interface import Trainer, peak_flops


def build(spec: LanguageSpec, device: torch.device) -> LanguageTrainer:
    """Build the model on the meta device, shard it, fill its shards and make the optimizers."""
    return LanguageTrainer(spec, device)


class LanguageTrainer(Trainer):
    """A language model and its optimizers on one rank."""

    spec: LanguageSpec

    def __init__(self, spec: LanguageSpec, device: torch.device) -> None:
        self.spec, self.device = spec, device
        self.parts = make_parts(spec, device)
        assert len(self.parts.head.columns) == spec.data.columns, "rows of another train.loss"
        self.model, self.optimizers = self.parts.lm, self.parts.optimizers
        before = spec.config.reference(self.parts.source.adapter) == "computed before"
        self.references = References(spec, self.parts.lm) if before else None
        self.kto = Kto(self.parts.lm) if spec.config.train.objective == "kto" else None

    @cached_property
    def generation(self) -> GenerationConfig:
        """Settings of generation with this model: among them, where it ends."""
        config, parts = self.spec.config, self.parts
        ends = ends_of_data(self.spec.data, parts.tokenizer)
        return generation_config(config, parts.source, parts.lm.hf.config, parts.tokenizer, ends)

    def num_parameters(self) -> int:
        return model.num_parameters(self.parts.lm)

    def amounts(self, step: int) -> Amounts:
        return {"tokens": step * self.spec.config.train.tokens_per_step}

    def warm_up(self) -> FinalFigures:
        """Check that packing works for this model; compile if asked to, and return the gain.

        Raises: Unavailable if documents of a row would see one another.
        """
        lm, packed = self.parts.lm, self.spec.config.data.pack and self.spec.order.num_steps > 0
        apart = not packed or keeps_documents_apart(lm, self.device)
        for by_row in (True, False):
            if not apart and split_documents(lm, by_row):
                apart = keeps_documents_apart(lm, self.device)
        if not apart:
            raise model.Unavailable(
                f"data.pack=true is not available: in transformers' {lm.hf.config.model_type}, the "
                "documents of a row see one another. Set data.pack=false"
            )
        compute, compiled = compute_dtype(self.spec.config), bool(self.spec.config.train.compile)
        slow = why_not_grouped(lm.hf, compute, self.device, compiled)
        if slow and dist.get_rank() == 0:
            print(f"experts: no grouped products, and so slower: {slow}", flush=True)
        lacked = missing_kernels(lm.hf)
        if lacked and self.device.type == "cuda" and dist.get_rank() == 0:
            print(f"mixers: no kernels, and so slower: install {' and '.join(lacked)}", flush=True)
        gain = compile_gain(self.spec, self.parts, self.device)
        if gain is None:
            return {"compile": None}
        return {"compile": cast(Gain, asdict(gain) | {"speedup": gain.speedup})}

    def engine(self, control: Any) -> Engine:
        spec, config = self.spec, self.spec.config
        names = tuple(spec.data.sources) if spec.order.source_ends else ()
        mfu = mfu_of(spec, self.parts, self.device)
        engine = self.common_engine(
            control,
            rows_per_epoch=spec.data.epoch_rows,
            take_sums=self.parts.lm.take_sums,
            take_expert_tokens=self.parts.lm.routing.take,
            by_source=bool(names),
            may_wait=lambda batch: spec.order.more and batch.ends_block,
            record=partial(token_record, mfu, names, spec.data.pairs),
            own_loss=config.train.loss,
            last_of_step=partial(sum_over_replicas, self.parts.lm),
            blocks=find_blocks(self.parts.lm.hf),
            unit=ANSWERS if self.kto else PAIRS if spec.data.pairs else TOKENS,
        )
        if spec.data.pairs:
            engine.figures = means
        if self.kto is not None:
            engine.ready = partial(self.kto.ready, engine)
        if spec.data.held_out or spec.tasks:
            engine.evaluate = partial(self.evaluate, engine, names)
        return engine

    def evaluate(self, engine: Engine, names: Sequence[str], step: int) -> HeldOut:
        """Evaluate the model after so many steps; `names` are those of the sources."""
        spec, config, found = self.spec, self.spec.config, HeldOut()
        if spec.data.held_out:
            rows, rank, world = spec.data.rows("eval"), dist.get_rank(), dist.get_world_size()
            # The rows of data.eval_path are of no source.
            mixed = () if config.data.eval_path else spec.data.held_out_ends

            def batches() -> Iterator[StepRows]:
                each = sequential_batches(rows, config.micro_batch, rank, world, mixed)
                return each if self.references is None else self.references.joined(each, "eval")

            every = batches() if self.kto is None else self.kto.held_out(engine, batches)
            found |= held_out_losses(engine, every, self.parts, names if mixed else ())
            if config.eval.prompts:
                found["eval_samples"] = self.samples(engine, AT_EVALUATION)
        if spec.tasks:
            found["eval_metrics"] = (found.get("eval_metrics") or {}) | self.scores(engine, step)
        return found

    def prepare(self, engine: Engine, first_step: int) -> HeldOut:
        """Compute the reference of preferences, or read it."""
        if self.references is not None:
            self.references.load_or_compute(engine, first_step)
        return {}

    def joined(self, steps: Iterator[StepRows]) -> Iterator[StepRows]:
        """Return the steps with the reference of preferences."""
        return steps if self.references is None else self.references.joined(steps, "train")

    def before_first_step(self, engine: Engine) -> HeldOut:
        """Score the model that the run starts with."""
        return {"eval_metrics": self.scores(engine, 0)} if self.spec.tasks else {}

    def scores(self, engine: Engine, step: int) -> dict[str, float | None]:
        """Score the model on the tasks after so many steps."""
        return score_tasks(
            self.spec.tasks,
            self.parts,
            engine,
            open_storage(self.spec.run_url),
            step,
            stops=self.generation.eos_token_id or (),
            room=self.spec.config.micro_batch * self.spec.config.data.seq_len,
        )

    def samples(self, engine: Engine, num_tokens: int, seed: int | None = None) -> list[Sample]:
        """Continue the prompts; the ranks may agree to leave meanwhile, as during an evaluation."""
        config = self.spec.config
        if not config.eval.prompts:
            return []
        engine.phases.begin("sampling")
        tokenizer, prompts = self.parts.tokenizer, config.eval.prompts
        how = takes_template(config.data.kind), self.spec.system
        texts = generated(
            self.parts,
            [prompt_ids(tokenizer, prompt, *how) for prompt in prompts],
            self.device,
            engine.control,
            num_tokens,
            stops=self.generation.eos_token_id or (),
            seed=seed,
            leave=partial(leave_if_told, engine),
            room=config.micro_batch * config.data.seq_len,
        )
        return list(zip(prompts, texts, strict=True))

    def finish(
        self, engine: Engine, storage: Storage, at: int, held_out: HeldOut, *, export: bool
    ) -> FinalFigures:
        """Sample the prompts, and export the model; return what the summary says."""
        config, parts, phases = self.spec.config, self.parts, engine.phases
        outcome: FinalFigures = {"eval_loss": None, "eval_loss_per_byte": None, "samples": []}
        outcome = {**outcome, **held_out}
        if self.spec.tasks and dist.get_rank() == 0:
            outcome["tasks"] = compared(self.spec.tasks, storage, at)
        if engine.experts is not None:
            outcome["experts"] = engine.experts.long().tolist()
        outcome["samples"] = self.samples(engine, AT_END, seed=config.run.seed)
        phases.end("sample")
        outcome["model_path"] = None
        if export:
            phases.begin("exporting the model", f"to {storage.url}/{MODEL}")
            export_model(self.spec, parts, self.generation, storage, self.device)
            outcome["model_path"] = (storage / MODEL).url
            folder, control = storage / MODEL, engine.control
            outcome["export_check"] = check_export(self.spec, parts, folder, self.device, control)
        dist.barrier(group=engine.control)
        phases.end("export")
        return outcome


def token_record(
    mfu: Callable[[int, int, float], float | None],
    names: Sequence[str],
    pairs: bool,
    facts: dict[str, Any],
    counts: StepCounts,
    losses: Sums,
    busy_s: float,
) -> MetricsLine:
    """Make a step's line from the loop's fields and the counts of the batch.

    `names` are the names of the sources, if there are several; `pairs` is as in StepRows. `busy_s`
    is the step's seconds without checkpoint stalls and evaluation.
    """
    by_byte = counts.target_bytes and not pairs
    figures: dict[str, object] = {
        "loss_per_byte": losses.loss / counts.target_bytes if by_byte else None,
        "tokens": counts.targets,
        "tokens_per_s": counts.tokens / busy_s,
        "tokens_per_s_per_gpu": counts.tokens / busy_s / facts["workers"],
        "mfu": mfu(counts.tokens, counts.attended_pairs, busy_s),
    }
    if names:
        of_sources = counts.weight_by_source
        figures["loss_by_source"] = per_token(names, losses.by_source, of_sources)
        if not pairs:
            figures["tokens_by_source"] = dict(zip(names, of_sources, strict=True))
    return line_of(TOKENS, facts, figures)


def per_token(
    names: Sequence[str], nats: Sequence[float], tokens: Sequence[float]
) -> dict[str, float | None]:
    """Return the loss of each source in nats per token, None where it has no tokens."""
    every = zip(names, nats, tokens, strict=True)
    return {name: loss / count if count else None for name, loss, count in every}


def held_out_losses(
    engine: Engine, batches: Iterable[StepRows], parts: Parts, names: Sequence[str] = ()
) -> HeldOut:
    """Return the held-out loss in nats per token and per byte, or per pair, over all batches.

    `eval_metrics` holds the means over the pairs of what the loss of preferences tells. With
    eval.metrics or train.loss, it holds the mean of each over the loss-bearing tokens, without
    those that have failed on a rank; with names of sources, `eval_loss_by_source` holds the loss of
    each.
    """
    head = parts.head

    def measure(batch: StepRows, i: int, output: tuple[torch.Tensor, ...]) -> dict[Any, float]:
        weights = batch.weights()[i]
        sums: dict[Any, float] = {
            "objective": float(output[0]),
            "loss": float(output[1]),
            "weight": float(weights.sum()),
            "targets": float((batch.labels[i] != IGNORE).sum()),
            "bytes": float(batch.target_bytes[i].sum()),
        }
        if head.of_pairs is not None:
            sums |= {("pairs", name): float(sum) for name, sum in parts.lm.take_sums().items()}
        if names:
            each = zip(names, output[2].tolist(), batch.of_source()[:, i], strict=True)
            for name, nats, mine in each:
                sums["nats", name], sums["weight", name] = nats, float(weights[mine].sum())
        if head.metric_sums is not None:
            sums |= dict(zip(head.metrics, head.metric_sums.tolist(), strict=True))
            sums |= {("failed", name): float(name in head.failed) for name in head.metrics}
            head.metric_sums.zero_()
        return sums

    if head.metrics:
        head.metric_sums = torch.zeros(len(head.metrics), dtype=torch.float64)
    try:
        sums = loop.evaluate(engine, batches, measure)
    finally:
        head.metric_sums = None
    loss, weight, targets = sums["loss"], max(sums["weight"], 1.0), max(sums["targets"], 1.0)
    by_byte = sums["bytes"] and head.of_pairs is None
    held_out: HeldOut = {
        "eval_loss": loss / weight,
        "eval_loss_per_byte": loss / sums["bytes"] if by_byte else None,
    }
    if names:
        nats, counts = ([sums[what, name] for name in names] for what in ("nats", "weight"))
        held_out["eval_loss_by_source"] = per_token(names, nats, counts)
    if head.of_pairs is not None:
        figures = {name[1]: value for name, value in sums.items() if name[0] == "pairs"}
        held_out["eval_metrics"] = dict[str, float | None](means(figures, weight))
    if head.metrics or head.own:
        kept = [name for name in head.metrics if not sums["failed", name]]
        held_out["eval_metrics"] = {
            **(held_out.get("eval_metrics") or {}),
            **({head.own: sums["objective"] / targets} if head.own else {}),
            **{name.rpartition(":")[2]: sums[name] / targets for name in kept},
        }
    return held_out


def mfu_of(
    spec: LanguageSpec, parts: Parts, device: torch.device
) -> Callable[[int, int, float], float | None]:
    """Return a function of (tokens, attended pairs, seconds) that computes the MFU, 0-1.

    MFU is model FLOP/s over the peak of all workers' GPUs. The function returns None on CPUs, and
    where the GPU's peak or the model's shape is not known.
    """
    peak = peak_flops(spec.config.train.precision, device)
    lora = spec.config.model.lora
    options = (None, (), ()) if lora is None else (lora.rank, lora.targets, lora.target_parameters)
    shape = None if peak is None else _shape(spec.config, parts.lm.hf.config)
    if peak is None or shape is None:
        return lambda tokens, pairs, seconds: None
    return lambda tokens, pairs, seconds: (
        tokens * model_flops(shape, pairs / tokens, *options) / seconds / peak
    )


def _shape(config: Config, hf_config: Any) -> Shape | None:
    """Return the model's shape for the planner; None if neither a formula nor reading gives it."""
    values = hf_config.to_dict()
    try:
        if has_formula(values):
            return shape_of(values)
        fp32 = config.train.precision == "fp32"
        return read(values, seq_len=config.data.seq_len, fp32=fp32, lora=config.model.lora)
    except UnknownShape:
        return None


def export_model(
    spec: LanguageSpec,
    parts: Parts,
    generation: GenerationConfig,
    storage: Storage,
    device: torch.device,
) -> None:
    """Export the model to model/.

    With LoRA, model/ holds the adapters alone; with lora.merge it holds the merged model, and
    adapter/ the adapters.
    """
    lora = spec.config.model.lora
    if lora is not None and lora.target_parameters and dist.get_rank() == 0:
        told = opened_by(parts.lm.hf.config.model_type, lora.target_parameters)
        print(f"experts: {told}", flush=True)
    if lora is not None and spec.config.model.new_tokens and not lora.merge and not dist.get_rank():
        print(f"new tokens: {NEW_TOKENS}", flush=True)
    if lora is not None:
        folder = storage / (ADAPTER if lora.merge else MODEL)
        model.export_adapters(
            parts.lm,
            folder,
            base=parts.source.base,
            tokenizer=parts.tokenizer,
            generation_config=generation,
        )
    if lora is None or lora.merge:
        base = None if lora is None else exact_base(spec.config, parts, device)
        model.export(
            base or parts.lm,
            storage / MODEL,
            tokenizer=parts.tokenizer,
            generation_config=generation,
            processor=processor_files(parts.source),
            trained=None if base is None else parts.lm,
        )
