"""A model and data small enough to train in a moment, by the trainer and in one process."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import Tensor

from course_pp.model import CrossEntropy, ModelConfig, Transformer, build_stage_module
from course_pp.model.experts import ExpertLoad, expert_loads, update_router_bias
from course_pp.parallel import (
    DistributedConfig,
    apply_expert_parallel,
    apply_fsdp2,
    get_pp_rank,
    get_pp_size,
    init_distributed,
)
from course_pp.training import TrainConfig, Trainer, stages_of_rank
from course_pp.training.data import IGNORE_INDEX, Batches, Sequences
from tests.equality import snapshot_gradients

SEQ_LEN = 8
MODEL = ModelConfig(dim=16, n_layers=2, n_heads=2, vocab_size=23, max_seq_len=SEQ_LEN)
TIED = ModelConfig(
    dim=16, n_layers=4, n_heads=2, vocab_size=23, max_seq_len=SEQ_LEN, tie_embeddings=True
)
RUN = TrainConfig(
    **{"steps": 3, "batch": 8, "microbatches": 2, "precision": "fp32", "peak_flops": 1e9},
    **{"lr": 1e-2, "clip_norm": 0.5, "warmup_steps": 1, "weight_decay": 0.3},
)


def rows(n: int = 24, padded: bool = False, seed: int = 0) -> Sequences:
    """Random tokens; padded, most rows are short and every batch has another number of tokens.

    Padding comes first: behind the tokens causal attention would not look at it, mask or no mask.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(MODEL.vocab_size, (n, SEQ_LEN + 1), generator=generator)
    if not padded:
        return Sequences(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    lengths = torch.randint(1, SEQ_LEN + 1, (n, 1), generator=generator)
    mask = torch.arange(SEQ_LEN) >= SEQ_LEN - lengths
    return Sequences(
        tokens[:, :-1].contiguous(), tokens[:, 1:].masked_fill(~mask, IGNORE_INDEX), mask
    )


def foreign_tokenizer(*added: str) -> tokenizers.Tokenizer:
    """A foreign tokenizer: `[UNK]` first, `[EOT]` and `[PAD]` last.

    It cuts and pads texts.
    """
    made = tokenizers.Tokenizer(models.BPE(unk_token="[UNK]"))
    made.pre_tokenizer, made.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    letters = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        ["the cat"], trainers.BpeTrainer(special_tokens=["[UNK]"], initial_alphabet=letters)
    )
    made.add_special_tokens(["[EOT]", "[PAD]", *added])
    made.enable_truncation(8)
    made.enable_padding(length=64)
    return made


@dataclass
class Trained:
    """What a run leaves on one rank."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)  # and routers' biases
    loads: list[Mapping[str, ExpertLoad]] = field(default_factory=list)
    validation: float = math.nan


def trainer(
    config: TrainConfig,
    model: ModelConfig = MODEL,
    layout: DistributedConfig | None = None,
    padded: bool = False,
    **options: Any,
) -> Trainer:
    """A trainer in float64 on all ranks; without a layout they are pipeline ranks."""
    layout = DistributedConfig(pp=torch.distributed.get_world_size()) if layout is None else layout
    mesh = init_distributed(layout, seed=0)
    indices, n_stages = stages_of_rank(config, get_pp_rank(mesh), get_pp_size(mesh))
    modules = [build_stage_module(model, i, n_stages).double() for i in indices]
    apply_expert_parallel(modules, mesh)
    for module in modules:
        apply_fsdp2(module, mesh)
    validation = rows(17, padded, seed=1)
    return Trainer(config, modules, rows(24, padded), validation, device_mesh=mesh, **options)


def train(rank: int, config: TrainConfig, *args: Any) -> Trained:
    """A few steps on this rank."""
    run, trained = trainer(config, *args), Trained()
    for _ in range(config.steps):
        result = run.train_step()
        trained.losses.append(result.loss)
        trained.norms.append(result.grad_norm)
        trained.loads.append(result.loads)
        trained.gradients = trained.gradients or _whole(snapshot_gradients(run.modules))
    trained.parameters = _whole({n: p for m in run.modules for n, p in m.state_dict().items()})
    trained.validation = run.evaluate()
    return trained


def in_one_process(
    config: TrainConfig, model: ModelConfig = MODEL, padded: bool = False
) -> Trained:
    """The reference: plain PyTorch, the whole batch at once."""
    torch.manual_seed(0)
    module, loss_fn, trained = Transformer(model).double(), CrossEntropy(), Trained()
    matrices, others = [], []
    for name, parameter in module.named_parameters():
        decays = "norm" not in name and name != "embed.weight"
        (matrices if decays else others).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.lr)
    batches = Batches(rows(24, padded), config.batch, config.seed)
    for step in range(config.steps):
        batch = batches[step]
        optimizer.zero_grad()
        loss = loss_fn(module(batch.inputs, attention_mask=batch.attention_mask), batch.targets)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), config.clip_norm)
        trained.losses.append(loss.item())
        trained.norms.append(norm.item())
        trained.gradients = trained.gradients or snapshot_gradients([module])
        for group in optimizer.param_groups:
            group["lr"] = config.lr * _FACTORS[step]
        optimizer.step()
        trained.loads.append(expert_loads([module], None))
        update_router_bias([module], trained.loads[-1])
    trained.parameters = {name: p.detach() for name, p in module.state_dict().items()}
    held_out = rows(17, padded, seed=1)[torch.arange(16) * 17 // 16]
    with torch.no_grad():
        output = module(held_out.inputs, attention_mask=held_out.attention_mask)
        trained.validation = loss_fn(output, held_out.targets).item()
    return trained


# Of three steps: one of warm-up, then the cosine at its beginning and in its middle, down to a
# tenth.
_FACTORS = (1.0, 1.0, 0.55)


def _whole(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """Sharded tensors put together."""
    found = {}
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found[name] = whole.clone()
    return found


def assert_equals(ranks: list[Trained], reference: Trained, tolerance: float = 1e-11) -> None:
    """Every rank's numbers, and the parameters of all ranks together, equal the reference's."""
    for kind in ("gradients", "parameters"):
        expected, seen = getattr(reference, kind), set()
        for trained in ranks:
            for name, value in getattr(trained, kind).items():
                source = name if name in expected else "embed.weight"  # a tied head
                torch.testing.assert_close(
                    value,
                    expected[source],
                    rtol=0,
                    atol=tolerance,
                    msg=lambda m, n=name: f"{n}: {m}",
                )
                seen.add(source)
        assert seen == set(expected), f"{kind} held by no rank"
    for trained in ranks:
        assert trained.loads == reference.loads
        for kind in ("losses", "norms", "validation"):
            torch.testing.assert_close(
                getattr(trained, kind), getattr(reference, kind), rtol=tolerance, atol=0
            )
