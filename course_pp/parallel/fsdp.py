"""FSDP2: parameters, gradients and optimizer state sharded over the data-parallel ranks.

    group 0 …     one for each block that :func:`find_blocks` finds
    experts       one for each layer whose experts are shared out over ``ep``; it is sharded over
                  the ranks that hold the same experts
    root group    all other parameters: embedding, final norm, head

A group is gathered in one collective and its gradients are reduced in one. On the 2-D mesh
(``dp_replicate``, ``dp_shard``) it is sharded over the second dimension and its reduced gradients
are averaged over the first (HSDP).

Zhao et al. 2023, "PyTorch FSDP", arXiv:2304.11277.
"""

import warnings
from collections.abc import Collection, Mapping
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from course_pp.base.arguments import check_arguments
from course_pp.base.ranks import refusing_together
from course_pp.parallel.blocks import Blocks, find_blocks, listed
from course_pp.parallel.experts import is_shared_out
from course_pp.parallel.mesh import get_dp_mesh, get_efsdp_mesh, get_ep_mesh, has_dp_mesh, size_of
from course_pp.parallel.replaced_forward import check_order
from course_pp.parallel.world import is_rank_zero

ReshardPolicy = bool | int | Literal["auto"]


def default_mp_policy(param_dtype: torch.dtype = torch.bfloat16) -> MixedPrecisionPolicy:
    """Return the policy that computes in ``param_dtype`` and reduces gradients in float32.

    It casts the inputs of every block to ``param_dtype``.
    """
    return MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=True
    )


def resolve_reshard_after_forward(
    policy: ReshardPolicy, *, pp: int = 1, dp_shard: int = 1, tp: int = 1, ep: int = 1
) -> bool | int:
    """Decide whether gathered parameters are freed after forward.

    True frees them, False keeps them, and a number keeps them on fewer ranks.

    ``"auto"`` is False under pipeline parallelism and True otherwise. A step of a pipeline runs the
    forward of every microbatch before the gradients are reduced, and True would gather the same
    parameters again for each of them: m + 1 all-gathers a group and step instead of one. Without a
    pipeline True costs two instead of one, and frees all other blocks while one computes.

    Args:
        policy: ``"auto"``; True or False, which mean what they say; or the world size to reshard
            to, which must divide the size of ``dp_shard`` and be neither 1 nor all of it, and needs
            a mesh without ``pp``, ``tp`` and ``ep``.
    """
    if policy == "auto":
        return pp == 1
    if isinstance(policy, bool):
        return policy
    words = "True, False or 'auto'"
    if type(policy) is not int:
        raise ValueError(
            f"policy reshard_after_forward={policy!r} must be {words}, or a number of ranks"
        )
    proper = [k for k in range(2, dp_shard) if dp_shard % k == 0]
    if policy not in proper:
        meant = {1: "False (keep everything)", dp_shard: "True (free everything)"}.get(policy)
        use = meant or " or ".join([*(map(str, proper) if pp * tp * ep == 1 else ()), words])
        raise ValueError(
            f"policy reshard_after_forward={policy} must divide dp_shard={dp_shard} and be neither"
            f" 1 nor {dp_shard}: say {use}"
        )
    if pp * tp * ep > 1:
        sizes = " and ".join(
            f"{name}={n}" for name, n in (("pp", pp), ("tp", tp), ("ep", ep)) if n > 1
        )
        # fully_shard makes the smaller groups of the ranks it shards over, where all ranks of the
        # world would have to make them together: it would wait for ever.
        raise ValueError(
            f"reshard_after_forward={policy} with {sizes}: torch reshards to fewer ranks only where"
            f" all hold shards of the same parameters: say {words}, or set these to 1"
        )
    return policy


