"""The ranks of a model that is wrapped before its optimizer is built, when no optimizer can tell them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zero_optim.comm.agreement import agree, failing_together, ranks_of


class RanksToBe:
    """The ranks that a wrapper was given, before anything was made for them.

    Args:
        mesh: as given to the wrapper. What is none is taken for no mesh: `RankMesh.of` refuses it.
        process_group: likewise; None for the mesh's row, or for the default group without a mesh.

    Raises:
        TypeError: ``process_group`` is none.
        ValueError: this process is not in it.
    """

    def __init__(self, mesh: object, process_group: object) -> None:
        self._told = f"mesh={mesh.mesh.tolist() if isinstance(mesh, DeviceMesh) else mesh!r}"
        self.process_group = process_group
        if not isinstance(mesh, DeviceMesh) or mesh.ndim != 2:
            self._groups = [ranks_of(process_group)]
            return
        if process_group is None:
            self.process_group = mesh.get_group(1)
        if mesh.mesh.numel() == dist.get_world_size():
            self._groups = [ranks_of(None)]  # so that a rank without a mesh is heard too
        else:
            self._groups = [ranks_of(mesh.get_group(dim)) for dim in (0, 1)]

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Run the body, then raise on all ranks if it raised on any; all ranks enter and leave it.

        Over a mesh that is a part of all ranks, the row of a rank that failed hears of it first. Then each of
        them tells its column, so every rank does.
        """
        with ExitStack() as stack:
            for group in self._groups:
                stack.enter_context(failing_together(group))
            yield

    def agree(self, items: list[str], what: str) -> None:
        """Check that all ranks have the same items, and the same mesh; all ranks call, and it communicates.

        Args:
            items: descriptions.
            what: what they describe.

        Raises:
            RankMismatchError: on every rank: they have not.
        """
        for group in self._groups:
            with self.failing_together():
                agree(group, [self._told, *items], what)
