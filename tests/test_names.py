"""Names: exceptions are in one tree; a private name of PyTorch that is missing costs one feature."""

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeGuard

import pytest
import torch

import zero_optim
import zero_optim.checkpoint
import zero_optim.ddp
import zero_optim.hooks
from zero_optim import errors
from zero_optim.compat import private

NOT_PYTORCH = {"_ArgumentGroup", "_Unpickler", "_exit", "_replace"}  # of argparse, pickle, os, named tuples
# The parts of an optimizer. No other file writes their attributes, whatever the depth.
PARTS = {"core", "inputs", "gathers", "local", "optimizer", "owned", "registration", "sharding", "snapshot"}
WRITTEN_ELSEWHERE = {
    *("grad", "data", "state", "param_groups", "value", "atexit"),  # of PyTorch, ctypes and weakref
    # What runs in a process group, which whoever starts it and the watchdog record.
    *("apart", "exits", "explain", "has_failed", "outstanding", "shares_memory"),
}
LISTED = [(feature, path) for feature, paths in private.NAMES.items() for path in paths]
INHERITED = [(feature, path) for feature, paths in private.INHERITED.items() for path in paths]


def modules() -> Iterator[str]:
    for found in pkgutil.walk_packages(zero_optim.__path__, "zero_optim."):
        if not re.search(r"__main__$|\.integrations\.", found.name):  # the latter need frameworks
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


def private_reads(tree: ast.Module) -> Iterator[str]:
    """The private names that a file reads, and whatever it reads of PyTorch's extension module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr != "_C" and not node.attr.startswith("__"):
            if node.attr.startswith("_") or ast.unparse(node.value) == "torch._C":
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            inside = "._" in (node.module or "")
            yield from (name.name for name in node.names if inside or name.name.startswith("_"))


def is_target(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)


def set_by_classes(tree: ast.Module) -> Iterator[str]:
    """The attributes that the classes of a file declare, or set of themselves."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif is_target(node) and ast.unparse(node.value) in ("self", "cls"):
            yield node.attr


def written_of_others(tree: ast.Module, *, of_parts: bool = True) -> Iterator[str]:
    """The targets that are attributes of an attribute, or of a part, of a class in another file; or all."""
    own = {*set_by_classes(tree), *WRITTEN_ELSEWHERE}
    for node in ast.walk(tree):
        if not is_target(node) or node.attr in own:
            continue
        if not of_parts or not isinstance(node.value, ast.Name) or node.value.id in PARTS:
            yield ast.unparse(node)


def asks(node: ast.AST) -> TypeGuard[ast.FunctionDef]:
    """Whether it is a property, or a function whose name is a question."""
    if not isinstance(node, ast.FunctionDef):
        return False
    named = re.match(
        r"_?(is|are|was|has|can|may|must|needs|takes|wants|hears|gains|why|which|who)_", node.name
    )
    return named is not None or "property" in map(ast.unparse, node.decorator_list)


def last(path: str) -> str:
    return path.rpartition(".")[2]


def test_every_private_name_of_pytorch_is_in_the_list_or_looked_up_by_it() -> None:
    trees = sources()
    own = {name for tree in trees for name in defined(tree)}
    inherited = {last(path) for _, path in INHERITED} | {last(path) for path in private.OPTIONAL}
    read = {name for tree in trees for name in private_reads(tree)} - NOT_PYTORCH
    assert read - own - inherited == set()
    assert "_join_config" in read  # the search finds something


def test_nobody_writes_the_attributes_of_the_parts_of_another_object() -> None:
    assert [target for tree in sources() for target in written_of_others(tree)] == []
    planted = "core.mesh = self.x = 1\nself.core.ranks, y.z = 1, 2\nfor a.b.c in (): a().d += 1"
    found = ["core.mesh", "self.core.ranks", "a.b.c", "a().d"]
    assert sorted(written_of_others(ast.parse(planted))) == sorted(found)


def test_no_file_of_the_wrappers_and_reducers_writes_attributes_of_objects_of_another_one() -> None:
    trees = [ast.parse(path.read_text()) for path in sorted(_folder("ddp").resolve().rglob("*.py"))]
    written = [target for tree in trees for target in written_of_others(tree, of_parts=False)]
    assert written == ["sys.excepthook", "error.args"]  # of Python
    assert [*written_of_others(ast.parse("unit.holds += 1"), of_parts=False)] == ["unit.holds"]


