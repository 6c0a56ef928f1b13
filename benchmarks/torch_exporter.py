"""What torch's own tracer, `torch.distributed.pipelining.pipeline`, makes of the families that
`auto_split` cuts.

    python benchmarks/torch_exporter.py

Each model is exported and cut at the place where `auto_split` cuts it into two. Printed is whether
that works, whether the two parts in turn return what the model does (in eval mode, and in training
with dropout from the same seed; for the example, and for a longer one), how many parameters they
hold over the model's, and whether the second part wants an argument of the model again, for which
torch's stages have no message.
"""

import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import Pipe, SplitPoint, pipeline

sys.path.insert(0, str(Path(__file__).parents[1]))

from course_pp.parallel import auto_split
from course_pp.parallel.split import crossing
from source_code.hf_pp.families import FAMILIES, Example, build, called, example, tensor_of


def cut_by_torch(name: str, batch: Example, train: bool) -> Pipe:
    model = build(name).train(train)
    found = crossing(auto_split(build(name), batch, 2))
    spec = {found.calls[begin]: SplitPoint.BEGINNING for begin in found.begins}
    args, kwargs = ((), batch) if isinstance(batch, dict) else ((batch,), {})
    return pipeline(model, args, kwargs, split_spec=spec)


def furthest(model: nn.Module, pipe: Pipe, batch: Example) -> float:
    """Return the largest difference between the outputs of the model and of its parts in turn."""
    results: list[Tensor] = []
    for run in (lambda: called(model, batch), lambda: called(pipe, batch)):
        torch.manual_seed(7)
        with torch.no_grad():
            output = run()
            results.append(tensor_of(output[0] if isinstance(output, tuple) else output))
    return (results[0] - results[1]).abs().max().item()


def wants_an_argument_again(pipe: Pipe) -> bool:
    later = [node for node in pipe.split_gm.graph.nodes if node.op == "call_module"][1:]
    return any(given.op == "placeholder" for node in later for given in node.all_input_nodes)


def told(name: str, train: bool) -> str:
    batch = example(name)
    try:
        pipe = cut_by_torch(name, batch, train)
    except Exception as error:
        return f"refused ({first_line(error)})"
    n_parts = sum(
        p.numel()
        for stage in range(pipe.num_stages)
        for p in pipe.get_stage_module(stage).parameters()
    )
    n = sum(p.numel() for p in build(name).parameters())
    again = ", wants an argument again" if wants_an_argument_again(pipe) else ""
    found = [compared(build(name).train(train), pipe, given) for given in (batch, longer(batch))]
    return (
        f"{pipe.num_stages} stages, {n_parts / n:.2f} times the parameters, {found[0]}; longer:"
        f" {found[1]}{again}"
    )


def longer(batch: Example) -> Example:
    """A batch of the same rows, with longer texts or larger images."""
    if isinstance(batch, dict):
        return {key: torch.cat([value, value], 1) for key, value in batch.items()}
    return torch.cat([batch, batch], -1)


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:80]}"


def compared(model: nn.Module, pipe: Pipe, batch: Example) -> str:
    try:
        called(model, batch)
    except Exception:
        return "nor does the model"
    try:
        difference = furthest(model, pipe, batch)
    except Exception as error:
        return f"does not run ({first_line(error)})"
    return "equal" if difference < 1e-12 else f"differs by {difference:.0e}"


def main() -> None:
    warnings.filterwarnings("ignore")
    print(f"torch {torch.__version__}")
    for train in (False, True):
        print("training" if train else "eval")
        for name in FAMILIES:
            print(f"  {name:28}{told(name, train)}", flush=True)


if __name__ == "__main__":
    main()
