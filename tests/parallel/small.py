"""A model small enough to train hundreds of times, and its pipeline."""

import torch

from course_pp.model import ModelConfig, build_stage_module
from course_pp.parallel import build_pipeline_schedule, build_pipeline_stage, get_stage_indices

BATCH, SEQ_LEN, N_MICROBATCHES = 8, 8, 4


def model_config(tied, n_layers=5):
    """Return sizes, by default with layers for two stages on each of two ranks and one more."""
    sizes = {
        "dim": 32,
        "n_heads": 4,
        "n_kv_heads": 2,
        "ffn_dim": 48,
        "vocab_size": 61,
        "max_seq_len": 16,
    }
    return ModelConfig(n_layers=n_layers, tie_embeddings=tied, **sizes)


def build(config, mesh, pp, rank, schedule, loss_fn, n_microbatches=N_MICROBATCHES, batch=BATCH):
    """Return this rank's stage modules in float64, and the pipeline of them."""
    indices = get_stage_indices(schedule, rank, pp)
    n_stages = pp * len(indices)
    modules = [build_stage_module(config, i, n_stages).double() for i in indices]
    stages = [
        build_pipeline_stage(
            m, mesh, "cpu", batch // n_microbatches, SEQ_LEN, param_dtype=torch.float64
        )
        for m in modules
    ]
    return modules, build_pipeline_schedule(
        stages if len(stages) > 1 else stages[0], n_microbatches, loss_fn, schedule
    )


def tokens(batch=BATCH, seq_len=SEQ_LEN):
    """Return a batch of the first token only."""
    return torch.zeros(batch, seq_len, dtype=torch.int64)
