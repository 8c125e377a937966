"""What users install: built from a copy of the checkout, installed elsewhere, imported from elsewhere."""

import platform
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

import zero_optim
from distribution import CHECKOUT, build, copy_files, make_environment, run_python, tracked, without_python

pytestmark = pytest.mark.packaging


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if ".dist-info/" not in name]


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = tracked()
    if names is None:
        pytest.skip("not a git checkout")
    copy = tmp_path_factory.mktemp("sources")
    copy_files(names, copy)
    return copy


@pytest.fixture(scope="session")
def sdist(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(sources, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="session")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(sources, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel, though a package of that version is on the path."""
    folder = tmp_path_factory.mktemp("path") / "zero_optim.egg-info"
    folder.mkdir()
    text = f"Metadata-Version: 2.1\nName: zero-optim\nVersion: {zero_optim.__version__}\n"
    (folder / "PKG-INFO").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder.parent))
        return make_environment(wheel, tmp_path_factory.mktemp("environment"))


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


def test_a_source_distribution_holds_what_git_tracks_and_no_more(sdist: Path) -> None:
    prefix = sdist.name.removesuffix(".tar.gz") + "/"
    with tarfile.open(sdist) as archive:
        names = {member.name.removeprefix(prefix) for member in archive if not member.isdir()}
    built = {name for name in names if name.startswith("zero_optim.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    left_out = {".gitignore", ".ci/run", "zero_optim/ddp", "zero_optim/hooks"}  # links to ddp/ and hooks/
    assert names ^ set(tracked() or ()) == built | left_out


def test_the_version_is_that_of_the_package_wherever_it_is_asked_for(
    wheel: Path, python: Path, tmp_path: Path
) -> None:
    version = zero_optim.__version__
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"zero_optim-{version}.dist-info/METADATA").decode()
    assert f"\nVersion: {version}\n" in metadata
    expected = f"zero-optim {version} (PyTorch {torch.__version__}, Python {platform.python_version()})\n"
    ran = subprocess.run(
        [python.with_name("zero-optim"), "--version"],
        cwd=tmp_path,
        env=without_python(),
        capture_output=True,
        text=True,
        timeout=400,
        check=True,
    )
    assert ran.stdout == expected


def test_the_installed_package_is_imported_beside_folders_of_the_user_called_hooks_and_ddp(
    python: Path, tmp_path: Path
) -> None:
    for name in ("hooks", "ddp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").touch()
    code = (
        "import zero_optim, zero_optim.ddp, zero_optim.hooks, hooks.mine, ddp.mine;"
        "print(zero_optim.__file__, zero_optim.ddp.__file__, zero_optim.hooks.__file__, sep='\\n')"
    )
    result = run_python(code, cwd=tmp_path, python=python)
    assert result.returncode == 0, result.stderr
    package = next(python.parents[1].glob("lib/python*/site-packages/zero_optim"))
    files = [package / "__init__.py", package / "ddp" / "__init__.py", package / "hooks" / "__init__.py"]
    assert result.stdout.splitlines() == [str(file) for file in files]


def test_the_bare_names_are_refused_in_the_checkout() -> None:
    for name in ("ddp", "hooks"):
        result = run_python(f"import {name}", cwd=CHECKOUT)
        assert result.returncode != 0
        assert f"ImportError: import this package as 'zero_optim.{name}', not as '{name}'" in result.stderr
