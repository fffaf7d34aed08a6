"""Check the config: what is legal, what is refused and in which words, and that nothing is lost."""

from __future__ import annotations

import copy
import json
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rayapp.config import (
    Config,
    ConfigError,
    combined_problems,
    differences,
    fields,
    from_dict,
    load,
    optimizers,
    parse_yaml,
)
from rayapp.config.optimizers import OPTIMIZERS
from rayapp.config.text import Dumper
from rayapp.config.text import shown as text_of

FORM = re.compile(r"[^=]*=.* is [a-z ]+: .+(\. [A-Z].*|\?)", re.DOTALL)

# The surface is closed: a field that comes or goes is a decision, and is made here too.
SURFACE = {
    "run": "name storage seed trackers hooks max_usd max_hours",
    "model": "path adapter init_from from_scratch tokenizer new_tokens attention lora overrides",
    "data": "path mixture format kind columns chat_template reasoning special_tokens seq_len pack"
    " packings truncate eval_path eval_fraction bad_rows window_bytes workers",
    "train": "max_steps epochs schedule decay warmup_steps schedule_from on_spike spike_sigmas"
    " profile_steps tokens_per_step micro_batch objective beta margin sft_weight"
    " undesirable_weight optimizer lr"
    " min_lr weight_decay freeze lr_by_name"
    " betas z_loss label_smoothing router_loss grad_clip precision compile loss loss_chunk"
    " loss_kernel",
    "parallel": "strategy replicas activation_checkpointing activation_offload cpu_offload",
    "checkpoint": "every_steps every_s keep best asynchronous export",
    "eval": "every_steps checkpoints patience gate prompts tasks metrics",
    "cluster": "workers gpu instance usd_per_hour ignore_plan resources max_failures"
    " failure_window_s max_preemptions mtbf_hours idle_minutes collective_timeout_s address",
    "model.lora": "rank alpha rslora dora dropout targets target_parameters quantize merge",
}
FIELDS = [f"{section}.{name}" for section, names in SURFACE.items() for name in names.split()]


def problems(path: str | None = None, **overrides: Any) -> list[str]:
    """Return the problems of overrides, written as section__field; the form of each is checked."""
    with pytest.raises(ConfigError) as caught:
        load(path, {name.replace("__", "."): value for name, value in overrides.items()})
    found = caught.value.problems
    assert str(caught.value) == "\n".join(found) and found
    for line in found:
        assert FORM.fullmatch(line) or line.startswith("config file "), line
        assert ". " in line and "\n" not in line and len(line) < 500
    return found


# ---- What is legal ---------------------------------------------------------------------------


def test_the_surface_is_closed_and_documented() -> None:
    assert list(fields()) == FIELDS
    for name, text in fields().items():
        assert len(text) > 10 and text.endswith("."), name


def test_defaults_are_legal() -> None:
    config = load()
    assert config == Config() == from_dict({})
    assert combined_problems(config) == []
    assert (config.rows_per_step, config.train.micro_batch) == (32, None)
    assert (config.cluster.min_workers, config.cluster.max_workers) == (1, 1)


def test_a_micro_batch_is_a_number_or_auto() -> None:
    config = load(None, {"train.micro_batch": "auto", "train.tokens_per_step": "1536"}, Config)
    assert config.train.micro_batch is None and "micro_batch: auto" in config.to_yaml()
    assert from_dict(parse_yaml(config.to_yaml())) == config
    with pytest.raises(AssertionError, match="not chosen yet"):
        _ = config.micro_batches_per_step
    chosen = config.with_micro_batch(3)
    assert (chosen.rows_per_step, chosen.micro_batch, chosen.micro_batches_per_step) == (3, 3, 1)
    assert differences(config, chosen) == []
    (line,) = problems(train__micro_batch="auto", train__tokens_per_step="1000")
    assert line.startswith("train.tokens_per_step=1000 is not divisible")


def test_every_config_of_the_project_is_legal() -> None:
    paths = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))
    assert paths
    for path in paths:
        load(str(path))


