"""Parts from other packages. A package declares them in its metadata, and they are added to the tables.

    [project.entry-points."outrider.methods"]
    my-method = "my_package.drafting:ROW"

A package that cannot be loaded is named in a warning and left out: everything else still works.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any


def each_entry_point(group: str, add: Callable[[str, Any], None]) -> None:
    """Hand every entry point of a group to ``add``, by name."""
    for point in entry_points(group=group):
        try:
            add(point.name, point.load())
        except Exception as error:  # foreign code may raise anything
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            warnings.warn(f"{group}: {point.name} = {point.value} was left out ({reason})", stacklevel=2)
