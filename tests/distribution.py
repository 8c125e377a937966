"""What users install: built from a copy of the checkout, and installed into an environment of its own.

``python tests/distribution.py DIST FOLDER`` is what ``make release`` runs before the tests. It leaves the
source distribution and the wheel in DIST, and in FOLDER the environment and the unpacked source distribution
without the package: tests there can only import the wheel.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Sequence
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]
PACKAGE = ("zero_optim", "ddp", "hooks", "build", "zero_optim.egg-info")  # and what a build leaves


def without_python() -> dict[str, str]:
    """The variables of this process but those of Python: pytest-xdist puts the checkout on PYTHONPATH."""
    return {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}


def run_python(
    code: str, *args: object, cwd: Path, path: Sequence[Path] = (), python: str | Path = sys.executable
) -> subprocess.CompletedProcess[str]:
    """Runs code as ``python -c`` in a folder, with nothing but ``path`` added to the installed packages."""
    environment = without_python()
    environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    command = [python, "-c", code, *map(str, args)]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=400, check=False
    )


def tracked() -> list[str] | None:
    """The files that git tracks, or would if asked to, as they are now; None outside of a checkout."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode != 0:
        return None
    names = filter(None, listing.stdout.split("\0"))
    return [name for name in names if (CHECKOUT / name).is_symlink() or (CHECKOUT / name).is_file()]


def copy_files(names: Sequence[str], into: Path) -> None:
    """Copies files of the checkout: a build from there finds no leftovers of another."""
    for name in names:
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(CHECKOUT / name, into / name, follow_symlinks=False)


def build(source: Path, kind: str, into: Path) -> Path:
    """Builds a wheel or an sdist with the installed setuptools: no network, no environment of its own."""
    code = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
    built = run_python(code, into.resolve(), cwd=source)
    assert built.returncode == 0, built.stdout + built.stderr
    return into / built.stdout.splitlines()[-1]


def unpack(sdist: Path, into: Path) -> Path:
    """Returns the folder with the files."""
    with tarfile.open(sdist) as archive:
        archive.extractall(into, filter="data")
    return into / sdist.name.removesuffix(".tar.gz")


def make_environment(wheel: Path, folder: Path) -> Path:
    """Installs the wheel, without network, into a new environment; returns its interpreter.

    PyTorch and the other packages are those of this environment, through a line in a .pth file. No other such
    file is read through it, so what is installed here in editable mode is not there.
    """
    python, environment = folder / "bin" / "python", without_python()
    venv = [sys.executable, "-m", "venv", "--without-pip", folder]
    subprocess.run(venv, check=True, timeout=400, env=environment)
    options = ["--quiet", "--no-index", "--no-deps", "--disable-pip-version-check"]
    pip = [sys.executable, "-m", "pip", "--python", python, "install", *options, wheel]
    subprocess.run(pip, check=True, timeout=400, env=environment)
    names = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", "posix_prefix", names))
    (packages / "packages_of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def make_release(dist: Path, folder: Path) -> None:
    """Fills DIST and FOLDER, see above; the wheel is built from the source distribution."""
    for path in (dist, folder):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
    names = tracked()
    if names is None:
        sys.exit("make release builds what git tracks: run it in a checkout")
    copy_files(names, folder / "sources")
    sdist = build(folder / "sources", "sdist", dist)
    sources = unpack(sdist, folder)
    wheel = build(sources, "wheel", dist)
    python = make_environment(wheel, folder / "environment")
    shutil.rmtree(folder / "sources")
    for name in PACKAGE:
        shutil.rmtree(sources / name)
    sources.rename(folder / "checkout")
    ran = run_python("import zero_optim; print(zero_optim.__file__)", cwd=folder / "checkout", python=python)
    assert Path(ran.stdout.strip()).is_relative_to((folder / "environment").resolve()), (
        ran.stdout + ran.stderr
    )


if __name__ == "__main__":
    make_release(*(Path(name).resolve() for name in sys.argv[1:]))
