"""What users install: built from a copy of the checkout, installed elsewhere, imported from elsewhere."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.packaging

CHECKOUT = Path(__file__).parents[1]


def run_python(
    code: str, *args: object, cwd: Path, path: Sequence[Path] = ()
) -> subprocess.CompletedProcess[str]:
    """Runs code as ``python -c`` in a folder, with nothing but ``path`` added to the installed packages."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=400, check=False
    )


def build(source: Path, kind: str, into: Path) -> Path:
    """Builds a wheel or an sdist with the installed setuptools: no network, no environment of its own."""
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    built = run_python(code, into, cwd=source)
    assert built.returncode == 0, built.stdout + built.stderr
    (result,) = into.iterdir()
    return result


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if ".dist-info/" not in name]


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files that git tracks, or would if asked to, as they are now."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    copy = tmp_path_factory.mktemp("sources")
    for name in filter(None, listing.stdout.split("\0")):
        original = CHECKOUT / name
        if original.is_symlink() or original.is_file():  # a tracked file may have been removed
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(original, copy / name, follow_symlinks=False)
    return copy


@pytest.fixture(scope="session")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(sources, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed wheel in it and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    options = ["--quiet", "--no-index", "--no-deps", "--disable-pip-version-check", "--target", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(wheel)], check=True, timeout=400)
    return folder


def test_the_wheel_holds_every_module_once_and_the_typing_marker_under_one_name(
    wheel: Path, sources: Path
) -> None:
    folders = {"ddp": "zero_optim/ddp", "hooks": "zero_optim/hooks", "zero_optim": "zero_optim"}
    expected = {
        f"{target}/{module.relative_to(sources / folder).as_posix()}"
        for folder, target in folders.items()
        for module in (sources / folder).rglob("*.py")
    }
    names = names_in(wheel)
    assert sorted(names) == sorted({*expected, "zero_optim/py.typed"})


def test_a_source_distribution_builds_the_same_wheel(sources: Path, wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "sdist").mkdir()
    (tmp_path / "wheel").mkdir()
    with tarfile.open(build(sources, "sdist", tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.glob("zero_optim-*")
    assert sorted(names_in(build(unpacked, "wheel", tmp_path / "wheel"))) == sorted(names_in(wheel))


def test_the_installed_package_is_imported_beside_folders_of_the_user_called_hooks_and_ddp(
    installed: Path, tmp_path: Path
) -> None:
    for name in ("hooks", "ddp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").touch()
    code = (
        "import zero_optim, zero_optim.ddp, zero_optim.hooks, hooks.mine, ddp.mine;"
        "print(zero_optim.__file__, zero_optim.ddp.__file__, zero_optim.hooks.__file__, sep='\\n')"
    )
    result = run_python(code, cwd=tmp_path, path=[installed])
    assert result.returncode == 0, result.stderr
    package = installed / "zero_optim"
    files = [package / "__init__.py", package / "ddp" / "__init__.py", package / "hooks" / "__init__.py"]
    assert result.stdout.splitlines() == [str(file) for file in files]


def test_the_bare_names_are_refused_in_the_checkout() -> None:
    for name in ("ddp", "hooks"):
        result = run_python(f"import {name}", cwd=CHECKOUT)
        assert result.returncode != 0
        assert f"ImportError: import this package as 'zero_optim.{name}', not as '{name}'" in result.stderr
