"""Groups of rows, each multiplied with a matrix of its own.

One call of torch's grouped product where it has a kernel, else one product after another.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function


def grouped_product(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Multiply each group of rows with its matrix: x (rows, in), weights (groups, in, out) ->
    (rows, out).

    The matrix of a group without rows gets a gradient of zeros.

    Args:
        counts: (groups,) int64, the number of rows of each group, in order; they add up to
            ``rows``.
    """
    # A torch function mode may compute this product itself, as course_pp.step.late_weights does.
    if has_torch_function((x, weights)):
        product: Tensor = handle_torch_function(grouped_product, (x, weights), x, weights, counts)
        return product
    # Autocast itself casts for ordinary products only.
    device = autocasts_as(x)
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, weights = x.to(dtype), weights.to(dtype)

    if _has_kernel(x, weights):
        return F.grouped_mm(x, weights, offs=counts.cumsum(0, dtype=torch.int32))
    if x.is_meta:  # where counts have no values
        return x @ weights[0]
    groups = zip(x.split(counts.tolist()), weights.unbind(), strict=True)
    return torch.cat([rows @ matrix for rows, matrix in groups])


def grouped_weight_gradient(x: Tensor, grad_output: Tensor, counts: Tensor) -> Tensor:
    """Return the gradient of the matrices.

    x (rows, in), grad_output (rows, out) -> (groups, in, out).
    """
    if _has_kernel(x, grad_output):
        return F.grouped_mm(x.t(), grad_output, offs=counts.cumsum(0, dtype=torch.int32))
    sizes = counts.tolist()
    groups = zip(x.split(sizes), grad_output.split(sizes), strict=True)
    return torch.stack([rows.t() @ grad for rows, grad in groups])


def autocasts_as(x: Tensor) -> str:
    """Return the type of device whose autocast applies to ``x``."""
    return "cpu" if x.is_meta else x.device.type


def _has_kernel(x: Tensor, other: Tensor) -> bool:
    """Return whether torch's grouped product takes these two."""
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 0):
        return False
    dtypes = _KERNEL_DTYPES.get(x.device.type, ())
    # The kernel reads rows in pieces of 16 bytes.
    aligned = all(width * x.itemsize % 16 == 0 for width in (x.shape[-1], other.shape[-1]))
    return x.dtype == other.dtype and x.dtype in dtypes and aligned and len(x) > 0


_KERNEL_DTYPES = {"cpu": (torch.bfloat16, torch.float32), "cuda": (torch.bfloat16,)}
