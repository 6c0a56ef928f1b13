"""Train a convolutional net on images through a pipeline.

    torchrun --standalone --nproc-per-node=4 source_code/examples/convnet.py --pp 4

Floats go in, feature maps cross the cuts, classes come out. A skip connection crosses too, so the
stages hand on a dict. At the end the net is asked for its classes."""

import argparse

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy, gelu

from course_pp import parallel as pp

ROWS = 32
CLASSES = 10
WIDTH = 16
N_BLOCKS = 14
N_MICROBATCHES = 8
Maps = dict[str, Tensor]


class Stem(nn.Conv2d):
    def forward(self, images: Tensor) -> Maps:
        maps = super().forward(images)
        return {"maps": maps, "skipped": maps}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.GroupNorm(4, WIDTH)

    def forward(self, x: Maps) -> Maps:
        return {"maps": x["maps"] + gelu(self.norm(self.conv(x["maps"]))), "skipped": x["skipped"]}


class Head(nn.Linear):
    def forward(self, x: Maps) -> Tensor:
        return super().forward((x["maps"] + x["skipped"]).mean((2, 3)))


class Stage(nn.Sequential):
    # A stage that returns a dict calls the next one with its entries as keyword arguments.
    def forward(self, images: Tensor | None = None, **maps: Tensor) -> Maps | Tensor:
        return super().forward(maps if images is None else images)


def build_model() -> Stage:
    torch.manual_seed(0)
    stem = Stem(3, WIDTH, 3, padding=1)
    blocks = [Block() for _ in range(N_BLOCKS)]
    return Stage(stem, *blocks, Head(WIDTH, CLASSES))


def build(model: Stage, mesh: DeviceMesh | None, schedule: str) -> pp.PipelineSchedule:
    """Return the pipeline over this rank's stages."""
    n_ranks = pp.get_pp_size(mesh)
    indices = pp.get_stage_indices(schedule, pp.get_pp_rank(mesh), n_ranks)
    ranges = pp.compute_layer_assignment(len(model), n_ranks * len(indices))
    rows = ROWS // pp.get_dp_size(mesh) // N_MICROBATCHES
    images = torch.empty(rows, 3, 8, 8, dtype=model[0].weight.dtype)
    stages = []
    for i in indices:
        module = model[slice(*ranges[i])].to(pp.get_device())
        pp.apply_fsdp2(module, mesh, blocks=Block)
        stage = pp.build_pipeline_stage(
            module, mesh, pp.get_device(), stage=i, n_stages=len(ranges), inputs=images
        )
        stages.append(stage)
    return pp.build_pipeline_schedule(stages, N_MICROBATCHES, cross_entropy, schedule)


def batch(step: int, mesh: DeviceMesh | None) -> tuple[Tensor, Tensor]:
    """Return this data-parallel rank's images, and their classes."""
    drawn = torch.Generator().manual_seed(step)
    images = torch.randn(ROWS, 3, 8, 8, generator=drawn)
    classes = torch.randint(CLASSES, (ROWS,), generator=drawn)
    n, i = pp.get_dp_size(mesh), pp.get_dp_rank(mesh)
    return images.chunk(n)[i].to(pp.get_device()), classes.chunk(n)[i].to(pp.get_device())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pp", type=int, default=2)
    args = parser.parse_args()
    mesh = pp.init_distributed(pp.DistributedConfig(pp=args.pp))
    rank, _, _ = pp.get_world_info()
    pipeline = build(build_model(), mesh, "1f1b")
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    images, classes = batch(0, mesh)
    for step in range(5):
        optimizer.zero_grad()
        loss = pipeline.step(images, target=classes)
        optimizer.step()
        print(f"rank {rank}, step {step + 1}: loss {loss:.4f}")
    right = (pipeline.evaluate(images, on="all").argmax(-1) == classes).float().mean()
    print(f"rank {rank}: {right:.0%} of its images are classified right")
    pp.destroy_distributed()
