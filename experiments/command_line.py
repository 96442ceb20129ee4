"""Errors at the command line: one line that says what to do, a traceback only when asked for."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Sequence

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

FULL_ERROR = "HYDRA_FULL_ERROR"
# Read before run_command sets the variable for Hydra's sake.
WANTS_TRACEBACK = os.environ.get(FULL_ERROR) == "1"
# Features that kernels elsewhere have and this project refuses: words of keys and values.
OUT_OF_SCOPE = {
    "fp8": "fp8 caches",
    "float8": "fp8 caches",
    "soft_cap": "logits soft-cap",
    "softcap": "logits soft-cap",
    "sliding_window": "sliding-window attention",
    "window_left": "sliding-window attention",
    "sinks": "attention sinks",
    "mla": "MLA (576/512)",
}


def out_of_scope(arguments: Sequence[str]) -> str | None:
    """The refusal of a feature that an argument names, None when none does."""
    for argument in arguments:
        words = argument.lower().replace("=", ".").split(".")
        for word, feature in OUT_OF_SCOPE.items():
            if any(word == part or (word != "mla" and word in part) for part in words):
                return f"{argument}: out of scope of this project: {feature}; see the README"
    return None


def one_line(error: BaseException) -> str:
    """The message of an error with its cause, on one line."""
    text = str(error).strip()
    unknown = re.search(r"Could not (?:find|load) '(?:.*/)?(\w+)/([^'/]+)'", text)
    if unknown:
        return _unknown_choice(*unknown.groups())
    if key := re.search(r"Could not override '([^']+)'", text):
        return f"unknown key {key[1]!r}; python -m experiments.bench --help lists every key"
    lines = [line.strip() for line in text.splitlines()]
    skip = ("full_key", "object_type", "reference_type")
    text = "; ".join(line for line in lines if line and not line.startswith(skip))
    if text.startswith("Error merging override") and error.__cause__:
        return f"{text}; {one_line(error.__cause__)}"  # Hydra keeps what was wrong to itself
    return text or type(error).__name__


def _unknown_choice(group: str, choice: str) -> str:
    from experiments.config import CONF_DIR

    names = sorted(path.stem for path in (CONF_DIR / group).glob("*.yaml"))
    close = difflib.get_close_matches(choice, names, 1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"unknown {group} {choice!r}; {hint}there are {', '.join(names)}"


USER_ERRORS = (
    HydraException,
    OmegaConfBaseException,
    ValueError,
    RuntimeError,
    OSError,
    MemoryError,
)


def print_error(error: BaseException) -> None:
    """One line on stderr."""
    print(f"error: {one_line(error)}", file=sys.stderr)


def run_command(main: Callable[[], None]) -> int:
    """Run a command; an error becomes one line on stderr and exit code 1.

    HYDRA_FULL_ERROR=1 keeps the traceback. Hydra prints errors itself unless that variable is set,
    so it is set for the time of the call.

    Returns:
        The exit code: 0, 1 after an error, 130 after Ctrl-C, or what the job chose.
    """
    refusal = out_of_scope(sys.argv[1:])
    os.environ[FULL_ERROR] = "1"
    try:
        if refusal:
            raise ValueError(refusal)
        main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except USER_ERRORS as error:
        if WANTS_TRACEBACK:
            raise
        print_error(error)
        return 1
    finally:
        if not WANTS_TRACEBACK:
            os.environ.pop(FULL_ERROR, None)
    return 0