def apply_fsdp2(
    model: nn.Module,
    device_mesh: DeviceMesh | None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: ReshardPolicy = "auto",
    *,
    blocks: Blocks = None,
) -> tuple[str, ...]:
    """Shard ``model`` in place: every block, then what is left at the root.

    Where the mesh has no data-parallel dimension nothing is done: :func:`compute_in` lowers
    precision there. Apply it before the optimizer is made, which would hold parameters that the
    model no longer uses. Gradients are averaged over the data-parallel ranks, under a pipeline once
    a step, after the last microbatch.

    In a step all data-parallel ranks must use the same parameters. If one rank leaves a part of the
    model unused, such as the encoder of images, gloo ends the process and NCCL waits. Leave such a
    part out of ``blocks``, so that it is gathered with the rest, and call
    ``model.set_reduce_scatter_unused_params(True)`` afterwards, which torch has from 2.13 on. The
    unused parameters then get gradients of zero, and AdamW moves them.

    Args:
        model: any model, or one stage of it.
        mp_policy: None is :func:`default_mp_policy` if all parameters are float32: it computes in
            bfloat16, keeps parameters and gradients in float32, and the first time rank 0 warns of
            it. With other dtypes it computes in the parameters' own and reduces in float32 or
            wider, so float64 stays float64. ``default_mp_policy(torch.float32)`` computes in
            float32.
        reshard_after_forward: see :func:`resolve_reshard_after_forward`.
        blocks: the modules that are each gathered by themselves; see :func:`find_blocks`.

    Returns:
        The names of the blocks; none where nothing was sharded.

    Raises:
        ValueError: on every rank of the mesh, also for a parameter that two groups share.
    """
    with refusing_together(device_mesh):
        check_arguments(apply_fsdp2, locals())
        check_order(model, "FSDP2")
        found = find_blocks(model, blocks)
        _check_sharing(model, found)
        sizes = {name: size_of(device_mesh, name) for name in ("pp", "dp_shard", "tp")}
        ep_mesh = get_ep_mesh(device_mesh)
        sizes["ep"] = 1 if ep_mesh is None else ep_mesh.size()
        policy = resolve_reshard_after_forward(reshard_after_forward, **sizes)

    if not has_dp_mesh(device_mesh):
        return ()
    mesh = get_dp_mesh(device_mesh)
    mixed = mp_policy
    if mixed is None:
        dtypes = {parameter.dtype for parameter in model.parameters()}
        mixed = policy_of_dtypes(dtypes)
        if dtypes == {torch.float32} and mixed.param_dtype == torch.bfloat16:
            _say_that_float32_becomes_bfloat16()
    options: dict[str, Any] = {"mp_policy": mixed, "reshard_after_forward": policy}
    # From the inside out: fully_shard takes all parameters that no module inside has taken before.
    for experts in filter(is_shared_out, model.modules()):
        same = get_efsdp_mesh(device_mesh)
        fully_shard(
            experts,
            mesh=same,
            shard_placement_fn=partial(_placement, n_shards=same.size(-1)),
            **options,
        )
    for module in dict.fromkeys((*found.values(), model)):
        fully_shard(module, mesh=mesh, **options)
    return tuple(found)


@cache  # once a process, for any number of stages
def _say_that_float32_becomes_bfloat16() -> None:
    if is_rank_zero():
        warnings.warn(
            "apply_fsdp2 was given no mp_policy, so this float32 model computes in bfloat16, and a "
            "loss gets bfloat16 logits: pass mp_policy=default_mp_policy(torch.float32) to compute "
            "in float32, or default_mp_policy() to keep bfloat16 without this line",
            stacklevel=3,
        )


def _placement(parameter: nn.Parameter, n_shards: int) -> Shard:
    """Cut experts by columns if the ranks can share the columns equally, else by rows.

    There is one row for each expert, and a rank may hold a single expert.
    """
    return Shard(int(parameter.dim() > 1 and parameter.shape[1] % n_shards == 0))


def _check_sharing(model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
    """Refuse a parameter in two groups.

    Each group would shard it and train a copy of its own, so the two would no longer be tied.
    """
    block_of = {part: name for name, block in blocks.items() for part in block.modules()}
    home: dict[nn.Parameter, tuple[str, str]] = {}
    for name, part in model.named_modules(remove_duplicate=False):
        for own, parameter in part.named_parameters(prefix=name, recurse=False):
            # A module that two blocks share is one block's in ``block_of``; by its name it is in
            # each of them.
            group = next(
                (block for block in blocks if name == block or name.startswith(f"{block}.")), None
            )
            group = block_of.get(part, "") if group is None else group
            other, first = home.setdefault(parameter, (group, own))
            if other != group:
                left_out = listed(block for block in (other, group) if block)
                raise ValueError(
                    f"{own!r} is the same parameter as {first!r}, but blocks are sharded one by"
                    f" one, and the two would part: leave {left_out} out of blocks=, so that one"
                    " group holds both names"
                )


def reshard(model: nn.Module) -> None:
    """Free the gathered parameters of every group; a no-op without FSDP2."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def policy_of_dtypes(dtypes: Collection[torch.dtype]) -> MixedPrecisionPolicy:
    """Return the policy of a model that is given none: see :func:`apply_fsdp2`."""
    if set(dtypes) == {torch.float32}:
        return default_mp_policy()
    half = any(dtype.itemsize < 4 for dtype in dtypes)
    return MixedPrecisionPolicy(reduce_dtype=torch.float32 if half else None)
