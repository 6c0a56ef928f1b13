"""Text from the model as it is trained: every token is one forward through the pipeline.

The model is not gathered. Each stage keeps the keys and values of the text so far, so a token costs
one position. In three cases it costs a whole window, padded behind the text: where the text is
longer than the window, under tensor parallelism, which divides the window, and with compiled
blocks, which would be compiled again for each length.
"""

from collections.abc import Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from course_pp.base.ranks import Ranks, rank_by_stage
from course_pp.model import KVCache, PipelineStageModule
from course_pp.parallel import build_pipeline_stage, get_pp_mesh, get_pp_size, get_tp_mesh
from course_pp.parallel.fsdp import reshard
from course_pp.parallel.pipeline import forward_only
from course_pp.parallel.replaced_forward import Compiled, has_replaced
from course_pp.parallel.stage import ModelStage
from course_pp.training.data import BOT_ID, EOT_ID, PAD_ID


def sample(
    modules: Sequence[PipelineStageModule],
    prompt: Sequence[int],
    n_tokens: int,
    *,
    device_mesh: DeviceMesh | None,
    vocab_size: int | None = None,
    temperature: float = 0.8,
    seed: int = 0,
    special_ids: tuple[int, int, int] = (PAD_ID, BOT_ID, EOT_ID),
) -> list[int]:
    """Continue ``[BOT] prompt`` by up to ``n_tokens`` tokens, until ``[EOT]``.

    Call it on every rank of the mesh, between steps. The text is a function of weights, prompt and
    seed, whatever the layout. Logits of two layouts may differ in their last bits; the drawn token
    is still the same, unless two tokens are that close.

    Args:
        modules: this rank's stages, as they are trained.
        vocab_size: number of ids that the tokenizer has. Larger ids of the model are never drawn.
        special_ids: the tokenizer's ids of ``[PAD]``, ``[BOT]`` and ``[EOT]``. The first two are
            never drawn.
        temperature: divisor of the logits; 0 takes the most likely token.

    Returns:
        The new tokens, on every rank.
    """
    if n_tokens == 0:
        return []
    weight = next(modules[0].parameters())
    window = modules[0].config.max_seq_len

    is_compiled = any(has_replaced(module, Compiled) for module in modules)
    can_cache = get_tp_mesh(device_mesh) is None and not is_compiled
    pp_mesh = get_pp_mesh(device_mesh)
    group = None if pp_mesh is None else pp_mesh.get_group()
    indices = [module.stage_id for module in modules]
    held = Ranks(group, alone=pp_mesh is None).gather((indices, can_cache))
    owner = rank_by_stage([theirs for theirs, _ in held])
    all_can_cache = all(theirs for _, theirs in held)
    keys_and_values = KVCache() if all_can_cache else None

    @cache
    def stages_for(length: int) -> list[ModelStage]:
        built = []
        for module in modules:
            stage = build_pipeline_stage(
                module, device_mesh, device=weight.device, batch_size=1, seq_len=length
            )
            stage.stage_index_to_group_rank = owner
            built.append(stage)
        return built

    # One rank draws for all, so that all agree where the text ends.
    ranks_of_a_stage = dist.get_world_size() // get_pp_size(device_mesh)
    speaker = owner[modules[0].num_stages - 1] * ranks_of_a_stage
    generator = torch.Generator().manual_seed(seed)

    pad, bot, eot = special_ids
    tokens = [bot, *prompt]
    n_prompt = len(tokens)
    while len(tokens) < n_prompt + n_tokens and tokens[-1] != eot:
        if len(tokens) > window:
            # The window has moved, so the kept keys are of other positions.
            keys_and_values = None
        if keys_and_values is None:
            visible, kwargs = tokens[-window:], {}
            row = visible + [pad] * (window - len(visible))
        else:
            # The cache holds all tokens but the last, once it has seen the prompt.
            visible = row = tokens if len(tokens) == n_prompt else tokens[-1:]
            kwargs = {"cache": keys_and_values}
        inputs = torch.tensor([row], device=weight.device)
        drawn = torch.zeros((), dtype=torch.int64, device=weight.device)

        # Only the last stage calls this.
        def draw(_: int, logits: Tensor, at: int = len(visible) - 1, drawn: Tensor = drawn) -> None:
            token = _draw(logits[0, at, :vocab_size], [pad, bot], temperature, generator)
            drawn.fill_(token)

        forward_only(stages_for(len(row)), [(inputs,)], [kwargs], draw)
        dist.broadcast(drawn, src=speaker)
        tokens.append(int(drawn))
    for module in modules:
        reshard(module)
    return tokens[n_prompt:]


def _draw(logits: Tensor, never: list[int], temperature: float, generator: torch.Generator) -> int:
    """Return a token id from logits (vocab,), by the largest of logit / temperature + Gumbel noise.

    On the CPU in float64, so that every device draws the same. Gumbel 1954; Maddison et al. 2014,
    arXiv:1411.0030.
    """
    logits = logits.cpu().double()
    logits[never] = -torch.inf
    if temperature == 0:
        return int(logits.argmax())
    noise = -torch.empty_like(logits).exponential_(generator=generator).log()
    return int((logits / temperature + noise).argmax())
