"""A ``custom_generate`` folder, as the hub and ``generate(custom_generate="owner/name")`` expect it.

folder/custom_generate/generate.py          calls this package with the method and the options written here
folder/custom_generate/requirements.txt     what transformers asks for before it runs the file
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from outrider.core.errors import OptionError
from outrider.core.version import VERSION
from outrider.transformers.drop_in import generate

_PROGRAM = '''"""Speculative decoding with Outrider: the text of plain ``generate``, in fewer passes."""

from outrider.transformers.attached import call
from outrider.transformers.drop_in import generate as decoding_loop

LOOP = decoding_loop({arguments})


def generate(*arguments, model, **options):
    """The arguments are those of ``model.generate``."""
    return call(model, LOOP, *arguments, **options)
'''


def write_folder(path: str | PathLike[str], method: str = "suffix", *, draft: str | None = None, **options: Any) -> Path:
    """Write ``custom_generate/`` under ``path``, which may be a model's folder, and return its path. ``draft`` is the name of a
    model, ``options`` are those of ``generate`` in this package."""
    given = {"method": method, **({} if draft is None else {"draft": draft}), **options}
    bad = next((name for name, value in given.items() if not _is_literal(value)), None)
    if bad is not None:
        raise OptionError(f"{bad} = {given[bad]!r} cannot be written to a file; give a name, a number or a list of them")
    generate(method, draft=draft, **options)
    folder = Path(path) / "custom_generate"
    folder.mkdir(parents=True, exist_ok=True)
    arguments = ", ".join(f"{name}={value!r}" for name, value in given.items())
    (folder / "generate.py").write_text(_PROGRAM.format(arguments=arguments))
    (folder / "requirements.txt").write_text(f"outrider>={VERSION}\n")
    return folder


def _is_literal(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_literal, value))
    return value is None or isinstance(value, str | int | float | bool)
