"""The files of a run: altered ones are refused, links are not followed, nothing small costs much, nothing is lost."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import shutil
import stat
import tarfile
import zipfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ell0 import files, recipe, train
from ell0.data import sources
from ell0.data.dataset import File
from ell0.files import FileError
from ell0.recipe import verdicts
from ell0.results import Results
from small_training import Killed, run, same


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("stop", [None, 6])
def test_altered_weights_stop_a_training_and_the_checkpoint_before_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int | None
) -> None:
    monkeypatch.setattr(train.checkpoint, "_SHARE", float("inf"))
    whole, home = run(None), tmp_path / "run"
    if stop is None:
        run(home)
    else:
        with pytest.raises(Killed):
            run(home, stop=stop)
    path, before = home / "checkpoint.safetensors", contents(home)
    for at in range(3, len(before[path.name]), len(before[path.name]) // 7):
        altered = bytearray(before[path.name])
        altered[at] ^= 4
        path.write_bytes(altered)
        todo = r"delete it to go on from checkpoint\.previous\.safetensors, the checkpoint before$"
        with pytest.raises(FileError, match=rf"checkpoint\.safetensors is .*: {todo}"):
            run(home)
        assert contents(home) == before | {path.name: bytes(altered)}
    path.unlink()
    assert same(run(home), whole)
    path.unlink()
    (home / "checkpoint.previous.safetensors").write_bytes(b"altered")
    with pytest.raises(FileError, match=r"delete it to train again$"):
        run(home)


@pytest.mark.parametrize(
    "name",
    [".lock", "results.json", "recipe.toml", ".format", "gallery.safetensors", "verdicts/0.safetensors",
     "f0/log.jsonl", "f0/checkpoint.safetensors", "f0", "verdicts"],
)  # fmt: skip
def test_no_link_leads_out_of_a_run_folder(tiny: Path, out: Path, tmp_path: Path, name: str) -> None:
    outside, link = tmp_path / "outside", out / name
    Path(shutil.move(link, outside))
    link.symlink_to(outside)
    before = contents(outside) if outside.is_dir() else outside.read_bytes()
    refused = pytest.raises(FileError, match=re.escape(f"{link} is a link"))
    with nullcontext() if name in ("gallery.safetensors", "verdicts/0.safetensors", "f0/log.jsonl") else refused:
        recipe.run(tiny, out=out, device="cpu")
    assert before == (contents(outside) if outside.is_dir() else outside.read_bytes())


def test_only_plain_files_of_a_bounded_size_are_read(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    for name, said in (("link", "is a link"), ("pipe", "is no plain file"), ("sparse", "has 1,099,511,627,776 bytes")):
        with pytest.raises(FileError, match=said):
            files.read(tmp_path / name)
    with pytest.raises(FileError, match="is no plain file"):
        files.read(tmp_path)
    with pytest.raises(FileNotFoundError):
        files.read(tmp_path / "none")


def npy(shape: str) -> bytes:
    head = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head


def test_an_array_claims_no_more_than_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.npz"
    for content, said in (
        (npy("(1000000, 1000000)"), "cannot reshape"),
        (npy(f"({'9' * 5000},)"), "no array of numbers|limit"),
        (b"\x80\x04pickle", "no array of numbers"),
        (npy("(1,)").replace(b"<f8", b"<f3"), "not understood"),
    ):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x.npy", content)
        with pytest.raises(FileError, match=said):
            files.read_npz(path, ["x"])
    np.savez_compressed(path, x=np.zeros(10**6))
    assert files.read_npz(path, ["x", "y"])[0]["x"].shape == (10**6,)
    monkeypatch.setattr(files, "_MOST_CLAIMED", 10**6)
    with pytest.raises(FileError, match=r"x\.npy claims 8,000,128 bytes"):
        files.read_npz(path, ["x"])


def test_an_archive_inflates_to_no_more_than_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = tarfile.TarInfo("header")
    header.type, header.size = tarfile.XHDTYPE, 3 << 30
    archive = tmp_path / "a.tgz"
    archive.write_bytes(gzip.compress(header.tobuf(tarfile.USTAR_FORMAT) + bytes(10_240)))
    with pytest.raises(ValueError, match="a part of the package must have at most"):
        list(sources._members(archive, ["a"]))
    for version in ({"map": "0,0"}, {"size": "1"}, {"major": "1", "minor": "0"}):
        sparse = tarfile.TarInfo("a")
        sparse.pax_headers = {f"GNU.sparse.{key}": value for key, value in version.items()}
        archive.write_bytes(gzip.compress(sparse.tobuf(tarfile.PAX_FORMAT) + bytes(10_240)))
        with pytest.raises(ValueError, match="no sparse files"):
            list(sources._members(archive, ["a"]))
    with tarfile.open(archive, "w:gz") as tar:
        for name in ("a", "b", "c"):
            member = tarfile.TarInfo(name)
            member.size = 4000
            tar.addfile(member, io.BytesIO(bytes(4000)))
    assert [(name, len(content)) for name, content in sources._members(archive, "ac")] == [("a", 4000), ("c", 4000)]
    for limit, most, said in (
        ("_MOST_BYTES", 5000, "must inflate to at most"),
        ("_MOST_MEMBERS", 2, "at most 2 files"),
        ("_MOST_FILE", 3999, "a must have at most 3,999 bytes, got 4,000"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(sources, limit, most)
            with pytest.raises(ValueError, match=said):
                list(sources._members(archive, "ac"))


def test_a_package_does_not_link_out_of_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unpacked(command: list[str], work: Path, _: object) -> None:
        if command[0] == "apt-get":
            (work / "a.deb").touch()
        else:
            (work / "unpacked").mkdir()
            (work / "unpacked" / "t10k.gz").symlink_to("/dev/zero")

    monkeypatch.setattr(sources, "_client", unpacked)
    with pytest.raises(FileError, match=r"t10k\.gz is a link"):
        list(sources.debian_idx("a", [File("t10k", 9, "")], tmp_path, print))


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The content is synced, then the old file is kept under its other name, then the folder is synced."""
    path, done = tmp_path / "a", list[Any]()
    fsync, replace = os.fsync, Path.replace

    def synced(handle: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else os.fstat(handle).st_size)
        fsync(handle)

    def renamed(source: Path, target: Path) -> Path:
        done.append(target.name)
        return replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    for content in (b"one", b"two!"):
        files.write(path, content, tmp_path / "before")
    assert done == [3, "a", "folder", 4, "before", "a", "folder"]
    assert contents(tmp_path) == {"a": b"two!", "before": b"one"}


