"""The version of the package, as ``outrider --version`` prints it.

An installed package has the version of its metadata, which the build took from the newest tag of the repository. Sources that
are imported without an installation, from ``PYTHONPATH``, have ``UNINSTALLED``.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

UNINSTALLED = "0.2.0.dev0"
"""The version of sources that nobody installed: the next release, in development."""


def version_here() -> str:
    """The version that was installed from these sources; ``UNINSTALLED`` where there is none.

    An installation of another copy of the package does not count.
    """
    try:
        installed = metadata.distribution("outrider")
    except metadata.PackageNotFoundError:
        return UNINSTALLED
    return installed.version if _is_of_these_sources(installed) else UNINSTALLED


def _is_of_these_sources(installed: metadata.Distribution) -> bool:
    """The package was copied to where this file lies, or it is an editable installation of this checkout."""
    here = Path(__file__).resolve()
    if Path(str(installed.locate_file("outrider/core/version.py"))).resolve() == here:
        return True
    return here.parents[3].as_uri() in (installed.read_text("direct_url.json") or "")


VERSION = version_here()