def test_yaml_then_overrides(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "run: {name: demo}\n"
        "data: {seq_len: 1_024}\n"
        "train:\n"  # everything below it is commented out
        "cluster: {workers: 2:8, gpu: true, resources: {accelerator_type:H100: 1e-3}}\n"
        "model: {overrides: {rms_norm_eps: 1e-5, layer_types: [a, b]}}\n"
    )
    config = load(str(path), {"run.seed": "7", "data.seq_len": "512"}, Config)
    assert (config.run.name, config.run.seed, config.data.seq_len) == ("demo", 7, 512)
    assert config.train == Config().train
    assert (config.cluster.min_workers, config.cluster.max_workers) == (2, 8)
    assert config.cluster.gpu == "true"
    assert config.cluster.resources == {"accelerator_type:H100": 0.001}
    assert config.model.overrides == {"rms_norm_eps": 1e-5, "layer_types": ["a", "b"]}
    path.write_text("cluster: {workers: 4}\n")
    assert load(str(path)).cluster.workers == "4"
    path.write_text("# nothing\n")
    assert load(str(path)) == Config()


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("train.lr", "1e-3", 1e-3),
        ("train.max_steps", "none", None),
        ("train.max_steps", "Null", None),
        ("train.max_steps", "0", 0),
        ("train.grad_clip", "none", None),
        ("train.compile", "true", True),
        ("train.compile", "False", False),
        ("train.betas", "0.9,0.99", (0.9, 0.99)),
        ("train.betas", "[0.8, 0.9]", (0.8, 0.9)),
        ("train.betas", "(0.8,0.9)", (0.8, 0.9)),
        ("train.tokens_per_step", "8192", 8192),
        ("train.tokens_per_step", "8_192", 8192),
        ("run.name", "1.10", "1.10"),
        ("cluster.workers", "2:8", "2:8"),
        ("cluster.gpu", "False", "false"),
        ("cluster.resources", "{CPU: 2, a:b: 0.5}", {"CPU": 2.0, "a:b": 0.5}),
        ("model.overrides", "{num_hidden_layers: 3}", {"num_hidden_layers": 3}),
        ("model.tokenizer", "none", None),
        ("model.tokenizer", "bpe:4096", "bpe:4096"),
        ("eval.prompts", "Once upon a time, there", ("Once upon a time, there",)),
        ("eval.prompts", '["a, b", c]', ("a, b", "c")),
        ("eval.prompts", "[INST] hi, you", ("[INST] hi, you",)),
        ("eval.prompts", "{x}", ("{x}",)),
        ("eval.prompts", "", ()),
        ("eval.prompts", "none", ()),
        ("eval.prompts", "[]", ()),
    ],
)
def test_the_command_line_is_coerced(field: str, text: str, value: object) -> None:
    section, name = field.split(".")
    found = getattr(getattr(load(None, {field: text}), section), name)
    assert found == value and type(found) is type(value)


def test_a_section_may_be_overridden_at_once() -> None:
    assert load(None, {"train": "{lr: 1e-2, max_steps: 3}"}, Config).train.lr == 1e-2
    lora = {"model": {"lora": "none"}}
    assert from_dict(lora, kind=Config).model.lora is None


