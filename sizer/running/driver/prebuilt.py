"""The precompiled null driver, for machines without a compiler: x86-64, CUDA 13, glibc 2.14 or later. No torch.

    python -m sizer.running.driver.prebuilt FOLDER...    compile it again, for the PyTorches whose packages are in these folders

It defines the functions that the oldest and the newest supported PyTorch call, and so those of the versions in between.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

from sizer.base.versions import Version, format_version, parse_version
from sizer.running.driver.compiling import LIBRARIES, SOURCES, PyTorch, build, sources_digest

ARCHIVE = SOURCES / "x86_64-cuda13.tar.xz"
_ABOUT = "about.json"  # in the archive: the digest of the sources, and the first and the last PyTorch version
_CUDA = "nvidia/cu13"  # folder of the packages of a CUDA 13 build of PyTorch


def covers(pytorch: PyTorch) -> bool:
    """Return True if the shipped libraries were made from these sources for this PyTorch."""
    about = read_about()
    if about.get("sources") != sources_digest() or not (pytorch.packages / _CUDA).is_dir():
        return False
    first, last = map(parse_version, about["pytorch"])
    return first <= _version_of(pytorch) <= last


def read_about() -> dict:
    """Return the archive's description of itself; empty if there is no archive."""
    if not ARCHIVE.exists():
        return {}
    with tarfile.open(ARCHIVE) as archive:
        about = archive.extractfile(_ABOUT)
        assert about is not None, "write_archive writes it"
        return json.load(about)


def unpack(folder: Path) -> None:
    """Write the shipped libraries into a folder."""
    with tarfile.open(ARCHIVE) as archive:
        for name in LIBRARIES:
            archive.extract(name, folder, filter="data")


def write_archive(pytorches: Iterable[PyTorch]) -> None:
    """Compile the libraries for all of some PyTorches, and write the archive."""
    from_old_to_new = sorted(pytorches, key=_version_of)
    ends = [format_version(_version_of(from_old_to_new[end])) for end in (0, -1)]
    about = {"sources": sources_digest(), "pytorch": ends}
    with tempfile.TemporaryDirectory() as place, tarfile.open(ARCHIVE, "w:xz") as archive:
        folder = Path(place)
        build(folder, *reversed(from_old_to_new))
        for name in LIBRARIES:
            _add(archive, name, (folder / name).read_bytes())
        _add(archive, _ABOUT, json.dumps(about).encode("ascii"))


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), 0o755
    archive.addfile(entry, io.BytesIO(data))


def _version_of(pytorch: PyTorch) -> Version:
    return parse_version(".".join(pytorch.version.split(".")[:2]))  # the rest may be "0+cu130" or "0.dev20261101"


def _find(packages: Path) -> PyTorch:
    (found,) = packages.glob("torch-*.dist-info")
    return PyTorch(version=found.name.removeprefix("torch-").removesuffix(".dist-info"), folder=packages / "torch")


if __name__ == "__main__":
    write_archive(_find(Path(argument)) for argument in sys.argv[1:])
