"""Faults that the tests must catch: python tests/mutations.py [WORD...]

Each fault is put into a copy of the repository, and the tests named beside it must fail there. Run
this before and after a change to the tests: a fault that was caught must still be caught. Words
choose the faults whose file or tests hold one of them. The exit status is 1 if a fault survives, if
the code that it changes is gone, or if the tests are too slow to tell.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LIMIT_S = 300


class Fault(NamedTuple):
    """A fault: in ``file``, ``right`` becomes ``wrong``, and ``tests`` must fail."""

    file: str
    right: str
    wrong: str
    tests: str


BY_HAND, FEATURES, RANDOM = (
    f"runtime/test_{name}.py" for name in ("by_hand", "features", "random_schedules")
)
READY = "runtime/test_ready_microbatches.py"
DEFERRED, FUSED = "runtime/test_deferred.py", "runtime/test_fused.py"
ATTACHED, SCALED = "step/test_attached_loss.py", "step/test_scaler.py"
EXPERTS, ROUTED = "model/test_experts.py", "step/test_experts_in_pipelines.py"
GRADIENTS = "step/late_weights.py"
GRID = "parallel/test_equals_one_process.py"
SHARED_OUT, FOREIGN = "parallel/test_expert_parallel.py", "parallel/test_whole_models.py"

SIZED = "parallel/test_ready_microbatches.py"

FAULTS = [
    Fault("runtime/by_hand.py", "full_like(y, 1 / n_microbatches)", "ones_like(y)", BY_HAND),
    Fault("base/sizes.py", "(stage < extras)", "(stage <= extras)", "model/test_model_stages.py"),
    Fault(
        "runtime/by_hand.py",
        "oldest_x, oldest_y = in_flight.popleft()",
        "oldest_x, oldest_y = in_flight.pop()",
        BY_HAND,
    ),
    Fault("runtime/by_hand.py", "return x.requires_grad_()", "return x", BY_HAND),
    Fault(
        "runtime/by_hand.py",
        "dx = backward_stage(x, y, dy)",
        "dx = backward_stage(x, y, 2 * dy)",
        BY_HAND,
    ),
    Fault(
        "runtime/by_hand.py",
        "while sends:\n",
        "while False:\n",
        BY_HAND,
    ),
    Fault(
        "step/loss.py",
        "(loss.total(output, target)) / divisor",
        "(loss.total(output, target))",
        GRID,
    ),
    Fault("step/loss.py", ") * self.samples(target)", ")", "step/test_loss.py"),
    Fault("step/loss.py", "counts / divisor,", "1 / divisor,", RANDOM),
    Fault("step/loss.py", "counts / divisor.double()", "counts / counts", "step/test_loss.py"),
    Fault(
        "step/loss.py", "return gradient, weight.clone()", "return gradient, 2 * weight", ATTACHED
    ),
    Fault("step/loss.py", "return numbers / divisor", "return numbers / len(numbers)", ATTACHED),
    Fault("step/loss.py", "if name in self.values:", "if False:", ATTACHED),
    Fault("step/loss.py", "for name in sorted(self._lacking)", "for name in ()", ATTACHED),
    Fault(
        "model/experts.py", "scores.gather(-1, experts)", "chosen_by.gather(-1, experts)", EXPERTS
    ),
    Fault("model/experts.py", "place < capacity", "place <= capacity", EXPERTS),
    Fault("model/experts.py", "tokens.mean() - tokens", "tokens - tokens.mean()", EXPERTS),
    Fault("model/experts.py", "        ctx.router.load += ctx.load\n", "", ROUTED),
    Fault("model/experts.py", "        dist.all_reduce(loads)\n", "        pass\n", ROUTED),
    Fault("model/experts.py", "/ pairs.sum(-1, keepdim=True)", "/ (sizes * top_k)", ROUTED),
    Fault(
        "model/hf.py", 'half=0 if matrix == "gate_proj" else 1', "half=0", "model/test_model_hf.py"
    ),
    Fault(
        GRADIENTS,
        "if has_hooks(getattr(weights, _PART_OF, weights)) or _is_autocast(x)",
        "if True",
        DEFERRED,
    ),
    Fault("step/scaler.py", "any(found for _, found, _ in told)", "found", SCALED),
    Fault("step/scaler.py", "            self.unscale_(optimizer)\n", "            pass\n", SCALED),
    Fault("runtime/stage.py", "weight() * self.scale", "weight()", SCALED),
    Fault(
        "training/trainer.py",
        "if not math.isfinite(loss) and not self._scaler.is_enabled():",
        "if False:",
        "training/test_precision.py",
    ),
    Fault("parallel/pipeline.py", "/ pipelines / scale", "/ pipelines", SCALED),
    Fault("step/loss.py", "None if is_in_backward() else 1.0", "1.0", ATTACHED),
    Fault("runtime/mailbox.py", "packet.weight.copy_(weight)", "pass", ATTACHED),
    Fault("runtime/mailbox.py", "notice[-_WEIGHT:] = weight", "pass", ATTACHED),
    Fault("runtime/pipeline.py", "stage.attached.clear()", "pass", ATTACHED),
    Fault(
        "runtime/pipeline.py",
        "for group in self._agreement.data_groups if sums else ():",
        "for group in ():",
        ATTACHED,
    ),
    Fault("parallel/pipeline.py", "value / pipelines", "value", ATTACHED),
    Fault("parallel/pipeline.py", "stage.attached.clear()", "pass", ATTACHED),
    Fault("parallel/stage.py", "bwd_chunk_id not in self.attached and ", "", ATTACHED),
    Fault(
        "parallel/stage.py",
        "_fit(self.args_recv_info[fwd_chunk_id], self.taken_by(fwd_chunk_id))",
        "pass",
        SIZED,
    ),
    Fault(
        "parallel/stage.py",
        "sent.append(meta.empty(self.device).zero_())",
        "sent.append(None)",
        SIZED,
    ),
    Fault(
        "parallel/pipeline.py",
        "self._counts_tokens or mine.ready or",
        "self._counts_tokens or",
        SIZED,
    ),
    Fault("parallel/crossing.py", "buffer.copy_(kept)", "pass", SIZED),
    Fault("parallel/crossing.py", "or next(iter(questions.values()))", "or questions[kind]", SIZED),
    Fault(
        "parallel/batch.py",
        "if (giver := givers.get((each.pipeline, i, name)))",
        "if (giver := None)",
        SIZED,
    ),
    Fault(
        "runtime/executor.py",
        "return tensor.detach().requires_grad_(tensor.requires_grad)",
        "return tensor",
        "runtime/test_edges.py",
    ),
    Fault("runtime/executor.py", "            worker.backward_weight(microbatch)\n", "", RANDOM),
    Fault("runtime/executor.py", "            if stage:\n", "            if stage > 1:\n", RANDOM),
    Fault("runtime/executor.py", "given.kwargs[microbatch] if", "given.kwargs[0] if", READY),
    Fault("runtime/batch.py", "kind != other_kind", "False", READY),
    Fault("runtime/batch.py", "rows != other_rows", "False", READY),
    Fault(
        "runtime/agreement.py",
        "dist.get_global_rank(group, rank)] for",
        "rank] for",
        "runtime/test_sharded.py",
    ),
    Fault("step/ties.py", "sum(there[1:], start=there[0])", "there[0]", FEATURES),
    Fault("runtime/agreement.py", "if len(ranks) > 1:", "if len(ranks) > 2:", FEATURES),
    Fault(GRADIENTS, "gradients.append(rows.sum(0)", "gradients.append(rows.mean(0)", DEFERRED),
    Fault("runtime/stage.py", "kept.weight_gradients.compute()", "pass", FEATURES),
    Fault(GRADIENTS, "self._entries.clear()", "", DEFERRED),
    Fault(
        GRADIENTS,
        'if _whither(ctx.next_functions[1][0]) == "into the sum":',
        "if ctx.queue._open:",
        FUSED,
    ),
    Fault(GRADIENTS, "match _whither(ctx.next_functions[1][0])", 'match "into the sum"', FUSED),
    Fault(GRADIENTS, " and _references(parameter) <= _UNHELD", "", FUSED),
    Fault(
        "step/random_streams.py", "torch.set_rng_state(on_cpu)", "pass", "runtime/test_features.py"
    ),
    Fault("step/ties.py", "total = add_up(terms)", "total = self._own(weight)", GRID),
    Fault(
        "step/ties.py",
        "parameter.grad = None if total is None else total.clone()",
        "pass",
        GRID,
    ),
    Fault("parallel/schedules.py", '"scale_grads": False', '"scale_grads": True', GRID),
    Fault(
        "parallel/clipping.py",
        "dist.all_gather(everyone, norms, group=group)",
        "everyone = [norms]",
        "parallel/test_clipping.py",
    ),
    Fault(
        "parallel/experts.py", "return gradient / ctx.n, None", "return gradient, None", SHARED_OUT
    ),
    Fault("parallel/experts.py", "if not len(rows):", "if False:", FOREIGN),
    Fault("parallel/experts.py", "n_sent, n_came = ", "n_came, n_sent = ", SHARED_OUT),
    Fault(
        "parallel/experts.py",
        "order = expert.argsort(stable=True)",
        "order = torch.arange(len(rows))",
        SHARED_OUT,
    ),
    Fault(
        "parallel/clipping.py", "everyone = torch.stack(gathered)", "", "parallel/test_clipping.py"
    ),
    Fault(
        "parallel/clipping.py",
        "if shard.counted:",
        "if True:",
        "parallel/test_clipping.py parallel/test_layouts.py",
    ),
    Fault(
        "base/sizes.py",
        "share + (stage < extras)",
        "share + (stage >= pp_size - extras)",
        "model/test_model_stages.py",
    ),
    Fault(
        "model/transformer.py",
        "rotate(q, cos, sin), rotate(k, cos, sin)",
        "rotate(q, cos, sin), k",
        "model",
    ),
    Fault(
        "schedule/families.py",
        "slope * (n_ranks - 1 - rank)",
        "slope * (n_ranks - rank)",
        "schedule/test_build.py",
    ),
    Fault(
        "schedule/families.py",
        "unfinished.remove(half)",
        "unfinished.pop()",
        "schedule/test_build.py",
    ),
    Fault("schedule/memory.py", '"W": kept[stage] - early[stage]', '"W": early[stage]', "schedule"),
    Fault(
        "schedule/timeline.py",
        "key=lambda each: each.arrival)\n    product",
        "key=lambda each: -each.arrival)\n    product",
        "schedule",
    ),
    Fault(
        "schedule/timeline.py", "if makespan > ends[-1]:", "if makespan > ends[-1] + 1:", "schedule"
    ),
    Fault(
        "training/optim.py",
        "return (step + 1) / config.warmup",
        "return step / config.warmup",
        "training/test_optim.py training/test_trainer.py",
    ),
    Fault(
        "show/trace.py",
        "_microseconds(tl, of.end) - begin",
        "_microseconds(tl, of.end)",
        "show/test_trace.py",
    ),
    Fault(
        "show/chart.py",
        "alt = escape(self.alt_text)",
        "alt = self.alt_text",
        "show/test_figures.py",
    ),
    Fault(
        "launch/fork_server.py",
        "    if not self._lives:\n            _end_orphans()",
        "    pass",
        "launch/test_nothing_is_left.py",
    ),
]


def outcome_of(fault: Fault, copy: Path) -> str:
    """Return the outcome of the tests in the copy with the fault; mend the copy afterwards."""
    file = copy / "course_pp" / fault.file
    source = file.read_text()
    if source.count(fault.right) < 1:
        return "GONE"
    file.write_text(source.replace(fault.right, fault.wrong, 1))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "--timeout=60", "-p", "no:cacheprovider"]
            + [f"tests/{test}" for test in fault.tests.split()],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        return {0: "SURVIVES", 1: "caught"}.get(done.returncode, f"EXIT {done.returncode}")
    except subprocess.TimeoutExpired:
        return "SLOW"
    finally:
        file.write_text(source)


def main() -> int:
    words, outcomes = sys.argv[1:], []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(
            ROOT,
            copy,
            ignore=shutil.ignore_patterns(".git", ".venv", "runs", "*_cache", "__pycache__"),
        )
        for fault in FAULTS:
            if words and not any(word in f"{fault.file} {fault.tests}" for word in words):
                continue
            began = time.monotonic()
            outcomes.append(outcome_of(fault, copy))
            change = f"{fault.right!r} -> {fault.wrong!r}"
            seconds = f"{time.monotonic() - began:4.0f} s"
            print(f"{outcomes[-1]:9}{seconds}  {fault.file}: {change}  ({fault.tests})", flush=True)
    print(f"{outcomes.count('caught')} of {len(outcomes)} caught")
    return 0 if set(outcomes) <= {"caught"} else 1


if __name__ == "__main__":
    sys.exit(main())
