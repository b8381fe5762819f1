"""Writes the lock files: every package that `make setup` and `make test-peers` install, pinned, with its SHA-256.

    python tools/lock.py               # after a change of pyproject.toml or peers.lock; asks the registry through uv
    python tools/lock.py --upgrade     # newest versions

requirements.lock is the tested environment without torch. torch-cpu.lock is PyTorch's CPU build, if pip finds one on
this machine. torch.lock is the registry's build and what it needs on Linux. peers.lock is the libraries that ell0 has
adapters for, without what they need: some want torchvision, which nothing here uses.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEAD = "# Written by tools/lock.py.\n"
ENTRY = re.compile(
    r"^(?P<name>[\w.-]+)==(?P<version>[\w.+]+)[^\\\n]*(?P<hashes>(?: \\\n    --hash=sha256:\w{64})*)\n", re.M
)
WITH_TORCH = re.compile("torch$|cuda-|nvidia-")


def compiled(path: Path, *words: str) -> list[re.Match[str]]:
    """The entries that uv makes of requirements; a version that the file at path pins already stays."""
    command = ["uv", "pip", "compile", "--quiet", "--generate-hashes", "--no-annotate", "--no-header"]
    subprocess.run([*command, *words, *sys.argv[1:], "--output-file", path], cwd=ROOT, check=True)
    return list(ENTRY.finditer(path.read_text()))


def write(name: str, lines: list[str]) -> None:
    (ROOT / name).write_text(HEAD + "".join(lines))


def lock_cpu_build(version: str) -> None:
    """Locks the file that pip would install as torch here, if that is a CPU build."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
    done = subprocess.run([*command, "--report", "-", f"torch=={version}"], stdout=subprocess.PIPE, check=True)
    (found,) = json.loads(done.stdout)["install"]
    here, digest = found["metadata"]["version"], found["download_info"]["archive_info"]["hashes"]["sha256"]
    if here == f"{version}+cpu":
        write("torch-cpu.lock", [f"torch=={here} \\\n    --hash=sha256:{digest}\n"])


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "all")
        path.write_text("".join((ROOT / name).read_text() for name in ("requirements.lock", "torch.lock")))
        entries = compiled(path, "pyproject.toml", "--extra", "dev", "--universal", "--python-version", "3.11")
    write("requirements.lock", [entry[0] for entry in entries if not WITH_TORCH.match(entry["name"])])
    write("torch.lock", [entry[0] for entry in entries if WITH_TORCH.match(entry["name"])])
    lock_cpu_build(next(entry["version"] for entry in entries if entry["name"] == "torch"))
    peers = compiled(ROOT / "peers.lock", "peers.lock", "--no-deps")
    here = {entry["name"] for entry in entries}
    write("peers.lock", [entry[0] for entry in peers if entry["name"] not in here])


if __name__ == "__main__":
    main()
