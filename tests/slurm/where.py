"""Prints where each rank is: python where.py PP TP, started as a rank by srun or torchrun."""

import os
import sys

from course_pp.parallel import (
    DistributedConfig,
    destroy_distributed,
    get_pp_rank,
    get_tp_mesh,
    get_world_info,
    init_distributed,
)

pp, tp = map(int, sys.argv[1:])
mesh = init_distributed(DistributedConfig(pp=pp, tp=tp))
tp_mesh = get_tp_mesh(mesh)
tp_rank = 0 if tp_mesh is None else tp_mesh.get_local_rank()
where = (
    f"{os.environ['SLURMD_NODENAME']}: rank {get_world_info()[0]}, pp {get_pp_rank(mesh)}, tp"
    f" {tp_rank}\n"
)
sys.stdout.write(where)  # in one piece, or lines of several ranks run together
destroy_distributed()
