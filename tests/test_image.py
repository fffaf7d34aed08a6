"""The image of cluster/Dockerfile, built here without EFA: what it does as the user that it has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from image import ROOT, Image, missing

pytestmark = pytest.mark.image

COMPILE = """
import torch
from torch._inductor import metrics

block = torch.nn.TransformerEncoderLayer(64, 4, 256, 0.0, "gelu", batch_first=True)
rows = torch.randn(2, 16, 64)
made = torch.compile(block, fullgraph=True)(rows)
torch.testing.assert_close(made, block(rows))
made.sum().backward()
print(metrics.generated_kernel_count)
"""

LAUNCHER = """
cd /tmp
echo '#include <stdlib.h>' > launcher.c
echo '#include <Python.h>' >> launcher.c
folder=$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')
gcc -shared -fPIC -I"$folder" launcher.c -o launcher.so
"""


@pytest.fixture(scope="module")
def image(request: pytest.FixtureRequest) -> Iterator[Image]:
    if absent := missing():
        pytest.fail(f"no {', '.join(absent)} here: apt-get install buildah mmdebstrap")
    with Image(ROOT / "build" / "image") as built:
        took = "".join(f"{name} {seconds:.0f} s, " for name, seconds in built.seconds.items())
        capture = request.config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            print(f"\nbuilt: {took}{built.size():.1f} GB")
        yield built


def test_a_block_is_compiled(image: Image) -> None:
    """torch.compile finds a compiler, and the headers of Python and libc."""
    assert int(image.run("python", "-c", COMPILE).splitlines()[-1]) > 0


def test_c_is_compiled(image: Image) -> None:
    """As Triton does on a GPU's node for each kernel's launcher."""
    image.run("sh", "-ec", LAUNCHER)


def test_the_command_is_there(image: Image) -> None:
    assert "train.tokens_per_step" in image.run("python", "-m", "rayapp.finetune", "--help")


def test_the_user_is_not_root(image: Image) -> None:
    """The volume of Ray's sessions belongs to the user."""
    assert image.run("id", "-u") == "10001"
    assert image.run("stat", "-c", "%u", "/tmp/ray") == "10001"
    assert image.run("pwd") == "/home/ray"


def test_ray_has_its_settings(image: Image) -> None:
    variables = image.run("env").splitlines()
    assert "RAY_free_objects_period_milliseconds=100" in variables
    assert "LD_LIBRARY_PATH=/opt/amazon/ofi-nccl/lib:/opt/amazon/efa/lib" in variables


def test_the_extras_are_there(image: Image) -> None:
    modules = "bitsandbytes, torchao, liger_kernel.transformers, mlflow, wandb"
    image.run("python", "-c", f"import {modules}")


def test_a_run_of_three_steps(image: Image) -> None:
    config = "/opt/rayapp/configs/tiny_cpu.yaml"
    options = ("--train.max_steps=3", "--train.warmup_steps=1", "--cluster.workers=1")
    image.run("python", "-m", "rayapp.finetune", config, *options)
    found = image.run("sh", "-c", "stat -c '%u %n' runs/tiny/model/*")
    assert "10001 runs/tiny/model/model.safetensors" in found
    assert image.run("sh", "-c", "wc -l < runs/tiny/metrics.jsonl") == "3"
