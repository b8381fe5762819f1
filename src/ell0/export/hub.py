"""Models in the layout of the Hugging Face hub: ``config.json``, ``model.safetensors``, and a card, ``README.md``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from .. import recipe
from ..files import check_out, read, read_tensors, write, write_tensors
from ..results import Measurement, Results
from ..train import Checkpoint

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
_SHOWN = {"clean_accuracy": "clean", "robust_accuracy": "attacked", "certified_accuracy": "proven"}

_THREAT = (
    "The attacker changes some units of a row: features (single numbers) or pixels (all channels of a position). A",
    "changed unit takes any value of the box. *Attacked* is what the attacks leave, a bound from above; *proven* holds",
    "for every attack, a bound from below.",
)


def save_pretrained(
    folder: Path | str, model: nn.Module, card: Mapping[str, Any], *, results: Results | None = None
) -> Path:
    """Writes a model with its card, which states the threat model and what was attacked and proven.

        checkpoint = ell0.train.load_checkpoint("runs/digits/f4")
        network = ell0.recipe.model(checkpoint)
        figures = ell0.results.Results.load("runs/digits/results.json")
        ell0.export.save_pretrained("hub/f4", network, checkpoint.card, results=figures)

    Args:
        card: as of a checkpoint, any JSON object. ``card["model"]``, such as ``{"name": "mlp", "k": 10}``, is what
            `from_pretrained` builds the model from; without it, the model must be given there.
            ``card["classifier"]`` is the name of the model in the results.
        results: figures for the card; those of other classifiers are left out.
    """
    folder = Path(folder)
    check_out(folder / CONFIG, "folder")
    try:
        config = json.dumps({"library_name": "ell0", **card}, indent=2) + "\n"
    except TypeError as error:
        raise ValueError(f"card must be made of JSON values, got {card!r} ({error})") from error
    if _buildable(card):
        recipe.model(Checkpoint(model.state_dict(), dict(card)))  # raises if the card is of another model
    rows = [] if results is None else [row for row in results.rows if row.what in _SHOWN]
    if "classifier" in card:
        rows = [row for row in rows if row.get("classifier") == card["classifier"]]
    text = "\n".join(_card(folder.name, model, card, rows, results)) + "\n"
    write_tensors(folder / WEIGHTS, model.state_dict(), {"format": "pt"})
    write(folder / CARD, text.encode())
    write(folder / CONFIG, config.encode())
    return folder


def from_pretrained(name: Path | str, *, model: nn.Module | None = None, revision: str | None = None) -> nn.Module:
    """The model of a folder of `save_pretrained`, on the CPU and in eval mode; runs no code from the folder.

    Args:
        name: a folder, or a repository on the Hugging Face hub (needs ``huggingface_hub``, which caches it).
        model: gets the weights. Default: a new model, built from the config.
        revision: branch, tag or commit of the repository.
    """
    folder = Path(name)
    if not folder.is_dir():
        folder = _downloaded(str(name), revision)
    try:
        config = dict(json.loads(read((folder / CONFIG).resolve())))
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"name must be a folder of save_pretrained, got {str(name)!r} ({error})") from error
    if model is None and not _buildable(config):
        why = "names code, which is not run" if "model" in config else "does not say how to build it"
        way = f"the config of {str(name)!r} {why}; write from_pretrained(..., model=my_model)"
        raise ValueError(f"model must be given: {way}")
    tensors, _ = read_tensors((folder / WEIGHTS).resolve(), "download it again", most=sys.maxsize, own=())
    checkpoint = Checkpoint(tensors, config)
    if model is None:
        return recipe.model(checkpoint).eval()
    checkpoint.into(model)
    return model.eval()


def _buildable(card: Mapping[str, Any]) -> bool:
    """Whether a model can be built from a card alone, without code that the card names."""
    words = card.get("model")
    return "model" in card and not (isinstance(words, Mapping) and "python" in words)


def _downloaded(name: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        rule = "name must be a folder that exists, or huggingface_hub must be installed to download it"
        raise ValueError(f"{rule}, got {name!r}; pip install huggingface_hub") from error
    return Path(snapshot_download(name, revision=revision, allow_patterns=[CONFIG, WEIGHTS, CARD]))


def _card(
    name: str, model: nn.Module, card: Mapping[str, Any], rows: list[Measurement], results: Results | None
) -> Iterator[str]:
    yield from ("---", "library_name: ell0", "tags: [adversarial-robustness, sparse-attacks, l0]", "---", "")
    yield from (f"# {card.get('classifier', name)}", "", "```python", "import ell0", "")
    own = "" if _buildable(card) else ", model=my_model"
    yield from (f'model = ell0.export.from_pretrained("{name}"{own})', "```", "")
    if "data" in card:
        yield from (f"Data: {card['data']}.", "")
    yield from ("## Threat model", "", *_THREAT, "", "## Figures", "")
    if not rows or results is None:
        yield "None was measured."
    else:
        yield from ("| | changed | box | by | accuracy | n |", "|---|---|---|---|---|---|")
        yield from (f"| {' | '.join(_cells(row))} |" for row in rows)
        made = f"commit {results.commit}, " if results.commit else ""
        yield from ("", f"In brackets: 95 % intervals. Made by `{results.command}`, {made}{results.device}.")
    yield from ("", "## Architecture", "", "```", str(model), "```")


def _cells(row: Measurement) -> Iterator[str]:
    from ..report.formatting import figure_words, several

    yield _SHOWN[row.what]
    clean = row.what == "clean_accuracy"
    yield "0" if clean else several(row.get("budget"), f"{row.get('unit', 'feature')}s")
    beta = row.get("beta")
    within = row.get("box", "any value") if beta is None else f"[{-beta:g}, {beta:g}]"
    yield "" if clean else within
    yield str(row.get("attack", row.get("method", "")))
    yield figure_words(row).replace("\N{NO-BREAK SPACE}", " ")
    yield str(row.n)
