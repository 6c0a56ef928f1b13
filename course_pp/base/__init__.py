"""The ground of the house: arguments, ranks, files, imports, cycles, and the sizes and shapes of a model.

The files here import nothing of the other rooms, and only ``ranks`` imports torch.
"""
