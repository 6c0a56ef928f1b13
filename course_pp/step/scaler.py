"""Loss scaling for float16: one scale for a whole mesh, and steps that all its ranks take or skip
together.

    scaler = MeshGradScaler() pipeline = build_pipeline_schedule(stage, 8, loss_fn, scaler=scaler)
    # or runtime's Pipeline(..., scaler=scaler) loss = pipeline.step(inputs, target=targets)  # as
    without a scaler; gradients are scale times as large
    scaler.unscale_(optimizer)                    # before clip_grad_norm_; else step does it
    scaler.step(optimizer)
    scaler.update()

Small gradients, which float16 has no numbers for, are representable in a backward that begins with
a large factor (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2). If they overflow, the step
is skipped and the factor halved.
"""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from course_pp.base.ranks import Ranks, difference
from course_pp.base.torch_private import OpenGradScaler, unscale


class MeshGradScaler(OpenGradScaler):
    """``torch.amp.GradScaler`` for all ranks of a run: an infinity on one of them is one on all.

    Give it to the pipeline, as in the first lines of ``course_pp.step.scaler``: it then scales the
    loss, and what :func:`attach_loss` adds, in the backward alone. Without a pipeline write
    ``scaler.scale(loss).backward()``, as in one process.

    It has a scale on every rank, also where no loss is. Shards, whole gradients and a rank without
    any go together, under fused optimizers too. If a rank has several optimizers, each is skipped
    for itself, as torch does it: the first one of every rank together, the second ones together. So
    give a rank's stages one optimizer.

    Args:
        init_scale: the first scale.
        growth_factor: the scale grows by it after ``growth_interval`` steps in a row without an
            infinity.
        backoff_factor: the scale is multiplied by it after a step with one.
        enabled: False scales nothing and skips nothing.

    A checkpoint keeps ``state_dict()``, the same on every rank, which ``torch.amp.GradScaler``
    takes as well.
    """

    def __init__(
        self,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        # The scale is on the CPU, wherever the gradients are: each step asks for it as a number.
        super().__init__("cpu", init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        super().scale(torch.ones(()))  # or there would be none before the first loss
        self.in_pipeline = self._has_scaled = False

    def scale(self, outputs: Any) -> Any:
        """Return ``outputs``, a loss or several, times the scale."""
        if self.in_pipeline:
            raise RuntimeError(
                "scale() of a scaler that a pipeline was given would scale its loss twice: return"
                " the loss as it is"
            )
        self._has_scaled = True
        return super().scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, and agree with all ranks on infinities; a
        collective.

        Raises:
            ValueError: on every rank, if their scalers differ, as after ``load_state_dict`` on one
                of them, or if none has scaled a loss; for gradients in float16, which would lose
                what scaling has saved.
        """
        if not self.is_enabled():
            return
        problem, found, scaled = "", False, self.in_pipeline or self._has_scaled
        try:
            super().unscale_(optimizer)
            found_inf = self.found_infinity(optimizer)
            found = bool(found_inf)
        except (RuntimeError, ValueError) as error:  # the others are told, or they would wait
            problem = Ranks.sentence(error)
        told = Ranks().gather((self.state_dict(), found, scaled, problem))
        raised = next((problem for *_, problem in told if problem), None) or difference(
            [state for state, *_ in told]
        )
        if raised:
            raise ValueError(f"MeshGradScaler: {raised}")
        if not any(scaled for *_, scaled, _ in told):
            raise ValueError(
                "this MeshGradScaler has scaled no loss: build the pipeline with scaler=, or call"
                " scale(loss)"
            )
        found_inf.fill_(any(found for _, found, *_ in told))

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer, unless a rank has found an infinity; unscale first, if that is not
        done.

        A collective if it unscales.
        """
        # Here and not in torch's step, which asks only this rank if the optimizer is fused.
        if self.is_enabled() and not self.is_unscaled(optimizer):
            self.unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)

    @torch.no_grad()
    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found: Tensor
    ) -> None:
        """Do so on this rank. torch's takes neither a rank without gradients nor shards beside whole ones."""
        gradients: dict[torch.device, dict[torch.dtype, list[Tensor]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for parameter in (
            p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ):
            local = (
                parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            )
            if local.dtype == torch.float16:
                raise ValueError(
                    "gradients in float16 cannot be unscaled: keep parameters in float32"
                    " (compute_in)"
                )
            gradients[local.device][local.dtype].append(local)
        for device, by_dtype in gradients.items():
            here = torch.zeros((), device=device)
            for alike in by_dtype.values():
                unscale(alike, here, inv_scale.to(device))
            found += here.cpu()
