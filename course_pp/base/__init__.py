"""The ground of the house: arguments, ranks, files, imports, cycles, and the sizes and shapes of a
model; and the one file that names something private of torch.

The files here import nothing of the other rooms. Only ``ranks`` and ``torch_private`` import torch.
"""