def test_nobody_asks_a_bucket_for_its_class() -> None:
    calls = [node for tree in sources() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    asked = [ast.unparse(each) for each in calls if ast.unparse(each.func) == "isinstance"]
    assert [each for each in asked if re.search(r"(Bucket|Values)\b", each)] == []


def test_buckets_and_what_they_keep_have_no_subclasses() -> None:
    classes = [node for tree in sources() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    bases = [ast.unparse(base).partition("[")[0] for each in classes for base in each.bases]
    names = ["Bucket", "InPlaceValues", "CopiedValues", "RowValues", "WideValues", "HeldValues"]
    names += ["ReducerBucket", "FlatGradients", "SparseGradients", "OwnerRows"]
    assert set(names) <= {each.name for each in classes}
    assert set(names).isdisjoint(bases)


def test_a_property_or_a_function_named_like_a_question_writes_no_attribute() -> None:
    asked = [node for tree in sources() for node in ast.walk(tree) if asks(node)]
    acting = [node.name for node in asked if any(map(is_target, ast.walk(node)))]
    assert acting == []
    assert {"has_begun", "is_no_step", "_why_untried"} <= {node.name for node in asked}


def test_every_name_that_is_looked_up_is_listed_and_every_listed_one_is_used() -> None:
    nodes = [node for tree in sources() for node in ast.walk(tree)]
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    used = {node.attr for node in attributes if ast.unparse(node.value) == "private"}
    used -= {"or_none", "require", "WORKS_WITH"}
    aliases = {last(path).removeprefix("_") for _, path in LISTED}
    optional = {last(path).removeprefix("_") for path in private.OPTIONAL}
    assert used - aliases - optional == set()
    assert aliases - used == {"disabled_torch_function_impl"} - used
    calls = [
        node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "private.require"
    ]
    required = {
        argument.value for call in calls for argument in call.args if isinstance(argument, ast.Constant)
    }
    assert required == private.INHERITED.keys()


def test_this_pytorch_has_every_name() -> None:
    for _, path in LISTED:
        getattr(private, last(path).removeprefix("_"))
    for feature in private.INHERITED:
        private.require(feature)
    with pytest.raises(AttributeError, match="no_such is not in the list"):
        _ = private.no_such


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have one name look as if this PyTorch did not have it."""
    is_there = private._is_there

    def hide_name(path: str) -> None:
        monkeypatch.delattr(private, last(path).removeprefix("_"), raising=False)
        monkeypatch.setattr(private, "_is_there", lambda asked: asked != path and is_there(asked))

    return hide_name


@pytest.mark.parametrize(("feature", "path"), LISTED, ids=str)
def test_a_name_that_is_missing_costs_the_feature_that_needs_it(
    hide: Callable[[str], None], feature: str, path: str
) -> None:
    hide(path)
    message = f"{feature} needs {path}, which PyTorch {torch.__version__} does not have: use PyTorch 2.8 to"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        getattr(private, last(path).removeprefix("_"))


@pytest.mark.parametrize(("feature", "path"), INHERITED, ids=str)
def test_a_name_that_classes_inherit_is_asked_for_by_the_constructor(
    hide: Callable[[str], None], feature: str, path: str
) -> None:
    hide(path)
    with pytest.raises(RuntimeError, match=re.escape(f"{feature} needs {path}, which PyTorch")):
        private.require(feature)


WITHOUT_ANY = """
import importlib.util, sys, types

class Hidden(types.ModuleType):
    WORKS_WITH = "none"

    def or_none(self, alias):
        return None

    def __getattr__(self, name):
        if name.startswith("__"):  # `inspect` looks into every module
            raise AttributeError(name)
        raise RuntimeError(f"this PyTorch has no {name}")

sys.modules["zero_optim.compat.private"] = Hidden("zero_optim.compat.private")
import zero_optim, zero_optim.checkpoint, zero_optim.ddp, zero_optim.hooks
assert zero_optim.compat.autograd.private.WORKS_WITH == "none"
"""


def test_everything_can_be_imported_from_a_pytorch_without_any_private_name() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_ANY], check=True, timeout=600)


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
