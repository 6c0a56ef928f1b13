import pytest

from course_pp.schedule import KINDS, Action, Overlap


@pytest.mark.parametrize("kind", KINDS)
def test_an_action_prints_as_torch_prints_it_and_is_read_back(kind: str) -> None:
    action = Action(2, kind, 13)
    assert str(action) == repr(action) == f"2{kind}13"
    assert Action.parse(f" 2{kind}13 ") == action


def test_an_overlapped_pair_prints_as_torch_prints_it_and_is_read_back() -> None:
    pair = Overlap(Action(0, "F", 1), Action(7, "B", 0))
    assert str(pair) == "(0F1;7B0)OVERLAP_F_B"
    assert Overlap.parse(str(pair)) == pair
    assert pair.parts == (Action(0, "F", 1), Action(7, "B", 0))


def test_torch_reads_what_we_print() -> None:
    # torch has no public name for its actions; the text is what both sides exchange.
    from torch.distributed.pipelining.schedules import _Action

    for text in ("2F0", "1B3", "0I7", "5W11", "(0F1;7B0)OVERLAP_F_B"):
        ours = Overlap.parse(text) if text.startswith("(") else Action.parse(text)
        assert str(_Action.from_str(str(ours))) == text


@pytest.mark.parametrize(
    "text", ["", "F0", "2F", "2X0", "-1F0", "2F0.5", "2f0", "2F0 3F0", "2SEND_F0", "²F0"]
)
def test_anything_else_is_refused_with_its_text_and_a_way_to_write_it(text: str) -> None:
    with pytest.raises(ValueError, match=r"2F0|use one of") as error:
        Action.parse(text)
    assert repr(text) in str(error.value) or "X" in str(error.value)


@pytest.mark.parametrize(
    "arguments", [(-1, "F", 0), (0, "F", -1), (0.0, "F", 0), (True, "F", 0), (0, "", 0)]
)
def test_impossible_actions_are_refused(arguments: tuple) -> None:
    with pytest.raises(ValueError, match=r"counted from 0|unknown kind"):
        Action(*arguments)


@pytest.mark.parametrize(
    "text", ["(0F1)OVERLAP_F_B", "(0F1;7B0)", "0F1;7B0", "(7B0;0F1)OVERLAP_F_B"]
)
def test_only_a_forward_and_a_backward_overlap(text: str) -> None:
    with pytest.raises(ValueError, match="overlap"):
        Overlap.parse(text)


@pytest.mark.parametrize(
    ("text", "needs"),
    [
        ("0F5", []),
        ("1F5", ["the activation of microbatch 5 from stage 0"]),
        (
            "1B5",
            [
                "the activation of microbatch 5 from stage 1",
                "the gradient of microbatch 5 from stage 2",
            ],
        ),
        ("2I5", ["the activation of microbatch 5 from stage 2"]),
        ("1W5", ["the gradient of microbatch 5 from stage 1"]),
        ("1U5", ["the weight gradient of microbatch 5 from stage 1"]),
    ],
)
def test_an_action_knows_what_it_needs_in_a_pipeline_of_three_stages(
    text: str, needs: list[str]
) -> None:
    assert [str(product) for product in Action.parse(text).needs(3)] == needs


def test_a_full_backward_provides_what_its_two_halves_provide() -> None:
    halves = Action.parse("1I4").provides + Action.parse("1W4").provides
    assert Action.parse("1B4").provides == halves
