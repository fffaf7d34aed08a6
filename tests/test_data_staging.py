"""Staging of images: both ways between folders and S3, cut off and gone on with, and checked."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from rayapp.__main__ import main
from rayapp.data.images import sources, staging
from rayapp.data.images.labels import LabelError, folders_of, read_labels, read_synsets
from rayapp.data.sources import SourceError
from rayapp.observe.run_folder import Exit
from rayapp.storage import Storage, StorageError, open_storage

NOT_IMAGE = b"<html>404</html>"


def picture(number: int, kind: str = "JPEG") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (24 + number % 5, 24), (number * 7 % 256, 80, 200)).save(out, kind)
    return out.getvalue()


def fill(storage: Storage, classes: int = 3, each: int = 4) -> dict[str, bytes]:
    """Write folders of classes; return what is in them."""
    files = {f"n{c:04d}/{i}.JPEG": picture(10 * c + i) for c in range(classes) for i in range(each)}
    for name, data in files.items():
        storage.write(name, data)
    return files


def contents(storage: Storage) -> dict[str, bytes]:
    names = [one.name for one in storage.list() if not sources.hidden(one.name)]
    return {name: storage.read(name) for name in names}


@pytest.fixture
def bucket(s3_bucket: str) -> str:
    return f"s3://{s3_bucket}"


def test_from_s3_to_a_folder_and_back(bucket: str, tmp_path: Path) -> None:
    files = fill(open_storage(f"{bucket}/train"))
    first = staging.stage(f"{bucket}/train", str(tmp_path / "train"))
    assert (first.copied, first.there, first.images, first.classes) == (12, 0, 12, 3)
    assert first.copied_bytes == sum(map(len, files.values()))
    assert contents(open_storage(str(tmp_path / "train"))) == files
    back = staging.stage(str(tmp_path / "train"), f"{bucket}/again")
    assert back.copied == 12 and contents(open_storage(f"{bucket}/again")) == files
    over = staging.stage(f"{bucket}/again", f"{bucket}/third")
    assert over.copied == 12 and contents(open_storage(f"{bucket}/third")) == files
    found = sources.find(str(tmp_path / "train"))  # what a run finds there
    assert found.format == "folder" and {file.name for file in found.files} == set(files)


def test_what_is_there_and_verified_is_not_copied_again(bucket: str, tmp_path: Path) -> None:
    here, target = open_storage(f"{bucket}/train"), str(tmp_path / "t")
    fill(here)
    staging.stage(here.url, target)
    assert staging.stage(here.url, target).copied == 0
    here.write("n0001/2.JPEG", picture(99))  # another image of that name
    there = open_storage(target)
    there.write("n0000/1.JPEG", b"someone wrote over it")
    there.delete("n0002/3.JPEG")
    again = staging.stage(here.url, target)
    assert (again.copied, again.there) == (3, 9)
    assert contents(there) == contents(here)


def test_a_copy_that_was_cut_off_goes_on(bucket: str, tmp_path: Path) -> None:
    here, target = open_storage(f"{bucket}/train"), str(tmp_path / "t")
    files = fill(here, each=10)

    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        staging.stage(here.url, target, parallel=2, progress=stop)
    rest = staging.stage(here.url, target)
    assert 0 < rest.copied < 20 and rest.copied + rest.there == 30
    assert contents(open_storage(target)) == files


def test_what_was_written_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(open_storage(str(tmp_path / "a")))
    kind = type(open_storage(str(tmp_path)))
    write = kind.write

    def flip(self: Storage, name: str, data: bytes) -> None:
        write(self, name, data[:-1] + b"?" if name == "n0001/1.JPEG" else data)

    monkeypatch.setattr(kind, "write", flip)
    with pytest.raises(StorageError, match=r"n0001/1\.JPEG: what was read back differs"):
        staging.stage(str(tmp_path / "a"), str(tmp_path / "b"))
    monkeypatch.undo()
    assert staging.stage(str(tmp_path / "a"), str(tmp_path / "b")).images == 12
    assert contents(open_storage(str(tmp_path / "b"))) == contents(
        open_storage(str(tmp_path / "a"))
    )


def test_bad_files_are_counted_named_and_left_out(bucket: str, tmp_path: Path) -> None:
    here = open_storage(f"{bucket}/train")
    files = fill(here)
    here.write("n0000/broken.JPEG", files["n0000/1.JPEG"][:-40])
    here.write("n0002/page.JPEG", NOT_IMAGE)
    here.write("README.txt", b"about")
    here.write("n0001/.DS_Store", b"x")
    with pytest.raises(staging.TooManyBad, match=r"unusable in . of 15 files: .*--bad_images"):
        staging.stage(here.url, str(tmp_path / "t"))
    report = staging.stage(here.url, str(tmp_path / "t"), bad_images=0.5)
    assert report.bad == {"not an image": 2, "damaged (OSError)": 1}
    assert dict(report.examples)["n0002/page.JPEG"] == "not an image"
    assert report.images == 12 and contents(open_storage(str(tmp_path / "t"))) == files
    again = staging.stage(here.url, str(tmp_path / "t"), bad_images=0.5)
    assert (again.copied, again.bad) == (0, report.bad)


def test_shards_are_copied_whole_and_looked_into(bucket: str, tmp_path: Path) -> None:
    here = open_storage(f"{bucket}/shards")
    for shard in range(3):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as archive:
            for i in range(5):
                data = NOT_IMAGE if (shard, i) == (1, 2) else picture(10 * shard + i)
                info = tarfile.TarInfo(f"n{i % 2:04d}/{shard}{i}.jpg")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        here.write(f"{shard}.tar", out.getvalue())
    here.write("3.tar", b"no tar at all" * 100)
    report = staging.stage(here.url, str(tmp_path / "t"), bad_images=0.5)
    assert report.images == 14 and report.copied == 3
    assert report.bad == {"not an image": 1, "no tar file that can be read": 1}
    assert set(contents(open_storage(str(tmp_path / "t")))) == {"0.tar", "1.tar", "2.tar"}
    assert staging.stage(here.url, str(tmp_path / "t"), bad_images=0.5).there == 3


# ImageNet's validation set.

VAL = [f"ILSVRC2012_val_{number:08d}" for number in range(1, 7)]
CLASSES = ["n02110063", "n01440764", "n02110063", "n03995372", "n01440764", "n03995372"]
SYNSETS = "n01440764 tench, Tinca tinca\nn02110063 malamute\nn03995372 power drill\n"
SOLUTION = "ImageId,PredictionString\n" + "".join(
    f"{name},{label} 85 1 499 272 {label} 0 0 9 9 \n"
    for name, label in reversed(list(zip(VAL, CLASSES, strict=True)))
)
NUMBERS = "2\n1\n2\n3\n1\n3\n"
FORMS = {
    "Kaggle's": (SOLUTION, None),
    "the devkit's": (NUMBERS, SYNSETS),
    "TensorFlow's": ("\n".join(CLASSES), None),
    "from 0": ("".join(f"{n}.JPEG {i}\n" for n, i in zip(VAL, "101202", strict=True)), SYNSETS),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_flat_folder_gets_folders_of_classes(
    form: str, bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = open_storage(f"{bucket}/val")
    for number, name in enumerate(VAL):
        here.write(f"{name}.JPEG", picture(number))
    text, synsets = FORMS[form]
    open_storage(bucket).write("labels.txt", text.encode())
    arguments = [here.url, str(tmp_path / "val"), f"--labels={bucket}/labels.txt", "--json"]
    if synsets is not None:
        (tmp_path / "synsets.txt").write_text(synsets)
        arguments.append(f"--synsets={tmp_path / 'synsets.txt'}")
    assert main(["stage", *arguments]) == Exit.DONE
    report = json.loads(capsys.readouterr().out)
    assert (report["images"], report["classes"], report["foreign"]) == (6, 3, 0)
    wanted = {
        f"{label}/{name}.JPEG": picture(number)
        for number, (name, label) in enumerate(zip(VAL, CLASSES, strict=True))
    }
    assert contents(open_storage(str(tmp_path / "val"))) == wanted
    assert main(["stage", *arguments]) == Exit.DONE
    assert json.loads(capsys.readouterr().out)["there"] == 6


def test_an_image_without_a_label_is_left_out_and_others_are_named(tmp_path: Path) -> None:
    here = open_storage(str(tmp_path / "val"))
    for number, name in enumerate([*VAL, "extra"]):
        here.write(f"{name}.JPEG", picture(number))
    labels = read_labels(SOLUTION)
    report = staging.stage(here.url, str(tmp_path / "t"), labels=labels, bad_images=0.5)
    assert report.bad == {"without a label": 1} and report.images == 6
    open_storage(str(tmp_path / "t")).write("n1/left.JPEG", b"of another day")
    again = staging.stage(here.url, str(tmp_path / "t"), labels=labels, bad_images=0.5)
    assert (again.foreign, again.foreign_examples) == (1, ["n1/left.JPEG"])


@pytest.mark.parametrize(
    ("text", "synsets", "message"),
    [
        ("", None, "is empty"),
        ("ImageId,PredictionString\n", None, "is empty"),
        ("a.JPEG n1\nb.JPEG\n", None, "line 2 has no label"),
        ("a n1\na.jpg n2\n", None, "a has two"),
        ("n1\nn2\n", None, "2 in order, and images 3"),
        ("a n1\nb n2\nc n3\nd n1\n", None, "1 images that are not there: e.g. d"),
        ("1\n2\n1\n", None, "Give --synsets=FILE"),
        ("1\n3\n1\n", "n1\nn2\n", "a label is 3"),
        ("n1\n../x\nn1\n", None, "is no name of a class"),
        ("n1\n.x\nn1\n", None, "is no name of a class"),
    ],
)
def test_labels_that_cannot_be_right_are_refused(
    text: str, synsets: str | None, message: str
) -> None:
    with pytest.raises(LabelError, match=message):
        names = None if synsets is None else read_synsets(synsets)
        folders_of(read_labels(text), ["a.JPEG", "b.JPEG", "c.JPEG"], names)


# From Python, and the command.


def test_python_stages_as_the_command_does(tmp_path: Path) -> None:
    """Labels and synsets by the names of their files; numbers out of range are told at once."""
    import rayapp

    here = open_storage(str(tmp_path / "flat"))
    for number in range(3):
        here.write(f"{number}.JPEG", picture(number))
    (tmp_path / "labels.txt").write_text("1\n2\n1\n")
    (tmp_path / "synsets.txt").write_text("n01 a fish\nn02 a bird\n")
    done = rayapp.stage(
        here.url,
        str(tmp_path / "there"),
        labels=str(tmp_path / "labels.txt"),
        synsets=str(tmp_path / "synsets.txt"),
    )
    assert isinstance(done, rayapp.Staged)
    assert (done.images, done.classes, done.copied, done.bad) == (3, 2, 3, {})
    found = sorted(entry.name for entry in open_storage(done.target).list() if "/" in entry.name)
    assert [name for name in found if not name.startswith(".")] == [
        "n01/0.JPEG",
        "n01/2.JPEG",
        "n02/1.JPEG",
    ]
    with pytest.raises(rayapp.ConfigError) as caught:
        rayapp.stage("nowhere", "there", bad_images=-1, parallel=1000)
    assert [problem.split(" is ")[0] for problem in caught.value.problems] == [
        "bad_images=-1",
        "parallel=1000",
    ]


def test_the_command_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = open_storage(str(tmp_path / "a"))
    fill(here)
    here.write("n0000/page.png", NOT_IMAGE)
    arguments = ["stage", here.url, str(tmp_path / "b")]
    assert main([*arguments, "--bad_images=0.1"]) == Exit.DONE
    text = capsys.readouterr().out
    for words in (
        "12 images in",
        "3 classes",
        "copied and verified 12",
        "left out: 1 not an image",
    ):
        assert words in text
    assert main(arguments) == Exit.FAILED
    assert "n0000/page.png is not an image" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], Exit.REFUSED, ""),
        (["only"], Exit.REFUSED, "a SOURCE and a TARGET are expected"),
        (["SOURCE", "b", "--bad_images=2"], Exit.REFUSED, "bad_images=2.0 is not a share"),
        (["SOURCE", "b", "--parallel=0"], Exit.REFUSED, "parallel=0 is not valid"),
        (["SOURCE", "b", "--label=x"], Exit.REFUSED, "Did you mean --labels?"),
        (["SOURCE", "SOURCE/b"], Exit.FAILED, "Give folders that lie apart"),
        (["EMPTY", "b"], Exit.FAILED, "is empty"),
        (["FLAT", "b"], Exit.FAILED, "Give --labels=FILE"),
        (["SOURCE", "b", "--labels=nowhere.csv"], Exit.FAILED, "no such file"),
    ],
)
def test_what_is_refused(
    arguments: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    fill(open_storage("SOURCE"))
    open_storage("FLAT").write("a.JPEG", picture(1))
    assert main(["stage", *arguments]) == code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_a_bucket_that_is_not_there_is_told(
    bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(open_storage(str(tmp_path / "a")))
    assert main(["stage", str(tmp_path / "a"), f"{bucket}-no/x"]) == Exit.FAILED
    assert "does not exist" in capsys.readouterr().err
    with pytest.raises(SourceError, match="is empty"):
        staging.stage(f"{bucket}/nothing", str(tmp_path / "b"))
