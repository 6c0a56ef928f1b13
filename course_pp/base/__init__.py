"""The ground of the house, which every other room may import.

It has arguments, ranks, files, imports, cycles, the sizes and shapes of a model, and the one file
that names something private of torch.

The files here import nothing of the other rooms. Only ``ranks`` and ``torch_private`` import torch.
"""
