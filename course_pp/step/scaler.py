"""Loss scaling for float16: one scale for a whole mesh, and steps that all its ranks take or skip
together.

    scaler = MeshGradScaler()
    pipeline = build_pipeline_schedule(stage, 8, loss_fn, scaler=scaler)   # or runtime's Pipeline
    loss = pipeline.step(inputs, target=targets)  # gradients are scale times as large
    scaler.unscale_(optimizer)                    # before clip_grad_norm_; else step does it
    scaler.step(optimizer)
    scaler.update()

Small gradients, for which float16 has no numbers, are representable in a backward that begins with
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

    It has a scale on every rank, also where no loss is. A rank may have shards, whole gradients or
    none, and its optimizer may be fused. If a rank has several optimizers, each is skipped by
    itself, as torch does it: the first ones of all ranks together, the second ones together. So
    give a rank's stages one optimizer.

    Args:
        init_scale: the first scale.
        growth_factor: factor of the scale after ``growth_interval`` steps in a row without an
            infinity.
        backoff_factor: factor of the scale after a step with an infinity.
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
        # torch makes the scale when it scales the first loss, which most ranks never see.
        super().scale(torch.ones(()))
        self.in_pipeline = False
        self._has_scaled = False

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

        def unscale_here() -> tuple[dict[str, Any], bool, bool]:
            try:
                super(MeshGradScaler, self).unscale_(optimizer)
                found = bool(self.found_infinity(optimizer))
            except (RuntimeError, ValueError) as error:
                raise ValueError(f"MeshGradScaler: {Ranks.sentence(error)}") from error
            return self.state_dict(), found, self.in_pipeline or self._has_scaled

        told = Ranks().each(unscale_here)
        problem = difference([state for state, *_ in told])
        if problem is not None:
            raise ValueError(f"MeshGradScaler: {problem}")
        if not any(scaled for *_, scaled in told):
            raise ValueError(
                "this MeshGradScaler has scaled no loss: build the pipeline with scaler=, or call"
                " scale(loss)"
            )
        self.found_infinity(optimizer).fill_(any(found for _, found, _ in told))

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer, unless a rank has found an infinity.

        Unscale first, if nobody has: then it is a collective.
        """
        # Here and not in torch's step, which asks only this rank if the optimizer is fused.
        if self.is_enabled() and not self.is_unscaled(optimizer):
            self.unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)

    @torch.no_grad()
    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found: Tensor
    ) -> None:
        """Unscale this rank's gradients, and add to ``found`` if one is not finite.

        torch's own takes neither a rank without gradients nor shards beside whole gradients.
        """
        # By device and dtype, as torch unscales a list of gradients in one kernel.
        gradients: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                if local.dtype == torch.float16:
                    raise ValueError(
                        "gradients in float16 cannot be unscaled: keep parameters in float32"
                        " (compute_in)"
                    )
                gradients[local.device, local.dtype].append(local)
        for (device, _), alike in gradients.items():
            here = torch.zeros((), device=device)
            unscale(alike, here, inv_scale.to(device))
            found += here.cpu()
