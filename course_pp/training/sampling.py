"""Text from the model as it is trained, without gathering it: every token is one forward through
the pipeline.

Each stage keeps the keys and values of the text so far, so a token costs one position. It costs a
whole window, padded behind the text, where the text outgrows that, under tensor parallelism, which
divides the window, and with compiled blocks, which would be compiled again for each length.
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
    """Continue ``[BOT] prompt`` by up to ``n_tokens`` tokens, until ``[EOT]``; the same at every
    layout.

    Call it on every rank of the mesh, between steps. The text is a function of weights, prompt and
    seed; layouts whose logits differ in their last bits still draw the same token, unless two
    tokens are that close.

    Args:
        modules: this rank's stages, as they are trained.
        vocab_size: ids from here on are never drawn: those that the tokenizer does not have.
        special_ids: the tokenizer's, of ``[PAD]``, ``[BOT]`` and ``[EOT]``; the first two are never
            drawn.
        temperature: logits are divided by it; 0 takes the most likely token.

    Returns:
        The new tokens, on every rank.
    """
    if n_tokens == 0:
        return []
    weight = next(modules[0].parameters())
    window = modules[0].config.max_seq_len

    @cache
    def stages_for(length: int) -> list[ModelStage]:
        built = [
            build_pipeline_stage(module, device_mesh, weight.device, 1, length)
            for module in modules
        ]
        for stage in built:
            stage.stage_index_to_group_rank = owner
        return built

    can_cache = get_tp_mesh(device_mesh) is None and not any(
        has_replaced(module, Compiled) for module in modules
    )
    pp_mesh = get_pp_mesh(device_mesh)
    held = Ranks(None if pp_mesh is None else pp_mesh.get_group(), alone=pp_mesh is None).gather(
        ([module.stage_id for module in modules], can_cache)
    )
    owner = rank_by_stage([indices for indices, _ in held])
    # One rank draws for all, so that none can be of another mind about where the text ends.
    speaker = owner[modules[0].num_stages - 1] * (dist.get_world_size() // get_pp_size(device_mesh))
    generator = torch.Generator().manual_seed(seed)
    pad, bot, eot = special_ids
    tokens, n_prompt = [bot, *prompt], 1 + len(prompt)
    keys_and_values = KVCache() if all(theirs for _, theirs in held) else None
    while len(tokens) < n_prompt + n_tokens and tokens[-1] != eot:
        if len(tokens) > window:
            keys_and_values = None  # of positions that are no longer where they were
        if keys_and_values is None:
            visible, kwargs = tokens[-window:], {}
            row = visible + [pad] * (window - len(visible))
        else:
            visible = row = tokens if len(tokens) == n_prompt else tokens[-1:]
            kwargs = {"cache": keys_and_values}
        inputs = torch.tensor([row], device=weight.device)
        drawn = torch.zeros((), dtype=torch.int64, device=weight.device)

        def draw(_: int, logits: Tensor, at: int = len(visible) - 1, drawn: Tensor = drawn) -> None:
            drawn.fill_(_draw(logits[0, at, :vocab_size], [pad, bot], temperature, generator))

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
