"""Train a convolutional net on images through a pipeline: floats go in, feature maps cross, classes
come out.

    torchrun --standalone --nproc-per-node=4 source_code/examples/convnet.py --pp 4

A skip connection crosses too: stages hand on a dict. Then the net is asked for its classes."""

import argparse

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy, gelu

from course_pp import parallel as pp

ROWS, CLASSES, WIDTH, N_BLOCKS, N_MICROBATCHES = 32, 10, 16, 14, 8
Maps = dict[str, Tensor]


class Stem(nn.Conv2d):
    def forward(self, images: Tensor) -> Maps:
        maps = super().forward(images)
        return {"maps": maps, "skipped": maps}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.GroupNorm(4, WIDTH)

    def forward(self, x: Maps) -> Maps:
        return {"maps": x["maps"] + gelu(self.norm(self.conv(x["maps"]))), "skipped": x["skipped"]}


class Stage(nn.Sequential):  # what one stage returns as a dict, the next is called with by name
    def forward(self, images: Tensor | None = None, **maps: Tensor) -> Maps | Tensor:
        return super().forward(maps if images is None else images)


class Head(nn.Linear):
    def forward(self, x: Maps) -> Tensor:
        return super().forward((x["maps"] + x["skipped"]).mean((2, 3)))


def build_model() -> Stage:
    torch.manual_seed(0)
    return Stage(
        Stem(3, WIDTH, 3, padding=1), *(Block() for _ in range(N_BLOCKS)), Head(WIDTH, CLASSES)
    )


def build(model: Stage, mesh: DeviceMesh | None, schedule: str) -> pp.PipelineSchedule:
    """The pipeline over this rank's stages."""
    indices = pp.get_stage_indices(schedule, pp.get_pp_rank(mesh), pp.get_pp_size(mesh))
    ranges = pp.compute_layer_assignment(len(model), pp.get_pp_size(mesh) * len(indices))
    modules = {i: model[slice(*ranges[i])].to(pp.get_device()) for i in indices}
    for module in modules.values():
        pp.apply_fsdp2(module, mesh, blocks=Block)
    images = torch.empty(
        ROWS // pp.get_dp_size(mesh) // N_MICROBATCHES, 3, 8, 8, dtype=model[0].weight.dtype
    )
    known = {
        "device_mesh": mesh,
        "device": pp.get_device(),
        "n_stages": len(ranges),
        "inputs": images,
    }
    stages = [pp.build_pipeline_stage(module, stage=i, **known) for i, module in modules.items()]
    return pp.build_pipeline_schedule(stages, N_MICROBATCHES, cross_entropy, schedule)


def batch(step: int, mesh: DeviceMesh | None) -> tuple[Tensor, Tensor]:
    """This data-parallel rank's images, and their classes."""
    drawn = {"generator": torch.Generator().manual_seed(step)}
    whole = torch.randn(ROWS, 3, 8, 8, **drawn), torch.randint(CLASSES, (ROWS,), **drawn)
    images, classes = (
        part.chunk(pp.get_dp_size(mesh))[pp.get_dp_rank(mesh)].to(pp.get_device()) for part in whole
    )
    return images, classes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pp", type=int, default=2)
    args = parser.parse_args()
    mesh = pp.init_distributed(pp.DistributedConfig(pp=args.pp))
    pipeline = build(build_model(), mesh, "1f1b")
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    images, classes = batch(0, mesh)
    for step in range(5):
        optimizer.zero_grad()
        loss = pipeline.step(images, target=classes)
        optimizer.step()
        print(f"rank {pp.get_world_info()[0]}, step {step + 1}: loss {loss:.4f}")
    right = (pipeline.evaluate(images, on="all").argmax(-1) == classes).float().mean()
    print(f"rank {pp.get_world_info()[0]}: {right:.0%} of its images are classified right")
    pp.destroy_distributed()
