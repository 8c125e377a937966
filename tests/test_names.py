"""Names: exceptions are in one tree, and the private names of PyTorch are checked when they are imported."""

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.algorithms.join import Joinable

import zero_optim
import zero_optim.checkpoint
import zero_optim.ddp
import zero_optim.hooks
from zero_optim import errors
from zero_optim.compat import engine
from zero_optim.ddp import data_parallel, rebindable
from zero_optim.ddp.full import parts

LISTS = (engine.NEEDED, data_parallel.NEEDED, rebindable.NEEDED, parts.NEEDED, zero_optim.hooks.NEEDED)
NOT_PYTORCH = {"_ArgumentGroup", "_exit", "_replace"}  # of argparse, os, and named tuples
READ_WITH_A_DEFAULT = {"_ExperimentalConfig", "_current_context", "_distributed_autograd"}


def modules() -> Iterator[str]:
    for found in pkgutil.walk_packages(zero_optim.__path__, "zero_optim."):
        if not found.name.endswith("__main__"):
            yield found.name


def sources() -> list[ast.Module]:
    paths = {path.resolve() for folder in ("", "ddp", "hooks") for path in _folder(folder).rglob("*.py")}
    return [ast.parse(path.read_text()) for path in sorted(paths)]


def _folder(name: str) -> Path:
    return Path(zero_optim.__file__).parent / name


def defined(tree: ast.Module) -> Iterator[str]:
    """The names that a file defines or sets, on whatever object."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def private(tree: ast.Module) -> Iterator[str]:
    """The private names that a file reads, and whatever it reads of PyTorch's extension module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr != "_C" and not node.attr.startswith("__"):
            if node.attr.startswith("_") or ast.unparse(node.value) == "torch._C":
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            inside = "._" in (node.module or "")
            yield from (name.name for name in node.names if inside or name.name.startswith("_"))


def test_every_private_name_of_pytorch_is_checked_at_import() -> None:
    trees = sources()
    own = {name for tree in trees for name in defined(tree)}
    listed = {name for needed in LISTS for _, name in needed}
    modules_of_theirs = {"_compile", "_python_dispatch"}  # names in them are listed
    read = {name for tree in trees for name in private(tree)} - NOT_PYTORCH - READ_WITH_A_DEFAULT
    assert read - own - listed - modules_of_theirs == set()
    assert "_current_graph_task_id" in read  # the search finds something


def test_this_pytorch_has_every_name_that_is_listed() -> None:
    for needed in LISTS:
        assert engine.missing_names(needed) == []


def test_this_pytorch_takes_every_argument_that_is_handed_in() -> None:
    assert engine.missing_arguments(engine.CALLED) == []
    with pytest.raises(ImportError, match=re.escape("_disable_dynamo(often=), which PyTorch")):
        engine.require([], "zero_optim", [(engine._compile, "_disable_dynamo", ("fn", "often"))])


def test_a_name_that_a_class_sets_on_its_instances_counts_as_there() -> None:
    assert not hasattr(Joinable, "_join_config")
    assert engine.missing_names([(Joinable, "_join_config"), (Joinable, "_no_such")]) == ["_no_such"]


def test_the_refusal_names_what_is_missing_and_which_versions_work() -> None:
    message = rf"zero_optim needs _gone, which PyTorch .* does not have: use PyTorch {engine.WORKS_WITH}"
    with pytest.raises(ImportError, match=message):
        engine.require([(torch, "_gone")], "zero_optim")


def test_every_exception_is_in_one_tree_and_exported() -> None:
    found = {
        value
        for name in modules()
        for value in vars(importlib.import_module(name)).values()
        if isinstance(value, type)
        and issubclass(value, BaseException)
        and value.__module__.startswith("zero")
    }
    assert {error.__module__ for error in found} == {errors.__name__}
    for error in found:
        assert issubclass(error, errors.ZeroOptimError)
        assert error.__name__ in zero_optim.__all__
        assert error.__name__ in (errors.__doc__ or "")
