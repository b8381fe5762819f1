"""The command line. Its modules import torch and the rooms that need it inside functions, so that --help is quick."""

from __future__ import annotations

import shlex
import sys

from cyclopts import App, CycloptsError, Parameter

from . import attack, certify, data, run, theory
from .options import tell

__all__ = ["app", "main"]

app = App(
    name="ell0",
    help="Classifiers that survive sparse (L0) attacks: an attacker who changes a few inputs, by any amount.",
    help_format="markdown",
    default_parameter=Parameter(negative=""),
    suppress_keyboard_interrupt=False,
)
for command in (run.run, attack.attack, certify.certify, run.report, theory.app, data.app):
    app.command(command)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    1: an error, told in one sentence. 2: a wrong command or option. 130: interrupted. `ell0 attack --fail-under`
    returns 3 if robust accuracy is below it, `ell0 certify --challenge` 4 if an attack breaks a certificate.
    """
    words = sys.argv[1:] if argv is None else argv
    try:
        code = app(words, exit_on_error=False, print_error=True, result_action="return_value")
    except KeyboardInterrupt:
        again = shlex.join(["ell0", *(word for word in words if word != "--fresh")])
        tell(f"interrupted: resume with `{again}`" if words[:1] == ["run"] else "interrupted", file=sys.stderr)
        return 130
    except CycloptsError:  # it has printed its message
        return 2
    except (OSError, ValueError, ImportError) as error:
        tell(f"ell0: {error}", file=sys.stderr)
        return 1
    except SystemExit as stop:
        lost = stop.__context__  # rich ends the process when the reader of a help leaves, such as `head`
        if isinstance(lost, BrokenPipeError) and lost.__context__ is None:
            return 0
        return stop.code if isinstance(stop.code, int) else 1
    return code if isinstance(code, int) else 0
