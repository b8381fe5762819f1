"""The command line: the only place where its words become objects."""

from __future__ import annotations

import sys

from cyclopts import App, CycloptsError

from .. import __version__
from ._attack import attack
from ._certify import certify
from ._data import app as data_app
from ._report import report
from ._run import run
from ._theory import app as theory_app
from ._theory import theory, theory_malware

__all__ = [
    "app", "attack", "certify", "main", "report", "run", "theory",
    "theory_malware",
]  # fmt: skip

app = App(
    name="ell0",
    version=__version__,
    help="Classifiers that survive sparse (L0) attacks: an attacker who changes a few inputs, by any amount.",
    suppress_keyboard_interrupt=False,
)
for command in (run, attack, certify, report, theory_app, data_app):
    app.command(command)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; gives its exit code.

    An error the user can mend is one sentence and 1; a wrong word is 2; an interrupt is 130. `attack --fail-under`
    gives 3 where too few rows stand.
    """
    try:
        code = app(argv, exit_on_error=False, print_error=True, result_action="return_value")
    except KeyboardInterrupt as stop:
        print(str(stop) or "interrupted", file=sys.stderr)
        return 130
    except CycloptsError:  # printed already, with what it may have meant
        return 2
    except (OSError, ValueError, ImportError) as error:
        print(f"ell0: {error}", file=sys.stderr)
        return 1
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    return code if isinstance(code, int) else 0
