"""Tests that compute on GPUs. Where torch sees none, all of them are skipped, in one line."""

import torch

from tests.optional import lacking

if not torch.cuda.is_available():
    lacking("gpu", "torch sees no GPU here")
