"""The reference computes with one thread, as the ranks do: more would add up in another order."""

import torch

torch.set_num_threads(1)
