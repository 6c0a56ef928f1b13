"""The smallest model that trains, in one process, and ways to damage what it saves."""

import hashlib
import json
from pathlib import Path

import torch

from course_pp.model import CrossEntropy, ModelConfig, Transformer
from course_pp.training.checkpoint import save
from tests.equality import adamw, batches

CONFIG = ModelConfig(dim=16, n_layers=2, n_heads=2, vocab_size=11, max_seq_len=8)
SHARD = "__0_0.distcp"


class Small:
    """A model with its optimizer."""

    def __init__(self, config: ModelConfig = CONFIG, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.config = config
        self.model = Transformer(config).double()
        self.optimizer = adamw([self.model])

    def step(self, seed: int = 0) -> float:
        """One step of training; the loss."""
        ((inputs, target),) = batches(self.config, 2, 8, 1, seed)
        self.optimizer.zero_grad()
        loss = CrossEntropy()(self.model(inputs), target)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def saved(self, root: Path, *steps: int) -> Path:
        """Train a step before each save; the path of the last."""
        for step in steps:
            self.step(step)
            path = save(
                root, step, self.model, self.optimizer, device_mesh=None, extra={"at": step}
            ).path
        return path


def flip_byte(path: Path, at: int = -100) -> None:
    """Change one byte of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def reseal(checkpoint: Path) -> None:
    """Make the manifest agree with the files, as someone could who wants to be believed."""
    path = checkpoint / "manifest.json"
    manifest = json.loads(path.read_bytes())
    for name in manifest["files"]:
        content = (checkpoint / name).read_bytes()
        manifest["files"][name] = {
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
    path.write_text(json.dumps(manifest))