def test_modes_follow_the_umask_and_kills_leave_nothing(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        files.write(tmp_path / "a", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640
    for name in (".a.0123abcd.part", ".b.0123abcd.part", ".keep.part"):
        (tmp_path / name).touch()
    handle, busy = files._part(tmp_path / "a")
    files.check_out(tmp_path / "a")
    assert {path.name for path in tmp_path.iterdir()} == {"a", ".b.0123abcd.part", ".keep.part", busy.name}
    os.close(handle)
    files.sweep(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"a", ".keep.part"}


def test_an_altered_results_file_is_refused(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    content = (whole / "results.json").read_bytes()
    path.write_bytes(content.replace(b'"n": 24', b'"n": 25', 1))
    with pytest.raises(FileError, match=r"it was altered, its content does not fit the SHA-256 in it"):
        Results.load(path)
    path.write_bytes(content.replace(b'{\n "sha256"', b'{\n  "sha256"', 1))
    with pytest.raises(FileError, match=r"it was altered"):
        Results.load(path)
    for rows in ("[1, 2]", "{}", "[[]]", '[{"what": 3}]', "[" * 9999):
        path.write_text(f'{{"schema": 2, "name": "", "command": "", "rows": {rows}}}')
        with pytest.raises(FileError, match=r"is not a results file: .*; restore it from a copy"):
            Results.load(path)


@pytest.mark.parametrize("name", ["verdicts/0.safetensors", "verdicts/3.safetensors"])
def test_altered_or_exchanged_verdicts_are_found_again(tiny: Path, out: Path, name: str) -> None:
    path, rows = out / name, Results.load(out / "results.json").rows
    whole = path.read_bytes()
    other = (out / "verdicts" / "1.safetensors").read_bytes()
    for altered in (whole[:-1], whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:], other):
        path.write_bytes(altered)
        recipe.run(tiny, out=out, device="cpu")
        assert path.read_bytes() == whole
    timeless = [{key: row[key] for key in row if key != "seconds"} for row in Results.load(out / "results.json").rows]
    assert sorted(map(str, timeless)) == sorted(str({k: row[k] for k in row if k != "seconds"}) for row in rows)


def test_verdicts_that_do_not_fit_are_found_again(tmp_path: Path) -> None:
    """Though their SHA-256 does."""
    path = tmp_path / "a"
    whole = {"beta": torch.ones(1), "verdict": torch.tensor([[0, -1]]), "distance": torch.tensor([[1, -1]])}
    for names, wrong in (
        ('["b"]', {}),
        ("[" * 99_999, {}),
        ("[[]]", {}),
        ('["a"]', {"verdict": torch.tensor([[1, -1]])}),
        ('["a"]', {"verdict": torch.tensor([[-2, -1]])}),
        ('["a"]', {"distance": torch.tensor([[1, -1, 2]])}),
        ('["a"]', {"verdict": torch.tensor([0]), "distance": torch.tensor([1])}),
        ('["a"]', {"beta": torch.ones(2)}),
    ):
        files.write_tensors(path, whole | wrong, {"made_from": "c", "names": names})
        assert (verdicts.load(path, "c") is None) == (names != '["b"]')
        assert verdicts.load(path, "d") is None


def test_a_checkpoint_whose_sha256_was_taken_out_is_refused(tmp_path: Path) -> None:
    path = train.save_checkpoint(tmp_path / "a", torch.nn.Linear(2, 2), {"classifier": "F"})
    content = path.read_bytes()
    head = json.loads(content[8 : (start := 8 + int.from_bytes(content[:8], "little"))])
    for key in ("sha256", "card", "about"):
        assert key in head["__metadata__"]
        rest = {name: text for name, text in head["__metadata__"].items() if name in (key, "format")}
        bare = json.dumps({**head, "__metadata__": dict(reversed(rest.items()))}).encode()
        path.write_bytes(len(bare).to_bytes(8, "little") + bare + content[start:])
        with pytest.raises(FileError, match="has no SHA-256 in its place"):
            train.load_checkpoint(path)


def test_tensors_of_other_bytes_than_0_and_1_are_bools(tmp_path: Path) -> None:
    content = files.encode_tensors({"a": torch.tensor([True, False])}, {})
    head = content[8 : 8 + int.from_bytes(content[:8], "little")].replace(b'"sha256"', b'"others"')
    (tmp_path / "a").write_bytes(content[:8] + head + b"\x02\x00")
    assert files.read_tensors(tmp_path / "a", "", own=())[0]["a"].view(torch.uint8).tolist() == [1, 0]
