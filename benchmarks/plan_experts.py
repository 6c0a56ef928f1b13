"""Published steps of models with experts, beside what the planner says of their layouts. Nothing is
fitted to them.

For each run: seconds of a step as published and as predicted, their ratio, and the ratio if links
took no time. Predictions are of this package's stack, in 16 bits and without costs of the host:

- NVIDIA's two runs on B200, and DeepSeek's, multiply most matrices in 8 bits, twice as fast on
  these GPUs. What the former recompute is not published: planned with whole layers, without which
  they would not fit.
- DeepSeek sends each token once to a node, to four at most, and there in 8 bits; and it hides the
  exchanges behind another microbatch's products (arXiv:2412.19437, sections 3.2 and 3.3). Here each
  token travels to each of its experts in 16 bits, and everybody waits.
- NVIDIA's runs force an even load; here it is even, too.

    python benchmarks/plan_experts.py
"""

from dataclasses import replace

from course_pp.plan import Cluster, Layout, cluster_of, gpu_named, model_named
from course_pp.plan.calibration import PublishedRun
from course_pp.plan.timing import model_flops

SEQ_LEN = 4096


def run(
    model: str,
    cluster: Cluster,
    batch: int,
    layout: Layout,
    *,
    tflops: float = 0.0,
    tokens_per_s: float = 0.0,
) -> PublishedRun:
    """A run of which the TFLOP/s or the tokens a second of one GPU are published."""
    each = model_flops(model_named(model), batch, SEQ_LEN) / 1e12 if tflops else batch * SEQ_LEN
    seconds = each / (tflops or tokens_per_s) / cluster.n_gpus
    layout = layout.with_(precision="megatron", receives_ahead=False)
    return PublishedRun(model, model_named(model), layout, cluster, batch, SEQ_LEN, seconds)


def runs() -> dict[str, PublishedRun]:
    interleaved = Layout(schedule="interleaved_1f1b")
    h800 = replace(gpu_named("H100"), name="H800", link_bandwidth=200e9)
    return {
        # NVIDIA/Megatron-LM, megatron/core/transformer/moe/README.md, core v0.8, which names layout
        # and links; v0.9 reports 468.
        "Megatron-Core 0.8, bfloat16": run(
            "mixtral-8x7b",
            cluster_of("8x8xH100"),
            256,
            interleaved.with_(pp=4, n_chunks=8, dp_shard=16, ep=8),
            tflops=438,
        ),
        # NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md, container 25.11, DGX-B200.
        "Megatron-Bridge 25.11, MXFP8": run(
            "qwen3-235b-a22b",
            cluster_of("8x8xB200"),
            1024,
            interleaved.with_(pp=8, n_chunks=2, dp_shard=8, ep=8, ac="full"),
            tokens_per_s=3269,
        ),
        "the same": run(
            "deepseek-v3",
            cluster_of("32x8xB200"),
            2048,
            Layout(pp=16, dp_shard=16, ep=8, ac="full"),
            tokens_per_s=2139,
        ),
        # arXiv:2412.19437, sections 1, 3.1, 3.2 and 4.2: 180,000 GPU hours for 10¹² tokens.
        # DualPipe keeps each stage on two ranks; planned is its V, which keeps one.
        "DeepSeek-AI 2024, FP8": run(
            "deepseek-v3",
            Cluster(256, 8, h800),
            15_360,
            Layout(pp=16, dp_shard=128, ep=64, schedule="dualpipe_v"),
            tokens_per_s=1e12 / (180e3 * 3600),
        ),
    }


def main() -> None:
    titles = f"{'timed s':>8}{'predicted s':>12}{'ratio':>7}{'free links':>11}  layout"
    print(f"{'source':<30}{'model':<17}{titles}")
    for source, each in runs().items():
        seconds = each.predicted().step_s
        fast = replace(each.cluster, intra_bandwidth=1e15, inter_bandwidth=1e15)
        free = replace(each, cluster=fast).predicted().step_s
        times = f"{each.seconds:8.2f}{seconds:12.2f}{seconds / each.seconds:7.2f}"
        print(f"{source:<30}{each.name:<17}{times}{free / each.seconds:11.2f}  {each.layout}")


if __name__ == "__main__":
    main()
