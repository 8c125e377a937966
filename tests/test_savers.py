"""Savers of other packages write every parameter, each as large as it is.

They look at storages: parameters that share one are taken for tied, or written as large as all of them.
"""

import copy
import io
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from pool import on_ranks
from training import adamw_pair, assert_same_bits, make_params, params_of, set_grads, train_both, twin
from zero_optim import ZeroRedundancyOptimizer

ANY_WAY = pytest.mark.parametrize("view", [True, False], ids=["view", "packed"])

Saver = Callable[[nn.Module, Path], dict[str, Tensor]]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 3))


def shard(model: nn.Module, view: bool) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=view, lr=0.1
    )


def save_file(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    safetensors.torch.save_file(model.state_dict(), folder / "file.safetensors")
    return safetensors.torch.load_file(folder / "file.safetensors")


def save_model(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    safetensors.torch.save_model(model, str(folder / "model.safetensors"))
    return safetensors.torch.load_file(folder / "model.safetensors")


def save_for_hub(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    import huggingface_hub  # slow, hence here

    folders = (folder / "model", folder / "dict")
    for each in folders:
        each.mkdir()
    huggingface_hub.save_torch_model(model, folders[0])
    huggingface_hub.save_torch_state_dict(model.state_dict(), folders[1])
    whole, from_dict = (safetensors.torch.load_file(each / "model.safetensors") for each in folders)
    assert list(whole) == list(from_dict)
    return whole


def save_with_torch(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    torch.save(model.state_dict(), folder / "model.pt")
    loaded: dict[str, Tensor] = torch.load(folder / "model.pt")
    assert len({tensor.untyped_storage().data_ptr() for tensor in loaded.values()}) == len(loaded)
    return loaded


def save_with_accelerate(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    from accelerate import Accelerator  # slow, hence here
    from accelerate.state import AcceleratorState

    try:
        accelerator = Accelerator(cpu=True)
        prepared = accelerator.prepare(model)
        folders = (folder / "model", folder / "state")
        accelerator.save_model(prepared, folders[0])
        accelerator.save_state(folders[1])
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    from_model, from_state = (safetensors.torch.load_file(each / "model.safetensors") for each in folders)
    assert list(from_model) == list(from_state)
    return from_model


SAVERS = (save_file, save_model, save_for_hub, save_with_torch, save_with_accelerate)


def check_saved(model: nn.Module, savers: tuple[Saver, ...] = SAVERS) -> None:
    expected = {name: param.detach().clone() for name, param in model.named_parameters()}
    for saver in savers:
        with tempfile.TemporaryDirectory() as folder:
            saved = saver(model, Path(folder))
        assert saved.keys() == expected.keys(), saver.__name__
        assert all(torch.equal(saved[name], expected[name]) for name in expected), saver.__name__


def saved_nbytes(tensor: Tensor) -> int:
    file = io.BytesIO()
    torch.save(tensor, file)
    return len(file.getvalue())


@on_ranks(1, 2)
@ANY_WAY
def test_every_saver_writes_every_parameter(view: bool) -> None:
    model = make_model()
    optimizer = shard(model, view)
    for step in range(2):
        check_saved(model)
        optimizer.consolidate_state_dict()
        check_saved(model)
        if dist.get_rank() == 0:
            state = optimizer.state_dict()["state"]
            held = [entry for entries in state.values() for entry in entries.values()]
            assert all(entry.untyped_storage().nbytes() == entry.nbytes for entry in held)
        set_grads(list(model.parameters()), step)
        optimizer.step()
    for param in model.parameters():
        assert saved_nbytes(param) == saved_nbytes(Parameter(param.detach().clone()))


# ---------------------------------------------------------------------- storages of views


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_a_view_has_a_storage_of_its_own_no_longer_than_itself_and_not_resizable() -> None:
    dtype = torch.complex64
    params = make_params(((6, 5), (), (7,), (4, 2, 3, 3), (0, 3), (2, 3)), dtype)
    params[3].data = params[3].data.contiguous(memory_format=torch.channels_last)
    params[5].data = params[5].data.t()
    before = twin(params)
    optimizer = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)
    for _ in range(2):
        for param, old in zip(params, before, strict=True):
            storage = param.untyped_storage()
            assert (storage.nbytes(), param.storage_offset()) == (param.nbytes, 0)
            assert storage.data_ptr() == param.data_ptr()
            assert (param.size(), param.stride()) == (old.size(), old.stride())
            assert param.dtype == dtype
            assert torch.equal(param, old)
        optimizer.gather_parameters()
    filled = sorted(param.data_ptr() for param in params if param.numel())
    apart = sum(-(-param.nbytes // 64) * 64 for param in params)
    assert filled[-1] - filled[0] < apart + 64 * dist.get_world_size()  # one block of memory
    for param in filter(Tensor.numel, params):
        with pytest.raises(RuntimeError, match="not resizable"):  # it would reach into its neighbour
            param.data.resize_(1000)
    set_grads(params, 0)
    optimizer.step()


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_dtypes_that_dlpack_does_not_know_have_storages_too() -> None:
    odd = (torch.float8_e4m3fn, torch.bool, torch.complex32, torch.int8, torch.uint8, torch.float8_e8m0fnu)
    params = []
    for dtype in odd:
        octets = torch.arange(1, 25, dtype=torch.uint8) % (2 if dtype == torch.bool else 99)
        params.append(Parameter(octets.view(dtype).reshape(2, -1), requires_grad=False))
    params += make_params(((3, 2),))
    before = [param.detach().view(torch.uint8).clone() for param in params]
    optimizer = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)
    optimizer.gather_parameters()
    for param, octets in zip(params, before, strict=True):
        assert param.untyped_storage().nbytes() == param.nbytes
        assert torch.equal(param.detach().view(torch.uint8), octets)


@on_ranks(2)
def test_copied_and_pickled_models_have_storages_of_their_own() -> None:
    model = make_model()
    optimizer = shard(model, view=True)
    set_grads(list(model.parameters()), 0)
    optimizer.step()
    both = (model, optimizer)
    for other, of_other in (copy.deepcopy(both), pickle.loads(pickle.dumps(both))):
        check_saved(other, (save_file, save_model))
        copied = list(other.parameters())
        assert {param.data_ptr() for param in copied}.isdisjoint(p.data_ptr() for p in model.parameters())
        addresses = [param.data_ptr() for param in copied]
        set_grads(copied, 1)
        of_other.step()
        assert [param.data_ptr() for param in copied] == addresses
    set_grads(list(model.parameters()), 1)
    optimizer.step()
    assert_same_bits(copied, list(model.parameters()))


@on_ranks(2)
@pytest.mark.parametrize(("early", "late"), [(True, False), (False, True)], ids=["before", "after"])
def test_parameters_in_shared_memory_stay_there_and_train(early: bool, late: bool) -> None:
    params = make_params()
    mine = twin(params)
    if early:
        mine[0].share_memory_()
    plain = torch.optim.AdamW(params, lr=0.01)
    sharded = ZeroRedundancyOptimizer(mine, torch.optim.AdamW, lr=0.01)
    train_both(plain, sharded, 1)
    shared = list(range(len(mine))) if late else [0]
    if late:  # on one rank alone: the others must not notice
        for index in shared if dist.get_rank() == 1 else ():
            mine[index].share_memory_()
    addresses = [mine[index].data_ptr() for index in shared]
    train_both(plain, sharded, 3, first=1)
    assert [mine[index].data_ptr() for index in shared] == addresses
    if dist.get_rank() == 1:
        assert all(mine[index].is_shared() for index in shared)
    for param in mine:
        assert param.untyped_storage().nbytes() == param.nbytes


@on_ranks(2)
def test_parameters_that_were_set_from_one_vector_have_storages_of_their_own_again() -> None:
    plain, sharded = adamw_pair()
    train_both(plain, sharded, 1)
    for own in map(params_of, (plain, sharded)):
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(own) * 2, own)
    train_both(plain, sharded, 2, first=1)
    assert all(param.untyped_storage().nbytes() == param.nbytes for param in params_of(sharded))
