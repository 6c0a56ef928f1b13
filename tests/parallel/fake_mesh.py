"""A mesh on paper."""

from types import SimpleNamespace

from torch.distributed.device_mesh import DeviceMesh


class FakeMesh(DeviceMesh):
    """Names and sizes of a mesh, without ranks."""

    def __init__(self, **sizes: int) -> None:
        self.sizes, self._mesh_dim_names = sizes, tuple(sizes)

    def __getitem__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(size=lambda: self.sizes[name])
