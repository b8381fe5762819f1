"""Writes the lock files: every package that `make setup` and `make test-peers` install, pinned, with its SHA-256.

    python tools/lock.py               # after a change of pyproject.toml or peers.lock; asks the registry through uv
    python tools/lock.py --upgrade     # newest versions

requirements.lock is the tested environment. cuda.lock is what the registry's torch needs beside it on Linux.
peers.lock is the libraries that ell0 has adapters for, without their own dependencies.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CUDA = re.compile("(cuda|nvidia)-")
ENTRY = re.compile(r"^(?P<name>[\w.-]+)==(?P<version>[\w.]+)(?P<marker>[^\\\n]*)(?P<hashes>(?: \\\n    --hash=\S+)*)$", re.M)


def pins(text: str) -> dict[str, str]:
    """The versions that a lock file pins, by name."""
    return {entry["name"]: entry["version"] for entry in ENTRY.finditer(text)}


def compiled(path: Path, *words: str) -> str:
    """What uv makes of requirements; a version that the file at path pins already stays."""
    command = ["uv", "pip", "compile", "--quiet", "--generate-hashes", "--no-annotate", "--no-header"]
    subprocess.run([*command, *words, *sys.argv[1:], "--output-file", path], cwd=ROOT, check=True)
    return path.read_text()


def found_here(requirements: Path) -> dict[str, tuple[str, str]]:
    """The file that pip would install for each pin on this machine, and its SHA-256."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
    done = subprocess.run([*command, "--report", "-", "-r", requirements], stdout=subprocess.PIPE, check=True)
    files = [(each["metadata"]["name"], each["download_info"]) for each in json.loads(done.stdout)["install"]]
    return {
        name.lower().replace("_", "-"): (each["url"].rsplit("/", 1)[1], each["archive_info"]["hashes"]["sha256"])
        for name, each in files
    }


def main() -> None:
    locks = [ROOT / name for name in ("requirements.lock", "cuda.lock")]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "all")
        path.write_text("".join(lock.read_text() for lock in locks if lock.exists()))
        text = compiled(path, "pyproject.toml", "--extra", "dev", "--universal", "--python-version", "3.11")
        path.write_text("".join(f"{name}=={version}\n" for name, version in pins(text).items() if not CUDA.match(name)))
        here = found_here(path)
    entries: tuple[list[str], list[str]] = [], []
    for entry in ENTRY.finditer(text):
        file, digest = here.get(entry["name"], ("", ""))
        if digest in entry["hashes"]:
            entries[bool(CUDA.match(entry["name"]))].append(f"{entry[0]}\n")
        else:
            note = f"# The last is of {file.replace('%2B', '+')}, found beside the registry.\n"
            entries[0].append(f"{note}{entry[0]} \\\n    --hash=sha256:{digest}\n")
    for lock, lines in zip(locks, entries, strict=True):
        lock.write_text(f"# Written by tools/lock.py.\n{''.join(lines)}")
    compiled(ROOT / "peers.lock", "peers.lock", "--no-deps")


if __name__ == "__main__":
    main()
