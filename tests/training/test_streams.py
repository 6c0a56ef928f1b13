"""A stream gives the rows of its documents in memory, and resumes at the exact token."""

import json
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from course_pp.launch import on_ranks
from course_pp.training import Trainer
from course_pp.training.data import (
    Corpus,
    Sequences,
    Stream,
    StreamedBatches,
    Tokenizer,
    encode,
    load_stream,
    packed,
    padded,
)
from course_pp.training.flags import DataOptions
from tests.training.small import RUN, rows, trainer

TEXTS = [f"document {i} says {'more and ' * (i % 5)}more." for i in range(40)]
TEXTS[::4] = [" \n"] * 10


def texts(start: int) -> Iterable[str]:
    return iter(TEXTS[start:])


@pytest.fixture(params=[False, True], ids=["packed", "padded"])
def stream(tokenizer: Tokenizer, request: pytest.FixtureRequest) -> Stream:
    return Stream("texts", texts, tokenizer, 16, is_padded=request.param)


def in_memory(stream: Stream, documents: Iterable[str]) -> Sequences:
    arrange = padded if stream.is_padded else packed
    return arrange(
        encode(Corpus("texts", tuple(t for t in documents if t.strip())), stream.tokenizer),
        stream.seq_len,
    )


def test_a_stream_gives_the_rows_in_order_and_begins_again_at_its_end(stream: Stream) -> None:
    batches, whole = StreamedBatches(stream, 2), in_memory(stream, TEXTS * 2)
    for step in range(len(whole) // 2):
        batch, expected = batches[step], whole[2 * step : 2 * step + 2]
        assert torch.equal(batch.inputs, expected.inputs)
        assert torch.equal(batch.targets, expected.targets)
        if expected.attention_mask is None:
            assert batch.attention_mask is None
        else:
            assert torch.equal(batch.attention_mask, expected.attention_mask)
    assert batches.epoch in (2, 3)


def test_every_step_can_be_taken_up_at_its_position(stream: Stream) -> None:
    batches = StreamedBatches(stream, 2)
    states = []
    seen = []
    for step in range(50):
        states.append(json.loads(json.dumps(batches.state())))
        seen.append(batches[step])
    assert max(state["document"] for state in states) > 30, "it began again"
    assert states[-1]["epoch"] >= 2
    for step, state in enumerate(states):
        again = StreamedBatches(stream, 2)
        again.seek(step, state)
        assert again.state() == (state if state["digest"] else again.state())
        assert again.epoch == state.get("epoch", 1)
        assert torch.equal(again[step].inputs, seen[step].inputs)


def test_what_cannot_go_on_is_refused(stream: Stream, tokenizer: Tokenizer) -> None:
    batches = StreamedBatches(stream, 2)
    batches[0], batches[1]
    other = StreamedBatches(
        Stream("texts", lambda start: [t + "!" for t in texts(start)], tokenizer, 16), 2
    )
    with pytest.raises(ValueError, match="another"):
        other.seek(2, batches.state())
    with pytest.raises(ValueError, match=r"step=5: .* 2"):
        batches[5]
    with pytest.raises(ValueError, match="blank holds no text"):
        StreamedBatches(Stream("blank", lambda start: [" ", None], tokenizer, 16), 2)[0]
    with pytest.raises(ValueError, match="40 documents"):
        stream.split(10_000)


def test_validation_rows_are_taken_from_the_beginning_and_not_trained_on(stream: Stream) -> None:
    rest, held_out = stream.split(4)
    assert len(held_out) >= 4
    assert torch.equal(held_out.inputs, in_memory(stream, TEXTS[: rest.first]).inputs)
    following = next(text for text in TEXTS[rest.first :] if text.strip())
    ids = stream.tokenizer.encode_document(following)[:16]
    assert StreamedBatches(rest, 1)[0].inputs.tolist()[0][: len(ids)] == ids
    assert (
        len({rest.digest, stream.digest, replace(stream, is_padded=not stream.is_padded).digest})
        == 3
    )


def of_a_run(
    rank: int, tokenizer: Tokenizer, is_padded: bool
) -> tuple[list[float], list[float], list[str]]:
    """Losses of a run on a stream, of one taken up after its first step, and what is refused."""

    def fresh(**change: Any) -> Trainer:
        base = trainer(replace(RUN, **change))
        # Each rank's own documents, if asked for, differ.
        own = texts
        if "seed" in change:
            own = lambda start: [f"{text} {rank}" for text in texts(start)]  # noqa: E731
        small = Stream("texts", own, tokenizer, 8, is_padded=is_padded)
        made = Trainer(
            replace(RUN, **change), base.modules, small, rows(17, seed=1), device_mesh=base._mesh
        )
        return made

    first, second = fresh(), fresh()
    whole = [first.train_step().loss]
    second.load_state(json.loads(json.dumps(first.state())))
    second.modules[0].load_state_dict(first.modules[0].state_dict())
    second.optimizer.load_state_dict(deepcopy(first.optimizer.state_dict()))
    whole += [first.train_step().loss for _ in range(2)]
    found = [second.train_step().loss for _ in range(2)]
    said = []
    for attempt in (
        lambda: fresh(workers=1),
        lambda: fresh(epochs=1, steps=200),
        lambda: fresh(seed=7).train_step(),
    ):
        with pytest.raises(ValueError, match=r".") as refusal:
            attempt()
        said.append(str(refusal.value))
    return whole[1:], found, said


@pytest.mark.parametrize("is_padded", [False, True], ids=["packed", "padded"])
def test_a_run_on_a_stream_goes_on_exactly_and_every_rank_refuses_alike(
    tokenizer: Tokenizer, is_padded: bool
) -> None:
    for expected, found, said in on_ranks(2, of_a_run, _small(tokenizer), is_padded, timeout_s=60):
        assert found == expected
        assert "workers=1 cannot be used with a stream" in said[0]
        assert "epochs=1 cannot be used with a stream, which has no end" in said[1]
        assert "rank 1 was given batch=" in said[2]


class _Small(Tokenizer):
    """Ids that the small model has."""

    def encode(self, text: str) -> list[int]:
        return [3 + i % 20 for i in super().encode(text)]

    def __reduce__(self) -> Any:
        return _Small, (self.definition,)


def _small(tokenizer: Tokenizer) -> Tokenizer:
    return _Small(tokenizer.definition)


def test_a_dataset_is_streamed_with_its_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets  # here: it takes a second

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "rows"
    folder.mkdir()
    bodies = [f"row {i} " * 9 for i in range(40)]
    bodies[3] = None
    lines = [json.dumps({"body": body, "id": i}) for i, body in enumerate(bodies)]
    (folder / "train.jsonl").write_text("\n".join(lines))
    name, documents = load_stream(str(folder), text_column="body")
    assert list(documents(2))[:3] == ["row 2 " * 9, None, "row 4 " * 9]
    assert name.endswith("rows/train/body")
    options = DataOptions(dataset=str(folder), column="body", streaming=True, tokenizer_size=300)
    train, validation, tokenizer = replace(options, padded=True).load(16, 8)
    assert isinstance(train, Stream)
    assert train.is_padded
    assert validation.is_padded
    train, validation, tokenizer = options.load(16, 8)
    assert isinstance(train, Stream)
    assert len(validation) >= 8
    assert tokenizer.decode(StreamedBatches(train, 2)[0].inputs[0]).startswith("[BOT]row ")
    with pytest.raises(ValueError, match="text_column"):
        load_stream(str(folder))
    with pytest.raises(ValueError, match="--streaming reads --dataset"):
        DataOptions(streaming=True).load(16, 8)
