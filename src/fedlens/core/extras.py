"""Packages that only some features need: which extra of FedLens brings one, in one line for whoever
misses it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re

# where a package is imported under another name than it is installed
INSTALLED_AS = {
    "cv2": "opencv-python-headless",
    "imageio_ffmpeg": "imageio-ffmpeg",
    "pywt": "pywavelets",
    "PIL": "pillow",
    "skimage": "scikit-image",
}


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ValueError, ImportError):  # something stands in its place, or refuses to look
        return False


def require(package: str) -> None:
    """Refuse, before any work, what cannot be done without this package."""
    if not is_installed(package):
        raise ModuleNotFoundError(_advice(package), name=package)


def explain_missing(error: ImportError) -> str | None:
    """What to install, where a package of an extra is what cannot be imported. None for an import
    that is broken for another reason."""
    if "pip install" in str(error):
        return str(error)
    package = (error.name or "").split(".")[0]
    if not package or package == "fedlens" or is_installed(package):
        return None
    return _advice(package)


def _advice(package: str) -> str:
    extra = extra_of(INSTALLED_AS.get(package, package))
    if extra is None:
        return f"this needs the package {package}, which is not installed: pip install {package}"
    return f'this needs {package}: pip install "fedlens[{extra}]"'


def extra_of(package: str) -> str | None:
    """The extra that brings a package: the first one that names it."""
    wanted = re.sub(r"[-_.]+", "-", package).lower()
    try:
        requirements = importlib.metadata.requires("fedlens") or []
    except importlib.metadata.PackageNotFoundError:  # run from a folder
        return None
    for requirement in requirements:
        found = re.match(r"([\w.-]+)[^;]*;.*extra == ['\"]([\w-]+)['\"]", requirement)
        if found is None or found[2] in ("all", "dev"):
            continue
        if re.sub(r"[-_.]+", "-", found[1]).lower() == wanted:
            return found[2]
    return None