@pytest.mark.parametrize("form", ["path", "Path", "mapping", "config"])
def test_sections_given_in_python_change_some_of_their_fields(tmp_path: Path, form: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("train: {max_steps: 5, lr: 1e-2}\ndata: {mixture: {a: 1, b: 2}}\n")
    sections = {"train": {"max_steps": 5, "lr": 1e-2}, "data": {"mixture": {"a": 1, "b": 2}}}
    forms = {"path": str(path), "Path": path, "mapping": sections, "config": from_dict(sections)}
    for changed in (
        load(forms[form], train={"lr": 1e-3}, data={"mixture": {"c": 1}}, model={"lora": {}}),
        load(forms[form], {"train": {"lr": 1e-3}, "data": {"mixture": {"c": 1}}, "model.lora": {}}),
    ):
        assert isinstance(changed, Config)
        assert (changed.train.lr, changed.train.max_steps) == (1e-3, 5)
        assert changed.data.mixture == {"c": 1} and changed.model.lora is not None
    assert sections["train"] == {"max_steps": 5, "lr": 1e-2}


def test_yaml_is_read_as_version_1_2() -> None:
    text = "[1e-3, 2:8, no, 012, 2020-01-01, 16_384, '1', ~, 1.5, .inf, -.5, true, 0x10, off]"
    values = [1e-3, "2:8", "no", "012", "2020-01-01", 16384, "1", None, 1.5]
    assert parse_yaml(text) == [*values, float("inf"), -0.5, True, "0x10", "off"]


# ---- What is refused -------------------------------------------------------------------------


def test_a_short_yaml_is_not_long_to_read() -> None:
    """Nine aliases a line would be 9^n values; a message shows the beginning of a value."""
    lines = ["a0: &a0 [x]"] + [f"a{n}: &a{n} [{f'*a{n - 1},' * 9}]" for n in range(1, 30)]
    for text, line in ((lines[0], 1), ("a: [b]\nb: &x {c: 1}", 2), ("\n".join(lines), 1)):
        with pytest.raises(yaml.YAMLError, match=rf"anchors .* not supported(.|\n)*line {line},"):
            parse_yaml(text)
    for text, why in (("[" * 10_000, "nested too deeply"), (f"[{'9' * 5000}]", "4300 digits")):
        with pytest.raises(yaml.YAMLError, match=why):
            parse_yaml(text)
    with pytest.raises(yaml.YAMLError, match="more than 1,048,576 characters"):
        parse_yaml("a" * 2**20 + "a")
    assert parse_yaml("[no, 1.10, 010, ~]", texts=True) == ["no", "1.10", "010", "~"]
    assert text_of("x" * 10**6) == "x" * 77 + "..." and len(text_of(["x"] * 999)) == 80
    for short in ({"a": (1, [None, "b\n"], {}), 2: ()}, (1,), [], 1.5, "a  b"):
        assert text_of(short) == " ".join(str(short).split())


def test_what_is_written_has_no_aliases() -> None:
    same = ["a"]
    written = yaml.dump({"one": same, "two": same}, Dumper=Dumper)
    assert parse_yaml(written) == {"one": same, "two": same}


def test_every_problem_is_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("trian: {lr: 1}\ndata: {seq_len: many}\nparallel: {replicas: 2}\n")
    found = problems(
        str(path),
        train__lr="abc",
        train__betas="0.9,1.5",
        train__max_steps="5",
        train__epochs="2",
        cluster__workers="5:2",
        model__lora="{rank: 0}",
        run__name="-x",
        run__seed="-1",
    )
    names = sorted(line.partition("=")[0] for line in found)
    assert names == sorted(
        [
            "trian",
            "data.seq_len",
            "parallel.replicas",
            "train.lr",
            "train.betas.1",
            "train.epochs",
            "cluster.workers",
            "model.lora.rank",
            "run.name",
            "run.seed",
        ]
    )
    # Not reported: that tokens_per_step does not fit a seq_len that is itself wrong.


@pytest.mark.parametrize(
    ("field", "value", "start"),
    [
        ("train.lr", "0", "train.lr=0 is not valid: it must be greater than 0. Set train.lr"),
        ("train.lr", "nan", "train.lr=nan is not valid: it must be a finite number. Set"),
        ("train.lr", "inf", "train.lr=inf is not valid: it must be a finite number. Set"),
        ("train.lr", "none", "train.lr=none is not valid: it must be a number. Set train.lr"),
        ("train.lr", None, "train.lr=none is not valid: it must be a number. Set train.lr"),
        ("train.lr.x", "1", "train.lr={'x': '1'} is not valid: it must be a number."),
        ("train.micro_batch", "1.5", "train.micro_batch=1.5 is not valid: it must be a whole"),
        ("train.micro_batch", True, "train.micro_batch=true is not valid: it must be a number."),
        ("train.grad_clip", True, "train.grad_clip=true is not valid: it must be a number."),
        ("train.compile", "maybe", "train.compile=maybe is not valid: it must be true or false."),
        ("train.schedule", "cos", "train.schedule=cos is not valid: it must be 'cosine', 'linear'"),
        ("train.betas", "0.9", "train.betas.1=['0.9'] is not valid: field required."),
        ("run.name", "a/b", "run.name=a/b is not valid: it must be letters, digits,"),
        ("run.name", 3, "run.name=3 is not valid: it must be text, in quotes"),
        ("run.storage", "", "run.storage= is not valid: string should have at least 1 character"),
        ("cluster.workers", "two", "cluster.workers=two is not valid: it must be N or MIN:MAX."),
        ("cluster.workers", "0:2", "cluster.workers=0:2 is not a range: it must be N or MIN:MAX"),
        (
            "train.profile_steps",
            "23:20",
            "train.profile_steps=23:20 is not possible: it must be FIRST:",
        ),
        (
            "train.profile_steps",
            "1:22",
            "train.profile_steps=1:22 is not possible: it must be FIRST:END",
        ),
        ("train.profile_steps", "0:3", "train.profile_steps=0:3 is not valid: it must be FIRST"),
        ("cluster.resources", "{CPU: x}", "cluster.resources.CPU=x is not valid: it must be a num"),
        ("model.overrides", "{a: ", "model.overrides={a: is not valid: it must be a mapping such"),
        ("train", "fast", "train=fast is not valid: it must be a mapping of fields. Set train."),
        ("train.optimizer", "sgd", "train.optimizer=sgd is not valid: it must be 'adamw', 'adamw8"),
        ("train.on_spike", "warn", "train.on_spike=warn is not valid: it must be 'none', 'skip'"),
        ("model.lora", "{rank: 0}", "model.lora.rank=0 is not valid: it must be greater than or"),
        ("model.lora", "{quantize: int8}", "model.lora.quantize=int8 is not valid: it must be"),
        ("parallel.replicas", "2", "parallel.replicas=2 is ineffective: only hybrid_shard"),
        ("train.precision", "fp4", "train.precision=fp4 is not valid: it must be 'auto', 'fp32', "),
        ("cluster.idle_minutes", "1441", "cluster.idle_minutes=1441 is not valid: it must be less"),
    ],
)
def test_the_words_of_a_refusal(field: str, value: Any, start: str) -> None:
    found = problems(**{field.replace(".", "__"): value})
    assert len(found) == 1 and found[0].startswith(start), found


def test_a_field_of_a_task_of_ones_own_name_is_told() -> None:
    (found,) = problems(eval__tasks={"mine": {"path": "a.jsonl", "zzzzz": "exact"}})
    assert found.startswith("eval.tasks.mine.zzzzz=exact is unknown"), found
    assert "Set eval.tasks: Questions with answers, by task name: a path, or `{path: " in found, (
        found
    )


@pytest.mark.parametrize(
    ("field", "hint"),
    [
        ("train.lrr", "Did you mean train.lr?"),
        ("train.tokens_per_stp", "Did you mean train.tokens_per_step?"),
        ("train.seq_len", "Did you mean data.seq_len?"),
        ("seed", "Did you mean run.seed?"),
        ("trian.lr", "Did you mean train?"),
        ("chekpoint.keep", "Did you mean checkpoint?"),
        ("model.lora.rnk", "Did you mean model.lora.rank?"),
        (
            "eval.zzzzz",
            "Set one of every_steps, checkpoints, patience, gate, prompts, tasks, metrics",
        ),
        ("zzzzz", "Set one of run, model, data, train, parallel, checkpoint, eval, cluster"),
    ],
)
def test_an_unknown_name_gets_the_nearest(field: str, hint: str) -> None:
    found = problems(**{field: "1"})
    assert " is unknown: there is no such field. " in found[0] and found[0].endswith(hint), found


@settings(max_examples=200, deadline=None)
@given(tokens=st.integers(8, 10**7), rows=st.integers(1, 64), seq_len=st.integers(8, 4096))
def test_an_indivisible_step_names_the_two_nearest_legal_ones(
    tokens: int, rows: int, seq_len: int
) -> None:
    tree = {
        "train": {"tokens_per_step": tokens, "micro_batch": rows},
        "data": {"seq_len": seq_len},
    }
    try:
        assert from_dict(tree, kind=Config).micro_batches_per_step * rows * seq_len == tokens
        return
    except ConfigError as error:
        (line,) = error.problems
    values = [int(v) for v in line.partition(". Set train.tokens_per_step=")[2].split(" or ")]
    assert 1 <= len(values) <= 2 and all(abs(v - tokens) < rows * seq_len for v in values)
    assert (len(values) == 1) == (tokens < rows * seq_len)
    for value in values:
        tree["train"]["tokens_per_step"] = value
        assert from_dict(tree, kind=Config).train.tokens_per_step == value


def test_held_out_data_are_chosen_once() -> None:
    assert load(None, {"data.eval_path": "x"}, Config).data.eval_path == "x"
    load(None, {"data.eval_path": "x", "data.eval_fraction": "0"})
    kept = load(None, {"data.eval_path": "x"})
    assert from_dict(parse_yaml(kept.to_yaml())) == kept  # a run with eval_path can be resumed
    (line,) = problems(data__eval_path="x", data__eval_fraction="0.1")
    assert line.startswith("data.eval_fraction=0.1 is in conflict: data.eval_path=x also")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"- run\n- data\n", "is not a mapping: it contains a list. Give"),
        (b"run", "is not a mapping: it contains a str. Give"),
        (b"run: {name: a", "is not YAML: "),
        (b"run: {name: a}\nrun: {seed: 1}\n", "the key run appears twice"),
        (b"run: {name: \xff}", "is not text: "),
        (b"run: {name: \x00}", "is not YAML: "),
        (b"data: {seq_len: " + b"9" * 5000 + b"}", "is not YAML: "),
    ],
)
def test_a_file_that_is_no_config(tmp_path: Path, text: bytes, words: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(text)
    found = problems(str(path), train__lr="x")
    assert len(found) == 2 and words in found[0], found
    assert found[0].startswith(f"config file {path} is not ") and "train.lr=x" in found[1]


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (str(tmp_path), f"{tmp_path}/absent.yaml", "a\0b"):
        (line,) = problems(path)
        assert " is not readable: " in line and line.endswith("of sections and fields")


def test_a_value_of_the_wrong_type_in_yaml(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("run: {name: 2024}\ntrain: [1]\ndata: {seq_len: [1], pack: 3}\n2: x\n")
    starts = [
        "run.name=2024 is not valid: it must be text, in quotes",
        "data.seq_len=[1] is not valid: it must be a whole number. Set data.seq_len",
        "data.pack=3 is not valid: ",
        "train=[1] is not valid: it must be a mapping of fields. Set train.",
        "2=2 is not valid: keys should be strings. ",
    ]
    found = problems(str(path))
    assert len(found) == len(starts)
    for line, start in zip(found, starts, strict=True):
        assert line.startswith(start), line


def test_fields_below_a_value_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("train: 3\n")
    found = problems(str(path), train__lr="1")
    assert found[0] == ("train.lr=1 is misplaced: train holds 3, not fields. Remove one of the two")


words = st.sampled_from([*FIELDS, *Config.model_fields, "", ".", "train.lr.x", "model.lora.rank.x"])
values = st.one_of(
    st.text(max_size=12),
    st.text("[]{}:,'\"#&*!|>-+.0123456789enulNaif~ ", max_size=12),
    st.sampled_from(["{a: &x [*x]}", "{<<: 1}", "{? [a] : b}", "{a: 1, a: 2}", "!!python/name:os"]),
    st.from_type(int | float | bool | None),
)


@settings(max_examples=600, deadline=None)
@given(st.dictionaries(words | st.text("train.lr", max_size=8), values, max_size=6))
def test_garbage_raises_nothing_but_config_error(overrides: dict[str, Any]) -> None:
    try:
        config = load(None, overrides)
    except ConfigError as error:
        assert error.problems
        for line in error.problems:
            assert FORM.fullmatch(line) and "\n" not in line and len(line) < 500, line
    else:
        assert from_dict(parse_yaml(config.to_yaml())) == config


# ---- What is kept ----------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
    path=st.text(min_size=1),
    lr=st.floats(1e-12, 1e3),
    prompts=st.lists(st.text()),
    overrides=st.dictionaries(st.text(), st.integers() | st.text() | st.booleans() | st.none()),
)
def test_yaml_round_trip(
    name: str, path: str, lr: float, prompts: list[str], overrides: dict[str, Any]
) -> None:
    tree = {
        "run": {"name": name},
        "data": {"path": path},
        "train": {"lr": lr},
        "eval": {"prompts": prompts},
        "model": {"overrides": overrides},
        "cluster": {"workers": "2:8"},
    }
    config = from_dict(tree)
    text = config.to_yaml()
    assert from_dict(parse_yaml(text)) == config
    assert from_dict(yaml.safe_load(text)) == config  # what other programs read is the same


def test_differences_name_what_makes_it_another_run() -> None:
    old = load()
    same = load(
        None,
        {
            "cluster.workers": "3:9",
            "cluster.resources": "{CPU: 2}",
            "checkpoint.every_steps": "5",
            "checkpoint.keep": "9",
            "run.storage": "s3://bucket/runs",
            "data.workers": "3",
        },
    )
    assert differences(old, same) == [] and differences(old, old) == []
    packages = (f"/tmp/ray/session/working_dir_files/_ray_pkg_{digest}/" for digest in ("0f", "1e"))
    first, second = (
        load(data={"mixture": {f"{folder}a.txt": 1, "b": 1}}, train={"max_steps": 9})
        for folder in packages
    )
    assert differences(first, second) == []
    other = load(
        None,
        {
            "run.seed": "1",
            "train.lr": "1e-3",
            "data.path": "x",
            "train.betas": "0.8,0.9",
            "model.overrides": "{num_hidden_layers: 3}",
        },
    )
    assert differences(old, other) == [
        "data.path: stdlib -> x",
        "model.overrides: {} -> None",
        "model.overrides.num_hidden_layers: None -> 3",
        "run.seed: 0 -> 1",
        "train.betas: [0.9, 0.95] -> [0.8, 0.9]",
        "train.lr: 0.0003 -> 0.001",
    ]


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # for the sham values
def test_every_other_field_makes_a_difference() -> None:
    old = load()
    for field in FIELDS:
        section, _, name = field.rpartition(".")
        if section == "model.lora":
            continue
        new = copy.deepcopy(old)
        vars(getattr(new, section))[name] = None if getattr(getattr(new, section), name) else 1
        others = (
            "run.max_usd",
            "run.max_hours",
            "run.storage",
            "run.trackers",
            "run.hooks",
            "data.workers",
            "train.micro_batch",
        )
        others += ("train.on_spike", "train.spike_sigmas", "train.profile_steps")
        others += ("eval.patience", "eval.gate")
        free = section in ("cluster", "checkpoint") or field in others
        assert bool(differences(old, new)) != free, field


def test_a_config_is_frozen_and_pickles() -> None:
    config = load(None, {"train.lr": "1"}, Config)
    with pytest.raises(ValueError, match="frozen"):
        config.train.lr = 2  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config
    error = pickle.loads(pickle.dumps(ConfigError(["a", "b"])))
    assert isinstance(error, ConfigError)
    assert error.problems == ["a", "b"] and str(error) == "a\nb"


def test_an_optimizer_may_have_defaults_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(OPTIMIZERS[name].defaults for name in ("adamw", "adamw8bit", "muon", "sgd"))
    own = replace(OPTIMIZERS["muon"], defaults={"lr": 1e-4, "betas": (0.9, 0.99)})
    monkeypatch.setattr(optimizers, "OPTIMIZERS", {**OPTIMIZERS, "muon": own})
    found = [load(None, {"train.optimizer": name}, Config).train for name in ("muon", "adamw")]
    assert [(each.lr, each.betas) for each in found] == [(1e-4, (0.9, 0.99)), (3e-4, (0.9, 0.95))]
    set_by_user = load(None, {"train.optimizer": "muon", "train.lr": "0.02"}, Config).train
    assert (set_by_user.lr, set_by_user.betas) == (0.02, (0.9, 0.99))


def test_json_schema() -> None:
    schema = json.loads(json.dumps(Config.model_json_schema()))
    assert list(schema["properties"]) == list(Config.model_fields)
    assert schema["additionalProperties"] is False
    train = schema["$defs"]["Train"]["properties"]
    assert train["lr"]["description"] == fields()["train.lr"] and train["lr"]["default"] == 3e-4
    workers = schema["$defs"]["Cluster"]["properties"]["workers"]
    assert {"string", "integer"} == {option["type"] for option in workers["anyOf"]}
