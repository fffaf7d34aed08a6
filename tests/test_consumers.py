"""What leaves is judged by who uses it: exports are opened by other programs, and write the same.

`make .venv/.consumers` installs the programs; `CONSUMERS` names the folder of their environments.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import served
import torch
import vllm_experts
from reference import product
from run_folders import RunFolder
from test_model_new_tokens import ANSWERS, NEW, base
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from rayapp import consumers, model
from rayapp.__main__ import main
from rayapp.cli.first import CHATS
from rayapp.consumers import LLAMA_CPP, TRANSFORMERS, TRANSFORMERS_4, VLLM, Verdict, prompts
from rayapp.data import tokens
from rayapp.data.packing import IGNORE
from rayapp.model.gguf import in_folder
from rayapp.storage import open_storage

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "serving.md"
TINY = str(ROOT / "configs" / "tiny_cpu.yaml")
BEGIN, END = "<!-- made by the test -->\n", "<!-- end -->"
PROGRAMS = (TRANSFORMERS_4, VLLM, LLAMA_CPP)
SMOLLM2 = "smollm2-135m-instruct"


def installed() -> dict[str, str]:
    """Return the environments of the programs that are installed."""
    root = Path(os.environ.get("CONSUMERS", Path(sys.prefix, "consumers")))
    found = {name: str(root / name) for name in PROGRAMS}
    return {name: place for name, place in found.items() if not [*consumers.absent(name, place)]}


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The installed programs; vLLM with what its build for CPUs lacks."""
    plugin = vllm_experts.as_plugin(tmp_path_factory.mktemp("plugin"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", plugin)
        patch.setenv("OMP_NUM_THREADS", "1")  # threads of small models wait for one another
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        yield installed()


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def smollm2(storage: Path) -> str:
    """The folder of SmolLM2, where a run in the same storage finds it."""
    return in_folder(SMOLLM2, open_storage(str(storage)) / ".prepared")


@pytest.fixture(scope="module")
def judged(
    environments: dict[str, str], smollm2: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[str], dict[str, list[Verdict]]]:
    """The names of the exports, and what each program makes of them."""
    models = dict(served.exports(tmp_path_factory.mktemp("exports"), smollm2))
    return [*models], consumers.tried([*models.values()], environments)


@pytest.mark.full
@pytest.mark.parametrize("number, consumer", [*enumerate([TRANSFORMERS, *PROGRAMS])])
def test_the_page_says_what_each_program_opens(
    number: int, consumer: str, judged: tuple[list[str], dict[str, list[Verdict]]]
) -> None:
    names, verdicts = judged
    if consumer not in verdicts:
        pytest.skip(f"{consumer} is not installed: make .venv/.consumers")
    said = ["yes" if each.good else "no" for each in verdicts[consumer]]
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    table, _, after = rest.partition(END)
    head, rule, *rows = table.splitlines()
    found = {cells[0]: cells[1:] for cells in (row.strip("| ").split(" | ") for row in rows)}
    if os.environ.get("GOLDEN") == "write":
        found = {name: found.get(name, ["?"] * (1 + len(PROGRAMS))) for name in names}
        for name, cell in zip(names, said, strict=True):
            found[name][number] = cell
        lines = [head, rule, *(f"| {' | '.join([name, *found[name]])} |" for name in names)]
        PAGE.write_text("\n".join([before + BEGIN.strip(), *lines, END + after]), encoding="utf-8")
    reasons = [f"{name}: {each.why}" for name, each in zip(names, verdicts[consumer], strict=True)]
    told = {name: cells[number] for name, cells in found.items()}
    assert told == dict(zip(names, said, strict=True)), "\n".join(["GOLDEN=write", *reasons])


@pytest.mark.full
def test_a_run_on_real_weights_is_opened_by_all(
    environments: dict[str, str], smollm2: str, storage: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Adapters on SmolLM2, as `rayapp finetune` exports them and `rayapp check` tries them."""
    data = storage / "chats.jsonl"
    turns = [
        [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]
        for ask, answer in CHATS
    ]
    data.write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns * 4))
    fields = {
        "model.path": SMOLLM2,
        "model.lora": "{rank: 8}",
        "data.path": data,
        "data.seq_len": 128,
        "train.tokens_per_step": 256,
        "train.micro_batch": 2,
        "train.max_steps": 2,
        "run.name": "real",
        "run.storage": storage,
        "cluster.workers": 1,
    }
    command = [sys.executable, "-m", "rayapp.finetune", TINY]
    subprocess.run([*command, *(f"--{name}={value}" for name, value in fields.items())], check=True)
    capfd.readouterr()
    code = main(
        ["check", str(storage / "real"), *(f"--{name}={at}" for name, at in environments.items())]
    )
    lines = capfd.readouterr().out.splitlines()
    rows = [line.split() for line in lines[1:]]
    tried = [TRANSFORMERS, *(name for name in consumers.INSTALL if name in environments)]
    assert rows == [[name, "yes", "yes", "yes"] for name in tried], lines
    assert code == 0


@pytest.mark.full
def test_a_base_that_has_learnt_chatml_stops_in_each_program(
    environments: dict[str, str], tmp_path: Path
) -> None:
    """With new tokens of its own; vLLM refuses them in adapters, llama.cpp the tokenizer."""
    fields = base(tmp_path) | {"model.new_tokens": NEW}
    ways: dict[str, dict[str, Any]] = {"merged": {"rank": 16, "merge": True}, "on": {"rank": 16}}
    runs = [product.Run(name, fields | {"model.lora": lora}) for name, lora in ways.items()]
    models = []
    for name, done in product.run(runs, tmp_path).items():
        folder = str(done.folder / "model")
        under = None if name == "merged" else fields["model.path"]
        tokenizer = AutoTokenizer.from_pretrained(folder)
        probes = [prompts.probe_of(tokenizer, asked, chat=True) for asked in ANSWERS]
        models.append(consumers.Served(folder, under, tokenizer, probes, must_stop=True))
        assert models[-1].stops == {tokenizer.convert_tokens_to_ids("<|im_end|>"), 0}
    found = consumers.tried(models, {n: at for n, at in environments.items() if n != LLAMA_CPP})
    for name, (merged, adapter) in found.items():
        assert merged.good, merged
        assert adapter.good == (name != VLLM), adapter
        assert name != VLLM or "trainable_tokens_delta" in adapter.why


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose small model remembers a chat."""
    made = RunFolder(
        open_storage(str(tmp_path_factory.mktemp("chats"))),
        config=TINY,
        data__kind="chat",
        eval__prompts=f"[{served.ASK}]",
    )
    made.train(2)
    made.end()
    tokenizer = tokens.train_bpe(iter([served.ASK, served.ANSWER] * 9), 300)
    lm = served.built(LlamaConfig(**served.SHAPE, vocab_size=len(tokenizer)))
    served.remembering(lm, tokenizer)
    ends = served.GenerationConfig(eos_token_id=[2, 0])
    model.export(lm, made.run / "model", tokenizer=tokenizer, generation_config=ends)
    return Path(made.run.url)


def test_check_says_what_transformers_makes_of_a_run(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(run)]) == 0
    assert capfd.readouterr().out.splitlines()[1].split() == [TRANSFORMERS, "yes", "yes", "yes"]


def test_an_adapter_and_its_base_become_one_model(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    adapter = peft.get_peft_model(hf, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    for name, weight in adapter.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.2)
    adapter.save_pretrained(tmp_path / "a" / "model")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(run / "model" / name, tmp_path / "a" / "model")
    (tmp_path / "a" / "model" / "README.md").write_text("of the adapter")
    monkeypatch.chdir(tmp_path)
    assert main(["merge", "a"]) == 0
    assert capsys.readouterr().out == "merged model in a-merged\n"
    merged = AutoModelForCausalLM.from_pretrained("a-merged", dtype="auto")
    assert len({path.stat().st_mode for path in Path("a-merged").iterdir()}) == 1
    assert merged.dtype == torch.bfloat16 and not Path("a-merged", "README.md").exists()
    wanted = adapter.merge_and_unload().to(torch.bfloat16).state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in merged.state_dict().items())
    assert AutoTokenizer.from_pretrained("a-merged").chat_template
    assert main(["merge", "a"]) == main(["merge", str(run)]) == 2
    used, whole = capsys.readouterr().err.splitlines()[-2:]
    assert "--out=a-merged is in use" in used and "has no adapter" in whole


@pytest.mark.full
def test_an_answer_that_does_not_end_fails_the_check(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = run / "model" / "generation_config.json"
    before = file.read_bytes()
    file.write_text(json.dumps({**json.loads(before), "eos_token_id": [0]}))
    try:
        assert main(["check", str(run)]) == 1
    finally:
        file.write_bytes(before)
    table, why = capfd.readouterr().out.splitlines()[1:]
    assert table.split() == [TRANSFORMERS, "yes", "no", "yes"]
    assert "none of 1 answers ends within 32 tokens by <|endoftext|>" in why


def test_an_environment_that_lacks_the_program_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(run), f"--vllm={tmp_path}", f"--llama_cpp={tmp_path}"]) == 2
    vllm, *llama_cpp = capsys.readouterr().err.splitlines()
    assert f"--vllm={tmp_path} is no environment of vllm: there is no bin/python in it" in vllm
    assert "pip install vllm" in vllm
    assert len(llama_cpp) == 2 and "node_modules/node-llama-cpp" in llama_cpp[1]


PROMPT, STOP = [5, 6], 2
# What a program makes of the prompt and writes, how far that is from the likeliest: the verdict.
JUDGED: dict[
    str, tuple[dict[str, Any], float, bool, tuple[bool, bool | None, bool | None], str]
] = {
    "right": ({"prompt": PROMPT, "ids": [7, STOP]}, 0.0, True, (True, True, True), ""),
    "a tie": ({"prompt": PROMPT, "ids": [7, STOP]}, 0.01, True, (True, True, True), ""),
    "other tokens": ({"prompt": [1, 5, 6], "ids": [STOP]}, 0.0, True, (True, True, False), "[1, 5"),
    "passes": ({"prompt": PROMPT, "ids": [STOP, 7]}, 0.0, True, (True, False, True), "not stop at"),
    "other text": ({"prompt": PROMPT, "ids": [9, STOP]}, 3.0, True, (True, True, False), "3 nats"),
    "no end": ({"prompt": PROMPT, "ids": [7, 8]}, 0.0, True, (True, False, True), "Train more"),
    "a text": ({"prompt": PROMPT, "ids": [7, 8]}, 0.0, False, (True, None, True), ""),
}


@pytest.mark.parametrize("case", JUDGED)
def test_a_verdict_names_what_is_wrong(case: str, tmp_path: Path) -> None:
    written, gap, must_stop, wanted, why = JUDGED[case]
    tokenizer = tokens.byte_tokenizer()
    probe: Any = {"messages": None, "text": None, "ids": PROMPT}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": STOP}))
    tried = consumers.Served(str(tmp_path), None, tokenizer, [probe], must_stop)
    found = consumers.verdict_of(VLLM, tried, {"written": [written]}, iter([gap]))
    assert (found.opens, found.stops, found.equal) == wanted
    assert why in found.why and bool(found.why) == bool(why)
    assert found.good == (not why)


def test_what_a_program_raises_is_its_verdict() -> None:
    """Also where the whole process ends, for all models that it has not answered."""
    ends = [sys.executable, "-c", "import sys; print('no room'); sys.exit(3)"]
    request: Any = {"folder": ""}
    answers = consumers.answers_of(ends, [request, request])
    assert [each["error"] for each in answers] == ["it ended with exit code 3: no room"] * 2
    tried = consumers.Served("", None, None, [], True)
    found = consumers.verdict_of(VLLM, tried, answers[0], iter([]))
    assert not found.opens and not found.good and "no room" in found.why


def test_a_document_is_cut_where_its_first_answer_ends() -> None:
    ids = np.array([10, 11, 12, 13, STOP, 14])
    labels = np.array([IGNORE, 12, 13, STOP, IGNORE, STOP])
    assert prompts.up_to_end(ids, labels, frozenset([STOP])) == [10, 11, 12, 13]
    assert prompts.up_to_end(ids, labels, frozenset([99])) == []
